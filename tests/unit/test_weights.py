"""Weights: what they are called, what is sent of them, what is refused, heads that swap them, that draft with variants
of them, and that say what they missed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from coppice.adaptation.weights import ROUTES, Route, Routes, Weights, pack_update, shape_of, sketch_of, variant_name
from coppice.config.sections import DrafterSettings
from coppice.errors import CoppiceError, InvalidField, StaleFence
from coppice.heads.base import DraftJob, build_head
from coppice.heads.checkpoints import fused_tensor, public_state, read_head, save_head
from coppice.heads.feature_head import FeatureHead
from coppice.limits import CHUNK_BYTES, MAX_KINDS, MAX_VARIANTS, SKETCH
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import Rejection
from coppice.wire.drafter import Advance, WeightsHeader
from services.drafter.staging import Staging
from tests.pushes import CORRUPTIONS, Case, Made, Push, altered, staged, swap
from tests.unit.test_feature_heads import GREEDY, SAMPLED, VOCAB, Slow, Text, build, drafted, opened, save_random

KINDS = ["specblock", "eagle3", "dspark"]
PROJECTION = {"specblock": "layers.1", "eagle3": "midlayer", "dspark": "layers.0"}
LAST = ("lm_head.", "rank_head.", "markov_head.", "confidence_head.")


@pytest.fixture(scope="module")
def first() -> Weights:
    torch.manual_seed(0)
    shapes = {"lm_head.weight": (48, 32), "fc.weight": (32, 96), "norm.weight": (32,), "a.b.weight": (3, 4, 5)}
    return Weights.of({name: torch.randn(shape) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def case(first: Weights) -> Case:
    return Case("eagle3", first, altered(first, 1, ["norm.weight", "fc.weight"], version=2))


def slow_hash(tensors: Mapping[str, Tensor]) -> bytes:
    """The definition, number by number."""
    whole = b""
    for name in sorted(tensors):
        values = tensors[name].float()
        shape = ",".join(str(size) for size in values.shape)
        numbers = b"".join(struct.pack("<f", value) for value in values.flatten().tolist())
        whole += name.encode() + b"\0" + hashlib.sha256(f"F32[{shape}]".encode() + numbers).digest()
    return hashlib.sha256(whole).digest()


def finished(push: Push, case: Case) -> Weights:
    return staged(push.header, push.parts, case.holder).finish()


# Names.


def test_the_hash_is_the_documented_one_whatever_the_order_and_the_dtype(first: Weights) -> None:
    tensors = dict(first.tensors)
    assert Weights.of(tensors).hash == first.hash == slow_hash(tensors)
    assert Weights.of(dict(reversed(tensors.items()))).hash == first.hash
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert Weights.of(rounded).hash == slow_hash(rounded) != first.hash
    turned = tensors | {"fc.weight": tensors["fc.weight"].T.contiguous().T}
    assert Weights.of(turned).hash == first.hash


# What is sent.


def test_a_pack_holds_the_changed_tensors_in_parts_of_a_mebibyte() -> None:
    first = Weights.of({"big": torch.randn(700, 1000), "small": torch.randn(3), "same": torch.ones(5)})
    after = altered(first, 2, ["big", "small"], version=9)
    header, parts = pack_update("head", first, after)
    assert [len(part.data) == CHUNK_BYTES for part in parts] == [True, True, False]
    file = b"".join(part.data for part in parts)
    assert (header.version, header.parent, header.parent_hash) == (9, 0, first.hash)
    sent = load(file)
    assert sent.keys() == {"big", "small"}
    assert all(torch.equal(sent[name], after.tensors[name]) for name in sent)
    made = finished(Push(header, parts), Case("head", first, first))
    assert (made.version, made.hash, Weights.of(made.tensors).hash) == (9, after.hash, after.hash)


# What is refused.


@pytest.mark.parametrize(("make", "error", "why"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_corruptions_are_refused_with_their_reason(make: Made, error: type[CoppiceError], why: str, case: Case) -> None:
    with pytest.raises(error, match=why):
        finished(make(case), case)
    assert finished(case.good, case).hash == case.new.hash


def test_no_flipped_bit_and_no_cut_of_a_file_gets_through_even_when_it_is_announced(case: Case) -> None:
    for junk in (b"", bytes(8), b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{]"):
        with pytest.raises(InvalidField, match="file: is no safetensors file"):
            finished(case.good.with_file(junk), case)
    generator, file = np.random.default_rng(0), case.good.file
    header = 8 + int.from_bytes(file[:8], "little")
    for number in range(100):
        spoiled = bytearray(file)
        if number % 10 == 0:
            del spoiled[generator.integers(len(file)) :]
        else:
            at = generator.integers(header if number % 2 else len(file))
            spoiled[at] ^= 1 << generator.integers(8)
        with pytest.raises(InvalidField):
            finished(case.good.with_file(bytes(spoiled)), case)


def test_the_version_in_use_is_acknowledged_and_old_values_come_back_under_a_new_number(case: Case) -> None:
    assert Staging(Push.of(case.head, case.first, case.live).header, case.holder).in_use
    back = case.first.changed({}, 3)
    for parent, weights in ((case.live, back), (case.first, back), (case.first, case.new)):
        assert finished(Push.of(case.head, parent, weights), case).hash == weights.hash


# Heads.


def saved(folder: Path, kind: str, source: Path, weights: Weights) -> Path:
    """A checkpoint with these weights, otherwise that of `source`."""
    model = read_head(source)
    public = {**public_state(model, model.config), **weights.tensors}
    model.load_state_dict({name: fused_tensor(public, name) for name in model.state_dict()})
    save_head(folder, model, model.config)
    return folder


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("dspark", "bfloat16")])
def test_after_a_swap_a_head_drafts_as_a_new_one(kind: str, dtype: str, target: Path, tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", kind)
    head, _ = build(kind, source, target, dtype=dtype)
    first, text = head.weights, Text.random(30, 3)
    names = [f"{PROJECTION[kind]}.self_attn.k_proj.weight", *(name for name in first.tensors if name.startswith(LAST))]
    versions = [altered(first, 1, version=1)]
    versions.append(altered(versions[0], 2, names, version=2))  # a part of a fused projection
    versions.append(altered(first, 3, ["norm.weight"], version=7))
    opened(head, 9, text, 12)  # a session that stays open
    for key, (weights, parent) in enumerate(zip(versions, [first, versions[0], first], strict=True)):
        swap(head, weights, parent)
        assert (head.description.weights_version, head.description.weights_hash) == (weights.version, weights.hash)
        fresh, _ = build(kind, saved(tmp_path / f"new{key}", kind, source, weights), target, dtype=dtype)
        assert fresh.weights.hash == weights.hash
        for one in (head, fresh):
            opened(one, key, text, 12)
        job = DraftJob(key, text.ids[12], 12, 40, GREEDY)
        (served,), (wanted,) = drafted(head, [job]), drafted(fresh, [job])
        assert served == wanted
        (tree,) = drafted(head, [replace(job, key=9)])
        assert tree  # over rows that older weights made


def test_weights_that_came_into_use_while_others_were_prepared_are_not_lost(target: Path, tmp_path: Path) -> None:
    head, _ = build("eagle3", save_random(tmp_path, "eagle3"), target)
    first = head.weights
    pushes = [staged(*pack_update("eagle3", first, altered(first, seed)), head) for seed in (1, 2)]
    prepared = [staging.prepare() for staging in pushes]
    pushes[0].swap(*prepared[0])
    with pytest.raises(StaleFence, match=r"version 1 came into use while"):
        pushes[1].swap(*prepared[1])
    assert head.weights.hash == altered(first, 1).hash


def test_heads_without_weights_of_their_own_refuse_a_push() -> None:
    head = build_head(DrafterSettings(kind="lookup"))
    header = WeightsHeader("lookup", 1, 0, b"\0" * 32, b"\1" * 32)
    with pytest.raises(InvalidField, match=r"header\.head: a lookup head has no weights that can be replaced"):
        Staging(header, head)
    assert head.description.weights_hash == b""


# --- variants: which texts they draft for, and drafts of sessions with different ones ---


def near(text: Text, length: int) -> tuple[float, ...]:
    """The centroid of a kind that a text is of."""
    return tuple(sketch_of(text.features[:length]).tolist())


def with_variant(weights: Weights, number: int, seed: int, routes: Routes, version: int) -> Weights:
    """The weights with a variant whose tensors are all moved."""
    moved = altered(weights, seed).tensors
    own = {variant_name(number, name): moved[name] for name in weights.tensors}
    return weights.changed(own | {ROUTES: routes.tensor()}, version)


@pytest.fixture(scope="module", params=KINDS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target: Path
) -> tuple[str, Path, Path]:
    return request.param, save_random(tmp_path_factory.mktemp("head"), request.param), target


def heads(folders: tuple[str, Path, Path], count: int) -> list[FeatureHead]:
    kind, source, target = folders
    return [build(kind, source, target, top_k=4, depth=4)[0] for _ in range(count)]


def test_sessions_draft_with_the_variant_that_their_prompt_is_for(folders: tuple[str, Path, Path]) -> None:
    head, moved = heads(folders, 2)
    one, other = Text.random(40, 3), Text.random(40, 4)
    routes = Routes([None, Route(near(one, 12), 0.01, 3, 1.0)])
    first = head.weights
    both = with_variant(first, 3, 7, routes, version=1)
    swap(head, both)
    whole = first.changed({name: both.tensors[variant_name(3, name)] for name in first.tensors}, 1)
    swap(moved, whole)
    deployed = heads(folders, 1)[0]

    for key, text in enumerate((one, other, one)):
        opened(head, key, text, 12)
    assert [head.opened(key).variant for key in range(3)] == [3, 0, 3]
    assert [head.opened(key).kind for key in range(3)] == [2, 0, 2]
    jobs = [DraftJob(key, text.ids[12], 12, 12, GREEDY) for key, text in enumerate((one, other, one))]
    trees = drafted(head, jobs)
    for reference, text, tree in ((moved, one, trees[0]), (deployed, other, trees[1]), (moved, one, trees[2])):
        opened(reference, 9, text, 12)
        (wanted,) = drafted(reference, [replace(jobs[0], key=9, root=text.ids[12])])
        assert tree == pytest.approx(wanted, abs=1e-4)
        reference.close(9)


def test_a_push_without_the_variant_takes_it_away(folders: tuple[str, Path, Path]) -> None:
    (head,) = heads(folders, 1)
    text, first = Text.random(40, 3), head.weights
    both = with_variant(first, 1, 7, Routes([Route(near(text, 12), 0.01, 1, 1.0)]), version=1)
    swap(head, both)
    opened(head, 0, text, 12)
    before = drafted(head, [DraftJob(0, text.ids[12], 12, 12, GREEDY)])
    swap(head, first.changed({}, 2), parent=first)
    opened(head, 1, text, 12)
    after = drafted(head, [DraftJob(number, text.ids[12], 12, 12, GREEDY) for number in (0, 1)])
    assert head.opened(1).variant == 0
    assert before[0] != after[0]


def test_impossible_tensors_are_refused(target: Path, tmp_path: Path) -> None:
    head, _ = build("eagle3", save_random(tmp_path, "eagle3"), target)
    first, cases = head.weights, []
    for name in (variant_name(MAX_VARIANTS + 1, "norm.weight"), variant_name(1, "nothing"), variant_name(1, ROUTES)):
        cases.append((name, first.tensors["norm.weight"]))
    for values in ([1.0, 2, 0.5], [1.0, 0, 1.5], [-1.0, 0, 0.5], [1.0, 0.5, 0.5]):
        cases.append((ROUTES, Routes().tensor()))
        cases[-1][1][0, :3] = torch.tensor(values)
    for name, tensor in cases:
        with pytest.raises(InvalidField) as refused:
            swap(head, first.changed({name: tensor}, 1))
        assert refused.value.field == f"tensors.{name}"
    assert head.description.weights_version == 0


def test_routes_are_read_as_they_were_written() -> None:
    route = Route(tuple(np.linspace(-1, 1, SKETCH, dtype=np.float32).tolist()), 0.25, 2, 0.75)
    tensors = {"a": torch.zeros(2), variant_name(2, "a"): torch.ones(2), ROUTES: Routes([None, route]).tensor()}
    assert Routes.of(tensors) == [None, route] + [None] * (MAX_KINDS - 2)
    assert shape_of(variant_name(2, "a"), tensors) == (2,)
    assert Routes.of({"a": torch.zeros(2)}).choose(np.ones(SKETCH, np.float32), "s") == (0, 0)


def test_a_share_of_the_texts_of_a_kind_gets_its_variant() -> None:
    sketch = np.eye(SKETCH, dtype=np.float32)[0]
    routes = Routes([Route(tuple(sketch.tolist()), 0.5, 1, 0.25)])
    chosen = [routes.choose(sketch, f"session-{number}") for number in range(2000)]
    assert {kind for kind, _ in chosen} == {1}
    assert np.mean([variant for _, variant in chosen]) == pytest.approx(0.25, abs=0.04)
    assert routes.choose(-sketch, "session-1") == (0, 0)


# --- misses: what a head says, against a full forward along the text for each node ---


def rejection(position: int, token: int) -> Rejection:
    return Rejection(position, 0, token)


def slow_miss(slow: Slow, path: tuple[int, ...], token: int) -> float:
    """1 - r: softmax over the draft vocabulary at T=1, by the book; 1 for an id that is not in it."""
    chances = dict(zip(slow.ids.tolist(), slow.said[path].double().softmax(-1).tolist(), strict=True))
    return 1.0 - chances.get(token, 0.0)


def chosen(slow: Slow, path: tuple[int, ...], at: int) -> int:
    """A token that the target may have chosen: in turn a likely one, any one, and one outside the vocabulary."""
    if at % 3 == 2:
        return next(token for token in range(VOCAB) if token not in slow.ids.tolist())
    order = slow.said[path].argsort(descending=True)
    return int(slow.ids[order[at % 7 + 1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sampling", "budget"), [(GREEDY, 8), (SAMPLED, 60)])
def test_misses_at_every_node_of_a_draft_are_those_of_a_full_forward(
    kind: str, sampling: SamplingParams, budget: int, target: Path, tmp_path: Path
) -> None:
    head, slow = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(40, 3)
    job = DraftJob(0, text.ids[9], 9, budget, sampling)
    tree = slow.tree(text, 2, job)
    paths = sorted({path[:-1] for path in tree})  # nodes with children in the tree that is sent
    assert len(paths) > 1
    for at, path in enumerate(paths):
        token = chosen(slow, path, at)
        opened(head, 0, text, 9, 2, misses=True)
        opened(head, 1, text, 5, misses=True)  # another session in the same forwards
        drafted(head, [DraftJob(1, text.ids[5], 5, 31, GREEDY), job])
        end = 10 + len(path)
        miss = head.advance(0, Advance([text.ids[9], *path], text.inline(9, end), rejection(end, token)))
        assert miss == pytest.approx(slow_miss(slow, path, token), abs=1e-4)
        assert miss == 1.0 or token in slow.ids.tolist()
        head.close(0)
        head.close(1)
    # Under merge another head's nodes may lead on behind this head's first miss.
    opened(head, 0, text, 9, 2, misses=True)
    drafted(head, [job])
    miss = head.advance(0, Advance(text.ids[9:14], text.inline(9, 14), rejection(10, text.ids[10])))
    assert miss == pytest.approx(slow_miss(slow, (), text.ids[10]), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_no_longer_knows_says_nothing(kind: str, target: Path, tmp_path: Path) -> None:
    head, _ = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(40, 1)
    job = DraftJob(0, text.ids[9], 9, 31, GREEDY)

    def after(*, draft: bool = True, misses: bool = True, start: int = 9, position: int = 10, root: int = -1) -> bool:
        opened(head, 0, text, start, misses=misses)
        if draft:
            drafted(head, [job])
        ids = [root if root >= 0 else text.ids[start], *text.ids[start + 1 : 12]]
        found = head.advance(0, Advance(ids, text.inline(start, 12), rejection(position, 1)))
        head.close(0)
        return found is not None

    assert after()
    unknown: list[Any] = [{"draft": False}, {"misses": False}, {"position": 9}, {"position": 13}]
    assert not any(after(**case) for case in (*unknown, {"root": (text.ids[9] + 1) % VOCAB}))
    opened(head, 0, text, 9, misses=True)
    drafted(head, [job])
    assert head.advance(0, Advance(text.ids[9:12], text.inline(9, 12))) is None  # no rejection
    assert head.advance(0, Advance(text.ids[12:14], text.inline(12, 14), rejection(13, 1))) is None  # no draft of it
    head.close(0)
    opened(head, 0, text, 9, misses=True)
    drafted(head, [job])
    head.exchange(head.weights, head.models, head.routes)  # swapped meanwhile
    assert head.advance(0, Advance(text.ids[9:12], text.inline(9, 12), rejection(10, 1))) is None

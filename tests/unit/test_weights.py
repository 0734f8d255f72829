"""Weights by themselves: what they are called, what is sent of them, what is refused, and heads that swap them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from coppice.adaptation.weights import Weights, pack_update
from coppice.config.sections import DrafterSettings
from coppice.errors import CoppiceError, InvalidField, StaleFence
from coppice.heads.base import DraftJob, build_head
from coppice.heads.checkpoints import fused_tensor, public_state, read_head, save_head
from coppice.limits import CHUNK_BYTES
from coppice.wire.drafter import WeightsHeader
from services.drafter.staging import Staging
from tests.pushes import CORRUPTIONS, Case, Made, Push, altered, staged, swap
from tests.unit.test_feature_heads import GREEDY, Text, build, drafted, opened, save_random

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


@pytest.mark.parametrize(
    "changes",
    [
        {"b": None, "c": torch.ones(2)},
        {"a": torch.zeros(3, 2)},
        {"b": torch.tensor([np.nextafter(np.float32(1), np.float32(2)), 1.0])},
        {"a": torch.zeros(2, 3).neg()},
    ],
    ids=["name", "shape", "bit", "sign of zero"],
)
def test_the_hash_tells_weights_apart(changes: dict[str, Tensor | None]) -> None:
    before: dict[str, Tensor | None] = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    hashes = [
        Weights.of({name: tensor for name, tensor in tensors.items() if tensor is not None}).hash
        for tensors in (before, before | changes)
    ]
    assert hashes[0] != hashes[1]


def test_changed_weights_have_the_hash_of_all_their_tensors_and_share_the_others(first: Weights) -> None:
    after = altered(first, 5, ["norm.weight"])
    assert (after.version, after.hash) == (1, Weights.of(after.tensors).hash)
    assert after.differing(first) == first.differing(after) == ["norm.weight"]
    assert all(after.tensors[name] is first.tensors[name] for name in first.tensors if name != "norm.weight")


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
def test_a_corruption_is_refused_and_says_what_is_wrong(
    make: Made, error: type[CoppiceError], why: str, case: Case
) -> None:
    with pytest.raises(error, match=why):
        finished(make(case), case)
    assert finished(case.good, case).hash == case.new.hash


def test_no_flipped_bit_and_no_cut_of_a_file_gets_through_even_when_it_is_announced(case: Case) -> None:
    for junk in (b"", bytes(8), b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{]"):
        with pytest.raises(InvalidField, match="file: is no safetensors file"):
            finished(case.good.with_file(junk), case)
    generator, file = np.random.default_rng(0), case.good.file
    header = 8 + int.from_bytes(file[:8], "little")
    for number in range(600):
        spoiled = bytearray(file)
        if number % 10 == 0:
            del spoiled[generator.integers(len(file)) :]
        else:
            at = generator.integers(header if number % 2 else len(file))
            spoiled[at] ^= 1 << generator.integers(8)
        with pytest.raises(InvalidField):
            finished(case.good.with_file(bytes(spoiled)), case)


def test_the_version_in_use_is_acknowledged_and_old_values_come_back_under_a_new_number(case: Case) -> None:
    retry = Push.of(case.head, case.first, case.live)
    assert Staging(retry.header, case.holder).in_use
    back = case.first.changed({}, 3)
    assert finished(Push.of(case.head, case.live, back), case).hash == case.first.hash
    of_nothing = Push.of(case.head, case.first, back)  # relative to the checkpoint nothing is changed
    assert load(of_nothing.file) == {}
    assert finished(of_nothing, case).hash == case.first.hash
    assert finished(Push.of(case.head, case.first, case.new), case).hash == case.new.hash


# Heads.


def saved(folder: Path, kind: str, source: Path, weights: Weights) -> Path:
    """A checkpoint with these weights, otherwise that of `source`."""
    model = read_head(source)
    public = {**public_state(model, model.config), **weights.tensors}
    model.load_state_dict({name: fused_tensor(public, name) for name in model.state_dict()})
    save_head(folder, model, model.config)
    return folder


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("dspark", "bfloat16")])
def test_after_a_swap_a_head_drafts_what_one_loaded_with_the_new_tensors_drafts(
    kind: str, dtype: str, target: Path, tmp_path: Path
) -> None:
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


def test_a_push_to_a_head_with_the_targets_output_layer_holds_none(target: Path, tmp_path: Path) -> None:
    head, _ = build("dspark", save_random(tmp_path, "dspark"), target)
    names = head.weights.tensors.keys()
    assert {name for name in names if name.startswith(LAST)} == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    output = head.model.lm_head.weight.to_dense().clone()
    push = Push.of("dspark", head.weights, altered(head.weights, 1))
    assert load(push.file).keys() == names
    swap(head, altered(head.weights, 1), head.weights)
    assert torch.equal(head.model.lm_head.weight.to_dense(), output)
    case = Case("dspark", head.weights, head.weights)
    with pytest.raises(InvalidField, match=r"tensors\.lm_head\.weight"):
        finished(case.sending({"lm_head.weight": output}), case)


def test_heads_without_weights_of_their_own_refuse_a_push() -> None:
    head = build_head(DrafterSettings(kind="lookup"))
    header = WeightsHeader("lookup", 1, 0, b"\0" * 32, b"\1" * 32)
    with pytest.raises(InvalidField, match=r"header\.head: a lookup head has no weights that can be replaced"):
        Staging(header, head)
    assert head.description.weights_hash == b""

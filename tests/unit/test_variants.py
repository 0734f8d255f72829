"""Variants of a head: which texts they draft for, and drafts of sessions with different ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.adaptation.weights import ROUTES, Route, Routes, Weights, shape_of, sketch_of, variant_name
from coppice.errors import CoppiceError, InvalidField
from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead
from coppice.limits import MAX_KINDS, MAX_VARIANTS, SKETCH
from tests.pushes import altered, swap
from tests.unit.test_feature_heads import GREEDY, Text, build, drafted, opened, save_random

KINDS = ["specblock", "eagle3", "dspark"]


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


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        (variant_name(MAX_VARIANTS + 1, "norm.weight"), None, "tensors.variants.5.norm.weight"),
        (variant_name(1, "nothing"), None, "tensors.variants.1.nothing"),
        (variant_name(1, ROUTES), None, "tensors.variants.1.routes"),
        (ROUTES, [1.0, 2, 0.5], "tensors.routes"),
        (ROUTES, [1.0, 0, 1.5], "tensors.routes"),
        (ROUTES, [-1.0, 0, 0.5], "tensors.routes"),
        (ROUTES, [1.0, 0.5, 0.5], "tensors.routes"),
    ],
)
def test_what_no_head_can_have_is_refused(
    folders: tuple[str, Path, Path], name: str, values: list[float] | None, field: str
) -> None:
    (head,) = heads(folders, 1)
    first = head.weights
    if values is None:
        pushed = first.changed({name: first.tensors["norm.weight"]}, 1)
    else:
        tensor = Routes().tensor()
        tensor[0, :3] = torch.tensor(values)
        pushed = first.changed({ROUTES: tensor}, 1)
    with pytest.raises(CoppiceError) as refused:
        swap(head, pushed)
    assert isinstance(refused.value, InvalidField)
    assert refused.value.field == field
    assert head.description.weights_version == 0


def test_routes_are_read_as_they_were_written() -> None:
    route = Route(tuple(np.linspace(-1, 1, SKETCH, dtype=np.float32).tolist()), 0.25, 2, 0.75)
    tensors = {"a": torch.zeros(2), variant_name(2, "a"): torch.ones(2), ROUTES: Routes([None, route]).tensor()}
    assert Routes.of(tensors).routes == [None, route] + [None] * (MAX_KINDS - 2)
    assert shape_of(variant_name(2, "a"), tensors) == (2,)
    assert Routes.of({"a": torch.zeros(2)}).choose(np.ones(SKETCH, np.float32), "s") == (0, 0)


def test_a_share_of_the_texts_of_a_kind_gets_its_variant_and_every_session_the_same_again() -> None:
    sketch = np.eye(SKETCH, dtype=np.float32)[0]
    routes = Routes([Route(tuple(sketch.tolist()), 0.5, 1, 0.25)])
    chosen = [routes.choose(sketch, f"session-{number}") for number in range(4000)]
    assert chosen == [routes.choose(sketch, f"session-{number}") for number in range(4000)]
    assert {kind for kind, _ in chosen} == {1}
    assert np.mean([variant for _, variant in chosen]) == pytest.approx(0.25, abs=0.03)
    assert routes.choose(-sketch, "session-1") == (0, 0)


def test_sketches_keep_the_distances_of_what_they_are_made_of() -> None:
    torch.manual_seed(0)
    kinds = torch.randn(3, 1, 768)
    texts = kinds + 0.7 * torch.randn(3, 50, 768)
    sketches = np.array([[sketch_of(text[None]) for text in kind] for kind in texts])
    centroids = sketches[:, :25].mean(1)
    nearest = np.square(sketches[:, 25:, None] - centroids).sum(-1).argmin(-1)
    assert (nearest == np.arange(3)[:, None]).all()

"""Kinds of text: told apart by sketches, and a variant drafts for one only as far as it is known to be better."""

from __future__ import annotations

import random

import numpy as np
import pytest

from coppice.adaptation.records import QueryRecord
from coppice.limits import MAX_KINDS, SKETCH
from coppice.weights.variants import Routes
from services.adapter.branching import YOUNG_SHARE, Kinds
from services.adapter.state import PROVEN_SHARE, KindsState

UPDATE_S = 2.0


def sketches(count: int, spread: float, seed: int) -> list[tuple[float, ...]]:
    """Sketches of one kind of text: unit vectors around a direction of its own."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(SKETCH) / np.sqrt(SKETCH) + spread * rng.standard_normal((count, SKETCH)) / np.sqrt(
        SKETCH
    )
    return [tuple((row / np.linalg.norm(row)).tolist()) for row in rows]


def query(
    sketch: tuple[float, ...] = (), tau: float = 2.0, kind: int = 0, variant: int = 0, version: int = 0
) -> QueryRecord:
    return QueryRecord(
        "s", 1.0, 1, tau, 40, 20, 50.0, 10**7, 10**6, (version, version), 1.0, "single:a", kind, variant, sketch
    )


def with_a_kind(queries: int = 30, tau: float = 2.0) -> Kinds:
    """Kinds that know one, kind 1."""
    kinds = Kinds()
    assert {kinds.take(query(sketch, tau), False) for sketch in sketches(queries, 0.3, 1)} == {1}
    return kinds


def young(kinds: Kinds, version: int) -> None:
    """Put an update of kind 1 to use."""
    assert kinds.due(1, UPDATE_S)
    assert kinds.trained(1, 0.2, 0.03)
    kinds.deploy(1, kinds.free_variant(1), version)


def drafted(kinds: Kinds, version: int, count: int, tau: float, other: float) -> list[str]:
    """Measure queries of kind 1, the variant's and the other one's in turn; returns the verdicts that were acted on."""
    noise, found = random.Random(version), []
    for number in range(count):
        kind = kinds[1]
        drafter, mean = ((kind.variant, tau), (kind.other, other))[number % 2]
        kinds.take(query(tau=noise.gauss(mean, 0.3), kind=1, variant=drafter, version=version), False)
        verdict = kinds.settle(1, version)
        if verdict != "undecided":
            found.append(verdict)
            break
    return found


def test_kinds_are_told_apart_and_a_place_is_found_for_every_one() -> None:
    kinds, groups = Kinds(), [sketches(40, 0.35, seed) for seed in range(4)]
    found = [[kinds.take(query(group[number]), False) for group in groups] for number in range(40)]
    assert {tuple(row) for row in found} == {(1, 2, 3, 4)}
    for seed in range(10, 10 + 3 * MAX_KINDS):
        kinds.take(query(sketches(1, 0.35, seed)[0]), False)
    assert len(kinds.numbers()) == MAX_KINDS
    assert kinds.take(query(()), False) == 0


def test_a_variant_that_is_better_drafts_for_nearly_all_texts() -> None:
    kinds = with_a_kind()
    young(kinds, 1)
    assert (kinds[1].variant, kinds[1].other, kinds[1].share) == (1, 0, YOUNG_SHARE)
    assert drafted(kinds, 1, 80, 2.6, 2.0) == ["pays"]
    assert (kinds[1].variant, kinds[1].other, kinds[1].share) == (1, 0, PROVEN_SHARE)
    assert kinds.gain(1).share == pytest.approx(0.3, abs=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_variant_that_is_worse_never_drafts_for_more_than_its_first_share(seed: int) -> None:
    kinds = with_a_kind(30 + seed)
    young(kinds, 1)
    assert kinds[1].share == YOUNG_SHARE
    assert drafted(kinds, 1, 80, 1.5, 2.0) == ["loses"]
    assert (kinds[1].variant, kinds[1].share) == (0, 0.0)
    assert [route and route.share for route in kinds.routes().routes] == [0.0]


def test_a_new_variant_is_compared_with_the_one_before_it_which_stays_if_it_is_better() -> None:
    kinds = with_a_kind()
    young(kinds, 1)
    drafted(kinds, 1, 80, 2.6, 2.0)
    for sketch in sketches(40, 0.3, 1):
        kinds.take(query(sketch, kind=1, variant=1, tau=2.6, version=2), False)
    young(kinds, 3)
    assert (kinds[1].variant, kinds[1].other, kinds[1].share) == (2, 1, YOUNG_SHARE)
    assert drafted(kinds, 2, 80, 1.0, 2.6) == []  # of weights before it
    assert drafted(kinds, 3, 80, 2.0, 2.6) == ["loses"]
    assert (kinds[1].variant, kinds[1].other, kinds[1].share) == (1, 0, PROVEN_SHARE)


def test_an_update_is_due_when_what_it_saves_is_more_than_it_costs() -> None:
    kinds = with_a_kind(23)
    assert not kinds.due(1, 0.0)  # too few texts
    kinds = with_a_kind(60)
    assert kinds.due(1, UPDATE_S)
    assert not kinds.due(1, 1000.0)
    costs = kinds.costs(1, UPDATE_S)
    assert not kinds.trained(1, 0.01, 0.03)  # no better: the next one has to save twice as much
    assert kinds.costs(1, UPDATE_S) == 2 * costs
    assert not kinds.due(1, UPDATE_S)


def test_what_training_costs_is_learnt_from_the_steps_beside_it() -> None:
    kinds = with_a_kind()
    before = kinds.costs(1, UPDATE_S)
    for _ in range(100):
        kinds.take(query(), True)  # steps as long as without
    assert kinds.costs(1, UPDATE_S) < 0.1 * before


def test_a_variant_is_taken_from_the_kind_that_was_not_met_for_longest() -> None:
    kinds = Kinds(most_variants=2)
    for seed in (1, 2, 3):
        for sketch in sketches(30, 0.3, seed):
            number = kinds.take(query(sketch), False)
        kinds.deploy(number, kinds.free_variant(number), seed)
    assert [kinds[number].share for number in kinds.numbers()] == [0.0, YOUNG_SHARE, YOUNG_SHARE]
    assert {kinds[2].variant, kinds[3].variant} == {1, 2}


def test_earlier_weights_bring_their_routes_back_and_a_restart_changes_nothing() -> None:
    kinds = with_a_kind()
    earlier = Routes.of({"routes": kinds.routes().tensor()})
    young(kinds, 1)
    again = Kinds(KindsState.model_validate_json(kinds.state.model_dump_json()))
    assert again.state == kinds.state
    again.follow(earlier, 2)
    assert (again[1].variant, again[1].share) == (0, 0.0)
    again.follow(Routes.of({"routes": kinds.routes().tensor(), "variants.1.a": kinds.routes().tensor()}), 3)
    assert (again[1].variant, again[1].share) == (1, YOUNG_SHARE)

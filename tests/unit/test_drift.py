"""Drift control: alarms on hand-written windows, false ones on noise, restarts, and the canary."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.adaptation import DriftSettings
from services.adapter.canary import Verdict, canary_verdict
from services.adapter.drift import Alarm, Drift, DriftState
from tests.reference import EFFORT

SMALL = DriftSettings(window=2, certainty=0)


def show(drift: Drift, *windows: tuple[float, int | None], spread: float = 0.0) -> list[Alarm | None]:
    """What it answers to windows of two queries, each with this mean tau, half their difference, and version."""
    answers = []
    for tau, version in windows:
        assert drift.observe(tau - spread, version) is None
        answers.append(drift.observe(tau + spread, version))
    return answers


def test_a_fall_over_three_windows_is_an_alarm_and_names_the_version_before_it() -> None:
    falling = Alarm(reason="falling", good_version=4)
    assert show(Drift(SMALL), (3.2, 3), (3.3, 4), (3.2, 5), (3.1, 6)) == [None, None, None, falling]


@pytest.mark.parametrize(
    "taus", [(3.0, 2.9, 2.9), (3.0, 3.0, 2.9), (3.0, 2.8, 2.9), (2.9, 3.0, 2.8), (3.0, 2.9), (1.0, 2.0, 3.0)]
)
def test_what_does_not_fall_each_time_is_none(taus: Sequence[float]) -> None:
    assert show(Drift(SMALL), *((tau, 0) for tau in taus)) == [None] * len(taus)


@pytest.mark.parametrize(("tau", "alarmed"), [(2.85, False), (2.83, False), (2.81, True)])
def test_the_whole_fall_must_exceed_the_standard_errors(tau: float, alarmed: bool) -> None:
    # Two queries 0.05 to either side of their mean: its standard error is 0.05, that of a difference 0.0707.
    drift = Drift(DriftSettings(window=2, certainty=2.5))
    assert (show(drift, (3.0, 0), (2.9, 0), (tau, 0), spread=0.05)[-1] is not None) is alarmed


def test_random_weights_are_an_alarm_at_once() -> None:
    assert show(Drift(SMALL), (3.0, 4), (1.9, 5)) == [None, Alarm(reason="collapse", good_version=4)]


def test_what_is_half_as_good_is_no_collapse() -> None:
    assert show(Drift(SMALL), (3.0, 4), (2.0, 5)) == [None, None]


def test_a_version_does_not_collapse_by_itself() -> None:
    assert show(Drift(SMALL), (3.0, 4), (1.5, 4)) == [None, None]


def test_a_collapse_within_the_noise_is_none() -> None:
    drift = Drift(DriftSettings(window=2))
    assert show(drift, (1.2, 0), (1.05, 1), spread=0.05) == [None, None]
    assert show(drift, (3.2, 2), (1.05, 3), spread=0.05)[-1] is not None


def test_a_window_is_of_the_version_that_drafted_most_of_it() -> None:
    drift = Drift(DriftSettings(window=4))
    for version in (1, None, 2, 2):
        drift.observe(2.0, version)
    for _ in range(4):
        drift.observe(2.0, None)
    assert [window.version for window in drift.state.windows] == [2, None]


def test_after_a_revert_it_begins_anew() -> None:
    drift = Drift(SMALL)
    show(drift, (3.2, 4), (3.1, 5))
    drift.observe(3.0, 5)
    drift.reset()
    assert drift.state == DriftState()
    assert show(drift, (3.0, 6), (2.9, 6)) == [None, None]


def test_the_state_is_bounded() -> None:
    drift = Drift(SMALL)
    show(drift, *((tau, 0) for tau in range(1, 50)))
    assert len(drift.state.windows) == 3
    assert not drift.state.taus


@settings(max_examples=50 * EFFORT, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 9), st.sampled_from([None, 0, 1])), min_size=12, max_size=60), st.data())
def test_a_restart_anywhere_changes_no_alarm(trace: list[tuple[float, int | None]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(trace)))
    whole, part = Drift(SMALL), Drift(SMALL)
    expected = [whole.observe(*query) for query in trace]
    said = [part.observe(*query) for query in trace[:cut]]
    part = Drift(SMALL, DriftState.model_validate_json(part.state.model_dump_json()))
    assert said + [part.observe(*query) for query in trace[cut:]] == expected
    assert part.state == whole.state


def false_reverts(certainty: float, streams: int) -> float:
    """Alarms for each check of three windows, over streams of 400 queries whose tau of 3 has 15% noise."""
    alarms = checks = 0
    for seed in range(streams):
        rng, drift = random.Random(seed), Drift(DriftSettings(certainty=certainty))
        for number in range(400):
            alarm = drift.observe(max(1.0, rng.gauss(3, 0.45)), number // 25)
            checks += not drift.state.taus and len(drift.state.windows) == 3
            if alarm is not None:
                alarms += 1
                drift.reset()
    return alarms / checks


def test_noise_is_seldom_an_alarm() -> None:
    """The bound is 2%."""
    assert false_reverts(DriftSettings().certainty, 200 * EFFORT) < 0.01


def test_the_bare_rule_fires_on_noise_one_time_in_six() -> None:
    assert false_reverts(0, 100 * EFFORT) == pytest.approx(1 / 6, abs=0.03)


def test_a_head_that_gets_worse_is_found() -> None:
    for seed in range(20 * EFFORT):
        rng, drift = random.Random(seed), Drift(DriftSettings())
        assert any(drift.observe(rng.gauss(3, 0.45) - number / 60, 0) for number in range(120))


# The canary

ABOUT_3 = [2.9, 3.1] * 10  # standard error 0.023


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (ABOUT_3, [4.0] * 9, "undecided"),
        ([3.0] * 9, [4.0] * 10, "undecided"),
        (ABOUT_3, [2.9, 3.1] * 5, "promote"),
        (ABOUT_3, [2.8, 3.0] * 5, "undecided"),
        (ABOUT_3, [2.7, 2.9] * 5, "reject"),
        (ABOUT_3, [2.8, 3.03] * 19, "undecided"),
        (ABOUT_3, [2.8, 3.03] * 20, "promote"),
        (ABOUT_3, [2.8, 3.01] * 20, "reject"),
        (ABOUT_3, [1.0, 1.1] * 5, "reject"),
    ],
)
def test_a_canary_is_judged_once_it_is_certain_and_at_the_limit_anyhow(
    old: list[float], new: list[float], expected: Verdict
) -> None:
    assert canary_verdict(DriftSettings(), old, new) == expected


def outcome(new_tau: float, seed: int) -> Verdict:
    """What becomes of a canary while three other replicas serve a tau of 3, with 15% noise."""
    rng, old, new = random.Random(seed), list[float](), list[float]()
    verdict: Verdict = "undecided"
    while verdict == "undecided":
        old += [rng.gauss(3, 0.45) for _ in range(3)]
        new.append(rng.gauss(new_tau, 0.15 * new_tau))
        verdict = canary_verdict(DriftSettings(), old, new)
    return verdict


@pytest.mark.parametrize(("new_tau", "lowest", "highest"), [(3.0, 0.75, 1.0), (3.3, 0.97, 1.0), (2.6, 0.0, 0.05)])
def test_a_version_that_is_not_worse_is_promoted_and_one_that_is_rejected(
    new_tau: float, lowest: float, highest: float
) -> None:
    seeds = 60 * EFFORT
    assert lowest <= sum(outcome(new_tau, seed) == "promote" for seed in range(seeds)) / seeds <= highest

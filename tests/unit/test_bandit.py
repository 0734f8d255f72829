"""The bandit: algorithm 1 line by line on hand-written traces, restarts, and simulated streams."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.adaptation import BanditSettings, PolicyName
from services.adapter.bandit import (
    ALWAYS_QUERIES,
    BLOCKED_QUERIES,
    EPSILON,
    LEAST_SIGNAL,
    Action,
    Bandit,
    BanditState,
    Query,
    Trigger,
    Value,
)
from tests.reference import EFFORT

SKIP, HEAD, FULL = Action
CAPACITY = 3  # queries whose samples saturate a simulated buffer


def make(
    state: BanditState | None = None,
    epsilon: tuple[float, float] = (0, 0),
    blocked_queries: int = BLOCKED_QUERIES,
    **changed: object,
) -> Bandit:
    """A bandit by the paper's bare rule, without chance and with short intervals, unless told otherwise."""
    bare = {"policy": "paper", "warmup_queries": 2, "exploration": 0, "certainty": 0, "interval": 3}
    chosen = BanditSettings.model_validate(bare | changed)
    bandit = Bandit(chosen, state)
    bandit.epsilon, bandit.blocked_queries = epsilon, blocked_queries
    return bandit


def warm(head: float | None, full: float | None, error: float = 0.0, **changed: Any) -> Bandit:
    """One after its cold start, with these values."""
    values = {action: Value(value=v, error=error) for action, v in ((HEAD, head), (FULL, full)) if v is not None}
    return make(BanditState(queries=100, events=8, last_event=90, values=values), **changed)


def ask(bandit: Bandit, tokens_per_s: float = 100.0, s: float = 20.0, load: float = 1.0) -> Action:
    """A query that lived wholly on the live version."""
    return bandit.decide(Query(s=s, tokens_per_s=tokens_per_s, version=bandit.state.version, load=load))


def event(bandit: Bandit, action: Action, s: float, before: Sequence[float], after: Sequence[float]) -> None:
    """An event with the rates of the queries before its trigger and after its sync."""
    bandit.state.rates = []
    for rate in before:
        ask(bandit, rate)
    trigger = Trigger(action=action, s=s, query=bandit.state.queries)
    bandit.synced(trigger, bandit.state.version + 1)
    for rate in after:
        ask(bandit, rate)


def value(bandit: Bandit, action: Action) -> float:
    return bandit.state.values[action].value


def test_the_defaults_are_the_papers() -> None:
    default = BanditSettings(policy="paper")
    assert (default.warmup_queries, default.cold_events, BLOCKED_QUERIES) == (10, 8, 2)
    assert (EPSILON, default.alpha) == ((0.30, 0.10), 0.10)
    assert (LEAST_SIGNAL, ALWAYS_QUERIES) == (5, 8)


def test_the_warm_up_only_measures() -> None:
    bandit = make(warmup_queries=10)
    assert [ask(bandit) for _ in range(12)] == [SKIP] * 10 + [HEAD] * 2
    assert len(bandit.state.rates) == 12


def test_a_query_without_rejections_has_nothing_to_learn_from() -> None:
    bandit = warm(1, 1)
    assert ask(bandit, s=0) == SKIP
    assert ask(bandit, s=0.1) == HEAD
    bandit.state.events = 0
    assert ask(bandit, s=0) == SKIP


def test_the_two_queries_after_an_event_are_blocked() -> None:
    bandit = warm(1, 0.5)
    event(bandit, HEAD, 20, [100] * 3, [])
    assert [ask(bandit, s=s) for s in (20, 0, 20)] == [SKIP, SKIP, HEAD]


# The cold start


def test_in_the_cold_start_an_unmeasured_action_counts_as_best_then_the_better_is_taken() -> None:
    bandit = make(blocked_queries=0)
    assert [ask(bandit) for _ in range(3)] == [SKIP, SKIP, HEAD]
    event(bandit, HEAD, 10, [100] * 3, [200] * 3)
    assert ask(bandit) == FULL
    event(bandit, FULL, 10, [100] * 3, [110] * 3)
    assert ask(bandit) == HEAD
    bandit.state.values[HEAD].value = -2.0
    assert ask(bandit) == FULL
    bandit.state.values[FULL].value = -1.0
    assert ask(bandit) == FULL, "no skip before there are enough events"


def test_the_cold_start_ends_with_its_eighth_event() -> None:
    bandit = warm(-1, -1)
    bandit.state.events = 7
    assert ask(bandit) == HEAD
    event(bandit, HEAD, 20, [100] * 3, [50] * 3)
    assert ask(bandit) == SKIP


@pytest.mark.parametrize(("events", "epsilon"), [(0, 0.30), (3, 0.30 - 0.20 * 3 / 7), (7, 0.10), (8, 0.0)])
def test_epsilon_falls_linearly_and_explores_both_actions_alike(events: int, epsilon: float) -> None:
    seeds = 2_000 * EFFORT
    chosen = []
    for seed in range(seeds):
        bandit = warm(2, 1, epsilon=(0.30, 0.10), seed=seed)
        bandit.state.events = events
        chosen.append(ask(bandit))
    assert chosen.count(FULL) / seeds == pytest.approx(epsilon / 2, abs=0.02)
    assert chosen.count(HEAD) + chosen.count(FULL) == seeds


def test_the_last_event_of_the_cold_start_has_the_last_epsilon() -> None:
    for seed in range(50):
        bandit = warm(2, 1, epsilon=(1, 0), seed=seed)
        bandit.state.events = 7
        assert ask(bandit) == HEAD


def test_chance_is_drawn_once_for_an_event_and_anew_for_the_next() -> None:
    bandit = warm(2, 1, epsilon=(0.5, 0.5), cold_events=100, blocked_queries=0)
    runs = []
    for _ in range(40):
        runs.append({ask(bandit) for _ in range(5)})
        event(bandit, HEAD, 20, [100] * 3, [])
    assert all(len(run) == 1 for run in runs)
    assert {HEAD, FULL} == set.union(*runs)


# Lines 3 to 8


@pytest.mark.parametrize(
    ("head", "full", "expected"),
    [
        (-1.0, -2.0, SKIP),
        (0.0, 0.0, SKIP),
        (0.0, -1.0, SKIP),
        (0.1, -1.0, HEAD),
        (-1.0, 0.1, FULL),
        (0.2, 0.1, HEAD),
        (0.1, 0.2, FULL),
        (0.1, 0.1, HEAD),
    ],
)
def test_the_larger_predicted_gain_is_taken_and_none_if_none_is_positive(
    head: float, full: float, expected: Action
) -> None:
    assert ask(warm(head, full)) == expected


def test_the_predicted_gain_is_s_times_v_less_the_certainty() -> None:
    assert warm(0.5, 0.0, error=0.2).gain(HEAD, 8) == 4.0
    assert warm(0.5, 0.0, error=0.2, certainty=2).gain(HEAD, 8) == pytest.approx(8 * (0.5 - 0.4))


def test_a_value_must_be_positive_by_its_certainty() -> None:
    assert ask(warm(0.5, 0.1, error=0.2, certainty=2)) == HEAD
    assert ask(warm(0.5, 0.1, error=0.3, certainty=2)) == SKIP


def test_unless_bare_a_signal_too_small_to_measure_begins_nothing_after_the_cold_start() -> None:
    assert ask(warm(9, 9), s=4.9) == HEAD
    assert ask(warm(9, 9, certainty=1), s=4.9) == SKIP
    assert ask(warm(9, 9, certainty=1), s=5.0) == HEAD


def test_what_was_never_measured_is_after_the_cold_start_if_it_can_be() -> None:
    assert ask(warm(9, None), s=5) == FULL
    assert ask(warm(9, None), s=4.9) == HEAD
    assert ask(warm(None, None), s=4.9) == SKIP


def test_exploration_keeps_it_from_skipping_for_ever() -> None:
    queries = 5_000
    assert {ask(warm(-1, -1)) for _ in range(100)} == {SKIP}
    bandit, begun = warm(-1, -1, exploration=0.01), []
    for _ in range(queries):
        action = ask(bandit)
        if action != SKIP:
            assert ask(bandit) == action, "it goes on until the buffer is full"
            begun.append(action)
            bandit.synced(Trigger(action=action, s=20, query=bandit.state.queries), 0)
            bandit.state.blocked, bandit.state.interval = 0, None
    assert len(begun) / queries == pytest.approx(0.01, abs=0.005)
    assert {HEAD, FULL} == set(begun)


# Lines 12 to 17


def test_a_saturated_buffer_is_due_with_the_signal_and_action_of_its_last_query() -> None:
    bandit = warm(0.1, 1)
    for _ in range(2):
        ask(bandit)
    query = Query(s=17, tokens_per_s=100, version=0)
    action = bandit.decide(query)
    assert bandit.due(action, query, 7, 8) is None
    assert bandit.due(SKIP, query, 8, 8) is None
    assert bandit.due(action, query, 8, 8) == Trigger(action=FULL, s=17, query=103)


def test_nothing_is_due_without_a_throughput_to_compare_with() -> None:
    bandit, query = warm(1, 1), Query(s=20, tokens_per_s=100, version=0)
    ask(bandit)
    assert bandit.due(HEAD, query, 1, 1) is None
    ask(bandit)
    assert bandit.due(HEAD, query, 1, 1) is not None


def test_nothing_is_due_while_an_event_is_measured() -> None:
    bandit, query = warm(1, 1), Query(s=20, tokens_per_s=100, version=1)
    event(bandit, HEAD, 20, [100] * 3, [100] * 2)
    assert bandit.due(HEAD, query, 1, 1) is None
    ask(bandit)
    assert bandit.due(HEAD, query, 1, 1) is not None


def test_events_and_updates_are_counted() -> None:
    bandit = make()
    event(bandit, HEAD, 20, [100] * 3, [100] * 3)
    event(bandit, FULL, 20, [100] * 3, [100] * 3)
    event(bandit, FULL, 20, [100] * 3, [])
    assert bandit.state.rates == [], "those were of other weights"
    assert (bandit.state.events, bandit.state.updates, bandit.state.version) == (3, {HEAD: 1, FULL: 2}, 3)


# Lines 19 to 21


def test_the_first_observation_is_the_change_of_throughput_for_each_unit_of_the_triggers_signal() -> None:
    bandit = make()
    event(bandit, FULL, 8, [1, 90, 100, 110], [118, 120, 125])
    assert value(bandit, FULL) == pytest.approx((121 - 100) / 8)
    spread = math.hypot(statistics.stdev([90, 100, 110]), statistics.stdev([118, 120, 125]))
    assert bandit.state.values[FULL].error == pytest.approx(spread / math.sqrt(3) / 8)
    assert HEAD not in bandit.state.values


def test_the_interval_closes_with_its_nth_query() -> None:
    bandit = make()
    event(bandit, HEAD, 10, [100] * 3, [120] * 2)
    assert bandit.state.values == {}
    ask(bandit, 120)
    ask(bandit, 500)
    assert value(bandit, HEAD) == pytest.approx(2)


def test_later_observations_are_averaged_by_equation_10() -> None:
    bandit = make()
    event(bandit, HEAD, 10, [100] * 3, [120] * 3)
    event(bandit, HEAD, 5, [100] * 3, [60] * 3)
    assert value(bandit, HEAD) == pytest.approx(0.9 * 2 + 0.1 * -8)
    bandit.state.values[HEAD].error = 2.0
    event(bandit, HEAD, 5, [90, 100, 110], [100] * 3)
    assert bandit.state.values[HEAD].error == pytest.approx(math.hypot(0.9 * 2, 0.1 * 10 / math.sqrt(3) / 5))


@pytest.mark.parametrize(("s", "revised"), [(4.9, False), (5.0, True)])
def test_an_observation_of_a_small_signal_is_not_used(s: float, revised: bool) -> None:
    bandit = make()
    event(bandit, HEAD, s, [100] * 3, [120] * 3)
    assert (HEAD in bandit.state.values) is revised
    assert bandit.state.interval is None


def test_only_queries_wholly_on_the_live_version_at_like_load_are_compared() -> None:
    bandit = make()
    for rate, load in ((100, 1.4), (900, 3.1), (100, 2)):
        ask(bandit, rate, load=load)
    bandit.synced(Trigger(action=HEAD, s=10, query=bandit.state.queries), 1)
    assert bandit.state.interval is not None
    assert bandit.state.interval.before == [100, 100], "2 is the usual load, within a factor of 1.5"
    for version in (None, 0, 2):
        bandit.decide(Query(s=20, tokens_per_s=900, version=version, load=2))
    for rate, load in ((150, 2), (900, 1.3), (900, 3.1), (150, 1.4), (150, 3)):
        ask(bandit, rate, load=load)
    assert value(bandit, HEAD) == pytest.approx(5)


def test_what_training_costs_the_queries_beside_it_is_taken_off_the_gain() -> None:
    bandit = make(horizon=5)
    for rate in (90, 100, 110):
        ask(bandit, rate)
    trigger = Trigger(action=FULL, s=10, query=bandit.state.queries)
    for rate in (70, 85):
        ask(bandit, rate)
    bandit.synced(trigger, 1)
    for _ in range(3):
        ask(bandit, 120)
    assert value(bandit, FULL) == pytest.approx((120 - 100 - (30 + 15) / 5) / 10)
    error = math.hypot(10 / math.sqrt(3) * (1 + 2 / 5), 10 * math.sqrt(2) / 5) / 10
    assert bandit.state.values[FULL].error == pytest.approx(error)


def test_an_interval_that_finds_no_comparable_queries_is_given_up() -> None:
    bandit = make(interval=3)
    event(bandit, HEAD, 20, [100] * 3, [100] * 2)
    for _ in range(27):
        ask(bandit, load=5)
    assert bandit.state.interval is not None
    ask(bandit, load=5)
    assert bandit.state.interval is None
    assert bandit.state.values == {}


def test_the_state_is_bounded() -> None:
    bandit = make(interval=5)
    for _ in range(200):
        ask(bandit)
    assert [rate.query for rate in bandit.state.rates] == list(range(151, 201))


# Line 23


def test_a_revert_resets_the_values_which_are_then_measured_again() -> None:
    bandit = warm(-1, -1)
    event(bandit, HEAD, 20, [100] * 3, [100] * 2)
    bandit.reverted(7)
    state = bandit.state
    assert (state.values, state.interval, state.rates, state.version) == ({}, None, [], 7)
    assert [ask(bandit) for _ in range(3)] == [SKIP, SKIP, HEAD]
    event(bandit, HEAD, 20, [100] * 3, [90] * 3)
    assert ask(bandit) == FULL
    event(bandit, FULL, 20, [100] * 3, [90] * 3)
    assert ask(bandit) == SKIP


# Policies


@pytest.mark.parametrize(
    ("policy", "actions"),
    [("paper", {HEAD, FULL}), ("head-only", {HEAD}), ("full-only", {FULL}), ("never", {SKIP}), ("always", {FULL})],
)
def test_a_policy_has_its_own_actions(policy: PolicyName, actions: set[Action]) -> None:
    bandit = warm(1, 1, policy=policy, epsilon=(1, 1), exploration=1)
    chosen = {ask(bandit)}
    bandit.state.events = 0
    for last_event in range(20):
        bandit.state.last_event = last_event
        chosen.add(ask(bandit))
    assert chosen == actions


def test_a_bandit_of_one_action_skips_too() -> None:
    assert ask(warm(-1, 1, policy="head-only")) == SKIP
    assert ask(warm(1, -1, policy="full-only")) == SKIP


def test_always_updating_is_due_every_eight_queries_whatever_there_is() -> None:
    bandit, due = make(policy="always"), []
    for _ in range(32):
        query = Query(s=1, tokens_per_s=100, version=bandit.state.version)
        trigger = bandit.due(bandit.decide(query), query, 1, 1_000)
        if trigger is not None:
            due.append(trigger.query)
            bandit.synced(trigger, bandit.state.version + 1)
    assert due == [8, 16, 24, 32]
    assert bandit.due(FULL, query, 0, 1_000) is None


# Restarts


QUERIES = st.lists(
    st.builds(
        Query,
        s=st.sampled_from([0.0, 3.0, 6.0, 20.0]),
        tokens_per_s=st.floats(0, 1e4),
        version=st.sampled_from([None, 0, 1, 2]),
        load=st.sampled_from([1.0, 1.5, 4.0]),
    ),
    min_size=30,
    max_size=80,
)


def follow(queries: Sequence[Query], cut: int, revert: int) -> tuple[list[object], BanditState]:
    """All that a bandit answers to a trace; before query `cut` it is saved and loaded, before `revert` reverted."""

    def start(state: BanditState | None = None) -> Bandit:
        return make(state, epsilon=(0.5, 0.1), interval=4, cold_events=3, exploration=0.2)

    bandit = start()
    said: list[object] = []
    waiting: Trigger | None = None
    for number, query in enumerate(queries):
        if number == revert:
            bandit.reverted(0)
        if number == cut:
            saved = bandit.state.model_dump_json()
            bandit = start(BanditState.model_validate_json(saved))
            assert bandit.state.model_dump_json() == saved
        if waiting is not None and query.version is not None:
            bandit.synced(waiting, query.version)
        action = bandit.decide(query)
        waiting = bandit.due(action, query, number % 4, 3)
        said += [action, waiting]
    return said, bandit.state


@settings(max_examples=30 * EFFORT, deadline=None)
@given(QUERIES, st.data())
def test_a_restart_anywhere_changes_no_decision(queries: list[Query], data: st.DataObject) -> None:
    cut, revert = data.draw(st.integers(0, len(queries) - 1)), data.draw(st.integers(0, len(queries) - 1))
    whole, parted = (follow(queries, at, revert) for at in (-1, cut))
    assert parted == whole


# Simulated streams


def simulate(seed: int, gain: dict[Action, float], s: float = 20.0, **changed: object) -> tuple[list[Action], int]:
    """Updates after the cold start, and the queries in which they were taken.

    A stream of 400 queries at 100 tokens/s with 15% noise. An update is live two queries after its trigger and adds
    `gain`.
    """
    rng, bandit = (
        random.Random(seed),
        Bandit(BanditSettings.model_validate({"policy": "paper", "seed": seed} | changed)),
    )
    queries = 400
    rate, buffers, updates, began = 100.0, {HEAD: 0, FULL: 0}, list[Action](), queries
    waiting: Trigger | None = None
    for number in range(queries):
        if waiting is not None and number == waiting.query + 1:
            rate += gain[waiting.action]
            bandit.synced(waiting, bandit.state.version + 1)
            if bandit.state.events == bandit.settings.cold_events:
                began = number
            elif bandit.state.events > bandit.settings.cold_events:
                updates.append(waiting.action)
            waiting = None
        query = Query(
            s=max(0.0, rng.gauss(s, s / 4)),
            tokens_per_s=max(1.0, rate * rng.gauss(1, 0.15)),
            version=bandit.state.version,
        )
        action = bandit.decide(query)
        if action != SKIP:
            buffers[action] = min(CAPACITY, buffers[action] + 1)
            if waiting is None:
                waiting = bandit.due(action, query, buffers[action], CAPACITY)
                buffers[action] *= waiting is None
    return updates, queries - began


def share_of_updates(streams: int, s: float = 20.0, **changed: object) -> float:
    """Updates for each query after the cold start, over streams in which no update gains anything."""
    runs = [simulate(seed, {HEAD: 0, FULL: 0}, s, **changed) for seed in range(streams)]
    assert all(queries > 100 for _, queries in runs), "a stream is long enough to judge"
    return sum(len(updates) for updates, _ in runs) / sum(queries for _, queries in runs)


def test_where_nothing_is_gained_it_all_but_stops() -> None:
    """The bound is one update in 20 queries; it is kept as well as that of a stream served well."""
    assert 0 < share_of_updates(200) < 0.01


def test_the_bare_rule_does_not_stop_where_nothing_is_gained() -> None:
    assert share_of_updates(40 * EFFORT, certainty=0) > 0.025


def test_a_stream_it_serves_well_is_left_alone() -> None:
    assert share_of_updates(50 * EFFORT, s=3.0) < 0.002


@pytest.mark.parametrize(("good", "bad"), [(HEAD, FULL), (FULL, HEAD)])
def test_it_converges_to_the_action_that_gains(good: Action, bad: Action) -> None:
    late = [simulate(seed, {good: 10, bad: -10})[0] for seed in range(40 * EFFORT)]
    taken = [action for updates in late for action in updates]
    assert taken.count(good) / len(taken) > 0.9
    assert statistics.fmean(updates.count(good) > 5 for updates in late) > 0.8

"""Parts of the adapter that need no process: its state, its wire, its pictures, the streams it is measured on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from coppice.adaptation import picture
from coppice.adaptation.records import Kind, QueryRecord, Sample
from coppice.config.adaptation import BanditSettings
from coppice.errors import InvalidField
from coppice.limits import MAX_HISTORY
from coppice.v1 import adapter_pb2
from coppice.weights.versions import Weights
from coppice.wire import adapter
from coppice.wire.adapter import ActionStatus, Change, HeadStatus, KindStatus, QueryPoint, ReplicaStatus, VersionStatus
from services.adapter.bandit import Action, Bandit, BanditState, Query, Trigger
from services.adapter.buffers import Buffers
from services.adapter.sorting import SAMPLES, SESSIONS, Sorting
from services.adapter.state import FILE, State
from tests.unit.test_records import sample

RECORD = QueryRecord("s", 1.0, 2, 3.0, 4, 5, 6.0, 7, 8, (9, 9), 1.0, "route")
STATUS = HeadStatus(
    head="a",
    policy="paper",
    paused=True,
    doing="idle",
    version=3,
    weights_hash=bytes(range(32)),
    good_version=2,
    queries=5,
    events=2,
    reverts=1,
    actions=[ActionStatus("head", None, 0.0, 0, 1, 2), ActionStatus("full", 0.0, 0.5, 2, 1, 2)],
    replicas=[ReplicaStatus("x:1", True, 3, True), ReplicaStatus("x:2", False, 0, False)],
    kinds=[KindStatus(1, 40, 1.8, 2, 0, 0.5, 0.25, 0.125, 9, 33, 1, 2.5, 1.5)],
    versions=[VersionStatus(0, 3, 1.5), VersionStatus(3, 2, 2.5)],
    history=[QueryPoint(1, 2.0, 30.0, 4.0, None, "skip"), QueryPoint(2, 2.5, 35.0, 4.0, 0, "full")],
    changes=[Change(2, "full", 3, 1.5, 0.25, "loss 2 to 1")],
)

# --- the wire ---


def test_a_status_arrives_as_it_was_sent() -> None:
    message = adapter_pb2.GetStatusResponse.FromString(adapter.status_to_wire([STATUS]).SerializeToString())
    assert adapter.read_status(message) == [STATUS]


def test_requests_arrive_and_are_checked() -> None:
    assert adapter.read_status_request(adapter.status_request(head="a", history=7)) == ("a", 7)
    assert adapter.read_rollback_request(adapter.rollback_request(head="", version=None)) == ("", None)
    assert adapter.read_rollback_request(adapter.rollback_request(head="b", version=0)) == ("b", 0)
    assert (
        adapter.read_head_name(adapter.pause_request(head="b"))
        == adapter.read_head_name(adapter.resume_request(head="b"))
        == "b"
    )
    assert adapter.rollback_to_wire(version=4).version == 4
    with pytest.raises(InvalidField, match="history"):
        adapter.read_status_request(adapter.status_request(head="a", history=MAX_HISTORY + 1))
    with pytest.raises(InvalidField, match="head"):
        adapter.read_head_name(adapter.pause_request(head="no name"))


# --- state ---


def weights(number: float, version: int) -> Weights:
    return Weights.of({"a": torch.tensor([number])}, version)


def test_the_state_outlives_the_process_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    state.paused, state.live = True, state.next_number()
    state.know(weights(1.0, 1))
    state.overwriting.bandit.queries = 7
    state.change(STATUS.changes[0])
    state.positions["queries"] = "17-2"
    state.observe(RECORD, 1, "full")
    state.observe(RECORD, None, "skip")
    state.save()
    again = State.load(tmp_path)
    assert again.model_dump() == state.model_dump()
    assert (again.queries, again.taus, again.newest, again.overwriting.bandit.queries) == (2, {1: (1, 3.0)}, 1, 7)
    assert [point.version for point in again.history] == [1, None]
    for damaged in ('{"live": "many"}', '{"positions": {"queries": "$"}}', "{"):
        (tmp_path / FILE).write_text(damaged)
        assert State.load(tmp_path).model_dump() == State().model_dump()


def test_the_state_is_bounded(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    for number in range(MAX_HISTORY + 50):
        state.observe(RECORD, number, "skip")
        state.know(weights(number, number))
        state.change(STATUS.changes[0])
    assert len(state.history) == MAX_HISTORY
    assert state.queries == state.history[-1].query == MAX_HISTORY + 50
    assert max(map(len, (state.hashes, state.taus))) <= 16
    assert len(state.changes) <= 200


def test_numbers_of_the_same_weights_are_one_version(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    state.know(weights(1.0, 4))
    state.know(weights(2.0, 5))
    state.live = 6
    state.know(weights(1.0, 6))
    state.know(weights(1.0, 6), 9)
    assert [state.lived_on((version, version)) for version in (4, 5, 6, 9, 77)] == [6, 5, 6, 6, None]
    assert [state.lived_on(versions) for versions in ((4, 9), (4, 5), (5, 77), (77, 4))] == [6, None, None, None]


# --- the bandit's foresight, and events that were never live ---


def test_expected_says_what_decide_will_and_changes_nothing() -> None:
    bandit = Bandit(BanditSettings(policy="paper", warmup_queries=3, exploration=0.2))
    bandit.epsilon = (1.0, 1.0)
    for number in range(200):
        query = Query(s=6.0 + number % 5, tokens_per_s=50.0, version=0)
        before = bandit.state.model_copy(deep=True)
        expected = bandit.expected(query)
        assert bandit.state == before
        assert bandit.decide(query) == expected
        trigger = bandit.due(expected, query, 1, 1)
        if trigger is not None:
            bandit.synced(trigger, 0)


def test_a_refused_event_counts_and_is_measured_side_by_side() -> None:
    bandit = Bandit(BanditSettings(policy="paper", alpha=0.5), BanditState(queries=30))
    bandit.refused(Trigger(action=Action.FULL, s=10.0, query=30), [50.0, 52.0], [41.0, 41.0])
    assert bandit.state.values[Action.FULL].value == pytest.approx(-1.0)
    assert (bandit.state.events, bandit.state.blocked, bandit.state.updates) == (1, 2, {Action.FULL: 1})
    assert bandit.state.interval is None
    bandit.refused(Trigger(action=Action.FULL, s=1.0, query=31), [50.0, 52.0], [90.0, 90.0])  # too little signal
    assert bandit.state.values[Action.FULL].value == pytest.approx(-1.0)


# --- samples until their query ends ---


def sorting_into(head: int, full: int) -> tuple[Sorting[Action], Buffers, Counter[str]]:
    """Sorting into buffers of these sizes, where 9 is a draft id, and what was dropped by reason."""
    dropped = Counter[str]()

    def drop(count: int, why: str) -> None:
        dropped[why] += count

    buffers = Buffers({"head": head, "full": full}, {9}, drop)
    return Sorting(buffers.keep, drop), buffers, dropped


def test_samples_go_to_the_buffer_that_their_query_chose_or_are_counted() -> None:
    sorting, buffers, dropped = sorting_into(10, 2)

    def missed(session: str, kind: Kind, token: int = 9) -> Sample:
        made = sample(kind, session=session)
        return replace(made, target_id=token)

    for kind in ("head", "full", "full", "full"):
        sorting.take(missed("one", kind))
    assert buffers.size("full") == 0
    sorting.claim("one", Action.FULL)
    assert (buffers.size("full"), dropped["unfit"], dropped["overflow"]) == (2, 1, 1)
    sorting.take(missed("one", "full"))  # late
    assert dropped["overflow"] == 2
    sorting.take(missed("two", "full"))
    sorting.take(missed("two", "head"))
    sorting.take(missed("two", "head", 5))
    sorting.claim("two", Action.HEAD)
    assert (buffers.size("head"), dropped["outside"]) == (2, 1)
    assert {one.kind for one in buffers.take("head")} == {"head"}
    sorting.take(missed("three", "head"))
    sorting.claim("three", Action.SKIP)
    assert dropped["skipped"] == 1


def test_samples_of_queries_that_never_end_are_bounded() -> None:
    sorting, _, dropped = sorting_into(1, 1)
    for number in range(SESSIONS + 7):
        sorting.take(sample("head", session=f"s{number}"))
    assert dropped["unclaimed"] == 7
    for _ in range(SAMPLES):
        sorting.take(sample("head", session="long"))
    assert dropped["unclaimed"] == SESSIONS + 7
    sorting.take(sample("head", session="long"))
    assert dropped["unclaimed"] == SESSIONS + 7 + SAMPLES + 1


# --- for people ---


def test_a_status_is_shown_and_drawn(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    picture.show(STATUS, console)
    text = console.export_text()
    for word in (
        "paused",
        "not measured",
        "+0.000 ± 0.500",
        "as wanted",
        "does not answer",
        "loss 2 to 1",
        "2.50",
        "+25.0% ± 12.5%",
    ):
        assert word in text
    picture.draw([STATUS, STATUS], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_moving_mean() -> None:
    assert picture.moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert picture.moving_mean([]) == []

"""Parts of the adapter that need no process: its state, its wire, its pictures, the streams it is measured on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console

from coppice.client.adapter import plain
from coppice.commands import adapter as adapter_command
from coppice.v1 import adapter_pb2 as pb
from services.adapter.learn import SAMPLES, Groups
from services.adapter.state import FILE, State
from tests.unit.test_records import sample

STATUS = pb.HeadStatus(
    head="a",
    paused=True,
    version=3,
    weights_hash=bytes(range(32)),
    actions=[pb.ActionStatus(action="head"), pb.ActionStatus(action="full", value=0.0, updates=2)],
    replicas=[pb.ReplicaStatus(address="x:1", reachable=True, current=True), pb.ReplicaStatus(address="x:2")],
    kinds=[pb.KindStatus(kind=1, queries=40, tau=1.8, variant=2, share=0.5, gain=0.25, error=0.125, measured=9)],
    versions=[pb.VersionStatus(version=0, queries=3, tau=1.5), pb.VersionStatus(version=3, queries=2, tau=2.5)],
    history=[pb.QueryPoint(query=1, tau=2.0, action="skip"), pb.QueryPoint(query=2, tau=2.5, version=0, action="full")],
    changes=[pb.Change(query=2, what="full", version=3, train_s=1.5, sync_s=0.25, why="loss 2 to 1")],
)

# --- state ---


def test_the_state_outlives_the_process_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    state.paused, state.live = True, state.next_number()
    state.bandit.queries = state.paper.queries = 7
    state.changes, state.history = plain(STATUS)["changes"], plain(STATUS)["history"]
    state.positions["queries"] = "17-2"
    state.save()
    again = State.load(tmp_path)
    assert again.model_dump() == state.model_dump()
    assert (again.newest, again.bandit.queries, again.history[0]["version"]) == (1, 7, None)
    for damaged in ('{"live": "many"}', '{"positions": {"queries": "$"}}', "{"):
        (tmp_path / FILE).write_text(damaged)
        assert State.load(tmp_path).model_dump() == State().model_dump()


# --- texts until they are learnt from ---


def test_texts_join_the_group_that_their_query_is_of_and_some_are_held_out() -> None:
    dropped = Counter[str]()
    groups = Groups(lambda reason: dropped.update([reason]))
    for _ in range(7):
        groups.take(sample(session="one"))
    assert groups.of(1) == ([], [])
    groups.claim("one", 1)
    groups.take(sample(session="one"))  # late
    assert [len(texts) for texts in groups.of(1)] == [7, 1]
    groups.take(sample(session="two"))
    groups.claim("two", 0)
    assert dropped == {"skipped": 1}
    groups.forget(1)
    assert (groups.of(1), groups.counts()) == (([], []), {})


def test_texts_of_queries_that_never_end_are_bounded_and_so_is_a_group() -> None:
    dropped = Counter[str]()
    groups = Groups(lambda reason: dropped.update([reason]))
    for number in range(SAMPLES + 7):
        groups.take(sample(session="long" if number > 100 else f"s{number}"))
    assert dropped["unclaimed"] == 7
    groups.claim("long", 1)
    assert [len(texts) for texts in groups.of(1)] == [128, 8]
    groups.claim("s99", 1)
    assert groups.counts() == {1: 128}


# --- for people ---


def test_a_status_is_shown_and_drawn(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    adapter_command.show(STATUS, console)
    text = console.export_text()
    for word in ("paused", "not measured", "does not answer", "loss 2 to 1", "+25.0% ± 12.5%"):
        assert word in text
    shown = plain(STATUS)
    assert (shown["weights_hash"], shown["history"][0]["version"]) == (STATUS.weights_hash.hex(), None)
    adapter_command.draw([STATUS, STATUS], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000

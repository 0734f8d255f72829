"""What `coppice bench adapt` asks, judges and shows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.client.completion import Accumulator, Completion
from coppice.errors import InvalidField
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference
from coppice.wire.generation import Chunk, Finished, Origin, Started, Timings
from lab.adapt.adapt import (
    BUDGET,
    INTERVAL,
    AdaptRow,
    Part,
    adapt_lines,
    adapt_row,
    draw,
    judged_lanes,
    lanes_of,
    spec_for,
)
from lab.adapt.lanes import Lane
from lab.adapt.shift import TURN, programs, shifted, stories, turning
from lab.options import Options
from lab.report import Row
from tests.tiny import make_target


def test_streams_are_different_prompts_in_the_same_order() -> None:
    assert len(set(stories())) == len(stories()) > 400
    assert len(set(programs())) == len(programs()) > 400
    stream = shifted(300)
    assert stream == shifted(300)
    assert [query.part for query in stream] == ["stories"] * 240 + ["code again"] * 60
    assert len({query.prompt for query in stream}) == 300


def row(method: str, tau: float, tokens_per_s: float, updates: list[int]) -> AdaptRow:
    parts = [
        Part("stories", 60, tau, 1.0, 0),
        Part("stories, last third", 20, tau, 1.0, 0),
        Part("code", 40, 3.0, 1.0, 0),
    ]
    return AdaptRow(
        Row(method, ("a",), 12, 1, 100, 4800, tau, tokens_per_s),
        updates=len(updates),
        parts=parts,
        query_tau=[tau] * 100,
        query_tokens_per_s=[tokens_per_s] * 100,
        changes=[{"query": query, "what": "full", "version": 1, "train_s": 1.0} for query in updates],
    )


def test_a_stream_that_turns_comes_back_to_every_kind_with_other_prompts() -> None:
    stream = turning(7 * TURN + 5)
    assert [stream[at].part for at in range(0, len(stream), TURN)] == [
        *("code", "stories", "maths") * 2,
        *("code", "stories"),
    ]
    assert len({query.prompt for query in stream}) == len(stream) == 7 * TURN + 5


def answer(ids: tuple[int, ...]) -> Completion:
    told = Accumulator()
    told.add(Started(3, "single:a", ("a",), 8))
    told.add(Chunk("", ids, (Origin.ROOT,) * len(ids), ("",) * len(ids)))
    steps = len(ids) - 1
    told.add(Finished("length", 3, len(ids), [1] * steps, [0] * steps, [0] * steps, 0, 0, Timings(decode_ns=10**9)))
    return told.completion()


def test_answers_that_differ_by_rounding_are_ties_and_others_are_wrong(tmp_path: Path) -> None:
    reference, stream = Reference(make_target(tmp_path), "float32", threads=1), shifted(5)
    own = [reference.greedy(reference.text.encode(query.prompt), 8).ids for query in stream]
    lanes = [Lane(name, StackSpec.demo()) for name in ("never", "bandit")]
    lanes[0].answers = [answer(ids) for ids in own]
    other = (own[0][0] + 1) % 300
    lanes[1].answers = [answer((other, *ids[1:]) if at == 0 else ids) for at, ids in enumerate(own)]
    verdicts = judged_lanes(lanes, stream, reference)
    rows = [adapt_row(lane, stream, None, verdicts[lane.name]) for lane in lanes]
    assert [row.row.verdicts for row in rows] == ["5/0/0", "4/0/1"]


def test_rows_are_shown_drawn_and_written(tmp_path: Path) -> None:
    rows = [row("never", 1.8, 35.0, []), row("bandit", 2.4, 40.0, [10])]
    assert len(adapt_lines(rows)) == 2
    draw(rows, shifted(100), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(json.dumps(rows[1].to_json()))
    assert (told["method"], told["tau"], told["changes"][0]["query"]) == ("bandit", 2.4, 10)


def test_a_lane_names_its_budget_so_that_no_verifier_cuts_trees_by_what_it_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, lanes, _ = lanes_of(Options(what="shift", n=10, methods=["never", "bandit"]))
    monkeypatch.setattr(Lane, "running", lambda lane: contextlib.nullcontext())
    for lane in lanes:
        asked: list[dict[str, Any]] = []
        lane.client = SimpleNamespace(generate=lambda prompt, asked=asked, **options: asked.append(options))  # type: ignore
        lane.answer(["a", "b"])
        assert [options["budget"] for options in asked] == [BUDGET, BUDGET]


def test_never_has_no_adapter_and_settings_go_where_they_are_read() -> None:
    base = StackSpec.demo(dtype="float32")
    never = spec_for("never", HeadSpec.shipped("specblock-code"), base)
    assert (never.adapt, never.adapted) == (False, ())
    always = spec_for("always", HeadSpec.shipped("specblock-code"), base)
    assert [head.name for head in always.adapted] == ["specblock-code"]
    assert always.extra["adapter"] == {"adapter.policy": "always", "adapter.interval": INTERVAL}
    with pytest.raises(InvalidField, match="no head can be adapted"):
        StackSpec.demo(heads=(HeadSpec("lookup", "lookup"),), adapt=True)

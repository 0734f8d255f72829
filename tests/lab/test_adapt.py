"""What `coppice bench adapt` asks, judges and shows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.errors import InvalidField
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference
from coppice.v1 import adapter_pb2 as pb
from lab.adapt import (
    BUDGET,
    INTERVAL,
    KIND_TURN,
    WORDS,
    Lane,
    adapt_line,
    lanes_of,
    prompts_of,
    report_lanes,
    shifted,
    spec_for,
    turning,
)
from lab.options import Options
from lab.report import Report
from tests.lab.conftest import completion
from tests.tiny import make_target


def test_streams_are_different_prompts_in_the_same_order() -> None:
    for kind in WORDS:
        assert len(set(prompts_of(kind))) == len(prompts_of(kind)) > 350
    stream = shifted(300)
    assert stream == shifted(300)
    assert [query.part for query in stream] == ["stories"] * 240 + ["code again"] * 60
    assert len({query.prompt for query in stream}) == 300
    turns = turning(7 * KIND_TURN + 5)
    kinds = [turns[at].part for at in range(0, len(turns), KIND_TURN)]
    assert kinds == [*("code", "stories", "maths") * 2, *("code", "stories")]
    assert len({query.prompt for query in turns}) == len(turns) == 7 * KIND_TURN + 5


def test_a_row_has_its_verdicts_parts_and_updates(tmp_path: Path) -> None:
    reference, stream = Reference(make_target(tmp_path), "float32", threads=1), shifted(5)
    own = [reference.greedy(reference.text.encode(query.prompt), 8).ids for query in stream]
    lanes = [Lane(name, StackSpec.demo()) for name in ("never", "bandit")]
    lanes[0].answers = [completion([1] * 7, 1.0, "a", ids) for ids in own]
    other = (own[0][0] + 1) % 300
    changed = [(other, *own[0][1:]), *own[1:]]
    lanes[1].answers = [completion([1] * 7, 1.0, "a", ids) for ids in changed]
    change = pb.Change(query=3, what="full", version=1, train_s=2.0)
    lanes[1].status = pb.HeadStatus(changes=[change], reverts=1)
    report = Report("bench adapt", "float32", 1)
    report_lanes(lanes, stream, reference, report)
    rows = report.rows
    lines = [adapt_line(row) for row in rows]
    assert [line["same/tie/wrong"] for line in lines] == ["5/0/0", "4/0/1"]
    assert [line["all"] for line in lines] == ["1.00 (7.0)"] * 2
    assert [(line["updates"], line["reverts"], line["training s"]) for line in lines] == [(0, 0, 0.0), (1, 1, 2.0)]
    assert [part["updates"] for part in rows[1]["parts"]] == [1, 1, 0]
    assert json.loads(json.dumps(rows[1]["changes"]))[0]["query"] == 3


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
    base = StackSpec.demo(heads=(HeadSpec.shipped("specblock-code"),), dtype="float32")
    never = spec_for("never", base)
    assert (never.adapt, never.adapted) == (False, ())
    always = spec_for("always", base)
    assert [head.name for head in always.adapted] == ["specblock-code"]
    assert always.extra["adapter"] == {"adapter.policy": "always", "adapter.interval": INTERVAL}
    with pytest.raises(InvalidField, match="no head can be adapted"):
        StackSpec.demo(heads=(HeadSpec("lookup", "lookup"),), adapt=True)

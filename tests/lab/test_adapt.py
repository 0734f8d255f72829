"""What `coppice bench adapt` asks, judges and shows."""

from __future__ import annotations

import json
from pathlib import Path

from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from coppice.v1 import adapter_pb2 as pb
from lab.adapt import Lane, adapt_line, report_lanes, shifted
from lab.report import Report
from tests.lab.conftest import completion
from tests.tiny import make_target


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

"""`coppice bench adapt`: one head on a stream that changes under it, with each policy of adaptation and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from coppice.client.completion import Completion
from coppice.commands.adapter import SMOOTHING, change_look, moving_mean
from coppice.config.sections import ADAPTED_KINDS, PolicyName
from coppice.errors import InvalidField
from coppice.limits import check_range
from coppice.pictures.style import looks
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import Reference, Verdict
from lab.adapt.lanes import NEW_TOKENS, Lane
from lab.adapt.shift import StreamQuery, programs, shifted, turning
from lab.asking import GREEDY, judged
from lab.measuring import reference_of
from lab.options import Options
from lab.report import Report, Row, exactness_checks, make_row

NEVER, BANDIT = "never", "bandit"
TRAINED = ("head", "full")
"""what a change is called that put newly trained weights to use"""
BUDGET = 12  # draft nodes verified a step
INTERVAL = 10
"""adapter.interval of the other policies: fit for a stream of a few hundred queries"""

STREAMS: dict[str, Callable[[int], list[StreamQuery]]] = {"shift": shifted, "turns": turning}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the stream."""

    name: str
    queries: int
    tau: float
    tokens_per_s: float
    updates: int
    """whose weights came into use in it"""


@dataclass(frozen=True, slots=True)
class AdaptRow:
    """One policy over the whole stream; the row's speedup is over never."""

    row: Row
    updates: int = 0
    reverts: int = 0
    train_s: float = 0.0
    parts: list[Part] = field(default_factory=list)
    query_tau: list[float] = field(default_factory=list)
    query_tokens_per_s: list[float] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The row as `--json` holds it: flat."""
        others = asdict(self)
        del others["row"]
        return self.row.to_json() | others


def lanes_of(options: Options) -> tuple[StackSpec, list[Lane], list[StreamQuery]]:
    """The stack that all lanes are variants of, the lanes, and what they are asked. Raises InvalidField."""
    known_policies = (NEVER, *get_args(PolicyName))
    policies = options.methods or [NEVER, *(name for name in get_args(PolicyName) if name != BANDIT), BANDIT]
    for option, given, known in (("what", [options.what], tuple(STREAMS)), ("methods", policies, known_policies)):
        if unknown := [name for name in given if name not in known]:
            raise InvalidField(option, f"{unknown[0]!r} is not one of {', '.join(known)}")
    head, most = HeadSpec.parse(options.head), 2 * len(programs())
    if head.kind not in ADAPTED_KINDS:
        why = f"{head.kind} heads are not adapted; those of these kinds are: {', '.join(ADAPTED_KINDS)}"
        raise InvalidField("head", why)
    check_range("n", options.n, 3, most)  # so many different prompts there are
    base = replace(replace(options, heads=[options.head]).spec(), budget=BUDGET)
    compared = policies if options.what == "shift" or options.methods else [NEVER, BANDIT]
    return base, [Lane(policy, spec_for(policy, head, base)) for policy in compared], STREAMS[options.what](options.n)


def spec_for(policy: str, head: HeadSpec, base: StackSpec) -> StackSpec:
    """A stack that serves one head and adapts it by a policy. `never` has no adapter and sends no signals."""
    extra = {"adapter": {} if policy == NEVER else {"adapter.policy": policy, "adapter.interval": INTERVAL}}
    return replace(base, heads=(head,), policy=f"single:{head.name}", adapt=policy != NEVER, extra=extra)


def judged_lanes(
    lanes: Sequence[Lane], stream: Sequence[StreamQuery], reference: Reference
) -> dict[str, list[Verdict]]:
    """By lane a verdict on each answer: the first one's are re-scored, the others' compared with them first."""
    asked = [(reference.text.encode(query.prompt), GREEDY) for query in stream]
    return judged(reference, asked, {lane.name: lane.answers for lane in lanes})


def report_lanes(
    lanes: Sequence[Lane], stream: Sequence[StreamQuery], base: StackSpec, report: Report
) -> list[AdaptRow]:
    """Add a row for each lane, their table and checks to the report. Returns the rows."""
    rows: list[AdaptRow] = []
    with reference_of(base) as reference:
        verdicts = judged_lanes(lanes, stream, reference)
    for lane in lanes:
        never = rows[0].row if rows and rows[0].row.method == NEVER else None
        rows.append(adapt_row(lane, stream, never, verdicts[lane.name]))
    report.rows += (row.to_json() for row in rows)
    title = f"{report.command}: tau (tokens/s) by part, updates counted in; {report.dtype}, {report.threads} threads"
    report.add_table(title, adapt_lines(rows), {"training s": ".0f"})
    report.checks += exactness_checks([row.to_json() for row in rows], report.dtype, NEW_TOKENS)
    report.figures = {"interval": INTERVAL, "stream": [query.part for query in stream]}
    return rows


def adapt_row(lane: Lane, stream: Sequence[StreamQuery], never: Row | None, verdicts: Sequence[Verdict]) -> AdaptRow:
    """The figures of a lane."""
    answers, status = lane.answers, lane.status
    changes = [asdict(change) for change in status.changes] if status else []
    row = make_row(lane.name, answers, verdicts, lane.spec.budget or 0)
    return AdaptRow(
        row=replace(row, speedup=row.tokens_per_s / never.tokens_per_s if never else 1.0),
        updates=sum(change["what"] in TRAINED for change in changes),
        reverts=status.reverts if status else 0,
        train_s=_training(changes),
        parts=parts_of(stream, answers, changes),
        query_tau=[answer.tau for answer in answers],
        query_tokens_per_s=[answer.tokens_per_s for answer in answers],
        changes=changes,
    )


def _training(changes: Sequence[dict[str, Any]]) -> float:
    """Seconds of all updates, by the median of each kind: some were held still halfway."""
    total = 0.0
    for kind in TRAINED:
        took = [change["train_s"] for change in changes if change["what"] == kind]
        total += len(took) * statistics.median(took) if took else 0.0
    return total


def parts_of(
    stream: Sequence[StreamQuery], answers: Sequence[Completion], changes: Sequence[dict[str, Any]]
) -> list[Part]:
    """Each part of the stream, and the last third of the first one."""
    places: dict[str, list[int]] = {}
    for number, query in enumerate(stream):
        places.setdefault(query.part, []).append(number)
    (first, its), *others = places.items()
    parts = []
    for name, at in ((first, its), (f"{first}, last third", its[2 * len(its) // 3 :]), *others):
        row = make_row(name, [answers[number] for number in at], [], 0)
        updates = sum(change["what"] in TRAINED and at[0] < change["query"] <= at[-1] + 1 for change in changes)
        parts.append(Part(name, len(at), row.tau, row.tokens_per_s, updates))
    return parts


def adapt_lines(rows: Sequence[AdaptRow]) -> list[dict[str, Any]]:
    """tau (tokens/s) of every part of the stream and of all of it, and what the updates cost."""
    return [
        {"method": row.row.method}
        | {f"{part.name} ({part.queries})": f"{part.tau:.2f} ({part.tokens_per_s:.1f})" for part in row.parts}
        | {
            "all": f"{row.row.tau:.2f} ({row.row.tokens_per_s:.1f})",
            "x never": row.row.speedup,
            "updates": row.updates,
            "reverts": row.reverts,
            "training s": row.train_s,
            "same/tie/wrong": row.row.verdicts,
        }
        for row in rows
    ]


def draw(rows: Sequence[AdaptRow], stream: Sequence[StreamQuery], file: Path) -> None:
    """tau and tokens/s along the stream, moving means, and below them when each policy changed the weights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.8), layout="constrained")
    upper, lower, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.2))
    styles, named = looks(row.row.method for row in rows), set[str]()
    for line, row in enumerate(rows):
        look = styles[row.row.method]
        style = {"color": look.colour, "linestyle": look.line, "label": row.row.method}
        upper.plot(moving_mean(row.query_tau), **style)
        lower.plot(moving_mean(row.query_tokens_per_s), **style)
        for change in row.changes:
            tick = {"markersize": 12, "markeredgewidth": 2, **change_look(change["what"], named)}
            below.plot(change["query"], line, "|", **tick)
    for at in range(len(stream)):
        if not at or stream[at].part != stream[at - 1].part:
            upper.annotate(
                stream[at].part, (at, 1), (4, -14), xycoords=("data", "axes fraction"), textcoords="offset points"
            )
            for panel in (upper, lower, below) if at else ():
                panel.axvline(at, color="0.6", linestyle=":")
    upper.set(ylabel=f"tau, mean of {SMOOTHING} queries")
    lower.set(ylabel=f"tokens/s, mean of {SMOOTHING} queries", ylim=(0, None))
    below.set(xlabel="query", ylim=(len(rows) - 0.4, -0.6))
    below.set_yticks(range(len(rows)), [row.row.method for row in rows])
    for panel in (upper, below):
        panel.legend(ncols=len(rows), loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    figure.savefig(file, dpi=130)

"""What a measuring command says: a table for people, and the same as JSON (docs/protocol.md)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from coppice import __version__
from coppice.client.completion import Completion
from coppice.machine import this_machine

Verdict = Literal["identical", "tie", "wrong"]
HF_GENERATE = "hf-generate"


@dataclass(frozen=True, slots=True)
class Row:
    """One method's figures over all its prompts."""

    method: str
    policy: str
    heads: tuple[str, ...]
    budget: int
    sessions: int
    prompts: int
    tokens: int
    tau: float
    tokens_per_s: float
    """prefill left out"""
    speedup: float = 0.0
    """over plain in the same run; 0 without plain"""
    draft_share: float = 0.0
    """waiting for drafts / step time"""
    verified_nodes: float = 0.0
    """mean of a step"""
    late_drafts: int = 0
    identical: int = 0
    """answers that are the reference's"""
    ties: int = 0
    """answers that differ by rounding alone (coppice.bench.reference)"""
    wrong: int = 0
    repeat_share: float = 0.0
    """share of an answer's 4-grams that occurred in it before, mean over answers: loops flatter every drafter"""


@dataclass(frozen=True, slots=True)
class Check:
    """A promise and whether it held."""

    name: str
    value: float
    bound: str
    ok: bool
    note: str = ""
    """for people only"""


@dataclass(slots=True)
class Report:
    """One run of a measuring command."""

    command: str
    dtype: str
    threads: int
    device: str = "cpu"
    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """what else was measured, for JSON"""

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The object of `--json FILE`."""
        return {
            "command": self.command,
            "version": __version__,
            "commit": commit(),
            "machine": machine_line(self.device),
            "dtype": self.dtype,
            "threads": self.threads,
            "rows": [asdict(row) for row in self.rows],
            "checks": [{key: getattr(check, key) for key in ("name", "value", "bound", "ok")} for check in self.checks],
            "ok": self.ok,
        } | ({"figures": self.figures} if self.figures else {})

    def write(self, file: Path) -> None:
        """Write the JSON object to a file."""
        file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def write_markdown(self, file: Path) -> None:
        """Write the tables and the checks as Markdown."""
        file.write_text(f"{machine_line(self.device)}\n\n" + markdown(self.tables(), self.checks), encoding="utf-8")

    def print(self, console: Console) -> None:
        """The tables and the checks below them."""
        if self.rows:
            for table in self.tables():
                console.print(table)
        for check in self.checks:
            sign = "[green]ok[/]" if check.ok else "[red]FAILED[/]"
            note = f" ({check.note})" if check.note else ""
            console.print(f"{sign} {check.name}: {check.value:g}, bound {check.bound}{note}", highlight=False)

    def tables(self) -> Iterable[Table]:
        """The rows for people."""
        title = f"{self.command}: {self.dtype}, {self.threads} threads, prefill left out; x hf is over transformers"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("method", no_wrap=True)
        for heading in ("tau", "tokens/s", "x plain", "x hf", "draft", "nodes", "same/tie/wrong"):
            table.add_column(heading, justify="right", no_wrap=True)
        peer = next((row.tokens_per_s for row in self.rows if row.method == HF_GENERATE), 0.0)
        for row in self.rows:
            figures = (row.tau, row.tokens_per_s, row.speedup, row.tokens_per_s / peer if peer else 0.0)
            table.add_row(
                row.method.removeprefix("single:"),
                *(f"{figure:.2f}" if figure else "-" for figure in figures),
                f"{row.draft_share:.0%}" if row.heads else "-",
                f"{row.verified_nodes:.1f}" if row.heads else "-",
                "-" if row.method == HF_GENERATE else f"{row.identical}/{row.ties}/{row.wrong}",
            )
        return [table]


def markdown(tables: Iterable[Table], checks: Iterable[Check]) -> str:
    """Tables, each behind its title, and the checks as one more."""
    parts = []
    for table in tables:
        lines = [[str(column.header) for column in table.columns]]
        lines += (list(line) for line in zip(*(map(str, column.cells) for column in table.columns), strict=True))
        parts.append(
            _markdown_table(str(table.title).replace("\n", "; "), lines)
            + (f"\n{table.caption}\n" if table.caption else "")
        )
    told = [[each.name, f"{each.value:g}", each.bound, "yes" if each.ok else "NO", each.note] for each in checks]
    return "\n".join([*parts, _markdown_table("Checks", [["check", "value", "bound", "held", "note"], *told])])


def _markdown_table(title: str, lines: Sequence[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"### {title}", "", first, "|---" * len(lines[0]) + "|", *others, ""])


def make_row(
    method: str, completions: Sequence[Completion], verdicts: Sequence[Verdict], budget: int, sessions: int = 1
) -> Row:
    """One method's row. Raises ValueError without an answer."""
    if not completions:
        raise ValueError(f"{method} has no answers")
    steps = sum(answer.steps for answer in completions)
    behind_first = sum(sum(answer.accept_lengths) for answer in completions)
    decode_s = sum(answer.decode_s for answer in completions)
    step_ns = sum(sum(answer.timings.step_ns) for answer in completions)
    counts = Counter(verdicts)
    return Row(
        method=method,
        policy=completions[0].policy,
        heads=completions[0].heads,
        budget=budget,
        sessions=sessions,
        prompts=len(completions),
        tokens=sum(answer.new_tokens for answer in completions),
        tau=behind_first / steps if steps else 1.0,
        tokens_per_s=behind_first / decode_s if decode_s else 0.0,
        draft_share=sum(answer.timings.draft_ns for answer in completions) / step_ns if step_ns else 0.0,
        verified_nodes=sum(sum(answer.verified_nodes) for answer in completions) / steps if steps else 0.0,
        late_drafts=sum(answer.late_drafts for answer in completions),
        identical=counts["identical"],
        ties=counts["tie"],
        wrong=counts["wrong"],
        repeat_share=sum(repeat_share(answer.ids) for answer in completions) / len(completions),
    )


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows with their speedup over plain; the answers are equally long, so speeds compare as times do."""
    plain = next((row.tokens_per_s for row in rows if row.method == "plain"), 0.0)
    return [replace(row, speedup=row.tokens_per_s / plain if plain else 0.0) for row in rows]


def exactness_checks(rows: Sequence[Row], dtype: str, trained_heads: bool, tokens_each: int) -> list[Check]:
    """Nothing wrong, in float32 no ties either, and enough evidence: long answers, and drafts that were accepted."""
    wrong, ties = sum(row.wrong for row in rows), sum(row.ties for row in rows)
    checks = [Check("wrong answers", wrong, "0", wrong == 0)]
    if dtype == "float32":
        checks.append(Check("ties", ties, "0", ties == 0))
    best = max((row.tau for row in rows if row.heads), default=1.0)
    strong = best > 1.3 and tokens_each >= 64
    note = "" if strong else "weak: too few drafts accepted, or answers too short, to prove much"
    checks.append(Check("best tau", best, "> 1.3 at 64 tokens a prompt", strong or not trained_heads, note))
    return checks


def repeat_share(ids: Sequence[int]) -> float:
    """Share of the 4-grams that occurred before."""
    grams = [tuple(ids[at : at + 4]) for at in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def commit() -> str:
    """The checkout's commit, with "-dirty" behind it when files differ; empty outside one."""
    root, git = Path(__file__).resolve().parents[2], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    command = [git, "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine_line(device: str) -> str:
    """The machine, and the accelerator if one is used."""
    line = this_machine().describe()
    if not device.startswith("cuda"):
        return line
    import torch

    return f"{line}, {torch.cuda.get_device_name(device)}"

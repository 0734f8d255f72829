"""The tables of `coppice bench paper`: what each shows, which options it takes, and what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from coppice.bench.report import Report
    from coppice.stack.spec import HeadSpec, StackSpec


@dataclass(frozen=True)
class Options:
    """The options that the tables share; a table takes those that its entry below has defaults for."""

    target: Path | None = None
    heads: list[str] | None = None
    prompts: Path | None = None
    n: int = 0
    max_new_tokens: int = 0
    budget: int | None = None
    temperatures: str = ""
    only: str | None = None
    data: list[str] | None = None
    cache: Path = Path()
    tokens: int = 0
    device: str = "cpu"
    dtype: str | None = "float32"


Compute = Callable[["StackSpec", Options, "Report", Callable[[str], None]], None]
REQUIRED = object()
TRAINED: dict[str, Any] = {"cache": REQUIRED, "only": None}
DECODED: dict[str, Any] = {"prompts": None, "max_new_tokens": 128, "dtype": None}


@dataclass(frozen=True)
class PaperTable:
    """One table: `defaults` holds the options that it takes, beside --target and --json."""

    shows: str
    module: str
    """of coppice.bench.paper; its function with the table's name fills a report"""
    defaults: Mapping[str, Any]


TABLES = {
    "coupling": PaperTable(
        "tau with coupled drafting and without, for the heads that can use the target's noise",
        "decoded",
        DECODED | {"heads": ["specblock-code", "eagle3-code", "lm"], "n": 16, "temperatures": "0.5,0.7,1"},
    ),
    "chains": PaperTable(
        "a tree, a chain, and a sampled chain that p/q rejection judges (nanoGPT, speculative sampling)",
        "decoded",
        DECODED | {"heads": ["bigram=bigram", "lm"], "n": 8, "temperatures": "0,1"},
    ),
    "drafting": PaperTable(
        "a draft of each head that reads features over its own forwards; --n drafts are timed",
        "drafting",
        {"heads": ["specblock-code", "eagle3-code"], "n": 60, "budget": None, "temperatures": "0,1", "dtype": None},
    ),
    "rank": PaperTable(
        "the rank head of a SpecBlock head along the target's answers, and what its trees gain (table 3)",
        "rank",
        {"heads": None, "prompts": None, "n": 12, "max_new_tokens": 96, "budget": 31},
    ),
    "ablate": PaperTable(
        "SpecBlock heads that lack one part each, trained alike, and what each part is worth (table 2)",
        "trained",
        TRAINED | {"data": REQUIRED, "tokens": 131_072, "budget": 31, "n": 8},
    ),
    "baselines": PaperTable(
        "the heads that SpecBlock is compared with, trained on the same data and steps",
        "trained",
        TRAINED | {"data": None, "tokens": REQUIRED, "device": "cpu"},
    ),
}


def heads_of(heads: Sequence[HeadSpec], kinds: Sequence[str]) -> tuple[HeadSpec, ...]:
    """The heads of some kinds. Raises InvalidField when there are none."""
    from coppice.errors import InvalidField

    chosen = tuple(head for head in heads if head.kind in kinds)
    if not chosen:
        raise InvalidField("heads", f"none is of kind {', '.join(kinds)}")
    return chosen


def read_options(name: str, given: Mapping[str, Any]) -> Options:
    """A table's options: those given, and its defaults. Raises BadParameter, which names the name or the option."""
    if name not in TABLES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(TABLES)}", param_hint="NAME")
    defaults: dict[str, Any] = {"target": None, **TABLES[name].defaults}
    for option in given:
        if option not in defaults:
            takes = ", ".join(map(_flag, defaults))
            raise typer.BadParameter(f"the table {name} takes {takes}", param_hint=_flag(option))
    options = {**defaults, **given}
    if "target" in given and "heads" not in given:
        options.pop("heads", None)  # the shipped heads are of the demo's target
    for option, value in options.items():
        if value is REQUIRED:
            raise typer.BadParameter(f"the table {name} needs it", param_hint=_flag(option))
    return Options(**options)


def compute_of(name: str) -> Compute:
    """What fills the report of a table; loads the table's module, which may load torch."""
    compute: Compute = getattr(import_module(f"coppice.bench.paper.{TABLES[name].module}"), name)
    return compute


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"

"""A stack from the options of a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from coppice.errors import InvalidField
from coppice.stack.spec import HeadSpec, StackSpec


def stack_spec(target: Path | None, heads: list[str] | None, **options: Any) -> StackSpec:
    """The spec of the options; an unusable one is a usage error that names it."""
    try:
        if heads:
            options["heads"] = tuple(HeadSpec.parse(head) for head in heads)
        if target is None:
            return StackSpec.demo(**options)
        return StackSpec(target=target, **options)
    except InvalidField as error:
        why = str(error).partition(": ")[2]
        raise typer.BadParameter(why, param_hint=f"--{error.field}") from None

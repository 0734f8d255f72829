"""Options that several commands take. What they name is checked before the work begins."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    from coppice.stack.spec import StackSpec


def split(texts: list[Any] | None) -> list[Any] | None:
    """The names, or paths, of an option that may be given several times, with commas between them."""
    return [type(text)(name) for text in texts for name in str(text).split(",")] if texts else None


def names(what: str, *flags: str, metavar: str = "NAME,...") -> Any:
    """An option that takes several names: it may be repeated, and commas separate names too."""
    return Option(*flags, metavar=metavar, callback=split, help=what)


def file(flag: str, what: str) -> Any:
    """An option that names a file to write; whether it can be is checked before the work."""

    def check(path: Path | None) -> Path | None:
        if path and not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
            raise typer.BadParameter(f"{path} cannot be written")
        return path

    return Option(flag, metavar="FILE", dir_okay=False, callback=check, help=what)


Heads = Annotated[
    list[str] | None,
    names(
        "Draft heads, or none; KIND is bigram, lookup, lm, eagle3, specblock, dflash, jetspec, dspark, mtp or what a "
        "package adds.",
        "--head",
        metavar="NAME=KIND[:DIR],...",
    ),
]
JsonFile = Annotated[Path | None, file("--json", "Also write the figures as JSON.")]


def stack_spec(
    target: Path | None, heads: list[str] | None, target_is: str = "--target", **options: Any
) -> "StackSpec":
    """The spec of the options; an unusable one is a usage error that names it. target_is: what gave the target."""
    from coppice.errors import InvalidField
    from coppice.stack.spec import HeadSpec, StackSpec, default_heads

    try:
        if heads:
            options["heads"] = () if heads == ["none"] else tuple(HeadSpec.parse(head) for head in heads)
        elif target:
            options["heads"] = default_heads(target)
        return StackSpec(target=target, **options) if target else StackSpec.demo(**options)
    except InvalidField as error:
        hint = target_is if error.field == "target" else f"--{error.field}"
        raise typer.BadParameter(str(error).partition(": ")[2], param_hint=hint) from None

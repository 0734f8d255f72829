"""Options that several commands take. What they name is checked before the work begins."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    from coppice.stack.spec import StackSpec

PICTURES = (".png", ".svg")


def split(texts: list[Any] | None) -> list[Any] | None:
    """The names, or paths, of an option that may be given several times, with commas between them."""
    return [type(text)(name) for text in texts for name in str(text).split(",")] if texts else None


def _writable(path: Path | None) -> Path | None:
    """A file that will be written into a folder that is there. Raises BadParameter where that cannot be done."""
    if path and not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def _drawable(path: Path | None) -> Path | None:
    """The same for a picture."""
    if path and path.suffix not in PICTURES:
        raise typer.BadParameter(f"{path} does not end in {' or '.join(PICTURES)}")
    return _writable(path)


def names(what: str, *flags: str, metavar: str = "NAME,...") -> Any:
    """An option that takes several names: it may be repeated, and commas separate names too."""
    return Option(*flags, metavar=metavar, callback=split, help=what)


def file(flag: str, what: str) -> Any:
    """An option that names a file to write; the path is checked before the work."""
    return Option(flag, metavar="FILE", dir_okay=False, callback=_writable, help=what)


def picture(flag: str, what: str) -> Any:
    """The same for a picture, whose format is the file's suffix."""
    return Option(flag, metavar="FILE", dir_okay=False, callback=_drawable, help=f"{what} ({', '.join(PICTURES)}).")


Heads = Annotated[
    list[str] | None,
    names(
        "Draft heads; KIND is bigram, lookup, lm, eagle3, specblock, dflash, jetspec, dspark or what a package adds.",
        "--head",
        metavar="NAME=KIND[:DIR],...",
    ),
]
JsonFile = Annotated[Path | None, file("--json", "Also write the figures as JSON.")]


def stack_spec(target: Path | None, heads: list[str] | None, **options: Any) -> "StackSpec":
    """The spec of the options; an unusable one is a usage error that names it."""
    from coppice.errors import InvalidField
    from coppice.stack.spec import HeadSpec, StackSpec

    try:
        if heads:
            options["heads"] = tuple(HeadSpec.parse(head) for head in heads)
        if target is None:
            return StackSpec.demo(**options)
        return StackSpec(target=target, **options)
    except InvalidField as error:
        why = str(error).partition(": ")[2]
        raise typer.BadParameter(why, param_hint=f"--{error.field}") from None

"""`coppice serve ROLE`, one service in this process, whose options are its settings, and `coppice settings`."""

import os
import sys
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coppice.config.settings import Settings
from coppice.stack.child import OPENMP_SPINS
from coppice.stack.launch import MODULES
from coppice.stack.process import environment

EVERY_ROLE = ("server", "tls", "limits")
ROLES = {
    "verifier": (
        "Serve one target, and draft heads beside it if `verifier.drafters` names some.",
        ("verifier", "drafter", "directory", "adaptation", "telemetry"),
    ),
    "drafter": ("Serve one draft head.", ("drafter", "directory", "adaptation", "telemetry")),
    "orchestrator": (
        "Serve generation over verifiers and drafters.",
        ("orchestrator", "directory", "adaptation", "telemetry"),
    ),
    "adapter": ("Train draft heads while they serve.", ("adapter", "adaptation", "directory")),
}
"""What each role does, and the sections it reads beside those of every role."""

PAGE = """# Settings

`coppice settings` prints this page. The first that is given holds: flag (`coppice serve ROLE --section.name VALUE`; a
list's once an entry), variable (`COPPICE_SECTION__NAME`; a list as JSON), YAML file (`--config`, `COPPICE_CONFIG`),
default. `coppice up` has options for the usual ones, and chooses dtype, threads and budget by the machine."""

app = typer.Typer(
    help="Run one service in this process.",
    no_args_is_help=True,
    add_completion=False,
    subcommand_metavar="ROLE [SETTINGS]...",
)


def _values(field: FieldInfo) -> str:
    """What a setting may be: its kind or its values."""
    kind: Any = field.annotation
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else str(kind) if get_args(kind) else kind.__name__


BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _print_sections(names: Iterable[str]) -> None:
    """Print every setting of some sections, with its kind, bounds and default, as Markdown."""
    for section in names:
        model: type[BaseModel] = type(Settings.model_fields[section].default)
        print(f"\n## {section}\n\n{' '.join((model.__doc__ or '').split())}\n")
        for name, field in model.model_fields.items():
            pairs = [(sign, getattr(bound, of, None)) for bound in field.metadata for of, sign in BOUNDS.items()]
            bounds = "".join(f", {sign}{value}" for sign, value in pairs if value is not None)
            default = "" if field.default in ("", []) else f": {field.default}"
            print(f"- `{section}.{name}{default}` ({_values(field)}{bounds}): {field.description}")


def settings() -> None:
    """List every setting of the services, with its kind, bounds and default, as a page of Markdown."""
    print(PAGE)
    _print_sections(Settings.model_fields)


def _add(role: str, doc: str, sections: tuple[str, ...]) -> None:
    """Make a role a command, whose arguments the service reads by itself."""

    def serve(context: typer.Context) -> None:
        if "--help" in context.args:
            print(f"coppice serve {role} [--config FILE] [--SECTION.NAME VALUE]...\n\n{doc}")
            _print_sections((*sections, *EVERY_ROLE))
            return
        command = [sys.executable, "-m", MODULES[role], *context.args]
        os.execve(sys.executable, command, {"GOMP_SPINCOUNT": OPENMP_SPINS, **environment()})  # noqa: S606

    raw = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(role, help=doc, context_settings=raw)(serve)


for _role, (_doc, _sections) in ROLES.items():
    _add(_role, _doc, _sections)

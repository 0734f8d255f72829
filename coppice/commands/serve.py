"""`coppice serve ROLE`, one service in this process, whose options are its settings, and `coppice settings`."""

import os
import sys
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

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


class _Service(TyperCommand):
    """Its options are for --help and completion: the service reads what is given, and variables and YAML too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or "--help" in args:
            return super().parse_args(ctx, args)
        ctx.args = args
        return args


def _values(field: FieldInfo) -> str:
    """What a setting may be: its kind or its values."""
    kind: Any = field.annotation
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else str(kind) if get_args(kind) else kind.__name__


def _options(section: str) -> list[Parameter]:
    """The settings of a section as options of a command, under its name and the first sentence of its docstring."""
    model: type[BaseModel] = type(Settings.model_fields[section].default)
    panel = f"{section}: {(model.__doc__ or '').partition('. ')[0].rstrip('.')}"
    options = []
    for name, field in model.model_fields.items():
        default = None if field.default in ("", []) else str(field.default)
        metavar = f"<{_values(field)}>"
        option = typer.Option(f"--{section}.{name}", metavar=metavar, help=field.description, rich_help_panel=panel)
        annotation = Annotated[str | None, option]
        options.append(Parameter(f"{section}_{name}", Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return options


BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def settings() -> None:
    """List every setting of the services, with its kind, bounds and default, as a page of Markdown."""
    print(PAGE)
    for section, of_section in Settings.model_fields.items():
        model: type[BaseModel] = type(of_section.default)
        print(f"\n## {section}\n\n{' '.join((model.__doc__ or '').split())}\n")
        for name, field in model.model_fields.items():
            pairs = [(sign, getattr(bound, of, None)) for bound in field.metadata for of, sign in BOUNDS.items()]
            bounds = "".join(f", {sign}{value}" for sign, value in pairs if value is not None)
            default = "" if field.default in ("", []) else f": {field.default}"
            print(f"- `{section}.{name}{default}` ({_values(field)}{bounds}): {field.description}")


def _add(role: str, doc: str, sections: tuple[str, ...]) -> None:
    """Make a role a command."""

    def serve(context: typer.Context, **_: Any) -> None:
        command = [sys.executable, "-m", MODULES[role], *context.args]
        os.execve(sys.executable, command, {"GOMP_SPINCOUNT": OPENMP_SPINS, **environment()})  # noqa: S606

    file = typer.Option("--config", metavar="FILE", help="YAML settings; COPPICE_CONFIG names it too.")
    config = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, file])
    parameters = [config, *(option for section in (*sections, *EVERY_ROLE) for option in _options(section))]
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    serve.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
    serve.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    app.command(role, cls=_Service, help=f"{doc} A variable COPPICE_SECTION__NAME is a setting too.")(serve)


for _role, (_doc, _sections) in ROLES.items():
    _add(_role, _doc, _sections)

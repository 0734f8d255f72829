"""The `coppice` command. Everything heavy is imported by the command that needs it, so that --help is quick."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from coppice import __version__
from coppice.errors import NOBODY, CoppiceError
from coppice.machine import extension, extensions

CHECK_FAILED, USAGE, UNREACHABLE = 1, 2, 3
OWN = ("coppice", "services", "orchestrator", "lab")  # a missing module of others is one of an extra's
COMMANDS = {
    "up": ("coppice.commands.up", "Start verifiers, drafters and orchestrators here, until Ctrl-C."),
    "fetch": ("coppice.commands.up", "Download a model from the Hugging Face Hub."),
    "top": ("coppice.commands.up", "Show what a running deployment does, from its pages of metrics."),
    "generate": ("coppice.commands.generate", "Answer a prompt, streaming the text."),
    "doctor": ("coppice.commands.doctor", "Look for what is needed here, and for a server."),
    "serve": ("coppice.commands.serve", "Run one service in this process."),
    "settings": ("coppice.commands.serve", "List every setting of the services."),
    "train": ("coppice.training.cli", "Train a target or a head."),
    "adapter": ("coppice.commands.adapter", "Look at the adapter, and steer it."),
}
"""The module of each command, which is imported when it is called or completed, and its help. A module has the command
as a function of its name, else several as a Typer app, `app`."""
ADDED = "coppice.commands"
"""Entry points of packages that add commands: NAME = MODULE:APP, a Typer app. Coppice's own such package is lab/."""
LAB = {"bench": "Measure speed and exactness.", "demo": "Start everything, stream three answers, compare the policies."}


class _Commands(TyperGroup):
    """All commands. Each is a stand-in, with no more than a help, until it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load(name), rest


def load(name: str) -> Any:
    """Import a command."""
    if name not in COMMANDS:
        return _with_bare_flags(get_command(extension(ADDED, name, "command")))
    module = import_module(COMMANDS[name][0])
    if function := getattr(module, name, None):
        group = typer.Typer(add_completion=False)
        group.command(name)(function)
    else:
        group = module.app
    return _with_bare_flags(get_command(group))


def _with_bare_flags(command: Any) -> Any:
    """The same: --help does not show a flag as if it took a value."""
    for each in (command, *getattr(command, "commands", {}).values()):
        for option in each.params:
            option.metavar = "" if getattr(option, "is_flag", False) else option.metavar
    return command


app = typer.Typer(
    cls=_Commands,
    help="Exact speculative decoding as a pipeline of services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: a deliberate error, or one about a file, becomes one line on stderr and its exit code."""
    try:
        app()
    except ModuleNotFoundError as error:
        if (error.name or "coppice").partition(".")[0] in OWN:
            raise
        _fail(f"{error.name} is not installed: in a checkout pip install '.[serve]' (or '.[train]')", USAGE)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", USAGE)
    except CoppiceError as error:
        hint = "; start one with `coppice up`, or name yours with --address" if str(error).startswith(NOBODY) else ""
        _fail(f"{error}{hint}", exit_code(error))


def _fail(message: str, code: int) -> NoReturn:
    print(f"coppice: {message}", file=sys.stderr)
    sys.exit(code)


def exit_code(error: CoppiceError) -> int:
    """2 for what the caller must change, 3 for a server that is away or refuses work, else 1."""
    if error.status in ("INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED"):
        return USAGE
    return UNREACHABLE if error.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED") else CHECK_FAILED


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coppice {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)
for _name in extensions(ADDED):
    app.command(_name, help=LAB.get(_name))(lambda: None)

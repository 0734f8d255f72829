"""The `coppice` command. Everything heavy is imported by the command that needs it, so that --help is quick."""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from coppice import __version__
from coppice.bench.options import Heads as Head
from coppice.commands.checks import demo, doctor
from coppice.commands.generate import chat, generate

if TYPE_CHECKING:
    from coppice.stack.launch import Stack

CHECK_FAILED, USAGE, UNREACHABLE = 1, 2, 3
# What a missing one of these means to people: the extra that brings it.
SERVE_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "jinja2",
    "matplotlib",
    "psutil",
    "huggingface_hub",
)
WATCH_S = 0.5
# Commands that are imported when they are called or completed: the module of each one's Typer app, and its help.
LATE = {
    "serve": ("coppice.commands.serve", "Run one service in this process."),
    "train": ("coppice.training.cli", "Train a target or a head."),
    "bench": ("coppice.bench.cli", "Measure speed and exactness."),
    "adapter": ("coppice.adaptation.cli", "Look at the adapter, and steer it."),
    "convert": ("coppice.commands.convert", "Convert a head between public layouts."),
}


class _Commands(TyperGroup):
    """All commands. Those of LATE are stand-ins, with no more than a help, until somebody asks for one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in LATE:
            command = get_command(import_module(LATE[name][0]).app)
        return name, command, rest


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
        if (error.name or "").partition(".")[0] not in SERVE_PACKAGES:
            raise
        _fail(f"{error.name} is not installed: pip install 'coppice-serve[serve]' (or [train])", USAGE)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", USAGE)
    except Exception as error:
        from coppice.errors import CoppiceError

        if not isinstance(error, CoppiceError):
            raise
        _fail(str(error), exit_code(error))


def _fail(message: str, code: int) -> NoReturn:
    print(f"coppice: {message}", file=sys.stderr)
    sys.exit(code)


def exit_code(error: Exception) -> int:
    """2 for what the caller must change, 3 for a server that is away or refuses work, else 1."""
    from coppice import errors

    usage = (errors.InvalidField, errors.NotFound, errors.Unauthenticated, errors.PermissionDenied)
    if getattr(error, "status", None) in [kind.status for kind in usage]:
        return USAGE
    away = (errors.Unavailable, errors.DeadlineExceeded, errors.Overloaded)
    return UNREACHABLE if isinstance(error, away) else CHECK_FAILED


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


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, or its name on the Hugging Face Hub; default: the demo's target and heads."
        ),
    ] = None,
    target: Annotated[Path | None, typer.Option(help="The same, if it is a folder.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model on the Hub; default: main.")
    ] = None,
    head: Head = None,
    policy: Annotated[str | None, typer.Option(help="Default policy.")] = None,
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: float32 on CPUs, else bfloat16.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default 50051; 0 takes a free one.")] = None,
    adapt: Annotated[bool, typer.Option("--adapt", help="Train the heads while they serve; starts Redis too.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML settings of every service.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="File to write addresses to once healthy.")] = None,
) -> None:
    """Start a verifier, drafters and an orchestrator here, until Ctrl-C."""
    from coppice.commands.hub import find_model
    from coppice.stack.launch import Stack
    from coppice.stack.options import stack_spec
    from coppice.stack.spec import DEFAULT_ADAPTER_PORT

    if config:
        os.environ["COPPICE_CONFIG"] = str(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on Ctrl-C
    options = {"policy": policy, "device": device, "dtype": dtype, "port": port}
    extra = {"adapter": {"server.port": 0 if port == 0 else DEFAULT_ADAPTER_PORT}}
    folder, name = find_model(model, target, revision)
    spec = stack_spec(folder, head, name=name, **options, adapt=adapt, extra=extra)
    stack = Stack(spec)
    try:
        with stack:
            _announce(stack, ready_file)
            reported = ""
            while True:
                time.sleep(WATCH_S)
                stack.check()
                if (lost := stack.lost()) and not reported:
                    print(f"coppice: heads are not adapted any more: {lost}", file=sys.stderr)
                reported = lost
    except KeyboardInterrupt:
        pass
    finally:
        if ready_file:
            ready_file.unlink(missing_ok=True)
    if stack.unclean:
        _fail(f"did not stop cleanly: {', '.join(stack.unclean)}", CHECK_FAILED)


def _announce(stack: "Stack", ready_file: Path | None) -> None:
    """Say that the stack is ready, on the terminal and in the file."""
    import json

    from rich.console import Console

    from coppice.commands.demo import services_table
    from coppice.machine import PROMISES

    console, dtype = Console(), stack.settings.verifier.dtype
    console.print(services_table(stack))
    console.print(f"{dtype}: {PROMISES[dtype]}", soft_wrap=True, highlight=False)
    console.print(f"ready at {stack.address}; Ctrl-C stops it", highlight=False)
    if ready_file:
        partial = ready_file.with_name(ready_file.name + ".partial")
        partial.write_text(json.dumps(stack.to_json()), encoding="utf-8")
        partial.replace(ready_file)


@app.command(
    "faults",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _faults() -> None:
    _fail("the fault campaign is a test: run python -m tests.faults in a checkout", USAGE)


app.command()(generate)
app.command()(chat)
app.command()(doctor)
app.command()(demo)
for _name, (_, _help) in LATE.items():
    app.command(_name, help=_help)(lambda: None)

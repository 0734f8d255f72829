"""The `coppice` command. Everything heavy is imported by the command that needs it, so that --help is quick."""

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from coppice import __version__
from coppice.commands.up import Head, top, up

if TYPE_CHECKING:
    from coppice.client.completion import Completion

GOOD, CHECK_FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
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

app = typer.Typer(
    help="Exact speculative decoding as a pipeline of services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Address = Annotated[str | None, typer.Option(help="HOST:PORT; default COPPICE_ADDRESS, else 127.0.0.1:50051.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")]


def main() -> None:
    """The console script: a deliberate error becomes one line on stderr and its exit code."""
    try:
        app()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVE_PACKAGES:
            raise
        _fail(f"{error.name} is not installed: pip install 'coppice-serve[serve]' (or [train])", USAGE)
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


app.command()(up)
app.command()(top)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead, such as 1,2,3.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A file instead: .jsonl and .txt hold a prompt a line, others are one prompt. All turns are asked."
        ),
    ] = None,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave out a file's prompts that the server's context has no room for.")
    ] = False,
    address: Address = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    policy: Annotated[
        str, typer.Option(help="plain, single:HEAD, route, merge, auto, ...; default: the server's.")
    ] = "",
    budget: Annotated[int | None, typer.Option(help="Draft nodes verified a step.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most probable ids kept; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the best id's probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none; default: the target's.")] = None,
    frequency_penalty: Annotated[float, typer.Option(help="For each time an id was generated.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="For ids that were generated.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to an id's logit (repeatable).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draws; default: one is drawn, which --json shows.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="0: the server's default.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer (repeatable).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Then draw the draft tree of the step that accepted most.")
    ] = False,
    tree_picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save that tree as a picture (.png, .svg).")
    ] = None,
) -> None:
    """Answer a prompt, streaming the text."""
    from coppice.client.client import Client, Options
    from coppice.commands.generate import answers_of, fitting, prompts_of

    prompts = prompts_of(prompt, ids, prompt_file)
    options: Options = {
        "policy": policy,
        "budget": budget,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": _read_bias(logit_bias or ()),
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "stop": stop or (),
        "trees": show_tree or tree_picture is not None,
    }
    with Client(address) as client:
        if prompt_file:
            prompts = fitting(client, prompts, chat, max_new_tokens, skip_long)
        for one in prompts:
            for answer in answers_of(client, one, chat, options, as_json):
                if answer.trees:
                    _draw_tree(answer, show_tree and not as_json, tree_picture)


def _read_bias(pairs: Iterable[str]) -> dict[int, float]:
    """ID=BIAS each."""
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise typer.BadParameter("is not ID=BIAS", param_hint="--logit-bias") from None


def _draw_tree(answer: "Completion", shown: bool, picture: Path | None) -> None:
    """The tree of the step that accepted most, on the terminal and as a picture."""
    from rich.console import Console

    from coppice.commands.tree_picture import longest, save, show

    tree = longest(answer.trees)
    if shown:
        show(tree, Console())
    if picture:
        save(tree, picture)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def serve(
    role: Annotated[str, typer.Argument(help="verifier, drafter, orchestrator or adapter.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its settings, such as --verifier.target DIR.")] = None,
) -> None:
    """Run one service in this process."""
    from coppice.stack.child import OPENMP_SPINS
    from coppice.stack.launch import MODULES
    from coppice.stack.process import environment
    from coppice.stack.spec import checkout

    if role not in MODULES:
        raise typer.BadParameter(f"{role!r} is not one of {', '.join(MODULES)}", param_hint="ROLE")
    command = [sys.executable, "-m", MODULES[role], *(arguments or [])]
    os.execve(sys.executable, command, {"GOMP_SPINCOUNT": OPENMP_SPINS, **environment(checkout())})  # noqa: S606


@app.command()
def demo(
    target: Annotated[Path | None, typer.Option(help="Model folder; default: the shipped models.")] = None,
    head: Head = None,
    json_file: JsonFile = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save what is shown as a picture.")] = None,
) -> None:
    """Start everything, with the shipped models if you name none, stream three answers, compare the policies."""
    from rich.console import Console

    from coppice.commands.demo import demo as run

    console = Console(record=svg is not None)
    good = run(console, json_file, target, head)
    if svg:
        console.save_svg(str(svg), title="coppice demo")
    raise typer.Exit(GOOD if good else CHECK_FAILED)


@app.command()
def doctor(
    address: Address = None,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Try a tiny random model of every causal LM class instead.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table of --architectures; goes on after a stop.")
    ] = None,
) -> None:
    """Look for what is needed here, and for a server."""
    from rich.console import Console

    from coppice.commands.doctor import doctor as run

    if architectures:
        from coppice.commands.architectures import architectures as try_all

        raise typer.Exit(GOOD if try_all(Console(), markdown) else CHECK_FAILED)
    raise typer.Exit(GOOD if run(Console(), address) else CHECK_FAILED)


@app.command(
    "faults",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _faults() -> None:
    _fail("the fault campaign is a test: run python -m tests.faults in a checkout", USAGE)


def _mount(name: str, module: str, help: str) -> None:
    """A command whose own Typer app is imported when it is called: its imports may need an extra."""

    def call(context: typer.Context) -> None:
        group: Callable[..., Any] = import_module(module).app
        code = group(context.args, prog_name=f"coppice {name}", standalone_mode=False)
        raise typer.Exit(code or GOOD)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=help, context_settings=settings)(call)


_mount("train", "coppice.training.cli", "Train a target or a head.")
_mount("bench", "coppice.bench.cli", "Measure speed and exactness.")
_mount("adapter", "coppice.adaptation.cli", "Look at the adapter, and steer it.")
_mount("convert", "coppice.commands.convert", "Convert a head between public layouts.")

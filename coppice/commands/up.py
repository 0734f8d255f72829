"""`coppice up` and `coppice top`. Everything heavy is imported when they are called."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.commands.options import Heads, stack_spec

if TYPE_CHECKING:
    from rich.console import Console

    from coppice.stack.launch import Stack

WATCH_S = 0.5


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
    head: Heads = None,
    policy: Annotated[str | None, typer.Option(help="Default policy.")] = None,
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: float32 on CPUs, else bfloat16.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default 50051; 0 takes a free one.")] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="OpenAI's API; default 8000, or a free one while that is taken; 0 serves none."
        ),
    ] = None,
    verifiers: Annotated[int, typer.Option(min=1, max=64, help="Verifiers, each with the target.")] = 1,
    drafters: Annotated[int, typer.Option(min=1, max=64, help="Drafters of each head.")] = 1,
    orchestrators: Annotated[int, typer.Option(min=1, max=64, help="Orchestrators; the first one is at --port.")] = 1,
    one_process: Annotated[
        bool, typer.Option("--one-process", help="Let the heads live in the verifiers' processes.")
    ] = False,
    adapt: Annotated[bool, typer.Option("--adapt", help="Train the heads while they serve; starts Redis too.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML settings of every service.")] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for the services' logs; default: one that is deleted at the end."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write addresses to once healthy.")
    ] = None,
) -> None:
    """Start verifiers, drafters and orchestrators here, and start again what dies, until Ctrl-C.

    A script stops it with SIGTERM: in the background of a shell (`coppice up &`) Ctrl-C's signal is ignored.
    """
    from coppice.commands.hub import find_model
    from coppice.config.model import warning_of
    from coppice.config.sections import HEAD_KINDS
    from coppice.stack.launch import Stack
    from coppice.stack.spec import DEFAULT_ADAPTER_PORT

    if config:
        os.environ["COPPICE_CONFIG"] = str(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on Ctrl-C
    options = {"policy": policy, "device": device, "dtype": dtype, "port": port, "adapt": adapt}
    options["one_process"] = one_process
    options["http_port"] = _http_port(http_port)
    replicas = {"verifiers": verifiers, "replicas": drafters, "orchestrators": orchestrators}
    extra = {"adapter": {"server.port": 0 if port == 0 else DEFAULT_ADAPTER_PORT}}
    folder, name = find_model(model, target, revision)
    spec = stack_spec(folder, head, name=name, **options, **replicas, extra=extra)
    for each in spec.heads:
        if each.path and each.kind in HEAD_KINDS and (warning := warning_of(each.path)):
            print(f"coppice: head {each.name}: {warning}", file=sys.stderr)
    _run(Stack(spec, log_dir=log_dir), ready_file)


def top(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of metrics, as `coppice up` prints them; several with commas between.")
    ],
) -> None:
    """Show what a running deployment does, from its pages of metrics; once where there is no terminal."""
    from coppice.commands.top import show

    show(address.split(","))


def _http_port(given: int | None) -> int | None:
    """What a stack is told: the port that was given, else 8000, any free one while that is taken, which is said.

    None leaves it to the settings, which name one.
    """
    from coppice.config.settings import load_settings
    from coppice.stack.preflight import why_no_port
    from coppice.stack.spec import DEFAULT_HTTP_PORT

    if given is not None:
        return given or -1
    settings = load_settings([])
    if "http_port" in settings.orchestrator.model_fields_set:
        return None
    host = settings.server.host
    if why := why_no_port(host, DEFAULT_HTTP_PORT):
        print(f"coppice: HTTP takes a free port: {host}:{DEFAULT_HTTP_PORT} cannot be used ({why})", file=sys.stderr)
        return 0
    return DEFAULT_HTTP_PORT


def _run(stack: "Stack", ready_file: Path | None) -> None:
    """Start a stack, keep it whole until Ctrl-C or SIGTERM, and stop it. Raises what Stack and Supervisor do."""
    from rich.console import Console

    from coppice.commands.top import facts, service_lines, services_table
    from coppice.stack.launch import ANSWERS_S
    from coppice.stack.preflight import target_warnings
    from coppice.stack.process import ProcessFailed

    console, logs_stay = Console(), stack.log_dir is not None
    try:
        if ready_file:
            _partial(ready_file).touch()  # an impossible path is known before anything loads
        for warning in target_warnings(stack.spec.target):
            print(f"coppice: {warning}", file=sys.stderr)
        with service_lines(console, stack):
            stack.start()
        console.print(services_table(stack))
        for line in facts(stack, logs_stay):
            console.print(line, soft_wrap=True, highlight=False)
        _watch(stack, console, ready_file)
    except KeyboardInterrupt:
        names = ", ".join(stack.processes)
        line = f"stopping {names}; answers that are running have {ANSWERS_S} s to end"
        console.print(line, highlight=False, soft_wrap=True)
    finally:
        with service_lines(console, stack):
            stack.stop()
        if ready_file:
            ready_file.unlink(missing_ok=True)
            _partial(ready_file).unlink(missing_ok=True)
    if stack.unclean:
        raise ProcessFailed(f"did not stop cleanly: {', '.join(stack.unclean)}")


def _watch(stack: "Stack", console: "Console", ready_file: Path | None) -> None:
    """Start again what dies, for ever; on a terminal a panel shows meanwhile what the stack does."""
    import json
    from contextlib import nullcontext

    from rich.live import Live

    from coppice.commands.top import Monitor, metrics_pages
    from coppice.stack.supervisor import Supervisor

    supervisor = Supervisor(stack, lambda line: print(f"coppice: {line}", file=sys.stderr, flush=True))
    monitor, changed = Monitor(metrics_pages(stack)), True
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext() as live:
        while True:
            if ready_file and changed:  # with new process ids; the file is whole at any moment
                _partial(ready_file).write_text(json.dumps(stack.to_json()), encoding="utf-8")
                _partial(ready_file).replace(ready_file)
            time.sleep(WATCH_S)
            changed = supervisor.look()
            if live:
                monitor.look()
                live.update(monitor.panel(), refresh=True)


def _partial(ready_file: Path) -> Path:
    return Path(f"{ready_file}.partial")

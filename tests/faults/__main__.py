"""`python -m tests.faults`: one fault after another on a stack of its own, under load; exits 1 when a check failed."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coppice.cli import exit_code
from coppice.errors import CoppiceError
from lab.measuring import finish, report_of
from lab.options import Heads, JsonFile, Options
from lab.report import table
from tests.certificates import Authority
from tests.faults.campaign.ledger import Ledger
from tests.faults.campaign.rig import Plan
from tests.faults.campaign.run import campaign, choose, every
from tests.tiny_stack import ONE_THREAD_EACH, tiny_stack

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def faults(
    kinds: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Faults or groups of them (see --list); default: all of them."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each fault.")] = 3,
    target: Annotated[Path | None, typer.Option(help="Model folder; default: a tiny random model.")] = None,
    heads: Heads = None,
    tls: Annotated[bool, typer.Option("--tls", help="All of it under mutual TLS, with new certificates.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what the file of --json holds of an earlier call.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is and what each proves, and stop.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill, stop, cut and mislead processes of a stack with two of everything, in float32, while clients ask.

    Every answer, greedy or sampled, must be what plain decoding said before the first fault, token by token; a stream
    that a fault met must go on within 5 s (p99), and afterwards nothing may be left behind: sessions, KV, signals, open
    files, threads. A repetition whose load was too small to prove anything fails as weak. Exit code 1 when a check
    failed. Every repetition prints a line and leaves its results in the file of --json.
    """
    console = Console()
    if listed:
        console.print(
            table("faults", [{"fault": one.name, "group": one.group, "proves": one.proves} for one in every()])
        )
        return
    with tempfile.TemporaryDirectory(prefix="coppice-faults-") as made:
        folder = Path(made)
        if target is None:
            os.environ |= ONE_THREAD_EACH
            target, tiny_heads = tiny_stack(folder)
            heads = heads or tiny_heads
        spec = Options(target=target, heads=heads, dtype="float32").spec()
        chosen, left_out = choose(kinds or [], spec)
        if left_out:
            names = ", ".join(one.name for one in left_out)
            console.print(f"left out, no head can be adapted: {names}", highlight=False)
        plan = Plan(repeat=repeat, tls=Authority(folder / "certificates") if tls else None)
        if plan.tls:
            os.environ["COPPICE_TLS__CA"] = str(plan.tls.folder / "ca.pem")  # clients need no certificate
        report = report_of("faults", spec)
        report.figures["asked"] = {"repeat": repeat, "tls": tls}
        ledger = Ledger(
            report, [one.name for one in chosen], repeat, json_file, lambda line: console.print(line, soft_wrap=True)
        )
        if resume:
            ledger.resume()
        try:
            report.checks += campaign(spec, chosen, plan, ledger, folder)
        except BaseException:
            ledger.report().print(console)
            raise
    finish(console, ledger.report(), json_file)


if __name__ == "__main__":
    try:
        app(prog_name="python -m tests.faults")
    except CoppiceError as error:
        print(f"faults: {error}", file=sys.stderr)
        sys.exit(exit_code(error))

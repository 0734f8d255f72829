"""`coppice doctor`: what this machine and this installation have, and what is missing."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage, which
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from coppice import __version__
from coppice.client.client import Client, default_address
from coppice.commands.generate import Address
from coppice.config.model import GIB, NO_MTP, ModelSize, ends_line, find_mtp, text_ends
from coppice.errors import CoppiceError, DeadlineExceeded, InvalidField, Unavailable
from coppice.machine import PROMISES, default_dtype, this_machine
from coppice.stack.process import checkout, find_redis, why_no_port
from coppice.stack.spec import COUNTING_KINDS, DEFAULT_PORT, SHIPPED_HEADS, StackSpec, check_target, target_warnings

CLIENT_PACKAGES = ("grpcio", "grpcio-health-checking", "protobuf", "numpy", "pydantic", "pydantic-settings")
SERVE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
SERVER = "server"
_TIMED_TOKENS = 4096  # of the KV pool, as the check of a model takes


class Finding(NamedTuple):
    """One line of the table. `ok` None is neither good nor bad."""

    name: str
    value: str
    ok: bool | None = None


def doctor(
    address: Address = None,
    target: Annotated[
        Path | None, typer.Option(help="A model's folder or GGUF file: does it fit the device that the settings name?")
    ] = None,
) -> None:
    """Look for what is needed here, and for a server; one that is named, or is COPPICE_ADDRESS, has to answer."""
    console, table = Console(), Table(show_header=False)
    findings = list(find(address or os.environ.get("COPPICE_ADDRESS"), target))
    for finding in findings:
        sign = {True: "[green]ok[/]", False: "[red]missing[/]", None: "-"}[finding.ok]
        table.add_row(finding.name, finding.value, sign)
    console.print(table)
    server = next(finding for finding in findings if finding.name == SERVER)
    if server.ok:
        step = 'coppice generate "Once upon a time"'
    elif find_spec("torch") is None:
        step = "pip install '.[serve]', in a checkout"
    else:
        step = "coppice up" if checkout() else "coppice up MODEL, a folder or a name on the Hugging Face Hub"
    console.print(f"try: {step}", highlight=False, soft_wrap=True, markup=False)
    if server.ok is False:
        raise Unavailable(server.value)
    raise typer.Exit(any(finding.ok is False for finding in findings))


def find(address: str | None, target: Path | None = None) -> Iterator[Finding]:
    """Every finding. What only servers need is needed in a checkout; a package may be installed as a client alone."""
    root = checkout()
    yield Finding("coppice", __version__)
    yield Finding("python", platform.python_version(), sys.version_info >= (3, 11))
    yield Finding("servers", f"of the checkout {root}" if root else "of the installed package")
    for name in (*CLIENT_PACKAGES, *SERVE_PACKAGES):
        yield _package(name, needed=root is not None or name in CLIENT_PACKAGES)
    machine = this_machine()
    yield Finding("cpu", f"{machine.cpu}, {machine.cores} cores")
    yield Finding("cpu features", " ".join(machine.features) or "none of note")
    try:
        from psutil import virtual_memory

        free = f", {virtual_memory().available / GIB:.1f} free"
    except ImportError:  # it comes with the servers
        free = ""
    yield Finding("memory", f"{machine.memory_gib:.1f} GiB{free}")
    disk = disk_usage(Path.home())
    yield Finding("disk", f"{disk.total / GIB:.1f} GiB, {disk.free / GIB:.1f} free, at {Path.home()}")
    yield Finding("default dtype on cpu", f"{default_dtype('cpu')}: {PROMISES[default_dtype('cpu')]}")
    yield from _devices()
    if root:  # the shipped target, and each shipped head with its kind
        folder = root / "models" / "demo"
        for name, kind in {"target": "the demo's target", **SHIPPED_HEADS}.items():
            if kind in COUNTING_KINDS:
                yield Finding(f"model {name}", f"{kind}, needs no weights", True)
            else:
                here = (folder / name / "config.json").is_file()
                yield Finding(f"model {name}", kind if here else f"{kind}: not in {folder}", here)
    yield Finding("redis-server", str(find_redis() or "none: needed by coppice up --adapt"))
    trusted = os.environ.get("COPPICE_TLS__CA")
    yield Finding("TLS to the server", f"trusting {trusted}" if trusted else "no: COPPICE_TLS__CA is not set")
    yield _server(address)
    yield Finding(f"port {DEFAULT_PORT}", why_no_port("127.0.0.1", DEFAULT_PORT) or "free")
    if target:
        yield from _target(target)


def _target(folder: Path) -> Iterator[Finding]:
    """Whether `coppice up` would find room for a model here, what ends its texts, and what is odd about its files."""
    from coppice.commands.up import find_model

    try:
        spec = StackSpec(target=find_model(None, folder, None)[0] or folder)
        settings = spec.settings()
        folder, verifier = spec.target, settings.verifier
        kv_tokens = check_target(spec, settings)
    except InvalidField as error:
        yield Finding("target", str(error), False)
        return
    place = f"{verifier.ranks} x {verifier.device} with {kv_tokens} KV tokens in {verifier.dtype}"
    yield Finding("target", f"{folder} fits {place}", True)
    if states := ModelSize.of(folder, verifier.dtype).states:
        kept = f"{states / 2**20:.2f} MiB for each of {settings.limits.sessions} sessions, and no prefix cache"
        yield Finding("states of texts", kept)
    if verifier.device == "cpu":
        from coppice.engine.loading import load_engine

        try:
            speed = load_engine(folder, dtype=verifier.dtype, kv_tokens=_TIMED_TOKENS).speed()
            yield Finding("forwards", speed or "the weights are so few that caches may hold them")
        except CoppiceError as error:
            yield Finding("forwards", str(error), False)
    yield Finding("MTP head", "in the checkpoint: coppice up drafts with it" if find_mtp(folder) else f"it {NO_MTP}")
    yield Finding("end of texts", ends_line(text_ends(folder)))
    for warning in target_warnings(folder):
        yield Finding("target's files", warning)


def _package(name: str, needed: bool) -> Finding:
    try:
        return Finding(name, metadata.version(name), True)
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", False if needed else None)


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("torch build", f"{build}, {torch.backends.cpu.get_cpu_capability()}")
    devices = []
    for number in range(torch.cuda.device_count()):
        spare, whole = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        devices.append(f"{name}, {whole / GIB:.1f} GiB, {spare / GIB:.1f} free")
    yield Finding("CUDA devices", "; ".join(devices) or "none")
    if devices:  # kernels are compiled when a verifier starts
        yield _package("triton", needed=True)
        compiler = which("gcc") or which("cc") or which("clang")
        yield Finding("C compiler", compiler or "none: needed by triton", compiler is not None)


def _server(address: str | None) -> Finding:
    at = address or default_address()
    try:
        with Client(at) as client:
            model = client.describe(timeout=2.0)
    except (Unavailable, DeadlineExceeded):
        return Finding(SERVER, f"none answers at {at}", False if address else None)
    except CoppiceError as error:
        return Finding(SERVER, f"{at} refuses: {error}")
    heads = ", ".join(model.heads) or "no heads"
    return Finding(SERVER, f"{model.name} at {at}: {heads}, default {model.default_policy}", True)

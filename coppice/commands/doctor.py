"""`coppice doctor`: what this machine and this installation have, and what is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from rich.console import Console
from rich.table import Table

from coppice import __version__
from coppice.client.client import Client, default_address
from coppice.errors import CoppiceError, DeadlineExceeded, Unavailable
from coppice.machine import PROMISES, default_dtype, this_machine
from coppice.stack.preflight import why_no_port
from coppice.stack.redis_server import find_server
from coppice.stack.spec import DEFAULT_PORT, checkout

CLIENT_PACKAGES = ("grpcio", "grpcio-health-checking", "protobuf", "numpy", "pydantic", "pydantic-settings")
SERVE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `ok` None is neither good nor bad."""

    name: str
    value: str
    ok: bool | None


def doctor(console: Console, address: str | None = None) -> bool:
    """Print what is found; returns whether nothing needed is missing."""
    table = Table(show_header=False)
    good = True
    for finding in find(address or default_address()):
        sign = {True: "[green]ok[/]", False: "[red]missing[/]", None: "-"}[finding.ok]
        table.add_row(finding.name, finding.value, sign)
        good &= finding.ok is not False
    console.print(table)
    return good


def find(address: str) -> Iterator[Finding]:
    """Every finding. What only servers need is needed in a checkout; a package may be installed as a client alone."""
    python = sys.version_info
    yield Finding("coppice", __version__, None)
    yield Finding("python", f"{python.major}.{python.minor}.{python.micro}", python >= (3, 11))
    root = checkout()
    yield Finding("servers", f"of the checkout {root}" if root else "of the installed package", None)
    for name in CLIENT_PACKAGES:
        yield _package(name, needed=True)
    for name in SERVE_PACKAGES:
        yield _package(name, needed=root is not None)
    yield from _hardware()
    if root:
        models = [name for name in ("target", "lm") if (root / "models" / "demo" / name / "config.json").is_file()]
        yield Finding("models/demo", ", ".join(models) or "none", len(models) == 2)
    yield Finding("redis-server", str(find_server() or "none: needed by coppice up --adapt"), None)
    trusted = os.environ.get("COPPICE_TLS__CA")
    yield Finding("TLS to the server", f"trusting {trusted}" if trusted else "no: COPPICE_TLS__CA is not set", None)
    yield _server(address)
    yield Finding(f"port {DEFAULT_PORT}", why_no_port("127.0.0.1", DEFAULT_PORT) or "free", None)


def _package(name: str, needed: bool) -> Finding:
    try:
        return Finding(name, metadata.version(name), True)
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", False if needed else None)


def _hardware() -> Iterator[Finding]:
    machine = this_machine()
    yield Finding("cpu", f"{machine.cpu}, {machine.cores} cores", None)
    yield Finding("cpu features", " ".join(machine.features) or "none of note", None)
    yield Finding("memory", f"{machine.memory_gib:.1f} GiB", None)
    yield Finding("default dtype on cpu", f"{default_dtype('cpu')}: {PROMISES[default_dtype('cpu')]}", None)
    try:
        import torch
    except ImportError:
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("torch build", f"{build}, {torch.backends.cpu.get_cpu_capability()}", None)
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding("CUDA devices", ", ".join(devices) or "none", None)


def _server(address: str) -> Finding:
    try:
        with Client(address) as client:
            model = client.describe(timeout=2.0)
    except (Unavailable, DeadlineExceeded):
        return Finding("server", f"none answers at {address}", None)
    except CoppiceError as error:
        return Finding("server", f"{address} refuses: {error}", None)
    heads = ", ".join(model.heads) or "no heads"
    return Finding("server", f"{model.name} at {address}: {heads}, default {model.default_policy}", True)

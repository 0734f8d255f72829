"""What would end a stack after its models were loaded, found before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from coppice.config.model import ModelSize, disagreements, free_memory, text_ends
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.stack.process import environment
from coppice.stack.spec import HTTP_PORT, StackSpec, checkout, module_of

_TEMPLATE_S = 30  # to say what is wrong with a chat template

PORTS = ("server.port", "server.health_port", "server.metrics_port", HTTP_PORT)


def preflight(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a port that is taken, a device that is not here, or a
    target that memory cannot hold.
    """
    taken: set[int] = set()
    for field, host, port in _ports(spec, settings):
        why = f"two of these services would listen on {port}" if port in taken else why_no_port(host, port)
        taken.add(port)
        if why:
            raise InvalidField(field, f"{host}:{port} cannot be used ({why}); choose another port, or 0 for a free one")
    kv_tokens = check_target(spec, settings)
    _check_device("drafter.device", settings.drafter.device)
    return kv_tokens


def check_target(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a device that is not here, or a target that theirs
    cannot hold or whose texts would not end.
    """
    verifier, told = settings.verifier, spec.extra.get("verifier", {})
    ranks = int(told.get("verifier.ranks", verifier.ranks))
    kv_tokens = int(told.get("verifier.kv_tokens", verifier.kv_tokens))
    _check_device("verifier.device", verifier.device, ranks)
    text_ends(spec.target)
    size = ModelSize.of(spec.target, verifier.dtype, wide_kv=verifier.invariant and verifier.device == "cpu")
    size.check_ranks(ranks)
    if (room := device_memory(verifier.device)) is None:
        return kv_tokens
    return size.fit_kv(kv_tokens, verifier.device, room, ranks=ranks, copies=spec.verifiers)


def target_warnings(folder: Path) -> Iterator[str]:
    """What is odd about a target's files and can be served nevertheless, a line each. Raises InvalidField."""
    yield from disagreements(folder)
    if not (folder / "tokenizer.json").is_file():
        return
    command = [sys.executable, "-m", module_of("orchestrator.text"), "check", str(folder.resolve())]
    try:
        checked = subprocess.run(command, capture_output=True, timeout=_TEMPLATE_S, env=environment(checkout()))
        yield from filter(None, checked.stdout.decode().splitlines())
    except subprocess.TimeoutExpired:
        yield "chats will be refused: this target's chat template does not end"


def _ports(spec: StackSpec, settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Setting, host and number of every port that is not just any free one: of the first orchestrator, the adapter."""
    first = {f"server.{name}": value for name, value in settings.server}
    first |= {HTTP_PORT: settings.orchestrator.http_port, **spec.extra.get("orchestrator", {})}
    adapter = spec.extra.get("adapter", {}) if spec.adapted else {}
    for flags in (first, {"server.host": "127.0.0.1", **adapter}):
        for name in PORTS:
            if (port := int(flags.get(name, 0))) > 0:
                yield name, flags["server.host"], port


def why_no_port(host: str, port: int) -> str:
    """Why nobody can listen there; empty when one can."""
    try:
        reserve(host, port).close()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to a port, 0 for a free one, that does not listen: a server that sets SO_REUSEADDR can listen
    there, and while none does, no outgoing connection and no server that takes any port gets it. Raises OSError.
    """
    bare = host.strip("[]")
    held = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((bare, port))
    except OSError:
        held.close()
        raise
    return held


def _check_device(field: str, device: str, ranks: int = 1) -> None:
    """Raise InvalidField unless torch can use a device here, or so many. torch is loaded for it, but for the CPU."""
    if device == "cpu":
        return
    import torch

    try:
        known = torch.device(device)
        if known.type != "cuda":
            torch.empty(0, device=known)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidField(field, f"{device!r} is no device here: {str(error).splitlines()[0]}") from None
    if known.type == "cuda" and (known.index or 0) + ranks > (count := torch.cuda.device_count()):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        what = f"{device!r} for {ranks} ranks" if ranks > 1 else f"{device!r}"
        raise InvalidField(field, f"{what} is not here: torch is built {built} and finds {count} CUDA devices")


def device_memory(device: str) -> float | None:
    """Bytes of the memory of a device, of the host's those that are free; None where nobody knows."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.get_device_properties(device).total_memory)
    return free_memory(device)

"""What would end a stack after its models were loaded, found before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from coppice.config.model import ModelSize, disagreements, free_memory, text_ends
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.stack.process import environment
from coppice.stack.spec import HTTP_PORT, StackSpec, checkout, module_of

PORTS = ("server.port", "server.health_port", "server.metrics_port", HTTP_PORT)
_TEMPLATE_S = 30  # to say what is wrong with a chat template


def preflight(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a port that is taken, a device that is not here, or a
    target that memory cannot hold.
    """
    first = {f"server.{name}": value for name, value in settings.server}
    first |= {HTTP_PORT: settings.orchestrator.http_port, **spec.extra.get("orchestrator", {})}
    adapter = {"server.host": "127.0.0.1", **(spec.extra.get("adapter", {}) if spec.adapted else {})}
    numbers: set[int] = set()
    for flags, name in ((flags, name) for flags in (first, adapter) for name in PORTS):
        if (port := int(flags.get(name, 0))) > 0:
            host = flags["server.host"]
            reason = f"two of these services would listen on {port}" if port in numbers else why_no_port(host, port)
            numbers.add(port)
            if reason:
                choose = "choose another port, or 0 for a free one"
                raise InvalidField(name, f"{host}:{port} cannot be used ({reason}); {choose}")
    kv_tokens = check_target(spec, settings)
    _check_device("drafter.device", settings.drafter.device)
    return kv_tokens


def check_target(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a device that is not here, or a target that theirs
    cannot hold or whose texts would not end.
    """
    verifier, flags = settings.verifier, spec.extra.get("verifier", {})
    ranks = int(flags.get("verifier.ranks", verifier.ranks))
    kv_tokens = int(flags.get("verifier.kv_tokens", verifier.kv_tokens))
    _check_device("verifier.device", verifier.device, ranks)
    text_ends(spec.target)
    size = ModelSize.of(spec.target, verifier.dtype, wide_kv=verifier.invariant and verifier.device == "cpu")
    size.check_ranks(ranks)
    if verifier.device.startswith("cuda"):
        import torch

        memory: float | None = torch.cuda.get_device_properties(verifier.device).total_memory
    else:
        memory = free_memory(verifier.device)
    if memory is None:
        return kv_tokens
    return size.fit_kv(kv_tokens, verifier.device, memory, ranks=ranks, copies=spec.verifiers)


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


def why_no_port(host: str, port: int) -> str:
    """Why nobody can listen there; empty when one can."""
    try:
        with ExitStack() as tried:
            reserve(tried, host, port)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def reserve(until: ExitStack, host: str, port: int) -> int:
    """Bind a port, 0 for a free one, without listening, until the stack ends; returns its number.

    A server that sets SO_REUSEADDR can listen there, and while none does, no outgoing connection and no server that
    takes any port gets it. Raises OSError.
    """
    bare = host.strip("[]")
    bound = until.enter_context(socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((bare, port))
    number = int(bound.getsockname()[1])
    if sys.platform != "linux":  # two sockets cannot share a port there
        bound.close()
    return number


def _check_device(field: str, device: str, ranks: int = 1) -> None:
    """Raise InvalidField unless torch can use a device here, or so many. torch is loaded for it, but for the CPU."""
    if device == "cpu":
        return
    import torch

    try:
        place = torch.device(device)
        if place.type != "cuda":
            torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidField(field, f"{device!r} is no device here: {str(error).splitlines()[0]}") from None
    if place.type == "cuda" and (place.index or 0) + ranks > (count := torch.cuda.device_count()):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        what = f"{device!r} for {ranks} ranks" if ranks > 1 else f"{device!r}"
        raise InvalidField(field, f"{what} is not here: torch is built {built} and finds {count} CUDA devices")

"""What would end a stack after its models were loaded, found before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from coppice.config.model_size import ModelSize, free_memory
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.stack.spec import HTTP_PORT, StackSpec


def preflight(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a port that is taken, a device that is not here, or a
    target that memory cannot hold.
    """
    for field, host, port in _ports(spec, settings):
        if why := why_no_port(host, port):
            raise InvalidField(field, f"{host}:{port} cannot be used ({why}); choose another port, or 0 for a free one")
    kv_tokens = check_target(spec, settings)
    _check_device("drafter.device", settings.drafter.device)
    return kv_tokens


def check_target(spec: StackSpec, settings: Settings) -> int:
    """The KV tokens of each verifier. Raises InvalidField over a device that is not here, or a target that theirs
    cannot hold.
    """
    verifier, told = settings.verifier, spec.extra.get("verifier", {})
    ranks = int(told.get("verifier.ranks", verifier.ranks))
    kv_tokens = int(told.get("verifier.kv_tokens", verifier.kv_tokens))
    _check_device("verifier.device", verifier.device, ranks)
    size = ModelSize.of(spec.target, verifier.dtype, wide_kv=verifier.invariant and verifier.device == "cpu")
    size.check_ranks(ranks)
    if (room := device_memory(verifier.device)) is None:
        return kv_tokens
    return size.fit_kv(kv_tokens, verifier.device, room, ranks=ranks, copies=spec.verifiers)


def _ports(spec: StackSpec, settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Setting, host and number of every port that is not just any free one: of the first orchestrator, the adapter."""
    names = ("server.port", "server.health_port", "server.metrics_port", HTTP_PORT)
    first = {f"server.{name}": value for name, value in settings.server}
    first |= {HTTP_PORT: settings.orchestrator.http_port, **spec.extra.get("orchestrator", {})}
    adapter = spec.extra.get("adapter", {}) if spec.adapted else {}
    for flags in (first, {"server.host": "127.0.0.1", **adapter}):
        for name in names:
            if (port := int(flags.get(name, 0))) > 0:
                yield name, flags["server.host"], port


def why_no_port(host: str, port: int) -> str:
    """Why nobody can listen there; empty when one can."""
    bare = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


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

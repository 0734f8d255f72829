"""What would end a stack after its models were loaded, found before anything is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from coppice.config.sections import VerifierSettings
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.stack.spec import HTTP_PORT, StackSpec

_GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def preflight(spec: StackSpec, settings: Settings) -> None:
    """Raise InvalidField over a port that is taken, a device that is not here, or a target that memory cannot hold."""
    for field, host, port in _ports(spec, settings):
        if why := why_no_port(host, port):
            raise InvalidField(field, f"{host}:{port} cannot be used ({why}); choose another port, or 0 for a free one")
    for field, device in (("verifier.device", settings.verifier.device), ("drafter.device", settings.drafter.device)):
        _check_device(field, device)
    told = spec.extra.get("verifier", {})
    kv_tokens = int(told.get("verifier.kv_tokens", settings.verifier.kv_tokens))
    _check_memory(spec, settings.verifier, kv_tokens)


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


def _check_device(field: str, device: str) -> None:
    """Raise InvalidField unless torch can use a device here. torch is loaded for it, but for the CPU."""
    if device == "cpu":
        return
    import torch

    try:
        known = torch.device(device)
        if known.type != "cuda":
            torch.empty(0, device=known)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidField(field, f"{device!r} is no device here: {str(error).splitlines()[0]}") from None
    if known.type == "cuda" and (known.index or 0) >= (count := torch.cuda.device_count()):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise InvalidField(field, f"{device!r} is not here: torch is built {built} and finds {count} CUDA devices")


def _check_memory(spec: StackSpec, verifier: VerifierSettings, kv_tokens: int) -> None:
    """Raise InvalidField if the verifiers' weights and KV, the least that they need, are more than there is."""
    room, each = _room(verifier.device), 4 if verifier.dtype == "float32" else 2
    weights, kv = each * count_weights(spec.target), each * kv_tokens * count_kv(spec.target)
    need = spec.verifiers * (weights + kv)
    if room is not None and need > room:
        raise InvalidField(
            "target",
            f"{spec.verifiers} x ({weights / _GIB:.1f} GiB of weights + {kv / _GIB:.1f} GiB of KV) are more than the "
            f"{room / _GIB:.1f} GiB of memory on {verifier.device}; a lower verifier.kv_tokens, bfloat16 or a "
            "smaller target takes less",
        )


def _room(device: str) -> float | None:
    """Bytes that may be taken of a device's memory; None where nobody knows."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.get_device_properties(device).total_memory)
    if device != "cpu":
        return None
    import psutil

    limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.is_file() else ""
    available = float(psutil.virtual_memory().available)
    return min(available, float(limit)) if limit.isdecimal() else available


def count_weights(folder: Path) -> int:
    """Numbers in a folder's checkpoint; a file that cannot be read has none: loading will say what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as tensors:
                count += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            continue
    return count


def count_kv(folder: Path) -> int:
    """Numbers that a model keeps of a token; 0 where its config.json names its shape in other words than Llama's."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * dim)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0

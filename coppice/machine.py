"""The machine: what a report must name, what decides the default dtype and thread counts, and what packages add."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from coppice.errors import InvalidField

# What matters to a target's speed, by the kernel's names.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")

Dtype = Literal["float32", "bfloat16"]
PROMISES: dict[Dtype, str] = {
    "float32": "exact: the same text as plain decoding, token for token",
    "bfloat16": "each token is the argmax within rounding; float32 promises plain decoding's text, and so does "
    "verifier.invariant, which costs a tenth of the speed",
}
"""what a target of a dtype says under speculation"""
INVARIANT = "invariant: the text is plain decoding's, token for token, whatever is beside it"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    vendor: str
    """as the processor says it: GenuineIntel, AuthenticAMD; empty where the kernel does not tell"""
    cores: int
    """cores this process may use"""
    memory_gib: float
    features: tuple[str, ...]
    system: str

    def describe(self) -> str:
        """One line for reports."""
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, {' '.join(self.features)}, {self.system}"


def this_machine() -> Machine:
    """The machine this runs on."""
    lines: dict[str, str] = {}  # the first core's
    with suppress(OSError):  # other kernels have none
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        pairs = (line.partition(":") for line in first.splitlines())
        lines = {key.strip(): value.strip() for key, _, value in pairs}
    flags = f"{lines.get('flags', '')} {lines.get('Features', '')}".split()
    return Machine(
        cpu=lines.get("model name") or platform.processor() or platform.machine(),
        vendor=lines.get("vendor_id", ""),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        features=tuple(name for name in _FEATURES if name in flags),
        system=f"{platform.system()} {platform.machine()}",
    )


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_dtype(device: str) -> Dtype:
    """What is served where nobody says: float32 on CPUs, whose text is plain decoding's, bfloat16 on CUDA."""
    return "bfloat16" if device.startswith("cuda") else "float32"


@cache
def extensions(group: str) -> Mapping[str, EntryPoint]:
    """What the installed packages add to a group of entry points, by name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=group)}


def extension(group: str, name: str, field: str) -> Any:
    """Import what a package adds under a name. Raises InvalidField about `field` when it cannot be imported."""
    entry = extensions(group)[name]
    try:
        return entry.load()
    except Exception as error:
        reason = f"{name!r} is not to be had from {entry.value}: {type(error).__name__}: {error}"
        raise InvalidField(field, reason) from error

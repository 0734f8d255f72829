"""What a model takes of a device's memory and how long a text it holds: known before any weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, Self

from coppice.config.sections import VerifierSettings
from coppice.errors import InvalidField
from coppice.limits import BLOCK_SIZE, MAX_CONTEXT

GIB = 2**30
RESERVE = 2 * GIB
"""bytes of a CUDA device beside weights and KV: CUDA itself, its libraries, and a forward of some hundred rows"""
KV_SHARE, LEAST_KV = 0.5, 1024
"""of what is free after the weights, as much may KV take whose size nobody chose; no fewer tokens"""
_DEFAULT = VerifierSettings.model_fields["kv_tokens"].default
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
FLOATS = ("F64", "F32", "F16", "BF16")
"""dtypes of safetensors that become the served one; others, as quantised weights have, stay"""
_BITS = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


_BATCH_DEPENDENT = ("dynamic", "longrope")
"""kinds of rotary positions that depend on the longest text of a batch: beyond their first length, sessions would
change each other"""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """weights: bytes of all weights. kv: bytes that a token's keys and values take, 0 where the folder does not tell.
    kv_heads: key heads of a layer, 0 where it does not tell.
    """

    weights: int
    kv: int
    kv_heads: int

    @classmethod
    def of(cls, folder: str | Path, dtype: str, *, wide_kv: bool = False) -> Self:
        """The size of a folder's model when its floating numbers are of this dtype, float32 or bfloat16; with
        `wide_kv` keys and values are float32 in any case.
        """
        each = 4 if dtype == "float32" else 2
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return cls(_weights(Path(folder), config, each), *_kv(config, 4 if wide_kv else each))

    def check_ranks(self, ranks: int) -> None:
        """Raise InvalidField unless each rank can hold as many of a layer's key heads as the others."""
        if self.kv_heads % ranks:
            why = f"{ranks} ranks cannot share the model's {self.kv_heads} KV heads evenly"
            raise InvalidField("verifier.ranks", why)

    def fit_kv(self, kv_tokens: int, device: str, room: float, *, ranks: int = 1, copies: int = 1) -> int:
        """The KV tokens that a verifier gets: so many, and of the default number what KV_SHARE of the memory that the
        weights leave can hold. Raises InvalidField, which says what would do, if a model and its KV need more than
        there is.

        room: bytes free on each device; ranks on the CPU share its one memory. copies: verifiers that share all that.
        """
        on_cuda = device.startswith("cuda")
        usable = max(0.0, room - RESERVE) if on_cuda else room
        devices = ranks if on_cuda else 1
        share = KV_SHARE * (devices * usable / copies - self.weights)
        if kv_tokens == _DEFAULT and LEAST_KV * self.kv < share < kv_tokens * self.kv:
            return int(share / self.kv)
        kv = self.kv * kv_tokens
        need = copies * (self.weights + kv)
        if need <= devices * usable:
            return kv_tokens
        where = f"{devices} x {device}" if devices > 1 else device
        kept = f", of which {RESERVE / GIB:.0f} are kept for forwards" if on_cuda else ""
        enough = self._ranks_for(need / usable) if on_cuda and usable else 0
        advice = f"{enough} ranks on as many such devices would hold them; " if enough else ""
        raise InvalidField(
            "verifier.ranks" if enough else "target",
            f"{copies} x ({self.weights / GIB:.1f} GiB of weights + {kv / GIB:.1f} GiB of KV) are more than the "
            f"{room / GIB:.1f} GiB of memory on {where}{kept}; {advice}a lower verifier.kv_tokens, bfloat16 or a "
            "smaller target takes less",
        )

    def _ranks_for(self, devices: float) -> int:
        """The least number of ranks that share the key heads and have so many devices; 0 if there is none."""
        return next((ranks for ranks in range(ceil(devices), self.kv_heads + 1) if self.kv_heads % ranks == 0), 0)


def free_memory(device: str) -> float | None:
    """Bytes of the host's memory that may be taken, its cgroup's limit included; None for other devices than the CPU,
    which torch knows.
    """
    if device != "cpu":
        return None
    import psutil

    limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.is_file() else ""
    available = float(psutil.virtual_memory().available)
    return min(available, float(limit)) if limit.isdecimal() else available


def _weights(folder: Path, config: dict[str, Any], each: int) -> int:
    """Bytes of a checkpoint; a file that cannot be read has none: loading will say what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    # These are as large as any once the first forward has made numbers of them.
    unpacked = (config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    count, dtype = prod(part.get_shape()), part.get_dtype()
                    if unpacked and name.endswith(".weight_packed"):
                        continue
                    if unpacked and name.endswith(".weight_shape"):
                        total += prod(map(int, tensors.get_tensor(name))) * each
                    elif dtype in FLOATS or (unpacked and name.endswith(".weight")):
                        total += count * each
                    else:
                        total += count * _BITS.get(dtype, 8) // 8
        except (SafetensorError, OSError):
            continue
    return total


def _kv(config: dict[str, Any], each: int) -> tuple[int, int]:
    """Bytes of a token's KV, and key heads; 0 and 0 where config.json names its shape in other words than Llama's."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return int(2 * config["num_hidden_layers"] * kv_heads * dim) * each, kv_heads
    except (KeyError, TypeError, ZeroDivisionError):
        return 0, 0


@dataclass(frozen=True, slots=True)
class Context:
    """A number of positions, and what it was cut by where the configuration promises more."""

    tokens: int
    cut_by: str = ""

    @classmethod
    def of(cls, config: Any, otherwise: int) -> Context:
        """What a text model's configuration allows; `otherwise` where it names no limit."""
        promised = longest = int(getattr(config, "max_position_embeddings", None) or otherwise)
        cut_by = ""
        rope = getattr(config, "rope_parameters", None) or {}
        # Where kinds of layers differ, each has parameters of its own.
        for kind in [rope] if "rope_type" in rope else filter(None, rope.values()):
            first = int(kind.get("original_max_position_embeddings") or longest)
            if kind.get("rope_type") in _BATCH_DEPENDENT and first < longest:
                longest = first
                cut_by = f"rope kind {kind['rope_type']} would let longer texts change each other; {promised} promised"
        return cls(longest, cut_by)

    def served(self, kv_tokens: int) -> Context:
        """What a verifier with so many KV tokens serves of it."""
        room = kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        if min(room, MAX_CONTEXT) >= self.tokens:
            return self
        return Context(room, f"verifier.kv_tokens is {kv_tokens}") if room < MAX_CONTEXT else Context(MAX_CONTEXT)

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.cut_by})" if self.cut_by else f"{self.tokens} tokens"

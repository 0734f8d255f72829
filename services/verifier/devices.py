"""Whether a target can be served by the devices that it is to run on, known before its weights are read."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from coppice.config.model_size import ModelSize, free_memory
from coppice.config.sections import VerifierSettings
from coppice.errors import InvalidField


def check_devices(settings: VerifierSettings, rank: int = 0) -> VerifierSettings:
    """The settings with the KV tokens that there is room for. Raises InvalidField unless there are the devices that the
    target's ranks need, and this rank's has the memory.
    """
    wide_kv, ranks = settings.invariant and settings.device == "cpu", settings.ranks
    size = ModelSize.of(settings.target, settings.dtype, wide_kv=wide_kv)
    size.check_ranks(ranks)
    if ranks > 1:
        _check_ranks(settings.device, ranks)
    room = free_memory(settings.device)
    if settings.device.startswith("cuda"):
        # Of no other device: to ask for its memory takes some of it.
        room = float(torch.cuda.mem_get_info((torch.device(settings.device).index or 0) + rank)[0])
    if room is None:
        return settings
    kv_tokens = size.fit_kv(settings.kv_tokens, settings.device, room, ranks=ranks)
    return settings.model_copy(update={"kv_tokens": kv_tokens})


def _check_ranks(device: str, ranks: int) -> None:
    devices = torch.cuda.device_count()
    if find_spec("accelerate") is None:
        why = "need the package accelerate, which is not installed: in a checkout pip install '.[ranks]'"
    elif device == "cuda" and devices < ranks:
        why = f"take a CUDA device each, and torch finds {devices}"
    elif device == "cpu" and devices:
        why = "would compute on the CUDA devices here: verifier.device cuda says so, CUDA_VISIBLE_DEVICES= hides them"
    else:
        return
    raise InvalidField("verifier.ranks", f"{ranks} ranks {why}")

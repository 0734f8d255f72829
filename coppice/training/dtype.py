"""Whether a device can be used, and which number format is fast there."""

import torch

from coppice.errors import InvalidField


def usable_device(name: str) -> torch.device:
    """Return the device of that name. Raises InvalidField when tensors cannot be put there."""
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise InvalidField("device", f"{name}: {str(error).partition(chr(10))[0]}") from None


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where there are units for it (CUDA, AMX), else float32: there bfloat16 is many times slower."""
    if device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported()):
        return torch.bfloat16
    return torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Return a context of mixed precision in `fast_dtype`, which does nothing where that is float32."""
    dtype = fast_dtype(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)

"""Which number format is fast on a device."""

import torch


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where there are units for it (CUDA, AMX), else float32: there bfloat16 is many times slower."""
    if device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported()):
        return torch.bfloat16
    return torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Return a context of mixed precision in `fast_dtype`, which does nothing where that is float32."""
    dtype = fast_dtype(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)

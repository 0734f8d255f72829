"""What tells two loads of a model apart, at the speed at which memory is read."""

from __future__ import annotations

import hashlib
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_RUN = 64  # words that are summed to one
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(model: nn.Module) -> bytes:
    """SHA-256 over every parameter's and buffer's name, dtype, shape, and the sums of its bits as integers.

    Each sum is of 64 words that lie one behind the other, so that rows which change places are noticed too. Sums of
    integers do not depend on their order: every device and number of threads finds the same. It tells loads apart that
    differ by mistake; somebody who means harm could make two that it takes for one. Of a model whose tensors lie on
    several ranks each finds what one that has it all does; they have to ask together.
    """
    digest = hashlib.sha256()
    with torch.inference_mode():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            words = _words(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
            end = len(words) // _RUN * _RUN
            for sums in (words[:end].view(-1, _RUN).sum(1), words[end:]):
                digest.update(sums.cpu().numpy().tobytes())
    return digest.digest()


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bits as the widest integers that it can be cut into, (n,)."""
    flat = tensor.contiguous().reshape(-1)
    width = next(width for width in _WORDS if flat.nbytes % width == 0)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()
    return flat.view(_WORDS[width])

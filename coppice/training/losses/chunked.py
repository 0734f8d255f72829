"""Losses over a large vocabulary, a few hundred positions at a time: all logits at once would not fit the caches."""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 512


def next_token_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of hidden (T, H), embedding (V, H) tied to the output, labels (T,)."""
    total = hidden.new_zeros(())
    for h, y in zip(torch.split(hidden, CHUNK), torch.split(labels, CHUNK), strict=True):
        total = total + F.cross_entropy((h @ embedding.T).float(), y, reduction="sum")
    return total / labels.numel()


def soft_target_loss(hidden: Tensor, embedding: Tensor, teacher_hidden: Tensor, teacher_embedding: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats to the teacher's full distribution at T=1.

    hidden (T, H) and embedding (V, H) are the student's, teacher_hidden (T, H') and teacher_embedding (V, H') the
    teacher's, both tied models over one vocabulary.
    """
    total = hidden.new_zeros(())
    for h, t in zip(torch.split(hidden, CHUNK), torch.split(teacher_hidden, CHUNK), strict=True):
        with torch.no_grad():
            wanted = (t @ teacher_embedding.T).float().softmax(-1)
        total = total + F.cross_entropy((h @ embedding.T).float(), wanted, reduction="sum")
    return total / hidden.shape[0]

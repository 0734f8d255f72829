"""Gradients of one batch by several threads, each with one core and a replica of the model that shares its weights.

On a CPU this beats intra-op parallelism: layers of a small model are too short to split, and on a busy machine every
split waits for the core that is taken away. Rows are dealt out in a fixed order, so that results repeat.
"""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs (B, T), labels (B, T)) -> the mean loss in nats."""


def share_weights(model: nn.Module) -> nn.Module:
    """A replica with its own gradients over the same weight storage."""
    replica = copy.deepcopy(model)
    for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return replica


class Workers:
    """`num_workers` threads that split batches and matrix stacks between them."""

    def __init__(self, model: nn.Module, loss: LossFunction, num_workers: int, micro_tokens: int) -> None:
        self.loss, self.micro_tokens = loss, micro_tokens
        self.replicas = [model] + [share_weights(model) for _ in range(num_workers - 1)]
        self.pool = ThreadPoolExecutor(num_workers, thread_name_prefix="training")
        if num_workers > 1:
            torch.set_num_threads(1)

    def backward(self, ids: Tensor) -> float:
        """Leave the mean loss's gradients of `ids` (B, T + 1) in the model; returns that loss in nats."""
        rows, length = len(ids), ids.shape[1] - 1
        parts = ids.split(max(1, self.micro_tokens // length))
        futures = [
            self.pool.submit(self._backward_parts, replica, parts[i :: len(self.replicas)], rows)
            for i, replica in enumerate(self.replicas)
        ]
        total = sum(future.result() for future in futures)
        first, *others = [list(replica.parameters()) for replica in self.replicas]
        for other in others:
            for p, q in zip(first, other, strict=True):
                if q.grad is not None:
                    p.grad = q.grad if p.grad is None else p.grad.add_(q.grad)
                    q.grad = None
        return total

    def mean_loss(self, ids: Tensor) -> float:
        """The mean loss of `ids` (B, T + 1) in nats, without gradients."""
        parts = ids.split(max(1, self.micro_tokens // (ids.shape[1] - 1)))
        futures = [
            self.pool.submit(self._evaluate_parts, replica, parts[i :: len(self.replicas)])
            for i, replica in enumerate(self.replicas)
        ]
        return sum(future.result() for future in futures) / len(ids)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()

    def _backward_parts(self, model: nn.Module, parts: Iterable[Tensor], rows: int) -> float:
        total = 0.0
        for part in parts:
            loss = self.loss(model, part[:, :-1], part[:, 1:]) * (len(part) / rows)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def _evaluate_parts(self, model: nn.Module, parts: Iterable[Tensor]) -> float:
        return sum(float(self.loss(model, part[:, :-1], part[:, 1:])) * len(part) for part in parts)

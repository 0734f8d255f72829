"""Gradients of one batch by several threads, each with one core and a replica of the model that shares its weights.

On a CPU this beats intra-op parallelism: the layers of a small model are too short to split, and on a busy machine
every split waits for the core that was taken away. Parts go to whichever thread is free, so with more than one
worker two runs agree to rounding, not to the bit.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from coppice.training.dtype import autocast

LossFunction = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, inputs (B, T), labels (B, T)) -> the mean loss in nats."""


def share_weights(model: nn.Module) -> nn.Module:
    """Return a replica with gradients of its own over the same weight storage, which shares all that is not trained."""
    shared = {id(buffer): buffer for buffer in model.buffers()}
    for part in model.modules():
        shared |= {id(value): value for name, value in vars(part).items() if not name.startswith("_")}
    replica = copy.deepcopy(model, shared)
    for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return replica


class Workers:
    """`num_workers` threads that share out the rows of a batch."""

    def __init__(self, model: nn.Module, loss: LossFunction, num_workers: int, micro_tokens: int) -> None:
        """A part has `micro_tokens` tokens; about 512 keep its activations in the caches."""
        self.loss, self.micro_tokens = loss, micro_tokens
        self.replicas = [model] + [share_weights(model) for _ in range(num_workers - 1)]
        self._torch_threads = torch.get_num_threads()
        if num_workers > 1:  # a core each; a single one keeps all of torch's
            torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="training")

    def close(self) -> None:
        """End the threads and give torch its own back."""
        self._pool.shutdown()
        torch.set_num_threads(self._torch_threads)

    def backward(self, ids: Tensor) -> float:
        """Add the gradients of the mean loss of `ids` (B, T + 1) to the model's and return that loss in nats."""

        def job(model: nn.Module, part: Tensor) -> float:
            with autocast(part.device):
                loss = self.loss(model, part[:, :-1], part[:, 1:]) * (len(part) / len(ids))
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        total = self._share_out(job, ids)
        for replica in self.replicas[1:]:
            for p, q in zip(self.replicas[0].parameters(), replica.parameters(), strict=True):
                if q.grad is not None:
                    p.grad = q.grad if p.grad is None else p.grad.add_(q.grad)
                    q.grad = None
        return total

    def mean_loss(self, ids: Tensor, loss: LossFunction | None = None) -> float:
        """Return the mean loss of `ids` (B, T + 1) in nats, without gradients; by default the one that is trained."""
        judge = loss or self.loss

        def job(model: nn.Module, part: Tensor) -> float:
            with torch.no_grad(), autocast(part.device):
                return float(judge(model, part[:, :-1], part[:, 1:])) * len(part) / len(ids)

        return self._share_out(job, ids)

    def _share_out(self, job: Callable[[nn.Module, Tensor], float], ids: Tensor) -> float:
        """Return the sum of `job` over parts of `ids`; each replica takes the next part when it is free."""
        parts = iter(torch.split(ids, max(1, self.micro_tokens // (ids.shape[1] - 1))))  # one for all threads

        def work(replica: nn.Module) -> float:
            return sum(job(replica, part) for part in parts)

        return float(sum(self._pool.map(work, self.replicas)))

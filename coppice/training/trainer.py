"""The training loop that targets and heads share: step, report, evaluate, checkpoint; resumable at every step."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from coppice.engine.modules import pays
from coppice.training.checkpoint import Named, load_checkpoint, save_checkpoint, save_weights
from coppice.training.data.packing import Packed, Reader, check_held_out, held_out_batches
from coppice.training.dtype import autocast
from coppice.training.progress import Progress
from coppice.training.run_folder import BEST, checkpoints, stop_signal


class Schedule(BaseModel):
    """Warm-up, then constant and linear decay to zero (WSD), or cosine to zero. All lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: PositiveInt
    """Tokens of the whole run."""
    warmup: PositiveInt = 60_000
    cosine: bool = False
    decay: PositiveFloat = 0.3
    """Share of the run over which the rate falls to zero."""
    length: PositiveInt = 256
    long_length: PositiveInt = 512
    """Row length in the last `long_share` of the run: positions beyond `length` must have been seen once."""
    long_share: float = 0.15
    batch: PositiveInt = 4096
    small_batch: PositiveInt = 2048
    """Tokens a step before `small_until`: early gradients agree, so more steps are worth more than better ones."""
    small_until: int = 1_500_000

    def rate(self, seen: int) -> float:
        """Return the factor on every learning rate after `seen` tokens."""
        risen = (seen + self.batch) / self.warmup
        if self.cosine:
            return max(0.0, min(risen, 0.5 + 0.5 * math.cos(math.pi * min(1.0, seen / self.tokens))))
        return max(0.0, min(1.0, (self.tokens - seen) / (self.tokens * self.decay), risen))

    def shape(self, seen: int) -> tuple[int, int]:
        """Return (rows, length) of the step after `seen` tokens."""
        length = self.long_length if seen >= self.tokens * (1 - self.long_share) else self.length
        batch = self.small_batch if seen < self.small_until else self.batch
        return max(1, batch // length), length


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


class Muon(torch.optim.Muon):
    """The same updates, but for the rounding; its state is torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change all weights that have a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            weights, gradients, buffers = list[Tensor](), list[Tensor](), list[Tensor]()
            self._init_group(group, weights, gradients, buffers)
            for weight, gradient, buffer in zip(weights, gradients, buffers, strict=True):
                buffer.lerp_(gradient, 1 - momentum)
                update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
                update = _orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * math.sqrt(max(1, weight.shape[0] / weight.shape[1])))


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrix with its singular values near 1, by Newton and Schulz's iteration."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


OUTSIDE = re.compile(r"embed|lm_head|position_queries|mask_tokens|rank_head|markov|confidence")
"""matrices that read or write tokens, slots, buckets or chances"""
MUON_STEPS = 4
"""Newton-Schulz iterations; a fifth made no run better"""


@dataclass
class Counters:
    """Everything that a resumed run needs besides tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = float("inf")
    """lowest so far: the held-out loss, or a figure's negative"""
    best_loss: float = float("inf")
    """the held-out loss of those weights"""
    best_tokens: int = 0
    drawn: dict[str, int] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and how often things happen."""

    muon: float = 0.02
    """of the matrices inside; 0 gives them to AdamW"""
    adam: float = 3e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    eval_tokens: int = 200_000
    eval_rows: int = 12
    patience_tokens: int = 1_000_000
    checkpoint_seconds: float = 180.0
    micro_tokens: int = 512


@dataclass(frozen=True)
class RunOptions:
    """Whether a run goes on from its newest checkpoint, and where and how it is done."""

    resume: bool = False
    device: str = "cpu"
    num_workers: int = 1
    """training threads"""
    seed: int = 0


DEFAULTS = RunOptions()


def make_optimisers(model: torch.nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    """Give the matrices inside to Muon; embeddings, the output layer and norms go to AdamW."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if rates.muon and p.ndim == 2 and not OUTSIDE.search(name)]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if not matrices:
        return [adamw]
    slow = matrices[0].device.type == "cpu" and not pays(torch.bfloat16)
    muon = (Muon if slow else torch.optim.Muon)(
        matrices, lr=rates.muon, weight_decay=rates.weight_decay, ns_steps=MUON_STEPS
    )
    return [muon, adamw]


class Trainer:
    """Trains `model` on `domains` into `folder` (checkpoints/, best.safetensors, log.jsonl)."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: LossFunction,
        domains: list[Packed],
        schedule: Schedule,
        folder: Path,
        rates: Rates | None = None,
        options: RunOptions = DEFAULTS,
        judge: LossFunction | None = None,
        measure: Callable[[], dict[str, float]] | None = None,
        best_by: str = "",
    ) -> None:
        """`judge` is the held-out loss, where the trained one does not compare over time. `measure` gives further
        figures of an evaluation. The best weights have the highest `best_by` of these, or the lowest held-out loss.

        Raises DataError when nothing is held out.
        """
        check_held_out(domains, schedule.length + 1)
        self.judge, self.measure, self.best_by = judge, measure or dict, best_by
        self.model, self.domains, self.schedule = model, domains, schedule
        self.folder, self.rates = folder, rates or Rates()
        self.workers = Workers(model, loss, options.num_workers, self.rates.micro_tokens)
        self.optimisers = make_optimisers(model, self.rates)
        self.counters = Counters()
        self.reader = Reader(domains, options.seed, max(schedule.length, schedule.long_length))
        self.resume = options.resume
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def named(self) -> Named:
        """The model's parameters by name."""
        return dict(self.model.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def _stale(self) -> bool:
        """The last `patience_tokens` made nothing better."""
        best = self.counters.best_tokens
        return best > 0 and self.counters.tokens - best > self.rates.patience_tokens

    def _load_newest(self) -> None:
        """Load the newest checkpoint, if any; the data goes on at the next unread row."""
        if saved := checkpoints(self.folder / "checkpoints"):
            self.counters = Counters(**load_checkpoint(saved[-1], self.named, self.optimisers))
            self.reader.drawn.update(self.counters.drawn)

    def checkpoint(self) -> None:
        """Write a checkpoint of this very step."""
        self.counters.drawn = dict(self.reader.drawn)
        save_checkpoint(
            self.folder / "checkpoints", self.counters.step, self.named, self.optimisers, vars(self.counters).copy()
        )

    def train(self, title: str) -> bool:
        """Run to the schedule's end; False when a signal stopped it first (a checkpoint is then written).

        `title` is what progress is called.
        """
        if self.resume:
            self._load_newest()
        last_checkpoint, smooth = time.monotonic(), 0.0
        try:
            with stop_signal() as stopping, Progress("tokens", self.schedule.tokens) as progress:
                while self.counters.tokens < self.schedule.tokens and not stopping.is_set() and not self._stale:
                    started = time.monotonic()
                    before = self.counters.tokens
                    loss = self._step()
                    if loss is None:
                        break
                    self.counters.seconds += time.monotonic() - started
                    smooth = 0.95 * smooth + 0.05 * loss if smooth else loss
                    progress.say(f"{title}, step {self.counters.step}, loss {smooth:.3f}")
                    progress.reach(self.counters.tokens, self.schedule.tokens)
                    if before // self.rates.eval_tokens != self.counters.tokens // self.rates.eval_tokens:
                        self._evaluate(loss, progress)
                    if time.monotonic() - last_checkpoint > self.rates.checkpoint_seconds:
                        self.checkpoint()
                        last_checkpoint = time.monotonic()
                if stopping.is_set():
                    progress.print(f"trained on {self.counters.tokens:,} tokens, go on with --resume")
                else:
                    self._evaluate(None, progress)
                self.checkpoint()
        finally:
            self.workers.close()
        return not stopping.is_set()

    def _step(self) -> float | None:
        rows, length = self.schedule.shape(self.counters.tokens)
        batch = self.reader.next_batch(rows, length)
        if batch is None:
            return None
        rate = self.schedule.rate(self.counters.tokens)
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate
        loss = self.workers.backward(torch.from_numpy(batch).to(self.device))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.rates.clip, foreach=True)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if loss != loss:
            raise FloatingPointError(f"the loss is not a number after {self.counters.tokens} tokens")
        self.counters.step += 1
        self.counters.tokens += rows * length
        return loss

    def _evaluate(self, loss: float | None, progress: Progress) -> None:
        batches = held_out_batches(self.domains, self.rates.eval_rows, self.schedule.length)
        held_out = {name: self.workers.mean_loss(rows.to(self.device), self.judge) for name, rows in batches.items()}
        weights = {d.name: d.weight for d in self.domains if d.name in held_out}
        mean = sum(held_out[name] * w for name, w in weights.items()) / sum(weights.values())
        self.counters.held_out = held_out
        measured = self.measure()
        score = -measured[self.best_by] if self.best_by else mean
        if score < self.counters.best:
            self.counters.best, self.counters.best_loss, self.counters.best_tokens = score, mean, self.counters.tokens
            save_weights(self.folder / BEST, self.named)
        told = "  ".join(f"{name} {value:.3f}" for name, value in (held_out | measured).items())
        progress.print(f"held out after {self.counters.tokens:,} tokens: {mean:.3f} ({told})")
        row = measured | {"tokens": self.counters.tokens, "seconds": round(self.counters.seconds, 1), "loss": loss}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row | {"held_out": held_out}) + "\n")

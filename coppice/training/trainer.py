"""The training loop of every kind of head: step, report, evaluate, checkpoint; resumable at every step."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor

from coppice.engine.modules import pays
from coppice.errors import InvalidField
from coppice.training.data import Packed, Reader, check_held_out, held_out_batches
from coppice.training.heads import HeadInTraining, RunOptions, TrainingConfig
from coppice.training.progress import Progress
from coppice.training.run_folder import (
    BEST,
    CARD,
    Named,
    checkpoints,
    load_checkpoint,
    load_weights,
    read_run,
    replacing,
    save_checkpoint,
    save_weights,
    stop_signal,
    write_card,
)


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


def share_weights(model: HeadInTraining) -> HeadInTraining:
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

    def __init__(self, model: HeadInTraining, source: Any, num_workers: int, micro_tokens: int) -> None:
        """A part has `micro_tokens` tokens; about 512 keep its activations in the caches."""
        self.source, self.micro_tokens = source, micro_tokens
        self.replicas = [model] + [share_weights(model) for _ in range(num_workers - 1)]
        self._torch_threads = torch.get_num_threads()
        if num_workers > 1:  # a core each; a single one keeps all of torch's
            torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="training")

    def close(self) -> None:
        """End the threads and give torch its own back."""
        self._pool.shutdown()
        torch.set_num_threads(self._torch_threads)

    def backward(self, rows: Tensor) -> float:
        """Add the gradients of the mean loss of (B, T) rows to the model's and return that loss in nats."""

        def job(model: HeadInTraining, part: Tensor) -> float:
            with autocast(part.device):
                loss = model.loss(self.source, part) * (len(part) / len(rows))
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        total = self._share_out(job, rows)
        for replica in self.replicas[1:]:
            for p, q in zip(self.replicas[0].parameters(), replica.parameters(), strict=True):
                if q.grad is not None:
                    p.grad = q.grad if p.grad is None else p.grad.add_(q.grad)
                    q.grad = None
        return total

    def held_out_loss(self, rows: Tensor) -> float:
        """Return the mean held-out loss of (B, T) rows in nats, without gradients."""

        def job(model: HeadInTraining, part: Tensor) -> float:
            with torch.no_grad(), autocast(part.device):
                return float(model.held_out_loss(self.source, part)) * len(part) / len(rows)

        return self._share_out(job, rows)

    def _share_out(self, job: Callable[[HeadInTraining, Tensor], float], rows: Tensor) -> float:
        """Return the sum of `job` over parts of the rows; each replica takes the next part when it is free."""
        parts = iter(torch.split(rows, max(1, self.micro_tokens // rows.shape[1])))  # one for all threads

        def work(replica: HeadInTraining) -> float:
            return sum(job(replica, part) for part in parts)

        return float(sum(self._pool.map(work, self.replicas)))


class Muon(torch.optim.Muon):
    """torch's updates and state, but iterated in float32 on CPUs where bfloat16 is slow."""

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
    x = x.bfloat16() if x.is_cuda or pays(torch.bfloat16) else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


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


HEAD_RATES = Rates(muon=0.02, adam=2e-3, clip=0.5, eval_tokens=100_000, eval_rows=8, micro_tokens=256)
"""of heads that read features"""
ADAMW_RATES = replace(HEAD_RATES, muon=0.0, adam=1e-3)
"""the paper's optimiser; on the demo target it took 2.4 times as many tokens to the same held-out loss"""
LM_RATES = Rates(muon=0.02, adam=4e-3, eval_tokens=50_000)


def head_schedule(tokens: int) -> Schedule:
    """Return a cosine with warm-up, in small steps over short rows."""
    return Schedule(
        tokens=tokens,
        cosine=True,
        warmup=min(20_000, -(-tokens // 10)),
        small_batch=512,
        batch=1024,
        length=128,
        long_length=256,
        long_share=0.2,
    )


def lm_schedule(tokens: int) -> Schedule:
    """Return a short run in small steps."""
    return Schedule(tokens=tokens, warmup=min(20_000, -(-tokens // 10)), batch=2048, length=128, long_length=256)


def make_optimisers(model: torch.nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    """Give the matrices inside to Muon; embeddings, the output layer and norms go to AdamW."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if rates.muon and p.ndim == 2 and not OUTSIDE.search(name)]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if not matrices:
        return [adamw]
    return [Muon(matrices, lr=rates.muon, weight_decay=rates.weight_decay, ns_steps=MUON_STEPS), adamw]


class Trainer:
    """Trains a head on what `source.domains()` gives into a work folder (checkpoints/, best.safetensors, log.jsonl)."""

    def __init__(
        self,
        model: HeadInTraining,
        source: Any,
        schedule: Schedule,
        folder: Path,
        rates: Rates,
        options: RunOptions,
    ) -> None:
        """`source` is handed to the model's losses. The best weights have the highest figure `model.best_by`, or the
        lowest held-out loss. Raises DataError when nothing is held out.
        """
        self.domains: list[Packed] = source.domains()
        check_held_out(self.domains, schedule.length + 1)
        self.model, self.schedule, self.folder, self.rates = model, schedule, folder, rates
        self.workers = Workers(model, source, options.num_workers, rates.micro_tokens)
        self.optimisers = make_optimisers(model, rates)
        self.counters = Counters()
        self.reader = Reader(self.domains, options.seed, max(schedule.length, schedule.long_length))
        self.device, self.resume = torch.device(options.device), options.resume
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def named(self) -> Named:
        """The model's parameters by name."""
        return dict(self.model.named_parameters())

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
        loss = self.workers.backward(torch.from_numpy(batch[:, :-1]).to(self.device))
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
        held_out = {name: self.workers.held_out_loss(rows[:, :-1].to(self.device)) for name, rows in batches.items()}
        weights = {d.name: d.weight for d in self.domains if d.name in held_out}
        mean = sum(held_out[name] * w for name, w in weights.items()) / sum(weights.values())
        self.counters.held_out = held_out
        measured = self.model.figures()
        score = -measured[self.model.best_by] if self.model.best_by else mean
        if score < self.counters.best:
            self.counters.best, self.counters.best_loss, self.counters.best_tokens = score, mean, self.counters.tokens
            save_weights(self.folder / BEST, self.named)
        figures = "  ".join(f"{name} {value:.3f}" for name, value in (held_out | measured).items())
        progress.print(f"held out after {self.counters.tokens:,} tokens: {mean:.3f} ({figures})")
        row = measured | {"tokens": self.counters.tokens, "seconds": round(self.counters.seconds, 1), "loss": loss}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row | {"held_out": held_out}) + "\n")


def train_head(head: HeadInTraining, config: TrainingConfig, schedule: Schedule, rates: Rates) -> bool:
    """Train in `config.work`; False when a signal stopped the run before its end."""
    trainer = Trainer(head.to(config.options.device), config.answers, schedule, config.work, rates, config.options)
    head.begin(lambda: trainer.counters.tokens / schedule.tokens)
    return trainer.train(config.kind)


def export_head(head: HeadInTraining, config: TrainingConfig, out: Path) -> None:
    """Write the head folder `out` from the run's best weights; an older one is replaced when it is complete."""
    load_weights(config.work / BEST, dict(head.named_parameters()))
    with replacing(out) as partial:
        head.export(partial)
        if not (partial / CARD).exists():
            run = read_run(config.work)
            write_card(partial, f"A {config.kind} draft head for {run.target}", head, run)


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

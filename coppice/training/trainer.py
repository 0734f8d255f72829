"""The training loop that targets and heads share: step, report, evaluate, checkpoint; resumable at every step."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coppice.engine.linear import pays
from coppice.training.checkpoint import Named, load_checkpoint, save_checkpoint, save_weights
from coppice.training.data.packing import Packed, Reader, check_held_out, held_out_batches
from coppice.training.muon import Muon
from coppice.training.progress import Progress
from coppice.training.run_folder import BEST, checkpoints, stop_signal
from coppice.training.schedule import Schedule
from coppice.training.workers import LossFunction, Workers

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

"""The training loop of every kind of head: step, report, evaluate, checkpoint, export; resumable at every step.

A run's work folder, beside the model folder that it makes, has checkpoint.safetensors, best.safetensors and log.jsonl.
"""

import json
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from coppice.training.answers import write_whole
from coppice.training.data import Reader, check_held_out, held_out_batches
from coppice.training.heads import HeadInTraining, TrainingConfig
from coppice.training.losses import autocast, fast_dtype
from coppice.training.progress import Progress

CHECKPOINT, BEST, CARD = "checkpoint.safetensors", "best.safetensors", "README.md"
COUNTERS = "counters"  # what a checkpoint's metadata calls them
CHECKPOINT_S = 180.0
OUTSIDE = re.compile(r"embed|lm_head|position_queries|mask_tokens|rank_head|markov|confidence")
"""matrices that read or write tokens, slots, buckets or chances: AdamW trains them"""
MUON_STEPS = 4  # Newton-Schulz iterations; a fifth made no run better
CLIP = 0.5  # largest norm of a gradient
WEIGHT_DECAY = 0.01
SMALL_UNTIL = 1_500_000  # tokens of small steps: early gradients agree, so more steps are worth more than better ones
LONG_SHARE = 0.2  # share of the run, its last, in long rows: positions beyond `length` must have been seen once
MICRO_TOKENS = 256  # tokens of a forward; its activations stay in the caches
EVAL_ROWS = 8
TAUGHT = (
    "Trained to predict the target's distribution at every position of its own answers to prompts of the text below, "
    "half of them at temperature 1, the others at 0 and 0.7."
)


@dataclass(frozen=True)
class Recipe:
    """A run's lengths, all in tokens, and peak learning rates: they rise at first and fall to zero along a cosine."""

    tokens: int  # of the whole run
    adam: float = 2e-3
    muon: float = 0.02  # of the matrices inside; 0 gives them to AdamW
    small_batch: int = 512
    batch: int = 1024
    length: int = 256
    long_length: int = 512
    eval_tokens: int = 200_000

    def rate(self, seen: int) -> float:
        """Return the factor on every learning rate after `seen` tokens."""
        risen = (seen + self.batch) / min(20_000, -(-self.tokens // 10))
        return max(0.0, min(risen, 0.5 + 0.5 * math.cos(math.pi * min(1.0, seen / self.tokens))))

    def shape(self, seen: int) -> tuple[int, int]:
        """Return (rows, length) of the step after `seen` tokens."""
        length = self.long_length if seen >= self.tokens * (1 - LONG_SHARE) else self.length
        return max(1, (self.small_batch if seen < SMALL_UNTIL else self.batch) // length), length


class Muon(torch.optim.Muon):
    """torch's updates and state, but iterated in float32 on CPUs where bfloat16 is slow."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
    x = x.to(fast_dtype(x.device))
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def make_optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Give the matrices inside to Muon; embeddings, the output layer and norms go to AdamW."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if recipe.muon and p.ndim == 2 and not OUTSIDE.search(name)]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, lr=recipe.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    muon = [Muon(matrices, lr=recipe.muon, weight_decay=WEIGHT_DECAY, ns_steps=MUON_STEPS)] if matrices else []
    return [*muon, adamw]


@dataclass
class Counters:
    """Everything that a resumed run needs besides tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = float("inf")  # lowest so far: the held-out loss, or a figure's negative
    best_tokens: int = 0
    drawn: dict[str, int] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains a head on the domains of its configuration's answers, in the work folder, and exports it."""

    def __init__(self, model: HeadInTraining, config: TrainingConfig, recipe: Recipe) -> None:
        """Raises DataError when nothing is held out, by which the best weights are chosen."""
        self.answers, self.work, self.kind = config.answers, config.work, config.kind
        self.domains = self.answers.domains()
        check_held_out({domain.name: len(domain.held_out) for domain in self.domains}, recipe.length + 1)
        self.model, self.recipe, self.device = model.to(config.device), recipe, torch.device(config.device)
        self.optimisers, self.counters = make_optimisers(model, recipe), Counters()
        self.reader = Reader(self.domains, config.seed, max(recipe.length, recipe.long_length))
        self.work.mkdir(parents=True, exist_ok=True)
        if config.resume and (checkpoint := self.work / CHECKPOINT).exists():
            with safe_open(checkpoint, framework="pt") as file:
                self.counters = Counters(**json.loads(file.metadata()[COUNTERS]))
            tensors = load_file(checkpoint, str(self.device))
            load_parameters(model, tensors)
            for name, parameter in model.named_parameters():
                state = {key.rpartition("|")[2]: tensors[key] for key in tensors if key.startswith(f"{name}|")}
                owner = next(o for o in self.optimisers if any(parameter is p for p in o.param_groups[0]["params"]))
                owner.state[parameter].update(state)
            self.reader.drawn.update(self.counters.drawn)

    def checkpoint(self) -> None:
        """Write a checkpoint of this very step, which takes the place of the one before."""
        self.counters.drawn = dict(self.reader.drawn)
        named = dict(self.model.named_parameters())
        tensors = {name: parameter.detach() for name, parameter in named.items()}
        for name, parameter in named.items():
            for optimiser in self.optimisers:
                tensors |= {f"{name}|{key}": value for key, value in optimiser.state.get(parameter, {}).items()}
        write_whole(self.work / CHECKPOINT, tensors, {COUNTERS: json.dumps(vars(self.counters))})

    def train(self) -> bool:
        """Run to the end; False when a signal stopped it first (a checkpoint is then written)."""
        counters, tokens, eval_tokens = self.counters, self.recipe.tokens, self.recipe.eval_tokens
        last_checkpoint, smooth = time.monotonic(), 0.0
        with stop_signal() as stopping, Progress("tokens", tokens) as progress:
            while counters.tokens < tokens and not stopping.is_set():
                started, before = time.monotonic(), counters.tokens
                loss = self._step()
                if loss is None:
                    break
                counters.seconds += time.monotonic() - started
                smooth = 0.95 * smooth + 0.05 * loss if smooth else loss
                progress.say(f"{self.kind}, step {counters.step}, loss {smooth:.3f}")
                progress.reach(counters.tokens, tokens)
                if before // eval_tokens != counters.tokens // eval_tokens:
                    self._evaluate(loss, progress)
                if time.monotonic() - last_checkpoint > CHECKPOINT_S:
                    self.checkpoint()
                    last_checkpoint = time.monotonic()
            if stopping.is_set():
                progress.print(f"trained on {counters.tokens:,} tokens, go on with --resume")
            else:
                self._evaluate(None, progress)
            self.checkpoint()
        return not stopping.is_set()

    def _step(self) -> float | None:
        """Learn from one batch and return its loss in nats; None when the data is used up."""
        rows, length = self.recipe.shape(self.counters.tokens)
        batch = self.reader.next_batch(rows, length)
        if batch is None:
            return None
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.recipe.rate(self.counters.tokens)
        self.model.share = self.counters.tokens / self.recipe.tokens
        positions, total = torch.from_numpy(batch[:, :-1]).to(self.device), 0.0
        for part in torch.split(positions, max(1, MICRO_TOKENS // length)):
            with autocast(self.device):
                loss = self.model.loss(self.answers, part) * (len(part) / rows)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if total != total:
            raise FloatingPointError(f"the loss is not a number after {self.counters.tokens} tokens")
        self.counters.step += 1
        self.counters.tokens += rows * length
        return total

    @torch.no_grad()
    def _evaluate(self, loss: float | None, progress: Progress) -> None:
        counters, length = self.counters, self.recipe.length
        with autocast(self.device):
            for name, rows in held_out_batches(self.domains, EVAL_ROWS, length).items():
                parts = torch.split(rows[:, :-1].to(self.device), max(1, MICRO_TOKENS // length))
                losses = (float(self.model.held_out_loss(self.answers, part)) * len(part) for part in parts)
                counters.held_out[name] = sum(losses) / len(rows)
            measured = self.model.figures()
        weights = {domain.name: domain.weight for domain in self.domains if domain.name in counters.held_out}
        mean = sum(counters.held_out[name] * w for name, w in weights.items()) / sum(weights.values())
        score = -measured[self.model.best_by] if self.model.best_by else mean
        if score < counters.best:
            counters.best, counters.best_tokens = score, counters.tokens
            write_whole(self.work / BEST, {name: p.detach() for name, p in self.model.named_parameters()})
        figures = "  ".join(f"{name} {value:.3f}" for name, value in (counters.held_out | measured).items())
        progress.print(f"held out after {counters.tokens:,} tokens: {mean:.3f} ({figures})")
        row = measured | {"tokens": counters.tokens, "seconds": round(counters.seconds, 1), "loss": loss}
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row | {"held_out": counters.held_out}) + "\n")

    def export(self, out: Path, title: str, command: str, how: str = TAUGHT) -> None:
        """Write the model folder `out` from the run's best weights, with a card; an older one is replaced at the end.

        command: the line that made it. how: the way it was trained.
        """
        load_parameters(self.model, load_file(self.work / BEST))
        size, counters = sum(p.numel() for p in self.model.parameters()) / 1e6, self.counters
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "tokenizers"))
        best = "longest accepted length" if self.model.best_by else "lowest loss"
        rows = []
        for name, fact in self.answers.facts().items():
            counts = f"{fact['documents']:,} | {fact['held_out_documents']:,} | {fact['tokens']:,}"
            epochs = counters.drawn.get(name, 0) / max(1, fact["tokens"])
            loss = counters.held_out.get(name, math.nan)
            rows.append(f"| {name} | {', '.join(fact['sources'])} | {counts} | {epochs:.2f} | {loss:.3f} |\n")
        card = (
            f"# {title}\n\n{size:.1f}M parameters.\n\n## Training\n{how}\n```\n{command}\n```\n"
            f"{counters.tokens:,} tokens in {counters.step:,} steps and {counters.seconds / 60:.0f} minutes "
            f"({versions}). These are the weights with the {best} on held-out text, after {counters.best_tokens:,} "
            "tokens.\n\n## Data\n| domain | files | documents | held out | tokens | epochs | held-out loss |\n"
            f"|---|---|---|---|---|---|---|\n{''.join(rows)}\n"
            "A document is held out when the SHA-256 of its text, taken modulo 20, is 0.\n"
        )
        with replacing(out) as partial:
            more = self.model.export(partial)
            if not (partial / CARD).exists():
                (partial / CARD).write_text(f"{card}\n{more}\n" if more else card, encoding="utf-8")


@torch.no_grad()
def load_parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy tensors into all parameters of their names. Raises KeyError where one is missing."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Give an empty folder to write into; at the end, and only without an error, it takes the place of `out`."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, but images run as another user
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


@contextmanager
def stop_signal() -> Iterator[Event]:
    """Let the first SIGTERM or SIGINT set an event, so that what works can end at a place to go on from."""
    stopping = Event()

    def stop(number: int, _: object) -> None:
        stopping.set()
        signal.signal(number, previous[number])  # a second one ends at once

    previous: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

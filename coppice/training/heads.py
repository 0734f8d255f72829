"""Training heads: what a kind of head gives to it, the kinds that read features, and the loop of every kind.

A run's work folder, beside the model folder that it makes, has checkpoint.safetensors, best.safetensors and log.jsonl.
Every step can be resumed.
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
from typing import Any, ClassVar, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from coppice.engine.engine import default_feature_layers
from coppice.errors import InvalidField
from coppice.heads.checkpoints import MASKED_KINDS, SHAPES, TargetParts, save_head, shape_of
from coppice.heads.layers import HeadConfig
from coppice.training import losses
from coppice.training.answers import TargetAnswers, write_whole
from coppice.training.data import Reader, check_held_out, held_out_batches
from coppice.training.progress import Progress

DRAFT_VOCAB, DRAFT_SHARE = 4096, 16
"""ids of the draft vocabulary: so many, or where that is more one in so many of the target's"""
MEASURED_ROWS = 12
LENGTH = "accepted length"  # the figure that the best weights have the highest of
HEAD = "head.json"  # in a run's work folder: configuration and draft vocabulary
LEAST_SIZE = 1e-6  # of a feature: smaller ones are as good as none


@dataclass(frozen=True)
class TrainingConfig:
    """What a head is built from before it is trained."""

    kind: str
    target: Path  # folder of the target
    answers: TargetAnswers  # what the target wrote; `answers.layers` are those of the features
    work: Path  # folder of the run, which is not shipped
    shape: Mapping[str, int] = field(default_factory=dict)  # fields of `--shape`
    resume: bool = False  # whether the run goes on from its checkpoint
    device: str = "cpu"
    seed: int = 0


class HeadInTraining(nn.Module):
    """A head in training. A kind makes one of a TrainingConfig: ours, or an entry point of `coppice.training`."""

    best_by: ClassVar[str] = ""  # the figure that is highest for the best weights; empty: the held-out loss is lowest
    share: float = 0.0  # how much of the run is done, 0 to 1; the trainer says it before each step

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the mean loss over (B, T) positions, each row a stretch of one text: see `answers.read(rows)`."""
        raise NotImplementedError

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return a loss that compares over the whole run, without gradients."""
        return self.loss(answers, rows)

    def figures(self) -> dict[str, float]:
        """Measure more on held-out text, by name."""
        return {}

    def export(self, folder: Path) -> str | None:
        """Write what this kind is served from into an empty folder. May return a further section of the model card."""
        raise NotImplementedError


def head_config(kind: str, parts: TargetParts, layers: tuple[int, ...] = (), **more: Any) -> Any:
    """Return a head's configuration in the shape of the target's layers.

    layers: those that the head reads; empty: the default ones. `more` are fields of the kind's own. Raises InvalidField
    for one that there is not, or whose value does not fit.
    """
    config: Any = parts.config
    of_target = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "vocab_size": parts.vocab_size,
        "feature_layers": layers or default_feature_layers(config.num_hidden_layers),
        "num_target_layers": config.num_hidden_layers,
    }
    copied = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    shape = {name: getattr(config, name) for name in (*copied, "max_position_embeddings")} | {
        "draft_vocab_size": min(max(DRAFT_VOCAB, parts.vocab_size // DRAFT_SHARE), parts.vocab_size),
        "shared_output": kind in SHAPES,
        "scaled_features": kind in SHAPES,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_parameters": head_rope(config) | {name: more[name] for name in ("rope_theta",) if name in more},
        "markov_drafts": kind == "dspark",
    }
    if kind == "specblock":
        shape |= {"rank_norm_topk": None, "block_rope_advance": True}
    fields = shape_of(kind)[0]
    own = {field.alias or name for name, field in fields.model_fields.items()} - of_target.keys()
    for name in sorted(more.keys() - own):
        raise InvalidField("--shape", f"{name} is no field of a {kind} head that training can choose")
    return fields.checked(shape | of_target | more, "--shape")


def head_rope(config: Any) -> dict[str, Any]:
    """Return how a new head for a target turns positions: all of a state, as the target does or its full attention."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        given = given.get("full_attention") or {}
    partial = given.get("partial_rotary_factor") not in (None, 1)
    return {"rope_theta": given.get("rope_theta", 10_000.0)} if partial or not given else dict(given)


def check_shape(kind: str, target: Path, layers: tuple[int, ...], shape: Mapping[str, Any]) -> str:
    """Raise InvalidField unless such a head can be made for the target; returns where it turns positions otherwise."""
    parts = TargetParts(target)
    head = head_config(kind, parts, layers, **shape)
    if head.rope_parameters == getattr(parts.config, "rope_parameters", None):
        return ""
    return f"the target's layers do not all turn positions alike; the head's rope_parameters: {head.rope_parameters}"


def build_student(
    config: HeadConfig, parts: TargetParts, draft_ids: Tensor, seed: int, dtype: torch.dtype = torch.float32
) -> losses.Student:
    """Make a fresh draft model whose output layer starts as the target's, or is it, then in `dtype`."""
    torch.manual_seed(seed)
    model: Any = shape_of(config.kind)[1](config)
    model.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.removesuffix(".weight")
            if part.endswith(("o_proj", "down_proj", "markov_w2", "head.proj", "residual")):
                parameter.zero_()
            elif part.endswith(("position_queries", "mask_tokens")):
                nn.init.normal_(parameter, std=0.02)
            elif part.startswith("shift_proj"):  # starts as the identity: slot k of the layer before
                parameter.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
            elif part.endswith("markov_w1") and len(parameter) == len(draft_ids) + 1:  # like tokens, like rows
                rows = parts.embedding[draft_ids].float()
                rows = rows @ torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -parameter.shape[1] :]
                parameter[:-1, : rows.shape[1]] = rows / rows.std(0).clamp_min(LEAST_SIZE) * parameter.shape[1] ** -0.5
            elif part.endswith("lm_head"):
                parameter.copy_(parts.output[draft_ids])
    if not model.own_output:
        model.lm_head.weight = parts.output[draft_ids].to(dtype)
    model.embedding_scale = parts.scale_of(config.kind)
    return losses.Student(model, parts.embedding.float())


@torch.no_grad()
def fit_scales(model: Any, answers: TargetAnswers) -> None:
    """Let a fresh model read features at one size, and write states as large as those that the output layer knows.

    They are measured on the first text of each domain: a target's values may differ by thousands.
    """
    first = np.stack([domain.train[: answers.length] for domain in answers.domains])
    sample = answers.read(torch.from_numpy(first))
    if model.config.scaled_features:
        sizes = sample.features.abs().mean((0, 1))
        model.feature_scale.copy_((1 / sizes.clamp_min(LEAST_SIZE)).bfloat16())
    if not model.own_output:
        model.norm.weight.copy_(sample.final.square().mean((0, 1)).sqrt())


class FeatureHeadInTraining(losses.Student, HeadInTraining):
    """A head that reads the answers' layers, of a kind of ours."""

    best_by = LENGTH

    def __init__(self, config: TrainingConfig, learns_by: Mapping[str, Any] | None = None) -> None:
        """`learns_by` are fields of the HeadLoss of a kind that LOSSES does not have.

        Raises InvalidField as `head_config` does, and for answers of other layers than a resumed run's head.
        """
        kind, answers, record = config.kind, config.answers, config.work / HEAD
        parts = TargetParts(config.target)
        counts, more = torch.bincount(answers.ids(), minlength=parts.vocab_size), dict(config.shape)
        if kind in MASKED_KINDS:  # the row of the embedding that the text needs least
            more = {"mask_token_id": int(counts.argmin())} | more
        sizes = head_config(kind, parts, answers.layers, **more)
        draft_ids = counts.argsort(descending=True, stable=True)[: sizes.draft_vocab_size].sort().values
        if config.resume and record.exists():  # more answers may be there now, but the vocabulary stays
            begun = json.loads(record.read_text(encoding="utf-8"))
            draft_ids, reads = torch.tensor(begun["draft_ids"]), tuple(begun["config"]["feature_layers"])
            if reads != answers.layers:
                reason = f"{answers.folder} holds features of layers {answers.layers}, the head reads {reads}"
                raise InvalidField("--lessons", reason)
            sizes = shape_of(kind)[0].checked(begun["config"], "--resume")
            for name, value in config.shape.items():
                if value != (has := begun["config"].get(name)):
                    raise InvalidField("--shape", f"{name} is {value}, and {has} of the head that {record} began")
        dtype = losses.fast_dtype(torch.device(config.device))
        fresh = build_student(sizes, parts, draft_ids, config.seed, dtype)
        fit_scales(fresh.model, answers)
        super().__init__(fresh.model, cast(Tensor, fresh.embedding))
        config.work.mkdir(parents=True, exist_ok=True)
        begun = {"config": sizes.model_dump(by_alias=True), "draft_ids": draft_ids.tolist()}
        record.write_text(json.dumps(begun) + "\n", encoding="utf-8")
        teacher = losses.Teacher(parts.output.to(config.device), draft_ids, dtype)
        self.trained = losses.HeadLoss(teacher, **(learns_by or losses.LOSSES[kind]))
        batches = held_out_batches(answers.domains, MEASURED_ROWS, min(128, answers.length))
        self.texts = {name: answers.read(batch[:, :-1].to(config.device)) for name, batch in batches.items()}
        """held-out texts, by the name of their domain"""

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        return self.trained(self, answers.read(rows), self.share)

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the loss without a mask, which admits more and harder rows as a head gets better."""
        return self.trained.held_out(self, answers.read(rows))

    def figures(self) -> dict[str, float]:
        measured = [losses.measure(self, self.trained, texts) for texts in self.texts.values()]
        return {LENGTH: losses.accepted_length(torch.cat(measured))}

    def export(self, folder: Path) -> str:
        """Write the head in its public layout, with what is expected of it. Returns its acceptance for the card."""
        self.model.bfloat16().float()  # what is measured is what is shipped: the rounded weights
        model = cast(Any, self.model)
        measured = {name: losses.measure(self, self.trained, texts) for name, texts in self.texts.items()}
        config = model.config.model_copy(update={"acceptance": losses.expectation(measured)})
        save_head(folder, model.cpu().bfloat16(), config)
        texts = torch.cat(list(measured.values()))
        shares = [f"{alpha:.3f}" for alpha in losses.alphas(texts)]
        return (
            "## Acceptance\nOn held-out text, how often the k-th greedy draft token is right when those before were; "
            f"a greedy chain would commit {losses.accepted_length(texts):.2f} tokens a step.\n\n"
            f"| k | {' | '.join(str(k) for k in range(1, len(shares) + 1))} |\n|---|{'---|' * len(shares)}\n"
            f"| alpha | {' | '.join(shares)} |"
        )


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
    x = x.to(losses.fast_dtype(x.device))
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
        self.domains = self.answers.domains
        check_held_out({domain.name: len(domain.held_out) for domain in self.domains}, recipe.length + 1)
        self.model, self.recipe, self.device = model.to(config.device), recipe, torch.device(config.device)
        self.optimisers, self.counters = make_optimisers(model, recipe), Counters()
        self.reader = Reader(self.domains, config.seed, max(recipe.length, recipe.long_length))
        self.work.mkdir(parents=True, exist_ok=True)
        if config.resume and (checkpoint := self.work / CHECKPOINT).exists():
            with safe_open(checkpoint, framework="pt") as file:
                self.counters = Counters(**json.loads(file.metadata()[COUNTERS]))
            tensors = load_file(checkpoint, str(self.device))
            model.load_state_dict(tensors, strict=False)
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
            with losses.autocast(self.device):
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
        with losses.autocast(self.device):
            for name, rows in held_out_batches(self.domains, EVAL_ROWS, length).items():
                parts = torch.split(rows[:, :-1].to(self.device), max(1, MICRO_TOKENS // length))
                weighted = (float(self.model.held_out_loss(self.answers, part)) * len(part) for part in parts)
                counters.held_out[name] = sum(weighted) / len(rows)
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
        self.model.load_state_dict(load_file(self.work / BEST), strict=False)
        size, counters = sum(p.numel() for p in self.model.parameters()) / 1e6, self.counters
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "tokenizers"))
        best = "longest accepted length" if self.model.best_by else "lowest loss"
        rows = []
        for name, fact in self.answers.facts.items():
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

"""What heads learn from: the target's own answers to prompts, with its hidden states, in bounded safetensors shards.

A shard is one batch of answers through the packed verifier engine. Every text has as many tokens: a prefix of a
training document or a chat up to an answer, the target's continuation and, behind an end of text, the next prefix.
Beside the ids a shard has the target's features and final hidden states; distributions are computed from the latter
when they are needed. While a shard is recorded, the ids of its texts are kept in a file, from which it goes on.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from coppice.config.model import text_ends
from coppice.engine.engine import Engine, default_feature_layers
from coppice.engine.kv_cache import BlockTable
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.speculation import sampling_torch
from coppice.training.data import (
    PROMPT_END,
    DataError,
    Ids,
    Messages,
    Packed,
    check_held_out,
    copy_tokenizer,
    load_corpus,
    load_tokenizer,
    open_prepared,
    parse_specs,
    prepare,
    seed_of,
)

LONGEST_CHUNK = 128
"""ids of a text in a forward: the logits of all of them are computed"""
COLDEST = 1e-3
"""temperature of the draws of greedy texts, which nobody looks at"""


@dataclass(frozen=True)
class Answer:
    """Texts with the target's features and final hidden states at each token."""

    ids: Tensor  # (..., T)
    features: Tensor  # (..., T, F)
    final: Tensor  # (..., T, hidden), what the target's output layer reads


def as_positions(texts: Sequence[Answer]) -> tuple[Callable[[Tensor], Answer], list[Tensor]]:
    """Return a reader of (B, T) positions in (T, ...) texts held in memory, and each text's own (T,) positions."""
    ids, features, final = (torch.cat([getattr(text, name) for text in texts]) for name in ("ids", "features", "final"))

    def read(positions: Tensor) -> Answer:
        return Answer(ids[positions], features[positions].float(), final[positions].float())

    return read, list(torch.split(torch.arange(len(ids)), [len(text.ids) for text in texts]))


@dataclass
class _Text:
    """One text while the target writes it: `waiting` ids are fed before anything is drawn."""

    table: BlockTable
    waiting: deque[int]
    length: int
    temperature: float
    seed: int
    ids: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)

    def chunk(self) -> list[int]:
        """Take the ids to feed next."""
        room = min(self.length - len(self.ids), LONGEST_CHUNK)
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def answer(self) -> Answer:
        """Return the whole text, (T, ...) each."""
        return Answer(torch.tensor(self.ids), torch.cat(self.features), torch.cat(self.final))


class Answerer:
    """Lets a target go on with prompts, many at once, and keeps its hidden states."""

    def __init__(
        self, engine: Engine, fed: Callable[[list[list[int]]], None] = lambda ids: None, layers: tuple[int, ...] = ()
    ) -> None:
        """fed: called after each forward with the ids of all texts so far.

        layers: those whose features are kept; empty: the engine's own.
        """
        self.engine, self._fed, self._layers = engine, fed, layers or engine.info.feature_layers
        self._final: list[Tensor] = []
        output: Any = engine.model.get_output_embeddings()
        output.register_forward_pre_hook(lambda _, args: self._final.append(args[0][0]))

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        temperature: float | Sequence[float] = 0.0,
        seed: int = 0,
        following: Callable[[], Sequence[int]] | None = None,
        keyed: bool = False,
    ) -> list[Answer]:
        """Write a text of lengths[n] tokens from each prompt n; end-of-text ids are tokens like any other.

        `temperature` is that of all texts, or of each. `following` gives the prompt behind an end of text. `keyed`:
        text n is drawn with the noise of requests whose seed is `seed` + n. Raises OutOfBlocks when the pool is too
        small for all.
        """
        temperatures = [temperature] * len(prompts) if isinstance(temperature, int | float) else temperature
        noise = None if keyed else torch.Generator(self.engine.model.device).manual_seed(seed)
        pool, texts = self.engine.pool, list[_Text]()
        try:
            for number, (prompt, length, heat) in enumerate(zip(prompts, lengths, temperatures, strict=True)):
                texts.append(_Text(pool.allocate(str(number), length), deque(prompt), length, heat, seed + number))
            while live := [text for text in texts if len(text.ids) < text.length]:
                self._forward(live, noise, following)
                self._fed([text.ids for text in texts])
        finally:
            for text in texts:
                pool.free(text.table)
        return [text.answer() for text in texts]

    @torch.inference_mode()
    def _forward(
        self,
        live: list[_Text],
        noise: torch.Generator | None,
        following: Callable[[], Sequence[int]] | None,
    ) -> None:
        """Feed every text its waiting ids, and let the token that the target draws next wait."""
        chunks = [text.chunk() for text in live]
        pieces = [
            Piece.chain(text.table, len(text.ids), chunk, range(len(chunk)))
            for text, chunk in zip(live, chunks, strict=True)
        ]
        self._final.clear()
        out = self.engine.forward(pack(pieces, self._layers))
        (final,) = self._final
        features = final[:, :0] if out.features is None else out.features
        lengths = [len(chunk) for chunk in chunks]
        logits = out.logits[torch.tensor(lengths).cumsum(0) - 1].float()
        tokens = logits.argmax(-1)
        heat = torch.tensor([text.temperature for text in live], dtype=torch.float64, device=logits.device)[:, None]
        if bool(heat.any()):
            divisor = heat.clamp_min(COLDEST)
            if noise is None:
                places = [(text.seed, len(text.ids) + len(chunk)) for text, chunk in zip(live, chunks, strict=True)]
                seeds, positions = torch.tensor(places, device=logits.device).unbind(1)
                ids = torch.arange(logits.shape[1], device=logits.device)
                drawn = (logits.double() / divisor + sampling_torch.noise(seeds, positions, ids)).argmax(-1)
            else:
                drawn = torch.multinomial((logits / divisor.float()).softmax(-1), 1, generator=noise)[:, 0]
            tokens = torch.where(heat[:, 0] > 0, drawn, tokens)
        parts = zip(torch.split(features, lengths), torch.split(final, lengths), strict=True)
        for text, chunk, token, (features, final) in zip(live, chunks, tokens.tolist(), parts, strict=True):
            text.features.append(features)
            text.final.append(final)
            text.ids += chunk
            if text.waiting:
                continue
            text.waiting.append(token)
            if following is not None and token in self.engine.info.eos_ids:
                text.waiting += following()


TEMPERATURES = (1.0, 0.0, 1.0, 0.7)
"""of a shard's texts, in turn: greedy ones of a small target loop and teach little, so half are its own samples"""
PREFIX_LENGTHS = (16, 32, 64, 96)
LEAST_HELD_OUT = 2 * max(PREFIX_LENGTHS) + 1  # tokens of a domain that are answered
HELD_OUT_SHARE = 8
"""texts of training for a held-out one"""
SAVE_S = 1.0
"""between two files of the ids that are recorded so far"""
READ_TIMES = 3
"""how often a run reads a recorded token"""
LINES = "lines.json"
"""in the data folder of answers: what they were made from"""


@dataclass(frozen=True)
class AnswerPlan:
    """At least `tokens` tokens in texts of `length`, of each domain a held-out shard and at least one of training."""

    tokens: int
    length: int = 256
    sessions: int = 32
    """most texts of a shard"""
    seed: int = 0

    def texts(self, held_out: bool, domains: int) -> int:
        """Return how many texts a new shard has: few tokens make small ones, with a text of each temperature."""
        texts = -(-self.tokens // self.length)
        return min(self.sessions, max(len(TEMPERATURES), texts // HELD_OUT_SHARE if held_out else -(-texts // domains)))


@dataclass(frozen=True)
class _Shard:
    domain: str
    held_out: bool
    number: int
    texts: int

    @property
    def name(self) -> str:
        return f"{self.domain}-{'held-out' if self.held_out else 'train'}-{self.number:05}.safetensors"

    @property
    def begun(self) -> str:
        """The file of the ids that are recorded so far."""
        return f".{self.name}.json"


@dataclass
class TargetAnswers:
    """The recorded answers of a target, read as one long text."""

    folder: Path
    plan: AnswerPlan
    weights: dict[str, float]
    shards: list[_Shard]
    layers: tuple[int, ...]
    """those of the features"""
    _files: dict[int, Any] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        for shard in self.shards:
            self._starts.append(self._starts[-1] + shard.texts * self.plan.length)

    def domains(self) -> list[Packed]:
        """Return each domain's positions, to be drawn as ids are."""
        return [
            Packed(name, weight, self._positions(name, False), self._positions(name, True), aligned=True)
            for name, weight in self.weights.items()
        ]

    def describe(self, folder: Path) -> None:
        """Copy into `folder` what a run's model card needs to know of the data, with the number of tokens answered."""
        shutil.copytree(self.folder / "data", folder, dirs_exist_ok=True)
        facts = json.loads((self.folder / "data" / "data.json").read_text(encoding="utf-8"))
        for domain in self.domains():
            facts[domain.name]["answered"] = len(domain.train)
        (folder / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @property
    def tokens(self) -> int:
        """All tokens, held-out ones included."""
        return self._starts[-1]

    def ids(self) -> Tensor:
        """Return all training ids, int64."""
        files = [load_file(self.folder / shard.name)["ids"] for shard in self.shards if not shard.held_out]
        return torch.cat(files).long()

    def read(self, positions: Tensor) -> Answer:
        """Read the answers at (B, T) positions; each row is a stretch of one text."""
        parts = [self._stretch(int(row[0]), len(row)) for row in positions]
        ids, features, final = (torch.stack(part).to(positions.device) for part in zip(*parts, strict=True))
        return Answer(ids.long(), features.float(), final.float())

    def _stretch(self, start: int, length: int) -> list[Tensor]:
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        if number not in self._files:
            self._files[number] = safe_open(self.folder / self.shards[number].name, framework="pt")
        file, at = self._files[number], start - self._starts[number]
        return [file.get_slice(name)[at : at + length] for name in ("ids", "features", "final")]

    def _positions(self, domain: str, held_out: bool) -> NDArray[np.int64]:
        spans = zip(self.shards, self._starts[:-1], self._starts[1:], strict=True)
        here = (domain, held_out)
        own = [np.arange(start, end) for shard, start, end in spans if (shard.domain, shard.held_out) == here]
        return np.concatenate(own) if own else np.zeros(0, dtype=np.int64)


class RecordingStopped(Exception):
    """A recording was stopped after so many tokens."""


def record_answers(
    lines: list[str],
    target: Path,
    folder: Path,
    plan: AnswerPlan,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    layers: tuple[int, ...] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> TargetAnswers:
    """Record a target's answers into `folder`, going on from what it holds.

    layers: those whose features are recorded; empty: the three that heads read by default.
    progress: called before the first forward and after each one with the tokens recorded, and with those of all.
    stopped: asked after each forward; then RecordingStopped is raised, and the same call goes on where this one ended.
    Raises DataError for bad `lines` and for a folder that holds answers of another target, other data, another seed,
    other temperatures or with features of other layers. Raises InvalidField for layers that the target does not have.
    """
    depth = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config().num_hidden_layers
    layers = layers or default_feature_layers(depth)
    if max(layers) >= depth:
        raise InvalidField("--layers", f"{max(layers)} is not among 0..{depth - 1} of the target")
    domains = _prepare(lines, target, folder / "data", plan, layers)
    shards = _planned(domains, plan, folder)
    answers = TargetAnswers(folder, plan, {domain.name: domain.weight for domain in domains}, shards, layers)
    missing = [shard for shard in shards if not (folder / shard.name).exists()]
    total, before = answers.tokens, answers.tokens - sum(shard.texts for shard in missing) * plan.length
    recorded = before + sum(map(len, chain.from_iterable(_begun(folder, shard) for shard in missing)))
    progress(recorded, total)
    if not missing:
        return answers
    saved = 0.0

    def fed(ids: list[list[int]]) -> None:
        nonlocal saved
        done, stop = before + sum(map(len, ids)), stopped()
        progress(max(done, recorded), total)
        if done >= recorded and (stop or time.monotonic() - saved > SAVE_S):  # before, the file has more
            file = folder / f"{shard.begun}.partial"
            file.write_text(json.dumps(ids), encoding="utf-8")
            file.rename(folder / shard.begun)
            saved = time.monotonic()
        if stop:
            raise RecordingStopped(max(done, recorded))

    engine = load_engine(target, device=device, dtype=dtype, kv_tokens=plan.sessions * (plan.length + 32))
    answerer, by_name = Answerer(engine, fed, layers), {domain.name: domain for domain in domains}
    for shard in missing:
        _record(answerer, plan, by_name[shard.domain], shard, folder)
        before += shard.texts * plan.length
    return answers


def _begun(folder: Path, shard: _Shard) -> list[list[int]]:
    """Return the ids of a shard's texts that an earlier recording wrote; none if it did not begin."""
    file = folder / shard.begun
    ids: list[list[int]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return ids


def _planned(domains: Sequence[Packed], plan: AnswerPlan, folder: Path) -> list[_Shard]:
    """List held-out shards, then training shards in the domains' proportions; those in `folder` stay as they are."""

    def shard(domain: Packed, held_out: bool, number: int) -> _Shard:
        fresh = _Shard(domain.name, held_out, number, plan.texts(held_out, len(domains)))
        if not (folder / fresh.name).exists():
            return replace(fresh, texts=len(_begun(folder, fresh)) or fresh.texts)
        with safe_open(folder / fresh.name, framework="pt") as file:
            return replace(fresh, texts=file.get_slice("ids").get_shape()[0] // plan.length)

    shards = [shard(domain, True, 0) for domain in domains if len(domain.held_out) >= LEAST_HELD_OUT]
    texts, drawn = dict.fromkeys((domain.name for domain in domains), 0), Counter[str]()
    while sum(texts.values()) * plan.length < plan.tokens or not all(texts.values()):
        domain = min(domains, key=lambda d: (texts[d.name] > 0, texts[d.name] / d.weight))
        shards.append(shard(domain, False, drawn[domain.name]))
        texts[domain.name] += shards[-1].texts
        drawn[domain.name] += 1
    return shards


def _prepare(lines: list[str], target: Path, folder: Path, plan: AnswerPlan, layers: tuple[int, ...]) -> list[Packed]:
    """Return the corpora in the target's tokens, packed into `folder` unless an earlier recording has done so."""
    record = folder / LINES
    source = {"lines": lines, "target": str(target.resolve()), "seed": plan.seed, "temperatures": list(TEMPERATURES)}
    source["layers"] = list(layers)
    if record.exists():
        recorded = json.loads(record.read_text(encoding="utf-8"))
        if recorded != source:
            raise DataError(f"{folder.parent} holds target answers made from {recorded}; these would be from {source}")
        return open_prepared(folder)
    tokenizer = lru_cache(1)(partial(AutoTokenizer.from_pretrained, target, local_files_only=True))

    def render(messages: Messages) -> Any:
        return tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    corpora = [load_corpus(spec, render) for spec in parse_specs(lines)]
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(target, folder)
    ends = text_ends(target)
    if not ends:
        raise DataError(f"{target}: no file of it names an id that ends a text, so texts cannot be told apart")
    domains = prepare(corpora, load_tokenizer(folder), folder, next(iter(ends.values()))[0])
    check_held_out(domains, LEAST_HELD_OUT)
    record.write_text(json.dumps(source) + "\n", encoding="utf-8")
    return domains


def _record(answerer: Answerer, plan: AnswerPlan, domain: Packed, shard: _Shard, folder: Path) -> None:
    """Write one shard."""
    begun = _begun(folder, shard)
    rng = np.random.default_rng([plan.seed, shard.number, shard.held_out, seed_of(domain.name), sum(map(len, begun))])
    seed = int(rng.integers(2**62))
    source = domain.held_out if shard.held_out else domain.train
    ends = np.flatnonzero(np.isin(source, [PROMPT_END] if domain.of_prompts else answerer.engine.info.eos_ids))

    def following() -> list[int]:
        return _prompt(source, ends, plan.length // 2, rng) if domain.of_prompts else _prefix(source, ends, rng)

    temperatures = list(islice(cycle(TEMPERATURES), shard.texts))
    prefixes = begun or [following() for _ in range(shard.texts)]
    texts = answerer.answer(prefixes, [plan.length] * shard.texts, temperatures, seed, following)
    tensors = {
        "ids": torch.cat([text.ids for text in texts]).int(),
        "features": torch.cat([text.features for text in texts]).bfloat16().cpu(),
        "final": torch.cat([text.final for text in texts]).bfloat16().cpu(),
    }
    partial_file = folder / f".{shard.name}.partial"
    save_file(tensors, partial_file)
    partial_file.rename(folder / shard.name)
    (folder / shard.begun).unlink(missing_ok=True)


def _prefix(source: Ids, ends: NDArray[np.int64], rng: np.random.Generator) -> list[int]:
    """Draw a prompt: half the time the beginning of a document, else a stretch from anywhere."""
    length = min(int(rng.choice(PREFIX_LENGTHS)), len(source) // 2)
    latest = len(source) - length
    beginnings = np.concatenate([[0], ends + 1])
    beginnings = beginnings[beginnings < latest]
    start = int(rng.choice(beginnings) if rng.random() < 0.5 else rng.integers(0, latest))
    prefix: list[int] = source[start : start + length].tolist()
    return prefix


def _prompt(source: Ids, ends: NDArray[np.int64], longest: int, rng: np.random.Generator) -> list[int]:
    """Draw a prompt of a chat; of a long one its end."""
    number = int(rng.integers(len(ends)))
    start = int(ends[number - 1]) + 1 if number else 0
    prompt: list[int] = source[max(start, int(ends[number]) - longest) : ends[number]].tolist()
    return prompt

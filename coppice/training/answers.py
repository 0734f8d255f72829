"""What heads learn from: the target's own answers to prompts, with its hidden states, in small safetensors shards.

A shard is four texts of a domain, answered at four temperatures. Every text has as many tokens: a stretch of a document
or a chat up to an answer, the target's continuation and, behind an end of text, the next prompt. Beside the ids a shard
has the target's features and final hidden states; distributions are computed from the latter when they are needed.
While shards are recorded, the ids of their texts are kept in a file, from which a recording goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from coppice.engine.engine import Engine, default_feature_layers
from coppice.engine.kv_cache import BlockTable
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.training.data import (
    Corpus,
    DataError,
    Domain,
    Messages,
    check_held_out,
    load_corpus,
    load_tokenizer,
    parse_specs,
    seed_of,
)

LONGEST_CHUNK = 128
"""ids of a text in a forward: the logits of all of them are computed"""
COLDEST = 1e-3
"""temperature of the draws of greedy texts, which nobody looks at"""
TEMPERATURES = (1.0, 0.0, 1.0, 0.7)
"""of a shard's texts: greedy ones of a small target loop and teach little, so half are its own samples"""
PROMPT_LENGTHS = (16, 32, 64, 96)
"""tokens of a document that begin a text"""
MOST_HELD_OUT = 8
"""shards of a domain; fewer where it has fewer than eight times as many to learn from"""
AT_ONCE = 8
"""shards that are recorded together"""
SAVE_S = 1.0
"""between two files of the ids that are recorded so far"""
READ_TIMES = 3
"""how often a run reads a recorded token"""
RECORD, BEGUN = "made-from.json", ".begun.json"
"""in a folder of answers: what they were made from; the ids of shards that are not complete"""


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

    number: int
    table: BlockTable
    waiting: deque[int]
    length: int
    temperature: float
    ids: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)


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
        following: Callable[[int], Sequence[int]] = lambda number: (),
    ) -> list[Answer]:
        """Write a text of lengths[n] tokens from each prompt n; end-of-text ids are tokens like any other.

        `temperature` is that of all texts, or of each. `following` gives the prompt behind an end of
        text n. Raises OutOfBlocks when the pool is too small for all.
        """
        temperatures = [temperature] * len(prompts) if isinstance(temperature, int | float) else temperature
        noise = torch.Generator(self.engine.model.device).manual_seed(seed)
        pool, texts = self.engine.pool, list[_Text]()
        try:
            for number, (prompt, length, heat) in enumerate(zip(prompts, lengths, temperatures, strict=True)):
                texts.append(_Text(number, pool.allocate(str(number), length), deque(prompt), length, heat))
            while live := [text for text in texts if len(text.ids) < text.length]:
                self._forward(live, noise, following)
                self._fed([text.ids for text in texts])
        finally:
            for text in texts:
                pool.free(text.table)
        return [Answer(torch.tensor(text.ids), torch.cat(text.features), torch.cat(text.final)) for text in texts]

    @torch.inference_mode()
    def _forward(self, live: list[_Text], noise: torch.Generator, following: Callable[[int], Sequence[int]]) -> None:
        """Feed every text its waiting ids, and let the token that the target draws next wait."""
        counts = [min(text.length - len(text.ids), LONGEST_CHUNK, len(text.waiting)) for text in live]
        chunks = [[text.waiting.popleft() for _ in range(count)] for text, count in zip(live, counts, strict=True)]
        pieces = [
            Piece.chain(text.table, len(text.ids), chunk, range(len(chunk)))
            for text, chunk in zip(live, chunks, strict=True)
        ]
        self._final.clear()
        out = self.engine.forward(pack(pieces, self._layers))
        (final,) = self._final
        features = final[:, :0] if out.features is None else out.features
        logits = out.logits[torch.tensor(counts).cumsum(0) - 1].float()
        tokens = logits.argmax(-1)
        heat = torch.tensor([text.temperature for text in live], dtype=torch.float64, device=logits.device)[:, None]
        if bool(heat.any()):
            probabilities = (logits / heat.clamp_min(COLDEST).float()).softmax(-1)
            tokens = torch.where(heat[:, 0] > 0, torch.multinomial(probabilities, 1, generator=noise)[:, 0], tokens)
        parts = zip(torch.split(features, counts), torch.split(final, counts), strict=True)
        for text, chunk, token, (features, final) in zip(live, chunks, tokens.tolist(), parts, strict=True):
            text.features.append(features)
            text.final.append(final)
            text.ids += chunk
            if not text.waiting:
                text.waiting.append(token)
                if token in self.engine.info.eos_ids:
                    text.waiting += following(text.number)


@dataclass(frozen=True)
class AnswerPlan:
    """At least `tokens` tokens in texts of `length`, of the domains in proportion to their weights."""

    tokens: int
    length: int = 256
    seed: int = 0


@dataclass(frozen=True)
class _Shard:
    domain: str
    held_out: bool
    number: int

    @property
    def name(self) -> str:
        return f"{self.domain}-{'held-out' if self.held_out else 'train'}-{self.number:05}.safetensors"


def _planned(facts: Mapping[str, Any], plan: AnswerPlan) -> list[_Shard]:
    """List the shards of each domain, held-out ones first. A plan with more tokens has these and more."""
    shards, total = list[_Shard](), sum(fact["weight"] for fact in facts.values())
    for name, fact in facts.items():
        count = math.ceil(plan.tokens * fact["weight"] / total / (len(TEMPERATURES) * plan.length))
        if fact["held_out_documents"]:
            shards += [_Shard(name, True, number) for number in range(min(MOST_HELD_OUT, max(1, count // 8)))]
        shards += [_Shard(name, False, number) for number in range(count)]
    return shards


class TargetAnswers:
    """The recorded answers of a target, read as one long text."""

    def __init__(
        self, folder: Path, plan: AnswerPlan, facts: dict[str, dict[str, Any]], layers: tuple[int, ...]
    ) -> None:
        self.folder, self.plan, self.layers = folder, plan, layers
        """layers: those of the features"""
        self.shards = _planned(facts, plan)
        self.shard_tokens = len(TEMPERATURES) * plan.length
        self.tokens = len(self.shards) * self.shard_tokens
        self._facts, self._files = facts, dict[int, Any]()

    def domains(self) -> list[Domain]:
        """Return each domain's positions."""
        return [
            Domain(name, fact["weight"], self._positions(name, False), self._positions(name, True))
            for name, fact in self._facts.items()
        ]

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what a model card needs to know of the data of each domain, with the tokens answered."""
        return {domain.name: self._facts[domain.name] | {"tokens": len(domain.train)} for domain in self.domains()}

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
        number, at = divmod(start, self.shard_tokens)
        if number not in self._files:
            self._files[number] = safe_open(self.folder / self.shards[number].name, framework="pt")
        return [self._files[number].get_slice(name)[at : at + length] for name in ("ids", "features", "final")]

    def _positions(self, domain: str, held_out: bool) -> NDArray[np.int64]:
        own = [n for n, shard in enumerate(self.shards) if (shard.domain, shard.held_out) == (domain, held_out)]
        starts = np.array(own, np.int64)[:, None] * self.shard_tokens
        return (starts + np.arange(self.shard_tokens)).flatten()


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
) -> TargetAnswers:
    """Record a target's answers into `folder`, going on from what it holds.

    layers: those whose features are recorded; empty: the three that heads read by default.
    progress: called before the first forward and after each one with the tokens recorded, and with those of all. What
    it raises ends the recording, and the same call goes on where this one ended.
    Raises DataError for bad `lines` and for a folder that holds answers of another target, other data, another seed,
    texts of another length or with features of other layers. Raises InvalidField for layers that the target does not
    have.
    """
    depth = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config().num_hidden_layers
    layers = layers or default_feature_layers(depth)
    if max(layers) >= depth:
        raise InvalidField("--layers", f"{max(layers)} is not among 0..{depth - 1} of the target")
    source = {"lines": lines, "target": str(target.resolve()), "seed": plan.seed, "length": plan.length}
    source["layers"] = list(layers)
    record, corpora = folder / RECORD, list[Corpus]()
    if not record.exists():
        if any(folder.glob("*.safetensors")):
            raise DataError(f"{folder} has no {RECORD}: what its answers were made from is not known")
        corpora = _load(lines, target)
        facts = {corpus.name: corpus.facts() for corpus in corpora}
        folder.mkdir(parents=True, exist_ok=True)
        partial_record = record.with_suffix(".partial")
        partial_record.write_text(json.dumps({"source": source, "facts": facts}) + "\n", encoding="utf-8")
        partial_record.rename(record)
    made_from = json.loads(record.read_text(encoding="utf-8"))
    if made_from["source"] != source:
        raise DataError(f"{folder} holds target answers made from {made_from['source']}; these would be from {source}")
    answers = TargetAnswers(folder, plan, made_from["facts"], layers)
    if missing := [shard for shard in answers.shards if not (folder / shard.name).exists()]:
        engine = load_engine(target, device=device, dtype=dtype, kv_tokens=AT_ONCE * (answers.shard_tokens + 128))
        recorder = _Recorder(answers, corpora or _load(lines, target), load_tokenizer(target), progress)
        recorder.record(engine, missing)
    else:
        progress(answers.tokens, answers.tokens)
    return answers


def _load(lines: list[str], target: Path) -> list[Corpus]:
    """Read the corpora, chats in the target's template. Raises DataError."""
    tokenizer = lru_cache(1)(partial(AutoTokenizer.from_pretrained, target, local_files_only=True))

    def render(messages: Messages) -> Any:
        return tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    corpora = [load_corpus(spec, render) for spec in parse_specs(lines)]
    check_held_out({corpus.name: len(corpus.held_out) for corpus in corpora}, 1)
    return corpora


class _Recorder:
    """Records shards, some at once, and keeps the ids of those that are not complete in a file."""

    def __init__(
        self,
        answers: TargetAnswers,
        corpora: Sequence[Corpus],
        tokenizer: Tokenizer,
        progress: Callable[[int, int], None],
    ) -> None:
        self.answers, self.tokenizer, self.progress = answers, tokenizer, progress
        self.corpora = {corpus.name: corpus for corpus in corpora}
        self.file = answers.folder / BEGUN
        self.begun: dict[str, list[list[int]]] = {}
        """ids of each text of a shard"""
        if self.file.exists():
            self.begun = json.loads(self.file.read_text(encoding="utf-8"))
        self.now: Sequence[_Shard] = ()
        self.recorded = self.replayed = 0
        """tokens of complete shards, and with those that an earlier recording wrote"""
        self.saved = 0.0

    def record(self, engine: Engine, missing: Sequence[_Shard]) -> None:
        """Record the shards that are missing."""
        answers, answerer = self.answers, Answerer(engine, self._fed, self.answers.layers)
        self.begun = {shard.name: self.begun[shard.name] for shard in missing if shard.name in self.begun}
        missing = sorted(missing, key=lambda shard: shard.name not in self.begun)  # those that the file has, at once
        self.recorded = answers.tokens - len(missing) * answers.shard_tokens
        self.replayed = self.recorded + sum(len(ids) for texts in self.begun.values() for ids in texts)
        self.progress(self.replayed, answers.tokens)
        for at in range(0, len(missing), AT_ONCE):
            self.now = missing[at : at + AT_ONCE]
            self._record(answerer)
            self.recorded += len(self.now) * answers.shard_tokens
        self.file.unlink(missing_ok=True)

    def _record(self, answerer: Answerer) -> None:
        plan, count = self.answers.plan, len(TEMPERATURES)
        place = [plan.seed, seed_of(self.now[0].name), sum(len(ids) for texts in self.begun.values() for ids in texts)]
        rng = np.random.default_rng(place)

        def following(number: int) -> list[int]:
            return self._prompt(self.now[number // count], rng)

        begun = [ids for shard in self.now for ids in self.begun.get(shard.name, [[]] * count)]
        prompts = [ids or following(number) for number, ids in enumerate(begun)]
        lengths, temperatures = [plan.length] * len(prompts), TEMPERATURES * len(self.now)
        texts = answerer.answer(prompts, lengths, temperatures, int(rng.integers(2**62)), following)
        for number, shard in enumerate(self.now):
            its, file = texts[number * count : (number + 1) * count], self.answers.folder / shard.name
            tensors = {
                "ids": torch.cat([text.ids for text in its]).int(),
                "features": torch.cat([text.features for text in its]).bfloat16().cpu(),
                "final": torch.cat([text.final for text in its]).bfloat16().cpu(),
            }
            save_file(tensors, f"{file}.partial")
            os.replace(f"{file}.partial", file)

    def _fed(self, ids: list[list[int]]) -> None:
        """Say how far the recording is, and keep the ids so far from time to time."""
        done, ended = self.recorded + sum(map(len, ids)), False
        try:
            self.progress(max(done, self.replayed), self.answers.tokens)
        except BaseException:
            ended = True
            raise
        finally:
            if done >= self.replayed and (ended or time.monotonic() - self.saved > SAVE_S):  # before, the file has more
                count = len(TEMPERATURES)
                begun = {shard.name: ids[count * n : count * (n + 1)] for n, shard in enumerate(self.now)}
                partial_file = self.file.with_suffix(".partial")
                partial_file.write_text(json.dumps(begun), encoding="utf-8")
                partial_file.rename(self.file)
                self.saved = time.monotonic()

    def _prompt(self, shard: _Shard, rng: np.random.Generator) -> list[int]:
        """Draw a prompt: the end of a chat, or a stretch of a document, half the time its beginning."""
        corpus = self.corpora[shard.domain]
        texts = corpus.held_out if shard.held_out else corpus.train
        text = texts[int(rng.integers(len(texts)))]
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not corpus.of_prompts).ids
        if corpus.of_prompts:
            return ids[-(self.answers.plan.length // 2) :]
        length = int(rng.choice(PROMPT_LENGTHS))
        start = int(rng.integers(0, max(1, len(ids) - length))) if rng.random() < 0.5 else 0
        return ids[start : start + length]

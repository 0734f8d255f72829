"""What heads learn from: the target's own answers to prompts, with its hidden states, in small safetensors shards.

A shard is four texts of a domain, answered at four temperatures. Every text has as many tokens: a stretch of a document
or a chat up to an answer, the target's continuation and, behind an end of text, the next prompt. Beside the ids a shard
has the target's features and final hidden states; distributions are computed from the latter when they are needed.
While shards are recorded, the ids of their texts are kept in a file, from which a recording goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
    load_tokenizer,
    read_corpora,
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


class Answer(NamedTuple):
    """Texts with the target's features and final hidden states at each token."""

    ids: Tensor  # (..., T)
    features: Tensor  # (..., T, F)
    final: Tensor  # (..., T, hidden), what the target's output layer reads


def stacked(texts: Sequence[Answer]) -> Answer:
    """Return (T, ...) texts of one length as (B, T, ...) ones, their states in float32."""
    ids, features, final = map(torch.stack, zip(*texts, strict=True))
    return Answer(ids, features.float(), final.float())


@dataclass
class _Text:
    """One text while the target writes it: `waiting` ids are fed before anything is drawn."""

    table: BlockTable
    waiting: deque[int]
    length: int
    temperature: float
    ids: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)


def write_answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    temperatures: Sequence[float] = (),
    seed: int = 0,
    layers: tuple[int, ...] = (),
    following: Callable[[int], Sequence[int]] = lambda number: (),
    fed: Callable[[list[list[int]]], None] = lambda ids: None,
) -> list[Answer]:
    """Let a target write a text of lengths[n] tokens from each prompt n, all at once, and keep its hidden states.

    End-of-text ids are tokens like any other; `following` gives the prompt behind one in text n. temperatures: of each
    text; empty: greedy. layers: those whose features are kept; empty: the engine's own. fed: called after each forward
    with the ids of all texts so far. Raises OutOfBlocks when the pool is too small for all.
    """
    layers, noise = layers or engine.info.feature_layers, torch.Generator(engine.model.device).manual_seed(seed)
    texts, final = list[_Text](), list[Tensor]()
    output: Any = engine.model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, args: final.append(args[0][0]))
    try:
        for number, prompt in enumerate(prompts):
            table = engine.pool.allocate(str(number), lengths[number])
            heat = temperatures[number] if temperatures else 0.0
            texts.append(_Text(table, deque(prompt), lengths[number], heat))
        while live := [number for number, text in enumerate(texts) if len(text.ids) < text.length]:
            drawn = _feed(engine, [texts[number] for number in live], layers, final, noise)
            for number, token in zip(live, drawn, strict=True):
                if not texts[number].waiting:
                    texts[number].waiting.append(token)
                    if token in engine.info.eos_ids:
                        texts[number].waiting += following(number)
            fed([text.ids for text in texts])
    finally:
        hook.remove()
        for text in texts:
            engine.pool.free(text.table)
    return [Answer(torch.tensor(text.ids), torch.cat(text.features), torch.cat(text.final)) for text in texts]


@torch.inference_mode()
def _feed(
    engine: Engine, live: list[_Text], layers: tuple[int, ...], final: list[Tensor], noise: torch.Generator
) -> list[int]:
    """Feed every text its waiting ids, and return the token that the target draws behind each.

    The forward leaves the states that its output layer reads in `final`.
    """
    counts = [min(text.length - len(text.ids), LONGEST_CHUNK, len(text.waiting)) for text in live]
    chunks = [[text.waiting.popleft() for _ in range(count)] for text, count in zip(live, counts, strict=True)]
    pieces = [
        Piece.chain(text.table, len(text.ids), chunk, range(len(chunk)))
        for text, chunk in zip(live, chunks, strict=True)
    ]
    final.clear()
    out = engine.forward(pack(pieces, layers))
    features = final[0][:, :0] if out.features is None else out.features
    logits = out.logits[torch.tensor(counts).cumsum(0) - 1].float()
    tokens = logits.argmax(-1)
    heat = torch.tensor([text.temperature for text in live], dtype=torch.float64, device=logits.device)[:, None]
    if bool(heat.any()):
        probabilities = (logits / heat.clamp_min(COLDEST).float()).softmax(-1)
        tokens = torch.where(heat[:, 0] > 0, torch.multinomial(probabilities, 1, generator=noise)[:, 0], tokens)
    parts = zip(torch.split(features, counts), torch.split(final[0], counts), strict=True)
    for text, chunk, (its_features, its_final) in zip(live, chunks, parts, strict=True):
        text.ids += chunk
        text.features.append(its_features)
        text.final.append(its_final)
    drawn: list[int] = tokens.tolist()
    return drawn


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

    def write(self, shard: _Shard, texts: Sequence[Answer]) -> None:
        ids, features, final = map(torch.cat, zip(*texts, strict=True))
        parts = {"ids": ids.int(), "features": features.bfloat16(), "final": final.bfloat16()}
        write_whole(self.folder / shard.name, parts)

    def _stretch(self, start: int, length: int) -> list[Tensor]:
        number, at = divmod(start, self.shard_tokens)
        if number not in self._files:
            self._files[number] = safe_open(self.folder / self.shards[number].name, framework="pt")
        return [self._files[number].get_slice(name)[at : at + length] for name in Answer._fields]

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
        write_whole(record, json.dumps({"source": source, "facts": facts}) + "\n")
    made_from = json.loads(record.read_text(encoding="utf-8"))
    if made_from["source"] != source:
        raise DataError(f"{folder} holds target answers made from {made_from['source']}; these would be from {source}")
    answers = TargetAnswers(folder, plan, made_from["facts"], layers)
    if missing := [shard for shard in answers.shards if not (folder / shard.name).exists()]:
        engine = load_engine(target, device=device, dtype=dtype, kv_tokens=AT_ONCE * (answers.shard_tokens + 128))
        _Recorder(answers, corpora or _load(lines, target), target, progress).record(engine, missing)
    else:
        progress(answers.tokens, answers.tokens)
    return answers


def _load(lines: list[str], target: Path) -> list[Corpus]:
    """Read the corpora, chats in the target's template. Raises DataError."""
    tokenizer = lru_cache(1)(partial(AutoTokenizer.from_pretrained, target, local_files_only=True))

    def render(messages: Messages) -> Any:
        return tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    corpora = read_corpora(lines, render)
    check_held_out({corpus.name: len(corpus.held_out) for corpus in corpora}, 1)
    return corpora


class _Recorder:
    """Records shards, some at once, and keeps the ids of those that are not complete in a file."""

    def __init__(
        self, answers: TargetAnswers, corpora: Sequence[Corpus], target: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.answers, self.progress, self.file = answers, progress, answers.folder / BEGUN
        self.tokenizer, self.corpora = load_tokenizer(target), {corpus.name: corpus for corpus in corpora}
        self.shards: Sequence[_Shard] = ()
        """those that are recorded now"""
        self.recorded = self.replayed = 0
        """tokens of complete shards, and with those that an earlier recording wrote"""
        self.saved = 0.0

    def record(self, engine: Engine, missing: Sequence[_Shard]) -> None:
        answers, plan, count, begun = self.answers, self.answers.plan, len(TEMPERATURES), dict[str, list[list[int]]]()
        if self.file.exists():
            earlier = json.loads(self.file.read_text(encoding="utf-8"))
            begun = {shard.name: earlier[shard.name] for shard in missing if shard.name in earlier}
        missing = sorted(missing, key=lambda shard: shard.name not in begun)  # those that the file has, at once
        begun_tokens = sum(len(ids) for texts in begun.values() for ids in texts)
        self.recorded = answers.tokens - len(missing) * answers.shard_tokens
        self.replayed = self.recorded + begun_tokens
        self.progress(self.replayed, answers.tokens)
        for at in range(0, len(missing), AT_ONCE):
            self.shards = missing[at : at + AT_ONCE]
            rng = np.random.default_rng([plan.seed, seed_of(self.shards[0].name), begun_tokens])
            following = partial(self._prompt, rng)
            ids = [its for shard in self.shards for its in begun.get(shard.name, [[]] * count)]
            texts = write_answers(
                engine,
                [its or following(number) for number, its in enumerate(ids)],
                [plan.length] * len(ids),
                TEMPERATURES * len(self.shards),
                int(rng.integers(2**62)),
                answers.layers,
                following,
                self._fed,
            )
            for number, shard in enumerate(self.shards):
                answers.write(shard, texts[number * count : (number + 1) * count])
            self.recorded += len(self.shards) * answers.shard_tokens
        self.file.unlink(missing_ok=True)

    def _fed(self, ids: list[list[int]]) -> None:
        """Say how far the recording is, and keep the ids so far from time to time, and when `progress` ends it."""
        done, ended = self.recorded + sum(map(len, ids)), True
        try:
            self.progress(max(done, self.replayed), self.answers.tokens)
            ended = False
        finally:
            if done >= self.replayed and (ended or time.monotonic() - self.saved > SAVE_S):  # before, the file has more
                count = len(TEMPERATURES)
                begun = {shard.name: ids[count * n : count * (n + 1)] for n, shard in enumerate(self.shards)}
                write_whole(self.file, json.dumps(begun))
                self.saved = time.monotonic()

    def _prompt(self, rng: np.random.Generator, number: int) -> list[int]:
        """Draw a prompt for a text: the end of a chat, or a stretch of a document, half the time its beginning."""
        shard = self.shards[number // len(TEMPERATURES)]
        corpus = self.corpora[shard.domain]
        texts = corpus.held_out if shard.held_out else corpus.train
        text = texts[int(rng.integers(len(texts)))]
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not corpus.of_prompts).ids
        if corpus.of_prompts:
            return ids[-(self.answers.plan.length // 2) :]
        length = int(rng.choice(PROMPT_LENGTHS))
        start = int(rng.integers(0, max(1, len(ids) - length))) if rng.random() < 0.5 else 0
        return ids[start : start + length]


def write_whole(file: Path, content: str | Mapping[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write a text, or tensors with `notes` as safetensors, into a file that takes an older one's place when whole."""
    partial_file = file.with_name(f"{file.name}.partial")
    if isinstance(content, str):
        partial_file.write_text(content, encoding="utf-8")
    else:
        save_file({name: tensor.cpu().contiguous() for name, tensor in content.items()}, partial_file, notes)
    partial_file.replace(file)

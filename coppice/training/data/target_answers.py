"""What heads learn from: the target's own answers to prompts, with its hidden states, in bounded safetensors shards.

A shard is one batch of answers through the packed verifier engine. Every text has as many tokens: a prefix of a
training document, the target's continuation and, behind an end of text, the next prefix. Beside the ids a shard has the
target's features and final hidden states; distributions are computed from the latter when they are needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from coppice.engine.engine import default_feature_layers
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.training.data.answerer import Answer, Answerer
from coppice.training.data.corpora import DataError, load_corpus, parse_specs
from coppice.training.data.packing import Ids, Packed, check_held_out, open_prepared, prepare
from coppice.training.data.tokenizer import copy_tokenizer, load_tokenizer

TEMPERATURES = (1.0, 0.0, 1.0, 0.7)
"""of a domain's answers, in turn: greedy ones of a small target loop and teach little, so half are its own samples"""
PREFIX_LENGTHS = (16, 32, 64, 96)
LEAST_HELD_OUT = 2 * max(PREFIX_LENGTHS) + 1  # tokens of a domain that are answered
ANSWERS_SHARE = 1 / 3
"""tokens to record for a token of training: each is read three times"""
LINES = "lines.json"
"""in the data folder of answers: what they were made from"""


@dataclass(frozen=True)
class AnswerPlan:
    """At least `tokens` tokens in texts of `length`; `sessions` of them make a shard, fewer a held-out one."""

    tokens: int
    length: int = 256
    sessions: int = 32
    held_out_sessions: int = 8
    seed: int = 0

    def shard_tokens(self, held_out: bool) -> int:
        """Return how many tokens a shard has."""
        return self.length * (self.held_out_sessions if held_out else self.sessions)


@dataclass(frozen=True)
class _Shard:
    domain: str
    held_out: bool
    number: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.domain}-{'held-out' if self.held_out else 'train'}-{self.number:05}.safetensors"


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
            self._starts.append(self._starts[-1] + self.plan.shard_tokens(shard.held_out))

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
    """Record a target's answers into `folder`, going on from the shards that it holds.

    layers: those whose features are recorded; empty: the three that heads read by default.
    progress: called after each forward with the tokens recorded, and with those to record in all.
    Raises DataError for bad `lines` and for a folder that holds answers of another target, other data, another seed,
    other temperatures or with features of other layers. Raises InvalidField for layers that the target does not have.
    """
    depth = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config().num_hidden_layers
    layers = layers or default_feature_layers(depth)
    if max(layers) >= depth:
        raise InvalidField("--layers", f"{max(layers)} is not among 0..{depth - 1} of the target")
    domains = _prepare(lines, target, folder / "data", plan, layers)
    weights = {domain.name: domain.weight for domain in domains}
    shards = _planned(domains, plan)
    missing = [shard for shard in shards if not (folder / shard.name).exists()]
    if missing:
        engine = load_engine(target, device=device, dtype=dtype, kv_tokens=plan.sessions * (plan.length + 32))
        done, total = 0, sum(plan.shard_tokens(shard.held_out) for shard in missing)

        def fed(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done, total)

        answerer = Answerer(engine, fed, layers)
        for shard in missing:
            domain = next(d for d in domains if d.name == shard.domain)
            _record(answerer, plan, domain, shard, folder)
    return TargetAnswers(folder, plan, weights, shards, layers)


def _planned(domains: Sequence[Packed], plan: AnswerPlan) -> list[_Shard]:
    """List held-out shards of every temperature, then training shards in the domains' proportions."""
    shards = [
        _Shard(domain.name, True, number, temperature)
        for domain in domains
        if len(domain.held_out) >= LEAST_HELD_OUT
        for number, temperature in enumerate(TEMPERATURES)
    ]
    drawn = dict.fromkeys((domain.name for domain in domains), 0)
    for _ in range(-(-plan.tokens // (plan.sessions * plan.length))):
        domain = min(domains, key=lambda d: (drawn[d.name] + 1) / d.weight)
        number = drawn[domain.name]
        shards.append(_Shard(domain.name, False, number, TEMPERATURES[number % len(TEMPERATURES)]))
        drawn[domain.name] += 1
    return shards


def _prepare(
    lines: list[str],
    target: Path,
    folder: Path,
    plan: AnswerPlan,
    layers: tuple[int, ...],
) -> list[Packed]:
    """Return the corpora in the target's tokens, packed into `folder` unless an earlier recording has done so."""
    record = folder / LINES
    source = {"lines": lines, "target": str(target.resolve()), "seed": plan.seed, "temperatures": list(TEMPERATURES)}
    source["layers"] = list(layers)
    if record.exists():
        held = json.loads(record.read_text(encoding="utf-8"))
        if held != source:
            raise DataError(f"{folder.parent} holds target answers made from {held}; these would be from {source}")
        return open_prepared(folder)
    corpora = [load_corpus(spec) for spec in parse_specs(lines)]
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(target, folder)
    eos = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config().eos_token_id
    if eos is None:
        raise DataError(f"{target}: its config.json names no eos_token_id, so texts cannot be told apart")
    end = int(eos[0] if isinstance(eos, list) else eos)
    domains = prepare(corpora, load_tokenizer(folder), folder, end)
    check_held_out(domains, LEAST_HELD_OUT)
    record.write_text(json.dumps(source) + "\n", encoding="utf-8")
    return domains


def _record(answerer: Answerer, plan: AnswerPlan, domain: Packed, shard: _Shard, folder: Path) -> None:
    """Write one shard."""
    own = [plan.seed, shard.number, shard.held_out, int.from_bytes(domain.name.encode(), "little") % 2**32]
    rng = np.random.default_rng(own)
    seed = int(rng.integers(2**62))
    source = domain.held_out if shard.held_out else domain.train
    sessions = plan.held_out_sessions if shard.held_out else plan.sessions
    ends = np.flatnonzero(np.isin(source, answerer.engine.info.eos_ids))

    def following() -> list[int]:
        return _prefix(source, ends, rng)

    prefixes = [following() for _ in range(sessions)]
    texts = answerer.answer(prefixes, [plan.length] * sessions, shard.temperature, seed, following)
    tensors = {
        "ids": torch.cat([text.ids for text in texts]).int(),
        "features": torch.cat([text.features for text in texts]).bfloat16().cpu(),
        "final": torch.cat([text.final for text in texts]).bfloat16().cpu(),
    }
    partial = folder / f".{shard.name}.partial"
    save_file(tensors, partial, {"temperature": str(shard.temperature)})
    partial.rename(folder / shard.name)


def _prefix(source: Ids, ends: NDArray[np.int64], rng: np.random.Generator) -> list[int]:
    """Draw a prompt: half the time the beginning of a document, else a stretch from anywhere."""
    length = min(int(rng.choice(PREFIX_LENGTHS)), len(source) // 2)
    latest = len(source) - length
    beginnings = np.concatenate([[0], ends + 1])
    beginnings = beginnings[beginnings < latest]
    start = int(rng.choice(beginnings) if rng.random() < 0.5 else rng.integers(0, latest))
    prefix: list[int] = source[start : start + length].tolist()
    return prefix

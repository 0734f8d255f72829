"""What heads learn from: the target's own answers to prompts, with its hidden states, in small safetensors shards.

A shard is four texts of a domain, answered at four temperatures. Every text has as many tokens: a prompt, the target's
answer and, where that ends or begins to repeat itself, the next prompt, which the target reads by itself. Beside the
ids a shard has the target's features, and the final hidden states, of which distributions are computed. The ids of
texts under way are kept in a file, from which a recording goes on.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from coppice.config.model import GIB, read_tokenizer
from coppice.engine.engine import Engine, default_feature_layers
from coppice.engine.kv_cache import BlockTable
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.limits import BLOCK_SIZE
from coppice.training.data import Corpus, DataError, Domain, Messages, check_held_out, read_corpora

LONGEST_CHUNK = 128  # ids of a text in a forward
BESIDE = 8  # ids of a text that are fed beside the latest ones of others
COLDEST = 1e-3  # temperature of the draws of greedy texts, which nobody looks at
ROWS = 8  # of logits that are drawn from together
TEMPERATURES = (1.0, 0.0, 1.0, 0.7)
"""of a shard's texts: greedy ones of a small target loop and teach little, so half are its own samples"""
PROMPT_LENGTHS = (16, 32, 64, 96)  # tokens of a document that begin a text
MOST_HELD_OUT = 4  # shards of a domain; fewer where it has fewer than eight times as many to learn from
AT_ONCE = 64  # texts that are written together
LOOP = 48  # ids: an answer that repeats so many is ended, and so is the longest stretch that it is searched for
SAVE_S = 1.0  # between two files of the ids that are recorded so far
READ_TIMES = 3  # how often a run reads a recorded token
RECORD, BEGUN = "made-from.json", ".begun.json"
"""in a folder of answers: what they were made from; the ids of shards that are not complete"""


class Answer(NamedTuple):
    """Texts with the target's features and final hidden states at each token."""

    ids: Tensor  # (..., T)
    features: Tensor  # (..., T, F)
    final: Tensor  # (..., T, hidden), what the target's output layer reads


@dataclass
class _Text:
    """One text while the target writes it: the first `fed` of its ids have gone through the target."""

    ids: list[int]
    length: int
    temperature: float
    shard: "_Shard | None" = None
    starts: list[int] = field(default_factory=lambda: [0])  # of its prompts
    fed: int = 0
    drawn: int = 0  # ids since the latest prompt
    table: BlockTable = field(init=False)
    features: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.fed == self.length

    def next(self) -> tuple[int, list[int]]:
        """Return where the prompt starts whose answer is written, and ids to feed behind what was fed of that."""
        start = max(start for start in self.starts if start <= self.fed)
        end = min(start for start in (*self.starts, len(self.ids)) if start > self.fed)
        return start, self.ids[self.fed : min(end, self.fed + LONGEST_CHUNK)]

    def answer(self) -> Answer:
        return Answer(torch.tensor(self.ids), torch.cat(self.features), torch.cat(self.final))


class _Tap:
    """A hook of an output layer, which keeps what the layer would read and has it read some rows of that."""

    rows: Tensor
    states: Tensor  # (T, hidden)

    def __call__(self, _: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.states = args[0][0]
        return (args[0][:, self.rows],)


def write_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], layers: tuple[int, ...] = ()
) -> list[Answer]:
    """Let a target write a greedy text of lengths[n] tokens from each prompt n, and keep its hidden states.

    End-of-text ids are tokens like any other. layers: those whose features are kept; empty: the engine's own. Raises
    OutOfBlocks when the pool is too small for those that are written at once.
    """
    texts = [_Text(list(prompt)[:length], length, 0.0) for prompt, length in zip(prompts, lengths, strict=True)]
    for _ in _written(engine, texts, 0, layers):
        pass
    return [text.answer() for text in texts]


def _written(
    engine: Engine,
    texts: Iterable[_Text],
    seed: int,
    layers: tuple[int, ...],
    following: Callable[[_Text], Sequence[int]] | None = None,
) -> Iterator[None]:
    """Let a target write texts, AT_ONCE at a time, and stop after each forward.

    Where an answer ends, is as long as half a text, or repeats itself, the prompt `following` gives comes behind it.
    """
    layers, noise = layers or engine.info.feature_layers, torch.Generator(engine.model.device).manual_seed(seed)
    queue, live, tap, output = iter(texts), list[_Text](), _Tap(), cast(Any, engine.model.get_output_embeddings())
    if engine.steps is not None:
        engine.steps.graphs = []  # replays call no hooks
    hook = output.register_forward_pre_hook(tap)
    try:
        while True:
            for text in islice(queue, AT_ONCE - len(live)):
                text.table = engine.pool.allocate(str(id(text)), text.length)
                del text.ids[text.length :]
                live.append(text)
            if not live:
                return
            # Prompts in a forward of their own: what attends together is padded to the longest.
            now = [text for text in live if len(text.next()[1]) > BESIDE] or live
            for text, token in zip(now, _feed(engine, now, layers, tap, noise), strict=True):
                if text.fed < len(text.ids) or text.complete:
                    continue
                text.ids.append(token)
                text.drawn += 1
                ended = token in engine.info.eos_ids
                if following and (ended or text.drawn >= text.length // 2 or repeats(text.ids[-text.drawn :])):
                    text.ids += () if ended else engine.info.eos_ids[:1]
                    text.starts.append(len(text.ids))
                    text.ids += following(text)
                    text.drawn = 0
                del text.ids[text.length :]
            for text in now:
                if text.complete:
                    engine.pool.free(text.table)
            live = [text for text in live if not text.complete]
            yield
    finally:
        hook.remove()
        for text in live:
            engine.pool.free(text.table)


@torch.inference_mode()
def _feed(engine: Engine, texts: list[_Text], layers: tuple[int, ...], tap: _Tap, noise: torch.Generator) -> list[int]:
    """Feed every text ids that it has, and return the token that the target draws behind each."""
    parts = [text.next() for text in texts]
    pieces = [
        Piece.chain(text.table, text.fed - start, ids, range(len(ids)))
        for text, (start, ids) in zip(texts, parts, strict=True)
    ]
    counts = [len(ids) for _, ids in parts]
    tap.rows = torch.tensor(counts, device=engine.model.device).cumsum(0) - 1
    out = engine.forward(pack(pieces, layers))
    features = tap.states[:, :0] if out.features is None else out.features
    heat = torch.tensor([text.temperature for text in texts], device=features.device)
    tokens: list[int] = draw(out.logits, heat, noise).tolist()
    states = zip(*(torch.split(rows[: sum(counts)], counts) for rows in (features, tap.states)), strict=True)
    for text, count, (its_features, its_final) in zip(texts, counts, states, strict=True):
        text.fed += count
        text.features.append(its_features)
        text.final.append(its_final)
    return tokens


def draw(logits: Tensor, heat: Tensor, noise: torch.Generator) -> Tensor:
    """Draw a token from each row of (B, V) logits at the row's temperature, (B,); at 0 the best one. Spends the logits.

    torch.multinomial draws a number for each token of a vocabulary, which takes longer than a forward. Here one number
    finds a block of tokens, then a token in it. Few rows at a time stay in the caches.
    """
    tokens = list[Tensor]()
    for rows, its_heat in zip(torch.split(logits, ROWS), torch.split(heat, ROWS), strict=True):
        shares = rows.float()
        highest, best = shares.max(-1, keepdim=True)
        shares.sub_(highest).div_(its_heat.clamp_min(COLDEST)[:, None]).exp_()
        blocks = shares.view(len(rows), -1, min(512, shares.shape[1] & -shares.shape[1]))
        sums = blocks.sum(-1).double()
        ends = sums.cumsum(-1)
        place = ends[:, -1:] * (1 - torch.rand(len(rows), 1, generator=noise, device=rows.device).double())  # never 0
        block = torch.searchsorted(ends, place)
        inside = blocks.take_along_dim(block[..., None], 1)[:, 0].double().cumsum(-1)
        rest = (place - (ends - sums).gather(1, block)).minimum(inside[:, -1:])
        drawn = block * inside.shape[1] + torch.searchsorted(inside, rest)
        tokens.append(torch.where(its_heat[:, None] > 0, drawn, best)[:, 0])
    return torch.cat(tokens)


def repeats(ids: Sequence[int]) -> bool:
    """Whether the end of a text repeats what is before it: LOOP ids at least, and a stretch of them thrice."""
    spans = ((period, max(2 * period, LOOP)) for period in range(1, LOOP + 1))
    return any(
        len(ids) >= span + period and ids[-1] == ids[-1 - period] and ids[-span:] == ids[-span - period : -period]
        for period, span in spans
    )


@dataclass(frozen=True)
class _Shard:
    domain: str
    held_out: bool
    number: int

    @property
    def name(self) -> str:
        return f"{self.domain}-{'held-out' if self.held_out else 'train'}-{self.number:05}.safetensors"


class TargetAnswers:
    """The recorded answers of a target, read as one long text: of each domain its shards, held-out ones first."""

    def __init__(
        self, folder: Path, tokens: int, length: int, facts: dict[str, dict[str, Any]], layers: tuple[int, ...]
    ) -> None:
        """At least `tokens` to learn from in texts of `length`, of the domains in proportion to their weights; more
        tokens have the same shards and more. layers: those of the features.
        """
        self.folder, self.length, self.layers = folder, length, layers
        self.shard_tokens, total = len(TEMPERATURES) * length, sum(fact["weight"] for fact in facts.values())
        self.shards, self.domains = list[_Shard](), list[Domain]()
        self.facts: dict[str, dict[str, Any]] = {}
        """what a model card needs to know of the data of each domain, with the tokens answered"""
        for name, fact in facts.items():
            count = math.ceil(tokens * fact["weight"] / total / self.shard_tokens)
            held_out = min(MOST_HELD_OUT, max(1, count // 8)) if fact["held_out_documents"] else 0
            ends = [(len(self.shards) + shards) * self.shard_tokens for shards in (0, held_out, held_out + count)]
            self.domains.append(Domain(name, fact["weight"], np.arange(ends[1], ends[2]), np.arange(ends[0], ends[1])))
            self.facts[name] = fact | {"tokens": ends[2] - ends[1]}
            self.shards += [_Shard(name, True, number) for number in range(held_out)]
            self.shards += [_Shard(name, False, number) for number in range(count)]
        self.tokens = len(self.shards) * self.shard_tokens
        self._files = dict[int, Any]()

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


def record_answers(
    lines: list[str],
    target: Path,
    folder: Path,
    tokens: int,
    *,
    length: int = 512,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    layers: tuple[int, ...] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> TargetAnswers:
    """Record a target's answers into `folder`, going on from what it holds: see TargetAnswers.

    layers: those whose features are recorded; empty: the three that heads read by default.
    progress: called before the first forward and after each one with the tokens recorded, and with those of all. What
    it raises ends the recording, and the same call goes on where this one ended. say: called before them with how much
    will be recorded, and about how long that takes.
    Raises DataError for bad `lines` and for a folder that holds answers of another target, other data, another seed,
    texts of another length or with features of other layers. Raises InvalidField for layers that the target does not
    have, and for a disk that is too small.
    """
    text = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    depth = text.num_hidden_layers
    layers = layers or default_feature_layers(depth)
    if max(layers) >= depth:
        raise InvalidField("--layers", f"{max(layers)} is not among 0..{depth - 1} of the target")
    source = {"lines": lines, "target": str(target.resolve()), "seed": seed, "length": length}
    source["layers"] = list(layers)
    record, corpora = folder / RECORD, list[Corpus]()
    if not record.exists():
        if any(folder.glob("*.safetensors")):
            raise DataError(f"{folder} has no {RECORD}: what its answers were made from is not known")
        corpora = _load(lines, target)
        facts = {corpus.name: corpus.facts() for corpus in corpora}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(record, f"{json.dumps({'source': source, 'facts': facts})}\n".encode())
    made_from = json.loads(record.read_text(encoding="utf-8"))
    if made_from["source"] != source:
        raise DataError(f"{folder} holds target answers made from {made_from['source']}; these would be from {source}")
    answers = TargetAnswers(folder, tokens, length, made_from["facts"], layers)
    if missing := [shard for shard in answers.shards if not (folder / shard.name).exists()]:
        tokens, at_once = len(missing) * answers.shard_tokens, min(AT_ONCE, len(missing) * len(TEMPERATURES))
        size = tokens * (4 + 2 * text.hidden_size * (1 + len(layers))) / GIB
        if size > (free := shutil.disk_usage(folder).free / GIB):
            reason = f"{folder} would take {size:.1f} GiB more, and its disk has {free:.1f} free"
            raise InvalidField("--lessons", reason)
        engine = load_engine(target, device=device, dtype=dtype, kv_tokens=at_once * (length + BLOCK_SIZE))
        step = engine.timing(1, sessions=at_once, context=length // 2, repeats=3) / at_once / 1e9
        say(
            f"recording {tokens} tokens of the target's answers, {at_once} texts at a time, in {dtype}: "
            f"about {tokens * step / 60:.0f} minutes, {size:.2f} GiB in {folder}"
        )
        _Recorder(answers, corpora or _load(lines, target), target, progress).record(engine, missing, seed)
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
        self.tokenizer, self.corpora = read_tokenizer(target), {corpus.name: corpus for corpus in corpora}
        self.begun: dict[_Shard, list[_Text]] = {}  # of shards that are not complete
        self.recorded = 0  # tokens of complete shards

    def record(self, engine: Engine, missing: Sequence[_Shard], seed: int) -> None:
        answers, saved = self.answers, time.monotonic()
        earlier = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        self.begun = {shard: self._texts(shard, earlier[shard.name]) for shard in missing if shard.name in earlier}
        self.recorded = answers.tokens - len(missing) * answers.shard_tokens
        rng = np.random.default_rng([seed, self._reached()])
        fresh = [shard for shard in missing if shard not in self.begun]
        fresh.sort(key=lambda shard: shard.number / self.corpora[shard.domain].weight)  # domains as far as each other
        following = partial(self._prompt, rng)

        def texts() -> Iterator[_Text]:
            for shard in (*self.begun, *fresh):
                for text in self.begun.setdefault(shard, self._texts(shard, [([], [0])] * len(TEMPERATURES))):
                    text.ids = text.ids or following(text)
                    yield text

        try:
            for _ in _written(engine, texts(), int(rng.integers(2**62)), answers.layers, following):
                for shard in [shard for shard, own in self.begun.items() if all(text.complete for text in own)]:
                    answers.write(shard, [text.answer() for text in self.begun.pop(shard)])
                    self.recorded += answers.shard_tokens
                self._reached()
                if time.monotonic() - saved > SAVE_S:
                    self._save()
                    saved = time.monotonic()
        finally:
            self._save()
        self.file.unlink()

    def _save(self) -> None:
        begun = {shard.name: [(text.ids, text.starts) for text in own] for shard, own in self.begun.items()}
        write_whole(self.file, json.dumps(begun).encode())

    def _reached(self) -> int:
        done = self.recorded + sum(len(text.ids) for own in self.begun.values() for text in own)
        self.progress(done, self.answers.tokens)
        return done

    def _texts(self, shard: _Shard, begun: Sequence[tuple[list[int], list[int]]]) -> list[_Text]:
        """Return the shard's texts, of which there are these ids and starts."""
        length, pairs = self.answers.length, zip(begun, TEMPERATURES, strict=True)
        return [_Text(ids, length, heat, shard, [*starts]) for (ids, starts), heat in pairs]

    def _prompt(self, rng: np.random.Generator, text: _Text) -> list[int]:
        """Draw a prompt for a text: a whole one's end, or a stretch of a document, half the time its beginning."""
        assert text.shard is not None
        corpus = self.corpora[text.shard.domain]
        documents = corpus.held_out if text.shard.held_out else corpus.train
        document = documents[int(rng.integers(len(documents)))]
        ids: list[int] = self.tokenizer.encode(document, add_special_tokens=corpus.kind != "chats").ids
        if corpus.kind != "texts":
            return ids[-(text.length // 2) :]
        length = int(rng.choice(PROMPT_LENGTHS))
        start = int(rng.integers(0, max(1, len(ids) - length))) if rng.random() < 0.5 else 0
        return ids[start : start + length]


def write_whole(file: Path, content: bytes | Mapping[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write bytes, or tensors with `notes` as safetensors: the file is the older one until this one is on the disk."""
    partial_file = file.with_name(f"{file.name}.partial")
    if isinstance(content, bytes):
        partial_file.write_bytes(content)
    else:
        save_file({name: tensor.cpu().contiguous() for name, tensor in content.items()}, partial_file, notes)
    with partial_file.open("rb") as written:
        os.fsync(written)
    partial_file.replace(file)

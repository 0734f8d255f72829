"""`lm`: any small causal language model with the target's tokenizer drafts a chain or a top-k tree (SpS).

Every level of the tree is one packed forward over the frontiers of all waiting sessions. The tree is grown as EAGLE-2
does: the best `top_k` nodes of a level are expanded, and the `budget` best candidates of all levels are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig

from coppice.config.sections import DrafterSettings
from coppice.engine.attention import one_line
from coppice.engine.engine import Context
from coppice.engine.kv_cache import BlockTable, OutOfBlocks
from coppice.engine.loading import load_engine
from coppice.engine.rows import Earlier, Piece, pack
from coppice.errors import InvalidField, Overloaded
from coppice.heads.base import DraftJob, Growth, Head, with_tree_shape
from coppice.heads.block_head import BlockTree, row_slices
from coppice.heads.models.expectation import read_expectation
from coppice.heads.ranking import Noise, noise_there, on_host, places
from coppice.speculation.sampling import uniform
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft, vocabulary_hash

_TOKENIZER = "tokenizer.json"


def common_width(folder: str | Path, target: str | Path) -> int:
    """Return the target's vocabulary width, in logits, for a draft model with the same vocabulary.

    Where both folders have a tokenizer.json, ids must name the same tokens in both, but for added tokens that one of
    them does not have. Then the widths may differ in rows that no common token has: a family's small models are often
    padded otherwise than its large ones. Raises InvalidField.
    """
    own, width = _config(folder).vocab_size, _config(target).vocab_size
    tokens = 0
    if (mine := _tokenizer(folder)) and (theirs := _tokenizer(target)):
        first, second = mine.get_vocab(), theirs.get_vocab()
        of_one = {*mine.get_vocab(with_added_tokens=False)} ^ {*theirs.get_vocab(with_added_tokens=False)}
        odd = [token for token in first.keys() | second.keys() if first.get(token) != second.get(token)]
        odd = [token for token in odd if token in of_one or (token in first and token in second)]
        if odd:
            number, token = min((first.get(token, second.get(token, 0)), token) for token in odd)
            reason = f"its tokenizer is not the target's: they differ in token {token!r}, id {number}"
            raise InvalidField("drafter.path", f"{folder}: {reason}")
        tokens = max((first[token] for token in first.keys() & second.keys()), default=-1) + 1
    if own != width and not 0 < tokens <= min(own, width):
        raise InvalidField("drafter.path", f"{folder}: vocab_size is {own}, the target's is {width}")
    return int(width)


def context_of(folder: str | Path, otherwise: int) -> int:
    """Return how many tokens a target's texts may have; `otherwise` where it names no limit. Raises InvalidField."""
    return Context.of(_config(folder), otherwise).tokens


def tokenizer_hash(folder: str | Path) -> bytes:
    """Return the hash of a folder's tokenizer.json, by which others know its vocabulary; empty without the file.

    Raises InvalidField.
    """
    tokenizer = _tokenizer(folder)
    return vocabulary_hash(tokenizer.get_vocab()) if tokenizer else b""


def _tokenizer(folder: str | Path) -> Tokenizer | None:
    file = Path(folder) / _TOKENIZER
    return _read(file, Tokenizer.from_file, str(file)) if file.is_file() else None


def _config(folder: str | Path) -> Any:
    config = _read(folder, AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False)
    return config.get_text_config()


def _read(place: str | Path, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a library reads there. Raises InvalidField for what it cannot use."""
    try:
        return read(*arguments, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidField("drafter.path", f"{place} cannot be read: {one_line(error)}") from None


log = structlog.get_logger()

PREFILL_ROWS = 512
_CHAIN_STREAM = 3  # randomness of the sampled chains of the p/q rule


@dataclass
class _Session:
    table: BlockTable
    ids: list[int]
    noise: Noise
    in_kv: int = 0  # ids whose keys and values are in place


@dataclass(eq=False)
class _Tree(BlockTree):
    session: _Session = field(kw_only=True)
    positions: list[int] = field(default_factory=list)  # of the nodes that were expanded, the root first
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def noisy(self) -> bool:
        """Whether its candidates are ranked with the target's noise."""
        return self.job.noisy and not self.job.want_q_rows

    def finish(self) -> Growth:
        """Return the best nodes, and the rows that they were sampled from if they were."""
        return replace(self.send(last=True), q_rows=np.stack(self.q_rows) if self.q_rows else None)


class LanguageModelHead(Head):
    """A Hugging Face causal LM as a drafter, on the packed engine the verifier uses."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load the model of `settings.path`, on the thread that will use it.

        Raises what load_engine raises, and InvalidField where the vocabulary is not that of a `settings.target`.
        """
        settings = with_tree_shape(settings)
        own_hash = tokenizer_hash(settings.path)
        if not own_hash:
            log.warning("no tokenizer.json: nothing says whether its ids mean the target's words", folder=settings.path)
        target_width = common_width(settings.path, settings.target) if settings.target else 0
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.engine = load_engine(
            settings.path, device=settings.device, dtype=settings.dtype, kv_tokens=settings.kv_tokens
        )
        self.settings = settings
        info = self.engine.info
        self._width = min(target_width or info.vocab_size, info.vocab_size)
        """of the logits that it drafts from; ids behind its own last one, which no token has, are read as that"""
        self._ids = torch.arange(self._width, device=settings.device)
        self.description = HeadDescription(
            settings.name or "lm",
            "lm",
            target_width or self._width,
            expected_acceptance=read_expectation(settings.path).by_depth,
            # Of the target's, where the two were compared: they may differ in added tokens.
            tokenizer_hash=own_hash and tokenizer_hash(settings.target or settings.path),
        )
        self.max_context = info.max_context
        self._sessions: dict[int, _Session] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Prefill the prompt chunk by chunk. Raises Overloaded without KV room."""
        ids = self._known(opening.ids[: self.max_context])  # what lies behind is never drafted from
        try:
            table = self.engine.pool.allocate(str(key), len(ids))
        except OutOfBlocks as error:
            raise Overloaded(str(error)) from None
        session = self._sessions[key] = _Session(table, self._known(opening.ids), Noise(self._ids))
        while session.in_kv < len(ids) - 1:  # the last id's row is the first draft's
            chunk = ids[session.in_kv : session.in_kv + PREFILL_ROWS]
            self.forward_ns += self.engine.forward(pack([Piece.chain(table, session.in_kv, chunk)])).forward_ns
            session.in_kv += len(chunk)
            yield

    def close(self, key: int) -> None:
        """Free the session's KV."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self.engine.pool.free(session.table)

    def advance(self, key: int, advance: Advance) -> None:
        """Remember the ids; their rows ride on the next draft's first forward."""
        self._sessions[key].ids += self._known(advance.ids)

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [min(token, self.engine.info.vocab_size - 1) for token in ids]

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees level by level; each is sent when it is complete, ranked as a whole."""
        width, sessions = self.settings.top_k, self._sessions
        trees = [_Tree(job, number, width, session=sessions[job.key]) for number, job in enumerate(jobs)]
        active = [tree for tree in trees if self._start(tree)]
        noisy = [tree for tree in active if tree.noisy] if self.engine.on_device else []
        depth = 0
        while active:
            output = self.engine.forward(pack([self._piece(tree, depth) for tree in active]))
            for tree in active:  # only now: a forward that failed wrote nothing
                tree.session.in_kv = tree.job.committed_len
            if depth == 0 and noisy:
                there = torch.from_numpy(places([tree.job for tree in noisy])).to(self._ids.device)
                noises = noise_there(there, self.settings.depth, self._ids)
                for tree, its_noise in zip(noisy, noises, strict=True):
                    tree.noise = its_noise
            depth += 1
            self._add_level(active, output.logits, depth)
            self.forward_ns += output.forward_ns
            active = [tree for tree in active if len(tree.starts)]
        yield [tree.finish() for tree in trees]

    def _start(self, tree: _Tree) -> bool:
        """Take the KV room of a tree; returns whether there is anything to draft and room for it."""
        job, session = tree.job, tree.session
        room = job.committed_len + 1 + self.settings.top_k * self.settings.depth
        if job.budget == 0 or job.committed_len + 1 + self.settings.depth > self.max_context:
            return False
        try:
            self.engine.pool.extend(session.table, max(room, session.table.num_tokens))
        except OutOfBlocks:
            return False
        if tree.noisy and not self.engine.on_device:
            levels = min(self.settings.depth, job.budget)
            tree.noise = session.noise.rows(job.sampling.seed, job.committed_len + 1, levels)
        return True

    def _piece(self, tree: _Tree, depth: int) -> Piece:
        """Make the rows of the next forward: what was committed and the root, later a level's frontier."""
        session, prefix = tree.session, tree.job.committed_len
        if depth == 0:
            tree.positions.append(prefix)
            chunk = [*session.ids[session.in_kv : prefix], *self._known([tree.job.root])]
            return Piece.chain(session.table, session.in_kv, chunk, [len(chunk) - 1])
        count, earlier = len(tree.starts), Earlier(tree.starts.visible(), np.array(tree.positions, np.int64))
        tree.positions += [prefix + depth] * count
        return Piece(
            table=session.table,
            prefix_len=prefix,
            tokens=[tree.tokens[node - 1] for node in tree.starts.nodes],
            parents=[-1] * count,
            depths=[depth] * count,
            keep=range(count),
            earlier=earlier,
        )

    @torch.inference_mode()
    def _add_level(self, trees: Sequence[_Tree], logits: Tensor, depth: int) -> None:
        """Add the children of the frontiers and choose the next ones."""
        logits, slices = logits[:, : self._width], row_slices(trees)
        tokens: list[list[int]] = []
        scores: list[list[float]] = []
        if not all(tree.job.want_q_rows for tree in trees):
            top = draft_scores(logits, trees, depth).topk(min(self.settings.top_k, self._width))
            of_tokens, of_scores = on_host(top.indices, top.values)
            scores, tokens = of_scores.tolist(), of_tokens.tolist()
        for tree, rows in zip(trees, slices, strict=True):
            deeper = depth < min(self.settings.depth, tree.job.budget)
            if tree.job.want_q_rows:
                token, score = self._sample(tree, logits[rows], depth)
                tree.grow_level([[token]], [[score]], deeper)
            else:
                tree.grow_level(tokens[rows], scores[rows], deeper)

    def _sample(self, tree: _Tree, logits: Tensor, depth: int) -> tuple[int, float]:
        """Sample the next token of a chain from q, and its score; q's row is kept for the p/q rule."""
        job = tree.job
        q = (logits[0].double() / (job.sampling.temperature or 1.0)).softmax(-1).cpu().numpy()
        drawn = uniform(job.sampling.seed, job.committed_len + depth, _CHAIN_STREAM)
        token = min(int(np.searchsorted(q.cumsum(), drawn, side="right")), len(q) - 1)
        tree.q_rows.append(np.pad(q.astype(np.float32), (0, self.description.vocab_size - len(q))))
        return token, min(0.0, float(np.log(max(q[token], 1e-30))))


def draft_scores(logits: Tensor, trees: Sequence[_Tree], depth: int) -> Tensor:
    """Return (n, V) scores of the children at `depth` of the trees' starts.

    They are log q, reweighted at T > 0 by the keyed noise of the position that the children stand at (coupled drafting,
    docs/architecture.md).
    """
    slices = row_slices(trees)
    scores = logits.float()
    for tree, rows in zip(trees, slices, strict=True):
        if tree.job.sampling.temperature not in (0, 1) and not tree.job.want_q_rows:
            scores[rows] /= tree.job.sampling.temperature
    scores = scores.log_softmax(-1)
    noisy = [(tree.noise[depth - 1], rows) for tree, rows in zip(trees, slices, strict=True) if tree.noise is not None]
    if not noisy:
        return scores
    for noise, rows in noisy:
        scores[rows] += noise
    return scores.log_softmax(-1)  # of the others it changes no more than rounding

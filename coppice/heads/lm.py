"""`lm`: any small causal language model with the target's tokenizer drafts a chain or a top-k tree (SpS).

Every level of the tree is one packed forward over the frontiers of all waiting sessions. The tree is grown as EAGLE-2
does: the best `top_k` nodes of a level are expanded, and the `budget` best candidates of all levels are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.config.model import check_model, common_tokens, read_expectation, read_tokenizer, text_config
from coppice.config.sections import DrafterSettings
from coppice.engine.kv_cache import BlockTable
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, KVHead, with_tree_shape
from coppice.heads.tree import Blocks, BlockTree, Ranking, row_slices
from coppice.speculation.sampling import DRAFT_STREAM, uniform
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft, vocabulary_hash


def common_width(folder: str | Path, target: str | Path) -> int:
    """Return the target's width of logits. Raises InvalidField unless the draft model has the same vocabulary.

    Where both folders have a tokenizer.json the widths may differ in rows that no `common_tokens` has: a family's small
    models are often padded otherwise than its large ones.
    """
    check_model("drafter.path", folder, typed=True)
    own, width = (int(text_config(each).get("vocab_size", 0)) for each in (folder, target))
    tokens = common_tokens(folder, target)
    if own != width and not 0 < tokens <= min(own, width):
        raise InvalidField("drafter.path", f"{folder}: vocab_size is {own}, the target's is {width}")
    return width


def tokenizer_hash(folder: str | Path) -> bytes:
    """Return the hash of a folder's tokenizer.json; empty without the file. Raises InvalidField."""
    tokenizer = read_tokenizer(folder)
    return vocabulary_hash(tokenizer.get_vocab()) if tokenizer else b""


log = structlog.get_logger()

PREFILL_ROWS = 512


@dataclass
class _Session:
    table: BlockTable
    ids: list[int]
    in_kv: int = 0  # ids whose keys and values are in place


class LanguageModelHead(KVHead):
    """A Hugging Face causal LM as a drafter, on the packed engine the verifier uses."""

    def __init__(self, settings: DrafterSettings) -> None:
        """Load `settings.path`. Raises as load_engine, and InvalidField for another vocabulary than the target's."""
        self.settings = settings = with_tree_shape(settings)
        own_hash = tokenizer_hash(settings.path)
        if not own_hash:
            log.warning("no tokenizer.json: nothing says whether its ids mean the target's words", folder=settings.path)
        target_width = common_width(settings.path, settings.target) if settings.target else 0
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.engine = load_engine(
            settings.path,
            device=settings.device,
            dtype=settings.dtype,
            kv_tokens=settings.kv_tokens,
            keeps_states=False,
        )
        info = self.engine.info
        self._width = min(target_width or info.vocab_size, info.vocab_size)
        """of the logits that it drafts from; ids behind its own last one, which no token has, are read as that"""
        self.ranking = Ranking(torch.arange(self._width, device=settings.device))
        self.description = HeadDescription(
            settings.name or "lm",
            "lm",
            target_width or self._width,
            expected_acceptance=read_expectation(settings.path).by_depth,
            # Of the target's, where the two were compared: they may differ in added tokens.
            tokenizer_hash=own_hash and tokenizer_hash(settings.target or settings.path),
        )
        self.pool, self.deepest = self.engine.pool, settings.depth
        self.max_context = info.context.tokens
        self._sessions: dict[int, _Session] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Prefill the prompt chunk by chunk. Raises Overloaded without KV room."""
        ids = self._known(opening.ids[: self.max_context])  # what lies behind is never drafted from
        table = self.pool.allocate(str(key), len(ids))
        session = self._sessions[key] = _Session(table, self._known(opening.ids))
        while session.in_kv < len(ids) - 1:  # the last id's row is the first draft's
            chunk = ids[session.in_kv : session.in_kv + PREFILL_ROWS]
            self.forward_ns += self.engine.forward(pack([Piece.chain(table, session.in_kv, chunk)])).forward_ns
            session.in_kv += len(chunk)
            yield

    def advance(self, key: int, advance: Advance) -> None:
        """Remember the ids; their rows ride on the next draft's first forward."""
        self._sessions[key].ids += self._known(advance.ids)

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [min(token, self.engine.info.vocab_size - 1) for token in ids]

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Grow all trees level by level; each is sent when it is complete, ranked as a whole."""
        trees = [BlockTree(job, number, self.settings.top_k) for number, job in enumerate(jobs)]
        most = 1 + self.settings.top_k * self.deepest  # rows of a tree, the root's included
        active = [tree for tree in trees if self.has_room(tree.job, tree.job.committed_len + most)]
        active.sort(key=lambda tree: tree.job.want_q_rows)
        q_rows: dict[int, list[NDArray[np.float32]]] = {tree.number: [] for tree in active if tree.job.want_q_rows}
        for depth in range(self.deepest):
            if not active:
                break
            output = self.engine.forward(pack([self._piece(tree) for tree in active]))
            if depth == 0:
                for tree in active:  # only now: a forward that failed wrote nothing
                    self._sessions[tree.job.key].in_kv = tree.job.committed_len
                self.ranking.couple(active, self.deepest)
            deeper, logits = depth + 1 < self.deepest, output.logits[:, : self._width]
            for tree, rows in zip(active, row_slices(active), strict=True):
                if tree.job.want_q_rows:
                    token, q = sample(logits[rows.start], tree.job, depth + 1)
                    score = min(0.0, float(np.log(max(q[token], 1e-30))))
                    tree.grow(Blocks([[[token]]], [[[score]]], [[0]], [[1]]), (0, 1), deeper)
                    beyond = self.description.vocab_size - len(q)  # ids that the model does not know
                    q_rows[tree.number].append(np.pad(q.astype(np.float32), (0, beyond)))
            if ranked := [tree for tree in active if not tree.job.want_q_rows]:
                count = row_slices(ranked)[-1].stop
                self.ranking.grow(ranked, logits[:count, None].float(), (0, self.settings.top_k), deeper)
            self.forward_ns += output.forward_ns
            active = [tree for tree in active if tree.grows]
        stacked = {number: np.stack(rows) for number, rows in q_rows.items()}
        yield [replace(tree.send(), last=True, q_rows=stacked.get(tree.number)) for tree in trees]

    def _piece(self, tree: BlockTree) -> Piece:
        """Make the rows of the next forward: what was committed and the root, later a level's starts."""
        session, prefix = self._sessions[tree.job.key], tree.job.committed_len
        if not tree.tokens:
            chunk = [*session.ids[session.in_kv : prefix], *self._known([tree.job.root])]
            return Piece.chain(session.table, session.in_kv, chunk, [len(chunk) - 1])
        count = len(tree.starts)
        return Piece(
            table=session.table,
            prefix_len=prefix,
            tokens=[tree.tokens[start.node - 1] for start in tree.starts],
            parents=[-1] * count,
            depths=[start.depth for start in tree.starts],
            keep=range(count),
            earlier=(tree.visible(), prefix + np.array(tree.entries, np.int64)),
        )


def sample(logits: Tensor, job: DraftJob, depth: int) -> tuple[int, NDArray[np.float64]]:
    """Sample a chain's token at a depth from (V,) logits; returns it and the (V,) probabilities, for the p/q rule."""
    q: NDArray[np.float64] = (logits.double() / (job.sampling.temperature or 1.0)).softmax(-1).cpu().numpy()
    drawn = uniform(job.sampling.seed, job.committed_len + depth, DRAFT_STREAM)
    return min(int(np.searchsorted(q.cumsum(), drawn, side="right")), len(q) - 1), q

"""One decoding session of the verifier: what it waits for, the walk over its tree, and the verdict.

`walk` is the one walk over a tree: it follows drawn ids, whoever drew them. `TargetRows.draw` draws on the host with
the keyed noise or hands on what a device drew; `pq_draws` draws by the p/q rule, for chains sampled from known rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable
from coppice.engine.rows import Piece
from coppice.errors import InvalidField, Overloaded, StaleFence
from coppice.limits import MAX_ROW_SUPPORT
from coppice.speculation.sampling import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    Penalties,
    decode_row,
    draw,
    draw_logits,
    largest,
    uniform,
)
from coppice.speculation.sampling import Row as SampledRow
from coppice.speculation.tree import DraftTree, TreeError, prune
from coppice.wire.common import Features, Fence, Row, TopLogProbs, committed_hash
from coppice.wire.verifier import Commit, NextRoot, OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

from .features import Committed, FeatureWindow, Feed, Window, columns
from .prefix import Prefix

MOST_FEEDS = 64  # followers of a session: a drafter for each of its heads, and those that a move left behind
_SCORED_ROWS = 64  # of a prompt that are in float32 at once


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk went: the accepted nodes in order, root excluded."""

    path: tuple[int, ...]
    drawn: int | None
    """the next root; None where the path ends at a stop token or at the limit, so that no root is wanted"""


def walk(
    tree: DraftTree,
    drawn: Callable[[int], int],
    stop_ids: Collection[int] = frozenset(),
    max_accept: int | None = None,
) -> Walk:
    """Follow the target's own draws through the tree for as long as it holds them.

    `drawn` is the id behind a node. As it depends on the text before it alone, the text is that of plain decoding,
    whatever the tree. Over a union every node that spells the text so far is followed, and the longest path is kept
    (Merged-Tree Dual Drafting, section 6.1); nodes that spell the same text have the same row, which is asked for once.
    At most `max_accept` drafts are accepted, and a stop token ends the path after itself. A drawn stop token that the
    tree does not hold is the next root like any other.
    """
    tokens, children = tree.tokens.tolist(), tree.children()
    at = [0]  # every node that spells the accepted text
    depth = 0
    while max_accept is None or depth < max_accept:
        token = drawn(at[0])
        onward = [child for node in at for child in children[node] if tokens[child - 1] == token]
        if not onward:
            return Walk(path_to(tree, at[0]), token)
        at, depth = onward, depth + 1
        if token in stop_ids:
            break
    return Walk(path_to(tree, at[0]), None)


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The nodes from the root, excluded, to `node`."""
    path = []
    while node:
        path.append(node)
        node = int(tree.parents[node - 1])
    return tuple(reversed(path))


def pq_draws(
    tree: DraftTree, row_at: Callable[[int], SampledRow], q_rows: NDArray[np.floating], seed: int, root_position: int
) -> Callable[[int], int]:
    """Draws of speculative sampling behind the nodes of a chain: the drafted x with probability min(1, p(x) / q(x)),
    else an id from max(p - q, 0); behind the last node one from its row.

    Exact in law when node i was sampled from `q_rows[i - 1]` of the (n, V) probabilities (an id from V on has none),
    with randomness other than the accept and the residual stream's, and when the chain's length does not depend on
    tokens it does not hold (Leviathan et al., arXiv 2211.17192, section 2.3; the chain of
    Tree-Based Speculative Decoding for NanoGPT). Raises TreeError, reason "no-chain", for another tree, and "q-rows"
    for rows of another shape; so does a draw where a row gives the drafted token no probability.
    """
    if (tree.parents != np.arange(len(tree))).any():
        raise TreeError("no-chain", "parents", "the p/q rule needs a chain")
    if q_rows.ndim != 2 or len(q_rows) != len(tree):
        raise TreeError("q-rows", "q_rows", f"has shape {q_rows.shape} for {len(tree)} nodes")

    def drawn(node: int) -> int:
        row, position = row_at(node), root_position + node + 1
        if node < len(tree):
            token, q_row = int(tree.tokens[node]), q_rows[node]
            q = float(q_row[token]) if token < q_row.size else 0.0
            if not 0 < q < np.inf:
                raise TreeError("q-rows", "q_rows", f"gives the drafted token {token} the probability {q}")
            if uniform(seed, position, ACCEPT_STREAM) * q < _probability(row, token):
                return token
            row = _residual(row, q_row)
        return draw(*row, seed, position, RESIDUAL_STREAM)

    return drawn


def _probability(row: SampledRow, token: int) -> float:
    """What a row gives a token; 0 outside its support."""
    ids, log_probs = row
    at = int(np.searchsorted(ids, token))
    return float(np.exp(log_probs[at])) if at < ids.size and ids[at] == token else 0.0


def _residual(row: SampledRow, q_row: NDArray[np.floating]) -> SampledRow:
    """max(p - q, 0), renormalised."""
    ids, log_probs = row
    excess = np.exp(log_probs)
    inside = ids < q_row.size
    excess[inside] -= q_row[ids[inside]]
    left = np.flatnonzero(excess > 0)
    if not left.size:  # p = q up to rounding, so that a rejection has no probability of its own
        return row
    return ids[left], np.log(excess[left] / excess[left].sum())


class Session:
    """State of one session. Every method runs on the worker thread."""

    def __init__(self, key: int, request: OpenSession, prefix: Prefix, feature_window: int, vocab_size: int) -> None:
        self.key, self.request, self.prefix = key, request, prefix
        self.table: BlockTable = prefix.table
        """where its KV lies"""
        self.step = 0
        self.committed_len = 0
        self.hash = committed_hash(())
        self.over = False  # ended by a stop id or at max_len; the orchestrator finds stop strings
        self.features = FeatureWindow(feature_window)
        self.feeds: list[Feed] = []
        self.last: Committed | None = None  # what the last step committed, for the feeds
        self.prompt_log_probs: list[float] = []
        self.prompt_top: list[TopLogProbs] = []
        self.penalties = Penalties(
            request.sampling,
            request.prompt_tokens or len(request.ids),
            vocab_size,
            request.stop_ids,
            request.min_len,
        )
        size, layers = self.table.block_size, request.feature_layers
        for number, block in enumerate(prefix.blocks):
            own = columns(block.features, block.layers, layers) if block.features is not None and layers else None
            self._take(request.ids[number * size : (number + 1) * size], own)

    @property
    def fence(self) -> Fence:
        """What the client must believe for its next step to be accepted."""
        return Fence(self.step, self.committed_len, self.hash)

    @property
    def room(self) -> int:
        """Draft nodes that its KV has room for in the next step."""
        return self.table.capacity - self.committed_len - 1

    def commit(self, ids: list[int], features: Tensor | None) -> None:
        """Take `ids` as committed. features: (len(ids), F) or None."""
        self._take(ids, features)
        self.prefix.append(ids, features)

    def _take(self, ids: list[int], features: Tensor | None) -> None:
        self.committed_len += len(ids)
        self.hash = committed_hash(ids, self.hash)
        if self.penalties.change_rows:
            self.penalties.append(ids)
        if features is not None:
            self.features.append(features)

    def follow(self, feed: Feed) -> Window:
        """Feed a follower from now on; the feature rows that it begins with. Raises InvalidField, Overloaded."""
        ref, layers = feed.ref, self.request.feature_layers
        if len(self.feeds) == MOST_FEEDS:
            raise Overloaded(f"a session has at most {MOST_FEEDS} followers")
        for layer in ref.layers if ref.count else ():
            if layer not in layers:
                raise InvalidField("ref.layers", f"{layer} is not one of the session's layers {layers}")
        if ref.count and ref.start + ref.count > self.committed_len:
            raise InvalidField("ref", f"ends behind the {self.committed_len} committed positions")
        first, chunks = self.features.since(ref.start) if ref.count else (0, [])
        self.feeds.append(feed)
        return first, chunks, layers

    def check_fence(self, fence: Fence) -> None:
        """Raise StaleFence unless the step continues exactly what is committed here, and that has room for a root."""
        expected = (self.step + 1, self.committed_len, self.hash)
        if (fence.step, fence.committed_len, fence.committed_hash) != expected:
            raise StaleFence(
                f"step {fence.step} on {fence.committed_len} tokens with hash {fence.committed_hash:016x}; expected "
                f"step {expected[0]} on {expected[1]} tokens with hash {expected[2]:016x}"
            )
        if self.committed_len >= self.request.max_len:
            raise StaleFence(f"step {fence.step} comes behind the end of the text at {self.request.max_len} tokens")

    def score_prompt(self, logits: Tensor) -> None:
        """Note the log-probabilities of the ids behind each of the next ids, given their (N, V) logits."""
        ids = self.request.ids[self.committed_len + 1 :][: len(logits)]
        for first in range(0, len(ids), _SCORED_ROWS):
            some = torch.tensor(ids[first : first + _SCORED_ROWS], device=logits.device)
            log_probs = logits[first : first + len(some)].float().log_softmax(-1)
            self.prompt_log_probs += log_probs.gather(1, some[:, None])[:, 0].tolist()
            if count := self.request.top_log_probs:
                best = log_probs.topk(min(count, log_probs.shape[-1]))
                self.prompt_top += map(TopLogProbs, best.indices.cpu().numpy(), best.values.cpu().numpy())

    def opened(self, rows: TargetRows, features: Features | None) -> SessionOpened:
        """The answer to the prompt, which is committed (timings empty)."""
        root = self._next_root(rows, 0, rows.draw(0), keyed=True)
        top = rows.tops((0,), self.request.top_log_probs)
        scored, prompt_top = tuple(self.prompt_log_probs), tuple(self.prompt_top)
        self.prompt_log_probs, self.prompt_top = [], []
        cached = self.prefix.reused_tokens
        return SessionOpened(self.fence, root, features, VerifyTimings(), top, scored, prompt_top, cached)

    def _next_root(self, rows: TargetRows, node: int, drawn: int, keyed: bool) -> NextRoot:
        """The row itself where it is small and the client's draw from it gives the same id; else the id."""
        want = self.request.want_log_probs
        if keyed and not rows.sends_ids:
            ids, log_probs = rows.law(node)
            if len(ids) <= MAX_ROW_SUPPORT:
                return NextRoot(Row(ids, log_probs, rows.log_probs(node)[ids] if want else None))
        return NextRoot(None, drawn, float(rows.log_probs(node)[drawn]) if want else 0.0)

    def walk(self, step: VerifyStep, rows: TargetRows) -> None:
        """Walk a step's tree, or what is left of it: which of the rows are text.

        Raises InvalidField, and ValueError on a row that decode_row refuses.
        """
        tree, request = rows.job.tree, self.request
        try:
            drawn: Callable[[int], int] = rows.draw
            if step.q_rows is not None and len(tree):
                q_rows = step.q_rows[: len(tree)]  # a chain that was cut to the room there is has lost its end
                drawn = pq_draws(tree, rows.law, q_rows, request.sampling.seed, self.committed_len)
            rows.walk = walk(tree, drawn, request.stop_ids, request.max_len - self.committed_len - 1)
        except TreeError as error:
            raise InvalidField(f"step.{error.field}", str(error)) from None
        rows.text = (0, *rows.walk.path)

    def judge(self, step: VerifyStep, rows: TargetRows, hint: int | None = None) -> Verdict:
        """Commit what the walk over a step's rows accepted, and say where the next root comes from (timings empty)."""
        job, path, drawn, request = rows.job, rows.walk.path, rows.walk.drawn, self.request
        ids = [step.root, *job.tree.tokens[np.array(path, np.int64) - 1].tolist()]
        self.step = step.fence.step
        self.commit(ids, rows.features)
        last = self.committed_len + 1 >= request.max_len  # the root is
        self.over = last or drawn is None or drawn in request.stop_ids
        if self.feeds:
            self.last = Commit(self.fence, tuple(ids), None if self.over else drawn), rows.features
        root = None if drawn is None else self._next_root(rows, rows.text[-1], drawn, keyed=step.q_rows is None)
        scored = zip(rows.text, ids[1:], strict=False) if request.want_log_probs else ()
        return Verdict(
            fence=self.fence,
            accepted=tuple([job.verified[node - 1] for node in path]) if job.verified else path,
            next=root,
            timings=VerifyTimings(),
            verified=job.verified,
            log_probs=tuple([float(rows.log_probs(node)[token]) for node, token in scored]),
            pruned=len(job.tree) < len(step.tree),
            budget_hint=hint,
            top=rows.tops(rows.text if root else rows.text[:-1], request.top_log_probs),
        )


@dataclass
class Job:
    """What one session waits for; a step's tree loses the nodes there is no room for and those that do not pay."""

    session: Session
    answer: asyncio.Future[Any]
    arrived: int
    step: VerifyStep | None = None
    """None for the opening of a session"""
    tree: DraftTree = field(default_factory=DraftTree.empty)
    verified: tuple[int, ...] = ()
    """the sender's numbers of the tree's nodes, when some were left out"""
    piece: Piece = field(init=False)
    """its rows of the forward under way"""
    started: int = 0
    forward_ns: int = 0
    answered: bool = False

    @property
    def whole(self) -> bool:
        """Whether no node may be left out: the sender says so, or sampled them, and a choice would change their law."""
        return self.step is not None and (self.step.whole_tree or self.step.q_rows is not None)

    @property
    def on_host(self) -> bool:
        """Whether it needs whole rows on the host: a session with penalties, or a step under the p/q rule."""
        return self.session.penalties.change_rows or (self.step is not None and self.step.q_rows is not None)

    @property
    def prefill_left(self) -> list[int]:
        """Prompt ids whose KV is still missing."""
        return self.session.request.ids[self.session.committed_len :]

    def cut(self, budget: int) -> None:
        """Leave out all but the `budget` likeliest nodes."""
        if budget < len(self.tree):
            numbers = self.verified or range(1, len(self.tree) + 1)
            self.tree, left = prune(self.tree, budget)
            self.verified = tuple(map(numbers.__getitem__, (left - 1).tolist()))

    def lay_chunk(self, room: int) -> int:
        """Lay the next ids of the prompt as rows, at most `room`; returns how many they are."""
        left, session = self.prefill_left, self.session
        chunk = left[:room]
        last = [len(chunk) - 1] if len(chunk) == len(left) else []
        keep = range(len(chunk)) if session.request.want_prompt_log_probs else last
        self.piece = Piece.chain(session.table, session.committed_len, chunk, keep)
        return len(chunk)

    def lay_tree(self, root: int) -> None:
        """Lay a step's root and tree as rows: node i is row i, so parents are the tree's own numbers."""
        self.piece = Piece(
            table=self.session.table,
            prefix_len=self.session.committed_len,
            tokens=[root, *self.tree.tokens.tolist()],
            parents=[-1, *self.tree.parents.tolist()],
            depths=self.tree.depths().tolist(),
            keep=range(len(self.tree) + 1),
        )


class TargetRows:
    """The target's rows of one job, turned into numpy and through G only where somebody looks.

    Node 0 is the last token that is no draft: a step's root, or the last of a prompt.
    """

    def __init__(self, job: Job, logits: Tensor, first: int, drawn: Sequence[int] = ()) -> None:
        """logits: (K, V) of the rows that the job's piece keeps. first: the piece's first row of the batch. drawn: (K,)
        ids that a device drew behind them, -1 where it refused; empty: the host draws.
        """
        self.job, self.logits, self.first = job, logits, first
        self.text: Sequence[int] = range(len(job.piece.tokens))
        """rows of the piece that are text: all of a prompt, of a step those on the walk's path"""
        self.walk = Walk((), None)
        self.features: Tensor | None = None
        """(len(text), F) of these rows on the host, if the session wants any"""
        self._node_0 = len(logits) - len(job.tree) - 1  # behind rows of a prompt that are scored
        self._sampling, self._drawn, width = job.session.request.sampling, drawn, logits.shape[1]
        self._wide = width > MAX_ROW_SUPPORT and self._sampling.keeps_all(width)
        self.sends_ids = self._wide or bool(drawn)
        """no row can be sent, or none is on the host: the next root is drawn here"""
        self._plain: dict[int, NDArray[np.float32]] = {}
        self._laws: dict[int, SampledRow] = {}
        self._log_probs: dict[int, NDArray[np.float32]] = {}

    def __getitem__(self, node: int) -> NDArray[np.float32]:
        if node not in self._plain:
            self._plain[node] = self.logits[self._node_0 + node].float().cpu().numpy()
        return self._plain[node]

    def law(self, node: int) -> SampledRow:
        """The row after G at a node, where the text before it ends with the root and the node's path.

        Raises ValueError on a row that decode_row refuses.
        """
        if node not in self._laws:
            self._laws[node] = decode_row(self._adjusted(node), self._sampling)
        return self._laws[node]

    def draw(self, node: int) -> int:
        """The id behind a node, drawn with the keyed noise. Raises ValueError on a row that decode_row refuses."""
        if self._drawn and (drawn := self._drawn[self._node_0 + node]) >= 0:
            return drawn
        piece = self.job.piece
        position = piece.prefix_len + piece.depths[piece.keep[self._node_0 + node]] + 1
        if self._wide:
            return draw_logits(self._adjusted(node), self._sampling, position)
        return draw(*self.law(node), self._sampling.seed, position)

    def _adjusted(self, node: int) -> NDArray[np.float32]:
        job, penalties = self.job, self.job.session.penalties
        if not penalties.change_rows:
            return self[node]
        path = job.tree.tokens[np.array(path_to(job.tree, node), np.int64) - 1].tolist()
        return penalties.adjusted(self[node], [job.step.root, *path] if job.step else path)

    def log_probs(self, node: int) -> NDArray[np.float32]:
        """(V,) log-probabilities at a node at T=1, before any penalty."""
        if node not in self._log_probs:
            scores = self[node].astype(np.float64)
            scores -= scores.max()
            scores -= np.log(np.exp(scores).sum())
            self._log_probs[node] = scores.astype(np.float32)
        return self._log_probs[node]

    def tops(self, nodes: Sequence[int], count: int) -> tuple[TopLogProbs, ...]:
        """The `count` most probable ids behind each node at T=1, the best first; nothing for a count of 0."""
        tops = []
        for node in nodes if count else ():
            row = self[node]
            ids = largest(row, count)
            ids = ids[np.argsort(-row[ids], kind="stable")[:count]]
            tops.append(TopLogProbs(ids, self.log_probs(node)[ids]))
        return tuple(tops)


def split(jobs: Sequence[Job], logits: Tensor, drawn: Sequence[int] = ()) -> Iterator[TargetRows]:
    """Each job's rows of a forward: of its (R, V) logits, and of the (R,) ids that a device drew, if one did."""
    first = start = 0
    for job in jobs:
        end = start + len(job.piece.keep)
        yield TargetRows(job, logits[start:end], first, () if job.on_host else drawn[start:end])
        first, start = first + len(job.piece.tokens), end


def take_features(parts: Sequence[TargetRows], features: Tensor | None, layers: tuple[int, ...]) -> None:
    """Give each of a forward's parts the features of its rows that are text, in one copy to the host.

    features: (T, F) of all rows of the forward, with the columns of `layers`; None when nobody wants any.
    """
    wanting = [rows for rows in parts if rows.job.session.request.feature_layers]
    if features is None or not wanting:
        return
    numbers = np.concatenate([np.array(rows.text) + rows.first for rows in wanting])
    with torch.inference_mode():
        taken = features.index_select(0, torch.from_numpy(numbers).to(features.device)).cpu()
    for rows, part in zip(wanting, torch.split(taken, [len(rows.text) for rows in wanting]), strict=True):
        # A copy where others are beside it: a window would keep the rows of all sessions.
        own = part if len(wanting) == 1 else part.clone()
        rows.features = columns(own, layers, rows.job.session.request.feature_layers)

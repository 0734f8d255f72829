"""One decoding session of the verifier: what it waits for, the walk over its tree, and the verdict.

`walk` is the one walk over a tree: it follows drawn ids, whoever drew them. `Job.draw` draws on the host with the keyed
noise, unless a device drew; `pq_draws` draws by the p/q rule, for chains sampled from known rows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable
from coppice.engine.rows import Piece
from coppice.errors import InvalidField, Overloaded, StaleFence
from coppice.limits import MAX_ROW_SUPPORT, MAX_TREE_DEPTH
from coppice.speculation.grammar import Guide
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
from coppice.speculation.tree import DraftTree, IntArray, TreeError, prune, select
from coppice.wire.common import FeatureRef, Features, Fence, Row, TopLogProbs, committed_hash
from coppice.wire.verifier import Commit, NextRoot, OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

from .features import Committed, FeatureWindow, Feed, Numbers, Window, columns
from .prefix import Prefix

MOST_FEEDS = 64  # followers of a session: a drafter for each of its heads, and those that a move left behind
_SCORED_ROWS = 64  # of a prompt that are in float32 at once


Walk = tuple[tuple[int, ...], int | None]
"""Where a walk went: the accepted nodes in order, root excluded, and the next root, None where none follows."""


def walk(
    tree: DraftTree, drawn: Callable[[int], int], stop_ids: Collection[int] = frozenset(), max_accept: int | None = None
) -> Walk:
    """Follow the target's own draws through the tree for as long as it holds them.

    `drawn` is the id behind a node. As it depends on the text before it alone, the text is that of plain decoding,
    whatever the tree. Over a union every node that spells the text so far is followed, and the longest path is kept
    (Merged-Tree Dual Drafting, section 6.1); nodes that spell the same text have the same row, which is asked for once.
    At most `max_accept` drafts are accepted, and a stop token ends the path after itself. A drawn stop token that the
    tree does not hold is the next root like any other.
    """
    tokens, children = tree.tokens.tolist(), tree.children()
    at, depth = [0], 0  # every node that spells the accepted text
    while max_accept is None or depth < max_accept:
        token = drawn(at[0])
        onward = [child for node in at for child in children[node] if tokens[child - 1] == token]
        if not onward:
            return path_to(tree, at[0]), token
        at, depth = onward, depth + 1
        if token in stop_ids:
            break
    return path_to(tree, at[0]), None


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The nodes from the root, excluded, to `node`."""
    path: tuple[int, ...] = ()
    while node:
        path, node = (node, *path), int(tree.parents[node - 1])
    return path


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
            p = float(np.exp(row[1][row[0] == token]).sum())  # 0 outside its support
            if uniform(seed, position, ACCEPT_STREAM) * q < p:
                return token
            row = _residual(row, q_row)
        return draw(*row, seed, position, RESIDUAL_STREAM)

    return drawn


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

    def __init__(
        self, key: int, request: OpenSession, prefix: Prefix, vocab_size: int, guide: Guide | None = None
    ) -> None:
        """guide: of an answer that must match a grammar, behind the ids that it is opened with."""
        self.key, self.request, self.prefix, self.guide = key, request, prefix, guide
        self.table: BlockTable = prefix.table  # where its KV lies
        self.step = 0
        self.committed_len = 0
        self.hash = committed_hash(())
        self.over = False  # ended by a stop id or at max_len; the orchestrator finds stop strings
        self.features = FeatureWindow()
        self.feeds: list[Feed] = []
        prompt_tokens = request.prompt_tokens or len(request.ids)
        self.penalties = Penalties(request.sampling, prompt_tokens, vocab_size, request.stop_ids, request.min_len)
        size, layers = self.table.block_size, request.feature_layers
        for number, block in enumerate(prefix.blocks):
            own = columns(block.features, block.layers, layers) if block.features is not None and layers else None
            self._take(request.ids[number * size : (number + 1) * size], own)

    @property
    def fence(self) -> Fence:
        """What the client must believe for its next step to be accepted."""
        return Fence(self.step, self.committed_len, self.hash)

    @property
    def prefill_left(self) -> list[int]:
        """Prompt ids whose KV is still missing."""
        return self.request.ids[self.committed_len :]

    def commit(self, ids: list[int], features: Numbers | None) -> None:
        """Take `ids` as committed. features: (len(ids), F) or None."""
        if self.guide is not None and not self.prefill_left:
            self.guide.append(ids)
        self._take(ids, features)
        self.prefix.append(ids, features)

    def _take(self, ids: list[int], features: Numbers | None) -> None:
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
        first, chunks = self.features.since(ref.start, ref.start + ref.count) if ref.count else (0, [])
        self.feeds.append(feed)
        return first, chunks, layers

    def check_fence(self, fence: Fence) -> None:
        """Raise StaleFence unless the step continues exactly what is committed here, and that has room for a root."""
        expected = (self.step + 1, self.committed_len, self.hash)
        if (fence.step, fence.committed_len, fence.committed_hash) != expected:
            sent = f"step {fence.step} on {fence.committed_len} tokens with hash {fence.committed_hash:016x}"
            raise StaleFence("{}; expected step {} on {} tokens with hash {:016x}".format(sent, *expected))
        if self.committed_len >= self.request.max_len:
            raise StaleFence(f"step {fence.step} comes behind the end of the text at {self.request.max_len} tokens")


@dataclass(eq=False)
class Job:
    """What one session waits for: its opening or a step, and the target's rows of the forward under way.

    A step's tree loses the nodes there is no room for and those that do not pay. Node 0 is the last token that is no
    draft: a step's root, or the last of a chunk of the prompt.
    """

    session: Session
    answer: Callable[[Any], None]
    arrived: int
    step: VerifyStep | None = None  # None for the opening of a session
    tree: DraftTree = field(default_factory=DraftTree.empty)
    verified: tuple[int, ...] = ()  # the sender's numbers of the tree's nodes, when some were left out
    started: int = 0
    forward_ns: int = 0
    scores: list[float] = field(default_factory=list)  # log-probabilities of the prompt's ids, if they are asked for
    score_tops: list[TopLogProbs] = field(default_factory=list)

    # Of the forward under way.
    piece: Piece = field(init=False)
    first: int = field(init=False)  # the piece's first row of the batch
    logits: Tensor = field(init=False)  # (K, V) of the rows that the piece keeps
    drawn: Sequence[int] = ()  # (K,) ids that a device drew behind them, -1 where it refused; empty: the host draws
    text: Sequence[int] = ()  # rows of the piece that are text: all of a prompt, of a step those on the walk's path
    next_root: int | None = None  # the id drawn behind the text; None where no root follows
    features: Numbers | None = None  # (len(text), F) of these rows on the host, if the session wants any

    @property
    def whole(self) -> bool:
        """Whether no node may be left out: the sender says so, or sampled them, and a choice would change their law."""
        return self.step is not None and (self.step.whole_tree or self.step.q_rows is not None)

    @property
    def on_host(self) -> bool:
        """Whether it needs whole rows on the host: a session with penalties, or a step under the p/q rule."""
        return self.session.penalties.change_rows or (self.step is not None and self.step.q_rows is not None)

    def cut(self, budget: int) -> None:
        """Leave out all but the `budget` likeliest nodes."""
        if budget < len(self.tree):
            self._keep(prune(self.tree, budget)[1])

    def cut_forbidden(self) -> None:
        """Leave out the nodes that the grammar forbids, unless a choice would change their law."""
        guide, step = self.session.guide, self.step
        if guide is not None and step is not None and step.q_rows is None and len(self.tree):
            self._keep(guide.nodes(step.root, self.tree))

    def _keep(self, nodes: IntArray) -> None:
        """Leave out all but these nodes, ascending and with all their ancestors."""
        if len(nodes) < len(self.tree):
            numbers = self.verified or range(1, len(self.tree) + 1)
            self.tree = select(self.tree, nodes)
            self.verified = tuple(map(numbers.__getitem__, (nodes - 1).tolist()))

    def lay(self, room: int) -> None:
        """Lay the rows of the next forward: a step's root and tree, or the prompt's next ids, at most `room`."""
        session, tree = self.session, self.tree
        if self.step is None:
            left = session.prefill_left
            chunk = left[:room]
            last = [len(chunk) - 1] if len(chunk) == len(left) else []
            keep = range(len(chunk)) if session.request.want_prompt_log_probs else last
            self.piece = Piece.chain(session.table, session.committed_len, chunk, keep)
            return
        self.piece = Piece(
            table=session.table,
            prefix_len=session.committed_len,
            tokens=[self.step.root, *tree.tokens.tolist()],
            parents=[-1, *tree.parents.tolist()],  # node i is row i
            depths=tree.depths().tolist(),
            keep=range(len(tree) + 1),
            certain=not len(tree),
        )

    def read(self, first: int, logits: Tensor, drawn: Sequence[int]) -> None:
        """Take what the forward says of the piece, and walk a step's tree: which of the rows are text.

        Raises InvalidField, and ValueError on a row that decode_row refuses.
        """
        self.first, self.logits, self.drawn = first, logits, () if self.on_host else drawn
        self.node_0 = len(logits) - len(self.tree) - 1  # behind rows of a prompt that are scored
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._laws: dict[int, SampledRow] = {}
        self._log_probs: dict[int, NDArray[np.float32]] = {}
        width, sampling = logits.shape[1], self.session.request.sampling
        self.is_wide = width > MAX_ROW_SUPPORT and sampling.keeps_all(width)  # no row can be sent
        if self.step is None:
            self.text = range(len(self.piece.tokens))
        else:
            self._walk(self.step)

    def _walk(self, step: VerifyStep) -> None:
        request, committed_len, tree = self.session.request, self.session.committed_len, self.tree
        try:
            drawn: Callable[[int], int] = self.draw
            if step.q_rows is not None and len(tree):
                q_rows = step.q_rows[: len(tree)]  # a chain that was cut to the room there is has lost its end
                drawn = pq_draws(tree, self.law, q_rows, request.sampling.seed, committed_len)
            path, self.next_root = walk(tree, drawn, request.stop_ids, request.max_len - committed_len - 1)
        except TreeError as error:
            raise InvalidField(f"step.{error.field}", str(error)) from None
        self.text = (0, *path)

    def row(self, node: int) -> NDArray[np.float32]:
        """(V,) logits at a node, before any penalty, on the host."""
        if node not in self._rows:
            self._rows[node] = self.logits[self.node_0 + node].float().cpu().numpy()
        return self._rows[node]

    def _adjusted(self, node: int) -> NDArray[np.float32]:
        """A row after the session's penalties and grammar, for which the text ends with the root and the node's path.

        Where a least length leaves no id that the grammar allows, the text is complete: the grammar decides.
        """
        row, penalties, guide = self.row(node), self.session.penalties, self.session.guide
        if not penalties.change_rows and guide is None:
            return row
        path = self.tree.tokens[np.array(path_to(self.tree, node), np.int64) - 1].tolist()
        text = [self.step.root, *path] if self.step else path
        adjusted = penalties.adjusted(row, text) if penalties.change_rows else row
        if guide is None:
            return adjusted
        masked = guide.masked(adjusted, text)
        return masked if masked.max() > -np.inf else guide.masked(row, text)

    def law(self, node: int) -> SampledRow:
        """The row after G at a node. Raises ValueError on a row that decode_row refuses."""
        if node not in self._laws:
            self._laws[node] = decode_row(self._adjusted(node), self.session.request.sampling)
        return self._laws[node]

    def draw(self, node: int) -> int:
        """The id behind a node, drawn with the keyed noise. Raises ValueError on a row that decode_row refuses."""
        sampling, kept = self.session.request.sampling, self.node_0 + node
        if self.drawn and self.drawn[kept] >= 0:
            return self.drawn[kept]
        position = self.piece.prefix_len + self.piece.depths[self.piece.keep[kept]] + 1
        if self.is_wide:
            return draw_logits(self._adjusted(node), sampling, position)
        return draw(*self.law(node), sampling.seed, position)

    def log_probs(self, node: int) -> NDArray[np.float32]:
        """(V,) log-probabilities at a node at T=1, before any penalty."""
        if node not in self._log_probs:
            scores = self.row(node).astype(np.float64)
            scores -= scores.max()
            scores -= np.log(np.exp(scores).sum())
            self._log_probs[node] = scores.astype(np.float32)
        return self._log_probs[node]

    def prefilled(self, address: str, dtype: str) -> SessionOpened | None:
        """Commit a chunk of the prompt; the session's answer behind the last one (timings empty).

        address and dtype: of the features that it refers to.
        """
        session, request = self.session, self.session.request
        if request.want_prompt_log_probs:
            self._score()
        session.commit(list(self.piece.tokens), self.features)
        if session.prefill_left:
            return None
        drawn = self.next_root = self.draw(0)
        start, count = session.features.newest(session.committed_len)
        ref = FeatureRef(address, request.session, start, count, request.feature_layers)
        return SessionOpened(
            fence=session.fence,
            next=self._root_after(0, drawn, keyed=True),
            features=Features(start, count, dtype, None, ref),
            timings=VerifyTimings(),
            top=self._tops((0,)),
            prompt_log_probs=tuple(self.scores),
            prompt_top=tuple(self.score_tops),
            cached_tokens=session.prefix.reused_tokens,
            forced=self._forced(),
        )

    def _score(self) -> None:
        """Note the log-probabilities of the prompt's ids behind those of the piece."""
        request = self.session.request
        ids = request.ids[self.session.committed_len + 1 :][: len(self.logits)]
        for first in range(0, len(ids), _SCORED_ROWS):
            some = torch.tensor(ids[first : first + _SCORED_ROWS], device=self.logits.device)
            log_probs = self.logits[first : first + len(some)].float().log_softmax(-1)
            self.scores += log_probs.gather(1, some[:, None])[:, 0].tolist()
            if count := request.top_log_probs:
                best = log_probs.topk(min(count, log_probs.shape[-1]))
                self.score_tops += map(TopLogProbs, best.indices.cpu().numpy(), best.values.cpu().numpy())

    def judge(self, step: VerifyStep, hint: int | None = None) -> tuple[Verdict, Committed]:
        """Commit what the walk accepted, and say where the next root comes from (timings empty); and the commit."""
        session, request, drawn, path = self.session, self.session.request, self.next_root, self.text[1:]
        ids = [step.root, *self.tree.tokens[np.array(path, np.int64) - 1].tolist()]
        session.step = step.fence.step
        session.commit(ids, self.features)
        last = session.committed_len + 1 >= request.max_len  # the root is
        session.over = last or drawn is None or drawn in request.stop_ids
        root = None if drawn is None else self._root_after(self.text[-1], drawn, keyed=step.q_rows is None)
        scored = zip(self.text, ids[1:], strict=False) if request.want_log_probs else ()
        verdict = Verdict(
            fence=session.fence,
            accepted=tuple([self.verified[node - 1] for node in path]) if self.verified else tuple(path),
            next=root,
            timings=VerifyTimings(),
            verified=self.verified,
            log_probs=tuple([float(self.log_probs(node)[token]) for node, token in scored]),
            pruned=len(self.tree) < len(step.tree),
            budget_hint=hint,
            top=self._tops(self.text if root else self.text[:-1]),
            forced=() if session.over else self._forced(),
        )
        return verdict, (Commit(verdict.fence, tuple(ids), None if session.over else drawn), self.features)

    def _root_after(self, node: int, drawn: int, keyed: bool) -> NextRoot:
        """The row itself where it is small and the client's draw from it gives the same id; else the id."""
        want = self.session.request.want_log_probs
        if keyed and not (self.is_wide or self.drawn):
            ids, log_probs = self.law(node)
            if len(ids) <= MAX_ROW_SUPPORT:
                return NextRoot(Row(ids, log_probs, self.log_probs(node)[ids] if want else None))
        return NextRoot(None, drawn, float(self.log_probs(node)[drawn]) if want else 0.0)

    def _forced(self) -> tuple[int, ...]:
        """The ids that the grammar forces behind the next root, as many as a path may have."""
        guide, root = self.session.guide, self.next_root
        return () if guide is None or root is None else guide.forced(root)[:MAX_TREE_DEPTH]

    def _tops(self, nodes: Sequence[int]) -> tuple[TopLogProbs, ...]:
        """The most probable ids behind each node at T=1, the best first; nothing where none are asked for."""
        tops, count = [], self.session.request.top_log_probs
        for node in nodes if count else ():
            row = self.row(node)
            ids = largest(row, count)
            ids = ids[np.argsort(-row[ids], kind="stable")[:count]]
            tops.append(TopLogProbs(ids, self.log_probs(node)[ids]))
        return tuple(tops)


def take_features(jobs: Sequence[Job], features: Tensor | None, layers: tuple[int, ...]) -> None:
    """Give each job of a forward the features of its rows that are text, in one gather and one copy to the host.

    features: (T, F) of all rows of the forward, with the columns of `layers`; None when nobody wants any.
    """
    wanting = [job for job in jobs if job.session.request.feature_layers]
    if features is None or not wanting:
        return
    numbers = np.concatenate([np.array(job.text) + job.first for job in wanting])
    with torch.inference_mode():
        taken = features.index_select(0, torch.from_numpy(numbers).to(features.device)).cpu()
    rows, end = (taken.view(torch.int16) if taken.dtype is torch.bfloat16 else taken).numpy(), 0
    for job in wanting:
        start, end = end, end + len(job.text)
        # A copy where others are beside it: a window would keep the rows of all sessions.
        own = rows[start:end] if len(wanting) == 1 else rows[start:end].copy()
        job.features = columns(own, layers, job.session.request.feature_layers)

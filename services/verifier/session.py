"""One decoding session inside the verifier: its KV, its fence, its features, and the verdict on a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.kv_cache import BlockTable
from coppice.errors import InvalidField, Overloaded, StaleFence
from coppice.limits import MAX_ROW_SUPPORT
from coppice.speculation.penalties import Penalties
from coppice.speculation.sampling import Row as SampledRow
from coppice.speculation.sampling import decode_row, draw, draw_logits, largest
from coppice.speculation.tree import DraftTree, TreeError
from coppice.wire.common import Features, Fence, Rejection, Row, TopLogProbs, committed_hash
from coppice.wire.verifier import Commit, NextRoot, OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

from .acceptance import Reading, Walk, path_to, pq_chain, walk, walked
from .features import Committed, FeatureWindow, Feed, Window, columns
from .prefix import Prefix

MOST_FEEDS = 64  # followers of a session: a drafter for each of its heads, and those that a move left behind
_SCORED_ROWS = 64  # of a prompt that are in float32 at once


class Session:
    """State of one session. Every method runs on the worker thread."""

    def __init__(self, key: int, request: OpenSession, prefix: Prefix, feature_window: int, vocab_size: int) -> None:
        self.key, self.request, self.prefix = key, request, prefix
        self.step = 0
        self.committed_len = 0
        self.hash = committed_hash(())
        self.over = False  # the text has come to its end, as far as it is known here: stop strings are not
        self.features = FeatureWindow(feature_window)
        self.feeds: list[Feed] = []
        self.last: Committed | None = None  # what the last step committed, for the feeds
        self.prompt_log_probs: list[float] = []
        self.prompt_top: list[TopLogProbs] = []
        self.penalties = Penalties.of(
            request.sampling,
            request.prompt_tokens or len(request.ids),
            vocab_size,
            request.stop_ids,
            request.min_len,
        )
        size, wanted = self.table.block_size, request.feature_layers
        for number, block in enumerate(prefix.blocks):
            own = columns(block.features, block.layers, wanted) if block.features is not None and wanted else None
            self._take(request.ids[number * size : (number + 1) * size], own)

    @property
    def table(self) -> BlockTable:
        """Where its KV lies."""
        return self.prefix.table

    @property
    def fence(self) -> Fence:
        """What the client must believe for its next step to be accepted."""
        return Fence(self.step, self.committed_len, self.hash)

    def commit(self, ids: list[int], features: Tensor | None) -> None:
        """Take `ids` as committed. features: (len(ids), F) or None."""
        self._take(ids, features)
        self.prefix.append(ids, features)

    def _take(self, ids: list[int], features: Tensor | None) -> None:
        self.committed_len += len(ids)
        self.hash = committed_hash(ids, self.hash)
        if self.penalties is not None:
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

    def opened(
        self, logits: Tensor, features: Features | None, timings: VerifyTimings, reading: Reading | None = None
    ) -> SessionOpened:
        """The answer to the prompt, given the (V,) logits of its last token."""
        rows = _Rows(self, logits[None], DraftTree.empty(), drawn=reading.drawn[-1:] if reading else [])
        row = rows.after(0)
        drawn = draw(*row, self.request.sampling.seed, self.committed_len)
        root = self._next_root(rows, 0, row, drawn, keyed=True)
        top = rows.tops((0,), self.request.top_log_probs)
        scored, prompt_top = tuple(self.prompt_log_probs), tuple(self.prompt_top)
        self.prompt_log_probs, self.prompt_top = [], []
        cached = self.prefix.reused_tokens
        return SessionOpened(self.fence, root, features, timings, top, scored, prompt_top, cached)

    def _next_root(self, rows: _Rows, node: int, row: SampledRow, drawn: int, keyed: bool) -> NextRoot:
        """The row itself where it is small and the client's draw from it gives the same id; else the id."""
        ids, log_probs = row
        want = self.request.want_log_probs
        if keyed and len(ids) <= MAX_ROW_SUPPORT and not rows.drawn_here:
            return NextRoot(Row(ids, log_probs, rows.raw(node, ids) if want else None))
        return NextRoot(None, drawn, float(rows.raw(node, np.array([drawn]))[0]) if want else 0.0)

    def judge(
        self,
        step: VerifyStep,
        tree: DraftTree,
        verified: tuple[int, ...],
        logits: Tensor,
        features: Tensor | None,
        reading: Reading | None = None,
    ) -> tuple[Verdict, tuple[int, ...]]:
        """Walk the verified tree, commit what it accepted and say where the next root comes from.

        logits: (n + 1, V), the root's row first; features: (n + 1, F) or None. `verified` are the sender's numbers of
        the nodes of `tree` when it is a part of the step's. With a reading the tree is walked already, and the features
        are those of its rows. Returns the verdict (timings empty) and the accepted rows.
        """
        rows = _Rows(self, logits, tree, (step.root,), reading.drawn if reading else [])
        outcome = self._walk(step, tree, rows, reading)
        path, start = outcome.path, self.committed_len
        kept = (0, *path)
        ids = [step.root, *tree.tokens[np.array(path, np.int64) - 1].tolist()]
        rejection = self._rejection(step.tree, verified, outcome, rows, start)
        new_features = features if features is None or reading else features[list(kept)].cpu()
        self.step = step.fence.step
        self.commit(ids, new_features)
        last = self.committed_len + 1 >= self.request.max_len  # the root is
        self.over = last or outcome.drawn is None or outcome.drawn in self.request.stop_ids
        if self.feeds:
            commit = Commit(self.fence, tuple(ids), None if self.over else outcome.drawn)
            self.last = Committed(commit, new_features, self.request.feature_layers)
        root = None
        if outcome.end_row is not None and outcome.drawn is not None:
            root = self._next_root(rows, kept[-1], outcome.end_row, outcome.drawn, keyed=step.q_rows is None)
        verdict = Verdict(
            fence=self.fence,
            accepted=tuple([verified[node - 1] for node in path]) if verified else path,
            next=root,
            timings=VerifyTimings(),
            verified=verified,
            rejection=rejection,
            log_probs=rows.log_probs_along(kept, ids[1:]) if self.request.want_log_probs else (),
            pruned=len(tree) < len(step.tree),
            top=rows.tops(kept if root else kept[:-1], self.request.top_log_probs),
        )
        return verdict, kept

    def _walk(self, step: VerifyStep, tree: DraftTree, rows: _Rows, reading: Reading | None) -> Walk:
        limit = self.request.max_len - self.committed_len - 1
        sampling, stop_ids = self.request.sampling, self.request.stop_ids
        if reading:
            return walked(tree, reading, rows.after, stop_ids, limit)
        if step.q_rows is None or not len(tree):
            return walk(tree, self.committed_len, rows.after, sampling, stop_ids, limit)
        try:
            q_rows = step.q_rows[: len(tree)]  # a chain that was cut to the room there is has lost its end
            return pq_chain(tree, rows.law, q_rows, sampling.seed, self.committed_len, stop_ids, limit)
        except TreeError as error:
            raise InvalidField(f"step.{error.field}", str(error)) from None

    def _rejection(
        self, tree: DraftTree, verified: tuple[int, ...], outcome: Walk, rows: _Rows, start: int
    ) -> Rejection | None:
        """Where the walk ended above nodes of the sender's tree, verified or not; None after a full accept.

        Source: SpecBlock, section 3.4. A node that was left out may have held the drawn token: the sender sees.
        """
        end = outcome.path[-1] if outcome.path else 0
        parent = verified[end - 1] if end and verified else end
        if outcome.drawn is None or parent not in tree.parents:
            return None
        top_n = self.request.rejection_top_n
        ids, log_probs = rows.best(end, top_n) if top_n else (np.empty(0, np.int64), np.empty(0, np.float32))
        tail = max(0.0, 1.0 - float(np.exp(log_probs.astype(np.float64)).sum()))
        return Rejection(start + len(outcome.path) + 1, parent, outcome.drawn, ids, log_probs, tail)


class _Rows:
    """The target's rows of one forward, turned into numpy and through G only where the walk looks."""

    def __init__(
        self, session: Session, logits: Tensor, tree: DraftTree, root: tuple[int, ...] = (), drawn: Sequence[int] = ()
    ) -> None:
        """`root`: its id, where node 0 is one; else the rows are a prompt's last, and node 0 is the text's end.
        `drawn`: what was drawn from each row on a device, -1 where it is refused.
        """
        self._logits, self._tree, self._root = logits, tree, root
        self._sampling, self._penalties = session.request.sampling, session.penalties
        self._next = session.committed_len + len(root)  # position of the token behind node 0
        self._drawn = drawn
        wide = logits.shape[1] > MAX_ROW_SUPPORT and self._sampling.keeps_all(logits.shape[1])
        self.drawn_here = wide or bool(drawn)
        """no row can be sent, or none is here: tokens are drawn from logits"""
        self._plain: dict[int, NDArray[np.float32]] = {}
        self._mass: dict[int, np.float64] = {}  # by node: log of the sum of exp(logit - the highest)

    def __getitem__(self, node: int) -> NDArray[np.float32]:
        if node not in self._plain:
            self._plain[node] = self._logits[node].float().cpu().numpy()
        return self._plain[node]

    def law(self, node: int) -> SampledRow:
        """The row after G at a node, where the text before it ends with the root and the node's path.

        Raises ValueError on a row that decode_row refuses.
        """
        return decode_row(self._adjusted(node, path_to(self._tree, node)), self._sampling)

    def after(self, node: int) -> SampledRow:
        """The same for a walk that draws with the keyed noise: of a row that is drawn here the id alone."""
        drawn = self._drawn[node] if self._drawn else -1
        if drawn < 0:  # `law` says why a row is refused
            if not self.drawn_here or self._drawn:
                return self.law(node)
            path = path_to(self._tree, node)
            drawn = draw_logits(self._adjusted(node, path), self._sampling, self._next + len(path))
        return np.array([drawn]), np.zeros(1)

    def _adjusted(self, node: int, path: tuple[int, ...]) -> NDArray[np.float32]:
        if self._penalties is None:
            return self[node]
        ids = self._tree.tokens[np.array(path, np.int64) - 1].tolist()
        return self._penalties.adjusted(self[node], [*self._root, *ids])

    def raw(self, node: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probabilities of ids at a node at T=1, before any penalty."""
        row = self[node]
        highest = np.float64(row.max())
        if node not in self._mass:
            scores = row.astype(np.float64)
            scores -= highest
            self._mass[node] = np.log(np.exp(scores, out=scores).sum())
        log_probs: NDArray[np.float32] = (row[ids] - highest - self._mass[node]).astype(np.float32)
        return log_probs

    def best(self, node: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The `count` most probable ids at a node at T=1, the best first, and their log-probabilities."""
        row = self[node]
        ids = largest(row, count)
        ids = ids[np.argsort(-row[ids], kind="stable")[:count]]
        return ids, self.raw(node, ids)

    def log_probs_along(self, nodes: tuple[int, ...], ids: list[int]) -> tuple[float, ...]:
        """Raw log-probability of each id at the node before it."""
        return tuple([float(self.raw(node, np.array([token]))[0]) for node, token in zip(nodes, ids, strict=False)])

    def tops(self, nodes: tuple[int, ...], count: int) -> tuple[TopLogProbs, ...]:
        """The `count` most probable ids behind each node; nothing for a count of 0."""
        return tuple([TopLogProbs(*self.best(node, count)) for node in nodes]) if count else ()

"""The drafters as the orchestrator sees them: what a text says of their trees, a head's pool of replicas, and one
request's session on one after another.

Drafts are advice. Whatever goes wrong with a session ends in an empty tree, never in an error.
"""

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import grpc
import numpy as np
import structlog
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coppice.adaptation.signals import QueryRecord
from coppice.errors import CoppiceError, InternalError, InvalidField, Overloaded, Unavailable, from_rpc_error
from coppice.limits import MAX_FEATURE_LAYERS, MAX_HEAD_NODES, MAX_TREE_DEPTH, MAX_TREE_NODES
from coppice.rpc.channels import Dialer
from coppice.rpc.link import LinkedCall
from coppice.speculation.tree import DraftTree, TreeError, extend, validate
from coppice.v1 import drafter_pb2
from coppice.wire import drafter
from coppice.wire.common import Features, Fence, Rejection
from coppice.wire.drafter import Advance, DraftOpened, DraftStep, HeadDescription, OpenDraft, TreeDelta
from coppice.wire.generation import Finished

from .metrics import OrchestratorMetrics
from .targets import PROBE_S, Pool, Replica

log = structlog.get_logger()

_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.020, 1.0
_FIRST_DEADLINE_S = 0.250
_MISSES_TO_COOL_DOWN = 2.0
_FORGIVEN = 0.125  # of a miss, by a draft in time: more than one miss in nine steps adds up
FALSE_ALARMS = 1e-6  # chance that a head which reaches what is expected is ever suspected, however long it serves
USELESS = 0.05
"""share of right first tokens that a head has to reach to be of any use; expected of one that nobody measured"""
_SHARES = np.array([1 / 2, 1 / 8, 1 / 64])  # of what is expected: what a faulty head may reach
_MOST = 0.999  # a head that is always right proves nothing with its first miss


Offer = tuple[int, int, int, float, float, bool]
"""a node whose parent spells the text: its number and its parent's, the parent's depth, its log-probability given the
parent (at most 0), its score, and whether it spells the text, too"""


def offers(tree: DraftTree, continuation: Sequence[int]) -> list[Offer]:
    """The nodes of a head's own tree that the text says something about, whether or not they were verified; it is told
    by the target's tokens after the root, which is at depth 0: the accepted path and the next root.
    """
    found, depths, end = list[Offer](), {0: 0}, len(continuation)
    scores = [0.0, *tree.log_probs.tolist()]
    # Plain numbers: a step offers a handful of nodes, too few to pay for array calls.
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True), 1):
        depth = depths.get(parent, end)
        if depth < end:
            right = token == continuation[depth]
            if right:
                depths[node] = depth + 1
            found.append((node, parent, depth, min(scores[node] - scores[parent], 0.0), scores[node], right))
    return found


def first_miss(tree: DraftTree, continuation: Sequence[int]) -> tuple[int, int] | None:
    """Where a head's own tree first left the text: (depth of the node it left at, the node). That is the first
    node on it that has children none of which is the target's token. None if it never did.
    """
    found = offers(tree, continuation)
    deepest = max([depth + right for _, _, depth, _, _, right in found], default=0)
    left = [parent for _, parent, depth, *_ in found if depth == deepest]
    return (deepest, min(left)) if left else None


def accepted(tree: DraftTree, continuation: Sequence[int]) -> list[int]:
    """The numbers of the nodes of a head's own tree that spell the target's tokens after the root."""
    return [offer[0] for offer in offers(tree, continuation) if offer[-1]]


def step_log_probs(tree: DraftTree) -> NDArray[np.float64]:
    """(n,) log-probability of each node given its parent, s_i - s_parent, at most 0."""
    scores: NDArray[np.float64] = np.concatenate((np.zeros(1), tree.log_probs))
    return np.minimum(scores[1:] - scores[tree.parents], 0.0)


def best_path(found: Sequence[Offer]) -> list[bool]:
    """Whether a head's best token, of the highest score, was right at depth 1, 2, ... as far as those before were."""
    best = dict[int, Offer]()
    for offer in found:
        parent, score = offer[1], offer[4]
        if parent not in best or score > best[parent][4]:
            best[parent] = offer
    path, at = list[bool](), 0
    while at in best:
        path.append(best[at][5])
        at = best[at][0] if path[-1] else -1
    return path


class Calibration:
    """Online calibration of one head: P(accepted | parent accepted) = sigmoid(scale * logit(q) + shift), where q is the
    head's conditional probability of a node.

    Scale and shift begin at 1 and 0 with a prior of PRIOR_NODES nodes and follow the text by online Newton steps of the
    logistic loss, with Boehning's bound of the curvature, 1/4 x x', so that no surprise overshoots. Evidence older than
    about MEMORY_STEPS steps fades. As scale stays positive, no two children of a node change places.
    """

    PRIOR_NODES = 64
    MEMORY_STEPS = 512
    MAX_LOGIT = 8.0  # a probability nearer to 0 or 1 than 3e-4 is not told from it
    _LEAST, _MOST = -math.log1p(math.exp(MAX_LOGIT)), -math.log1p(math.exp(-MAX_LOGIT))  # its log-probabilities
    MAX_CORRECTION = 20.0  # bounds scale and shift, and so every exponent below
    _PRIOR = (PRIOR_NODES / 4 * 4.0, 0.0, PRIOR_NODES / 4)  # that of nodes with logits of +-2

    def __init__(self) -> None:
        self.scale, self.shift = 1.0, 0.0
        # Precision of (scale, shift), a symmetric 2 x 2 matrix: entries 00, 01 and 11.
        self._precision = self._PRIOR

    def observe(self, seen: Sequence[tuple[float, bool]]) -> None:
        """Learn from one step: of each offered node its log-prob given its parent, and whether it was right."""
        if not seen:
            return
        fade, h = 1 / self.MEMORY_STEPS, self._precision
        h00, h01, h11 = (each + fade * (prior - each) for each, prior in zip(h, self._PRIOR, strict=True))
        g0 = g1 = 0.0
        for log_prob, was_accepted in seen:
            q = min(max(log_prob, self._LEAST), self._MOST)
            x = q - math.log(-math.expm1(q))
            error = was_accepted - 1 / (1 + math.exp(-(self.scale * x + self.shift)))
            g0, g1 = g0 + error * x, g1 + error
            h00, h01, h11 = h00 + x * x / 4, h01 + x / 4, h11 + 1 / 4
        determinant = h00 * h11 - h01 * h01
        scale = self.scale + (h11 * g0 - h01 * g1) / determinant
        shift = self.shift + (h00 * g1 - h01 * g0) / determinant
        self.scale = max(1 / self.MAX_CORRECTION, min(self.MAX_CORRECTION, scale))
        self.shift = max(-self.MAX_CORRECTION, min(self.MAX_CORRECTION, shift))
        self._precision = (h00, h01, h11)

    def of(self, tree: DraftTree) -> DraftTree:
        """The tree with calibrated cumulative log-probs."""
        q = np.minimum(np.maximum(step_log_probs(tree), self._LEAST), self._MOST)
        steps = -np.log1p(np.exp(-(self.scale * (q - np.log(-np.expm1(q))) + self.shift)))
        scores = [0.0]
        for step, parent in zip(steps.tolist(), tree.parents.tolist(), strict=True):
            scores.append(scores[parent] + step)
        return DraftTree(tree.tokens, tree.parents, np.array(scores[1:], np.float32))


class AcceptanceWatch:
    """A sequential test of whether a head drafts far below what it was trained to, as one that was loaded wrongly does:
    every text is right, only slow. What is expected stands in the head's folder (coppice/config/model.py).

    It is an e-process, a bet against "the head is right at least as often as expected": for each depth and each of a
    few shares of what is expected, the likelihood ratio of that share (Wald, 1945) over all trials since some start; a
    start at trial n weighs 1 / (n (n + 1)), so that a head which becomes faulty late is found, too. While every trial
    is right with at least the expected chance, the mixture is a supermartingale that begins at 1, so it ever reaches
    1 / a with a chance of at most a (Ville, 1939). Each push of weights begins anew, the nth with 1 / (n (n + 1)) of a.
    """

    def __init__(self, expected: Sequence[float], false_alarms: float = FALSE_ALARMS) -> None:
        """expected: the least share of right tokens at depth 1, 2, ..., each among trials whose path was right."""
        self.expected = tuple(expected)
        self.version, self.suspect = 0, False
        self._false_alarms, self._pushes = false_alarms, 0
        self._begin()

    def _begin(self) -> None:
        depths = len(self.expected)
        self.trials, self.hits = [0] * depths, [0] * depths
        self._bets = np.full((depths, len(_SHARES)), -np.inf)  # logs of the mixtures over starts
        self._pushes += 1
        self.suspect = False

    def observe(self, path: Sequence[bool], version: int = 0) -> bool:
        """Learn from a draft's `best_path`, of weights of this version; whether the head is suspected from now on."""
        if version > self.version:
            self.version = version
            self._begin()
        if version < self.version or self.suspect:
            return False
        for depth, right in enumerate(path[: len(self.expected)]):
            self.trials[depth] += 1
            self.hits[depth] += right
            expected, trial = min(self.expected[depth], _MOST), self.trials[depth]
            ratios = _SHARES if right else (1 - _SHARES * expected) / (1 - expected)
            started = np.logaddexp(self._bets[depth], -math.log(trial * (trial + 1)))
            self._bets[depth] = started + np.log(ratios)
        self.suspect = self.evidence >= math.log(self._pushes * (self._pushes + 1) / self._false_alarms)
        return self.suspect

    @property
    def evidence(self) -> float:
        """The log of what the bet is worth: depth d weighs 2^-d, the shares all alike."""
        depths = np.arange(1, len(self.expected) + 1)[:, None]
        return float(np.logaddexp.reduce(self._bets - depths * math.log(2) - math.log(len(_SHARES)), axis=None))


class HeadPool(Pool):
    """The replicas of one head, what its confidences are worth, and how long it takes to draft.

    The first that answers says which features the head reads; one that reads others is unfit.
    """

    service = drafter_pb2

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        dialer: Dialer,
        metrics: OrchestratorMetrics,
        layers: int,
        vocab_size: int = 0,
        vocabulary: bytes = b"",
    ) -> None:
        """layers, vocab_size and the hash of its tokenizer: of the target; 0, or without a hash: any will do."""
        self.metrics, self._layers, self._vocab_size, self._vocabulary = metrics, layers, vocab_size, vocabulary
        self.calibration = Calibration()
        self.watches = WeakKeyDictionary[Replica, AcceptanceWatch]()
        """whether each drafts as it was trained to, or of one that nobody measured whether it is of any use"""
        self.feature_layers: tuple[int, ...] | None = None
        """target layers whose features the head reads; None until a replica has said so"""
        self.kind = ""  # of head; empty until a replica has said so
        self.draft_s: deque[float] = deque(maxlen=64)  # how long the latest drafts took
        super().__init__(name, addresses, replace(dialer, head=name))
        suspects = metrics.suspect.labels(name)
        suspects.set_function(lambda: sum(self.watches[each].suspect for each in self.replicas if each in self.watches))

    async def describe(self, replica: Replica) -> str:
        head = drafter.read_head(await replica.stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=PROBE_S))
        misfit = self._misfit(head)
        if misfit and misfit != replica.unfit:
            self.metrics.unfit.labels(self.name).inc()
        self.kind = self.kind or head.kind
        # The watch begins anew where more or less is expected, or older weights say that the process is a new one.
        expected, watch = head.expected_acceptance or ((USELESS,) if head.vocab_size else ()), self.watches.get(replica)
        if watch is None or expected != watch.expected or head.weights_version < watch.version:
            self.watches[replica] = AcceptanceWatch(expected)
        return misfit

    def _misfit(self, head: HeadDescription) -> str:
        """Why a head cannot be used with the target or beside the others of its pool; empty when it can."""
        layers = head.feature_layers
        if max(layers, default=0) > self._layers + 1:  # the last two: what its final norm reads and gives
            return f"it reads features of {layers}, of a target of {self._layers} layers"
        if head.vocab_size and self._vocab_size and head.vocab_size != self._vocab_size:
            return f"it has a vocabulary of {head.vocab_size} ids, the target one of {self._vocab_size}"
        if head.tokenizer_hash and self._vocabulary and head.tokenizer_hash != self._vocabulary:
            return "its tokenizer is not the target's"
        self.feature_layers = layers if self.feature_layers is None else self.feature_layers
        return "" if layers == self.feature_layers else f"it reads features of {layers}"

    def judge(self, replica: Replica, path: Sequence[bool], version: int) -> None:
        """Learn from a draft's `best_path` whether a replica drafts as it was trained to; log once that it does not."""
        watch = self.watches.get(replica)
        if watch is not None and watch.expected and watch.observe(path, version):
            log.error(
                "head drafts far below what is expected of it",
                head=self.name,
                replica=replica.address,
                expected=[round(share, 3) for share in watch.expected],
                measured=[f"{hits}/{trials}" for hits, trials in zip(watch.hits, watch.trials, strict=True)],
                weights_version=version,
            )

    @property
    def deadline_s(self) -> float:
        """How long to wait for a draft: max(20 ms, 4 x the median draft time), at most a second; 250 ms at first."""
        if not self.draft_s:
            return _FIRST_DEADLINE_S
        return min(_MOST_DEADLINE_S, max(_LEAST_DEADLINE_S, 4 * statistics.median(self.draft_s)))


def feature_layers(pools: Sequence[HeadPool], field: str) -> tuple[int, ...]:
    """The layers whose features these heads read together. Raises InvalidField naming `field` for too many of them."""
    layers = tuple(dict.fromkeys(layer for pool in pools for layer in pool.feature_layers or ()))
    if len(layers) > MAX_FEATURE_LAYERS:
        named = ", ".join(f"{pool.name} {pool.feature_layers}" for pool in pools if pool.feature_layers)
        raise InvalidField(field, f"heads read features of more than {MAX_FEATURE_LAYERS} layers: {named}")
    return layers


@dataclass(slots=True)
class Draft:
    """A step that a head was asked to draft, and what came of it."""

    step: int = 0
    answer: asyncio.Future[None] | None = None  # done when the tree is complete, or is not waited for any more
    replica: Replica | None = None  # the one that was asked
    asked_at: float = field(default_factory=time.perf_counter)
    tree: DraftTree = field(default_factory=DraftTree.empty)  # as the head sent it
    scored: DraftTree = field(default_factory=DraftTree.empty)  # the same nodes with calibrated log-probs
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    """of each node its place in the request's prediction, from 1, or 0; empty when the head drafts from none"""
    deltas: list[int] = field(default_factory=list)  # nodes of each delta that arrived
    forward_ns: int = 0
    weights_version: int = 0
    late: bool = False
    bad: bool = False

    def give_up(self, late: bool = True) -> None:
        """Have nobody wait any longer, unless it is complete."""
        if self.answer is not None and not self.answer.done():
            self.late = late
            self.answer.set_result(None)

    def add(self, delta: TreeDelta) -> None:
        """Take in a part of the tree."""
        nodes = delta.nodes
        self.forward_ns, self.weights_version = delta.forward_ns, delta.fence.weights_version
        self.tree = extend(self.tree, nodes) if len(self.tree) else nodes
        self.deltas += delta.made or (len(nodes),)
        self.predicted += delta.predicted
        if delta.q_rows is not None:
            self.q_rows.append(delta.q_rows)


NO_DRAFT = Draft()  # the draft of a head that was not asked; nobody changes it


class HeadSession:
    """One request's stream to one replica of a head; re-opened after trouble.

    A replica that misses two deadlines in a row, or more than one in nine, is asked nothing for a while. Between two
    steps the stream moves to a replica with fewer sessions.
    """

    def __init__(self, pool: HeadPool, opening: OpenDraft, vocab_size: int, learns: bool) -> None:
        """`learns`: whether an adapter hears of the request."""
        self.pool, self.opening, self.vocab_size, self.learns = pool, opening, vocab_size, learns
        self._missed_by = 0.0  # sum of what the drafter said of its misses
        self._versions = set[int]()  # of the weights that drafted
        self._choices = set[tuple[int, int]]()  # kind of text and variant; several after a move to another drafter
        self._sketch: tuple[float, ...] = ()
        # What is expected of a head is measured where the target draws what its rows say, or its noise is known.
        sampling = opening.sampling
        self._is_measured = not sampling.temperature or (sampling.temperature <= 1 and opening.coupled)
        self._layers = pool.feature_layers  # as they were known when the verifier was asked for them
        self.window: Features | None = None  # of the verifier's session that the drafter can follow
        self._followed = ""  # the verifier's session that the drafter follows
        self._replica: Replica | None = None  # to which there is a stream
        self._call: LinkedCall | None = None
        self._listening: asyncio.Task[None] | None = None
        self._sent = 0  # committed ids that the drafter knows of
        self._rejection: Rejection | None = None  # of the last tree, for the drafter's next step
        self._draft: Draft | None = None  # under way
        self._opened = False
        self._waited_to_open = False
        self._misses = 0.0
        self._refused: dict[Replica, float] = {}  # until when those that refused the text are not asked again

    def open(self, ids: list[int]) -> None:
        """Start a stream on the committed ids unless there is one, no replica is fit, or features are missing."""
        if self._replica is not None or self._layers is None or (self._layers and self.window is None):
            return
        replica = self._replica = self.pool.pick(self._refusing())
        if replica is None:
            return
        self._opened, self._misses, self._followed = False, 0.0, ""
        self._sent, self._rejection = len(ids), None
        replica.sessions += 1
        self._call = replica.stub.Draft()
        self._listening = asyncio.create_task(self._listen(self._call))
        opening = replace(self.opening, ids=ids, features=self._follow(len(ids)))
        self._call.send(drafter.draft_request_to_wire(opening))

    def close(self) -> None:
        """End the stream; the drafter frees the session."""
        if self._replica is not None and self._call is not None and self._listening is not None:
            self._replica.sessions -= 1
            self._call.cancel()
            self._listening.cancel()
        self._replica = self._call = self._listening = None
        if self._draft is not None:
            self._draft.give_up(late=False)

    async def _listen(self, call: LinkedCall) -> None:
        """Take in what the drafter sends, and leave it when its stream ends."""
        end: CoppiceError = Unavailable("the drafter ended the session")
        try:
            await call.listen(lambda message: self._receive(drafter.read_draft_response(message)))
        except grpc.RpcError as error:
            end = from_rpc_error(error)
        except (CoppiceError, DecodeError) as error:  # of an answer: no refusal of a text
            end = InternalError(f"the drafter answered wrongly: {error}")
        log.warning("head lost", head=self.pool.name, why=str(end)[:200])
        if self._replica is not None and isinstance(end, InvalidField | Overloaded):  # this text, or no room for it
            pause_s = end.retry_after_s if isinstance(end, Overloaded) else math.inf
            self._refused[self._replica] = time.monotonic() + pause_s
            self.close()
        else:
            self._cool_down()

    def _receive(self, answer: TreeDelta | DraftOpened) -> None:
        if isinstance(answer, DraftOpened):
            self._opened = True
            self._choices.add((answer.kind, answer.variant))
            self._versions.add(answer.weights_version)
            self._sketch = answer.sketch
            return
        self._missed_by += answer.miss or 0.0
        self._versions.add(answer.fence.weights_version)
        draft = self._draft
        if draft is None or draft.answer is None or answer.fence.step != draft.step or draft.answer.done():
            return  # late: an answer to a step that went on without it
        draft.add(answer)
        if answer.last:
            if len(draft.tree):  # an empty answer says nothing of how long drafts take
                self.pool.draft_s.append(time.perf_counter() - draft.asked_at)
            draft.answer.set_result(None)

    def _follow(self, length: int) -> Features | None:
        """The verifier's session for the drafter to follow, unless it was told of it, with features before `length`."""
        window = self.window
        if window is None or window.ref is None or window.ref.session == self._followed:
            return None
        self._followed = window.ref.session
        layers = self._layers or ()
        count = length - window.start if layers else 0
        return replace(window, count=count, ref=replace(window.ref, count=count, layers=layers))

    def ask(self, fence: Fence, root: int, ids: list[int], budget: int) -> Draft | None:
        """Ask for a tree below `root`. None when the head sits this out: an opening stream is waited for once."""
        if self._opened and self._replica:
            best = self.pool.pick(self._refusing())
            if best is not None and best.sessions + 1 < self._replica.sessions:  # to even out how many they have
                self.close()
                self._waited_to_open = True  # it had drafts until now
        self.open(ids)
        if self._replica is None or self._call is None or not (self._opened or self.still_opening):
            return None
        self._waited_to_open |= not self._opened
        advance = Advance(ids[self._sent :], self._follow(len(ids)), self._rejection)
        self._sent, self._rejection = len(ids), None
        draft = self._draft = Draft(fence.step, asyncio.get_running_loop().create_future(), self._replica)
        question = DraftStep(fence, root, min(budget, MAX_HEAD_NODES), advance)
        self._call.send(drafter.draft_request_to_wire(question))
        return draft

    @property
    def still_opening(self) -> bool:
        """Whether the next draft would be waited for while the drafter takes in the text."""
        return not self._opened and not self._waited_to_open

    def reject(self, draft: Draft, start: int, offered: Sequence[int]) -> None:
        """Tell the drafter with the next step where its last tree left the text: it has `offered` from `start` on."""
        if (miss := first_miss(draft.tree, offered)) is not None:
            depth, node = miss
            self._rejection = Rejection(start + depth, node, offered[depth])

    def learn(self, draft: Draft, offered: Sequence[int]) -> None:
        """Learn what the head's confidences are worth, and whether it drafts as it was trained to, from the text."""
        found = offers(draft.tree, offered)
        self.pool.calibration.observe([(log_prob, right) for _, _, _, log_prob, _, right in found])
        if draft.replica is not None and self._is_measured:
            self.pool.judge(draft.replica, best_path(found), draft.weights_version)

    def collect(self) -> Draft:
        """What arrived of the tree asked for last, with calibrated scores; a malformed tree is dropped and counted."""
        draft, self._draft = self._draft, None
        if draft is None or draft.answer is None:
            return NO_DRAFT
        try:
            validate(draft.tree, self.vocab_size, MAX_TREE_NODES, MAX_TREE_DEPTH)
        except TreeError as error:
            self.pool.metrics.bad_drafts.labels(self.pool.name, error.reason).inc()
            draft.tree, draft.bad, draft.deltas, draft.predicted = DraftTree.empty(), True, [], []
        if len(draft.tree):
            draft.scored = draft.tree if self.opening.prediction else self.pool.calibration.of(draft.tree)
        if draft.late:
            self.pool.metrics.late_drafts.labels(self.pool.name).inc()
        missed = draft.bad or (draft.late and self._opened)
        self._misses = self._misses + 1 if missed else max(0.0, self._misses - _FORGIVEN)
        if missed and self._misses >= _MISSES_TO_COOL_DOWN:
            self._cool_down()
        return draft

    def record(self, session: str, result: Finished) -> QueryRecord:
        """What an adapter is told of an answer that has ended."""
        kind, variant = next(iter(self._choices), (0, 0))
        return QueryRecord(
            session=session,
            s=self._missed_by,
            tau=result.tau,
            new_tokens=result.new_tokens,
            steps=result.steps,
            tokens_per_s=result.new_tokens / max(1, result.timings.decode_ns) * 1e9,
            versions=(min(self._versions, default=0), max(self._versions, default=0)),
            kind=kind,
            variant=variant,
            sketch=self._sketch if len(self._choices) == 1 else (),
        )

    def _refusing(self) -> list[Replica]:
        now = time.monotonic()
        return [replica for replica, until in self._refused.items() if until > now]

    def _cool_down(self) -> None:
        """Leave this replica, and have the pool ask it nothing for a while."""
        if self._replica is not None:
            if self._replica.cool_down():
                self.pool.metrics.benched.labels(self.pool.name).inc()
            self.close()

"""What the services say to each other, as plain values. coppice/wire puts them into protobuf and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def committed_hash(ids: Sequence[int], state: int = _FNV_OFFSET) -> int:
    """FNV-1a 64 over `ids` as little-endian uint32; pass an earlier result as `state` to roll on."""
    for byte in np.asarray(ids, dtype="<u4").tobytes():
        state = ((state ^ byte) * _FNV_PRIME) & _MASK
    return state


@dataclass(frozen=True, slots=True)
class Fence:
    """Which state of a session a message is about. `committed_len` excludes the root."""

    step: int
    committed_len: int
    committed_hash: int
    weights_version: int = 0
    deadline_ns: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A target row after G: ids (n,) and float64 log-probs (n,), raw T=1 float32 log-probs (n,) if asked for."""

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    raw_log_probs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The most probable ids of a row at T=1, the best first: ids (n,) and their raw float32 log-probs (n,)."""

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NextRoot:
    """Where the next root comes from: a row to draw from, else the id the verifier drew with the same function."""

    row: Row | None = None
    drawn_id: int = -1
    drawn_log_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class FeatureRef:
    """A window of positions whose features a verifier session holds.

    `layers` are those of a row, one behind the other; of a fetch: those wanted, empty for all that the session has. A
    window of no positions names the session alone.
    """

    verifier: str
    session: str
    start: int
    count: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Target features of positions start..start+count-1: bytes of rows, or where to fetch them."""

    start: int
    count: int
    dtype: str = "float32"
    inline: bytes | None = None
    ref: FeatureRef | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step committed, as those hear that follow the session; `root` is None when the text has ended."""

    fence: Fence
    ids: tuple[int, ...]
    root: int | None = None
    features: Features | None = None

    @property
    def start(self) -> int:
        """Position of the first id."""
        return self.fence.committed_len - len(self.ids)


@dataclass(frozen=True, slots=True)
class Rejection:
    """What the target said where the walk left the tree (SpecBlock, section 3.4)."""

    position: int
    parent: int
    target_id: int
    top_ids: NDArray[np.int64]
    top_log_probs: NDArray[np.float32]
    tail: float


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Times of one request inside the verifier, nanoseconds; rows and sessions of its packed forward.

    `plain_ns` is what that forward would have taken without a draft node; 0 when the verifier does not know.
    """

    queue_ns: int = 0
    forward_ns: int = 0
    accept_ns: int = 0
    total_ns: int = 0
    rows: int = 0
    sessions: int = 0
    plain_ns: int = 0


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a verifier session on prompt + committed ids; the first `prompt_tokens` are the prompt, 0: all of them.

    Below `min_len` tokens in all no id of `stop_ids` is drawn.
    """

    session: str
    ids: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    max_len: int
    feature_layers: tuple[int, ...] = ()
    rejection_top_n: int = 0
    want_log_probs: bool = False
    prompt_tokens: int = 0
    top_log_probs: int = 0
    want_prompt_log_probs: bool = False
    min_len: int = 0
    salt: str = ""
    """whose session it is: it begins with cached blocks of sessions of the same"""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The prefill is done. `top` has an entry for the next root, `prompt_top` one for each of `prompt_log_probs`."""

    fence: Fence
    next: NextRoot
    features: Features | None
    timings: VerifyTimings
    top: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top: tuple[TopLogProbs, ...] = ()
    cached_tokens: int = 0
    """that were not prefilled again"""


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Verify root + tree. `q_rows` (n, vocab) float32 asks for p/q rejection of a chain.

    The tree's log-scores are calibrated, and the verifier may leave out nodes that do not pay, unless `whole_tree`.
    """

    fence: Fence
    root: int
    tree: DraftTree
    q_rows: NDArray[np.float32] | None = None
    whole_tree: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said about one tree; `next` is None when the text ended inside the path.

    `verified`: the nodes that were, when `pruned` says that others were left out. `budget_hint`: how many nodes to
    draft for the next step at the present load; None: any number.
    """

    fence: Fence
    accepted: tuple[int, ...]
    next: NextRoot | None
    timings: VerifyTimings
    verified: tuple[int, ...] = ()
    rejection: Rejection | None = None
    log_probs: tuple[float, ...] = ()
    pruned: bool = False
    budget_hint: int | None = None
    top: tuple[TopLogProbs, ...] = ()
    """of the accepted tokens and of the next root"""


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What a verifier serves; `repetition_penalty` is that of sessions that set none."""

    name: str
    vocab_size: int
    max_len: int
    layers: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    dtype: str
    kv_tokens: int
    kv_tokens_used: int = 0
    sessions: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    repetition_penalty: float = 1.0
    weights_hash: bytes = b""
    """of what was loaded"""
    prefix_cache_tokens: int = 0
    """whose KV is kept for later sessions at most"""
    bits_hash: bytes = b""
    """of what some rows say, where bits are promised"""


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Opens a drafting session on prompt + committed ids."""

    session: str
    ids: list[int]
    sampling: SamplingParams
    coupled: bool = True
    features: Features | None = None
    want_q_rows: bool = False
    want_misses: bool = False
    prediction: tuple[int, ...] = ()
    """what the answer is expected to be"""
    salt: str = ""
    """whose session it is: look-up with a memory drafts from ended sessions of the same; empty: from none"""


@dataclass(frozen=True, slots=True)
class DraftOpened:
    """The head holds the prompt."""

    weights_version: int
    variant: int = 0
    """of the weights, which drafts"""
    kind: int = 0
    """of text that the prompt was taken for; 0: none that is known"""
    sketch: tuple[float, ...] = ()
    """what the prompt is like, to a head that reads features"""


@dataclass(frozen=True, slots=True)
class Advance:
    """Committed ids the drafter has not seen, the earlier root first."""

    ids: list[int] = field(default_factory=list)
    features: Features | None = None
    rejection: Rejection | None = None


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Asks for a tree of at most `budget` nodes below `root`."""

    fence: Fence
    root: int
    budget: int
    advance: Advance


@dataclass(frozen=True, slots=True)
class TreeDelta:
    """Nodes to append to a step's tree; parents may lie in earlier deltas. `miss` is 1 - r of the step's rejection."""

    fence: Fence
    nodes: DraftTree
    last: bool
    forward_ns: int = 0
    total_ns: int = 0
    q_rows: NDArray[np.float32] | None = None
    miss: float | None = None
    predicted: tuple[int, ...] = ()
    """of each node its place in the prediction, from 1; 0 for none"""
    made: tuple[int, ...] = ()
    """how many of the nodes each forward of the head made; empty when one made all"""


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """What a drafter serves."""

    name: str
    kind: str
    vocab_size: int
    weights_version: int = 0
    feature_layers: tuple[int, ...] = ()
    sessions: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    weights_hash: bytes = b""
    expected_acceptance: tuple[float, ...] = ()
    tokenizer_hash: bytes = b""
    """`vocabulary_hash` of the head's own tokenizer; empty when it has none"""


def vocabulary_hash(vocabulary: Mapping[str, int]) -> bytes:
    """SHA-256 of a tokenizer's tokens in the order of their ids: equal where ids mean the same."""
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number} {token}\n".encode())
    return digest.digest()

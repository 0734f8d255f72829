"""Bounds on everything that crosses the wire, checked before anything is allocated (docs/protocol.md)."""

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from coppice.errors import InvalidField

MAX_TREE_NODES = 256  # nodes of a verified tree
MAX_HEAD_NODES = 64  # nodes one head is asked for in a step; while it streams it may send MAX_TREE_NODES
MAX_TREE_DEPTH = 64  # longest draft path a verifier accepts
MAX_ROW_SUPPORT = 1024  # ids of a row that travels; beyond it the verifier draws
MAX_CONTEXT = 131_072
BLOCK_SIZE = 32  # tokens of one KV block
TREE_ROOM = 128  # KV tokens a verifier reserves behind a session's longest text for rows in flight
MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_FEATURE_LAYERS = 16  # of a head, and of the heads of one request together
MAX_LAYERS = 4096  # of a target
MAX_TOP_LOG_PROBS = 20  # best ids whose log-probabilities a client is told
MAX_WINDOW = 4096  # positions of a training sample
MAX_HIDDEN = 65_536  # width of a head's states, and of one layer's features
MAX_CHAT_MESSAGES = 256
MAX_GRAMMAR_CHARS = 1 << 16
MAX_POLICY_CHARS = 80
MAX_ADDRESS_CHARS = 256
MAX_NAME_CHARS = 256  # of a target, of a head
MAX_SALT_CHARS = 64
MAX_HISTORY = 2000  # queries of a head that an adapter remembers
MAX_TEMPERATURE = 10.0
MAX_COUNT = 1 << 53  # of anything; JSON keeps numbers up to here
MAX_TOKEN_ID = (1 << 31) - 1
LOG_PROB_TOLERANCE = 1e-3  # of sums of log-softmax, nats: rounding may put one a little above 0
MAX_VERSION = 1 << 53  # of weights
MAX_VERSION_STEP = 1 << 20  # how far a push may raise the version of a drafter
MAX_VARIANTS = 4  # of a head, beside the deployed weights
MAX_KINDS = 8  # of text that a head's adapter tells apart
SKETCH = 64  # numbers that say what a prompt is like
LEAST_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0  # of frequency and presence, up and down
MAX_BIAS = 100.0  # of a logit, up and down
MAX_BIASES = 1024  # ids with one
MAX_DEADLINE_NS = 600 * 10**9
CHUNK_BYTES = 1 << 20  # of features or weights in one message
HASH_BYTES = 32
MAX_PROMPT_CHARS = 1 << 20  # of a text prompt, a conversation or a prediction
NEW_TOKENS = 256  # of an answer whose request does not say
MESSAGE_BYTES = 64 << 20  # of a gRPC message
REQUEST_BYTES = (1 << 20) + 5 * MAX_CONTEXT  # of a client's message: 1 MiB of text and the longest context's ids

_SESSION = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Limits(BaseModel):
    """What a deployment may tighten or widen. Starting values, not constants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(4096, gt=0, description="largest max_new_tokens of a request")
    sessions: int = Field(128, gt=0, description="sessions a service holds at once")
    queued: int = Field(128, ge=0, description="requests that may wait for a session")
    queue_s: float = Field(30.0, gt=0, description="longest wait for a session, seconds")
    call_s: float = Field(600.0, gt=0, description="longest call, a whole session or answer, seconds")
    idle_s: float = Field(300.0, gt=0, description="a session without a message for this long is ended, seconds")


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise InvalidField unless low <= value <= high (NaN fails)."""
    if not low <= value <= high:
        raise InvalidField(field, f"{value} is outside {low}..{high}")


def check_count(field: str, count: int, low: int, high: int) -> None:
    """Raise InvalidField unless a repeated field has low..high entries."""
    if not low <= count <= high:
        raise InvalidField(field, f"has {count} entries, allowed are {low} to {high}")


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidField on an id at or above the logits width; 0 means that any id will do."""
    if vocab_size and ids and max(ids) >= vocab_size:
        raise InvalidField(field, f"token id {max(ids)} is not below the vocabulary width {vocab_size}")


def check_session(field: str, session: str) -> str:
    """Return the id. Raises InvalidField unless it is 1 to 64 plain characters."""
    if not _SESSION.fullmatch(session):
        raise InvalidField(field, "must be 1 to 64 characters of [A-Za-z0-9_.-]")
    return session

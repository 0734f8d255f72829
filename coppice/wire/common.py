"""Types of bounded fields, and the messages that more than one service speaks."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coppice import limits
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import common_pb2 as common
from coppice.wire.codec import Among, AsLongAs, Conversion, Length, Within, array, carried_by, varint

ANYWHERE = Length(0, limits.MAX_CONTEXT)
NODES = Length(0, limits.MAX_TREE_NODES)
LOG_PROBABILITY = Within(-math.inf, limits.LOG_PROB_TOLERANCE)
TOKEN_ID = Within(0, limits.MAX_TOKEN_ID)

Position = Annotated[int, Within(0, limits.MAX_CONTEXT)]
Node = Annotated[int, Within(0, limits.MAX_TREE_NODES)]
TokenId = Annotated[int, TOKEN_ID]
LogProb = Annotated[float, LOG_PROBABILITY]
Count = Annotated[int, Within(0, limits.MAX_COUNT)]
Nanoseconds = Annotated[int, Within(0, limits.MAX_DEADLINE_NS)]
Version = Annotated[int, Within(0, limits.MAX_VERSION)]
Layer = Annotated[int, Within(0, limits.MAX_LAYERS)]
Layers = Annotated[tuple[Layer, ...], Length(0, limits.MAX_FEATURE_LAYERS)]
PlainName = Annotated[str, limits.check_session]
Name = Annotated[str, Length(0, limits.MAX_NAME_CHARS)]
Salt = Annotated[str, Length(0, limits.MAX_SALT_CHARS)]
Hash = Annotated[bytes, Length(limits.HASH_BYTES, limits.HASH_BYTES)]
HashOrNone = Annotated[bytes, Length(0, limits.HASH_BYTES)]
Ids = Annotated[NDArray[np.int64], TOKEN_ID]
LogProbs = Annotated[NDArray[np.float32], LOG_PROBABILITY]

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def committed_hash(ids: Sequence[int], state: int = _FNV_OFFSET) -> int:
    """FNV-1a 64 over `ids` as little-endian uint32; pass an earlier result as `state` to roll on."""
    for byte in np.asarray(ids, dtype="<u4").tobytes():
        state = ((state ^ byte) * _FNV_PRIME) & _MASK
    return state


@carried_by(common.Fence)
class Fence:
    """Which state of a session a message is about. `committed_len` excludes the root."""

    step: Count
    committed_len: Position
    committed_hash: int
    weights_version: Version = 0
    deadline_ns: Nanoseconds = 0


@carried_by(common.Row)
class Row:
    """A target row after G: ids (n,) and float64 log-probs (n,), raw T=1 float32 log-probs (n,) if asked for."""

    ids: Annotated[Ids, Length(1, limits.MAX_ROW_SUPPORT)]
    log_probs: Annotated[NDArray[np.float64], LOG_PROBABILITY, AsLongAs("ids")]
    raw_log_probs: Annotated[LogProbs | None, AsLongAs("ids")] = None


@carried_by(common.TopLogProbs)
class TopLogProbs:
    """The most probable ids of a row at T=1, the best first: ids (n,) and their raw float32 log-probs (n,)."""

    ids: Annotated[Ids, Length(0, limits.MAX_TOP_LOG_PROBS)]
    log_probs: Annotated[LogProbs, AsLongAs("ids")]


@carried_by(common.FeatureRef)
class FeatureRef:
    """A window of positions whose features a verifier session holds.

    `layers` are those of a row, one behind the other; of a fetch: those wanted, empty for all that the session has. A
    window of no positions names the session alone.
    """

    verifier: Annotated[str, Length(0, limits.MAX_ADDRESS_CHARS)]
    session: PlainName
    start: Position
    count: Position
    layers: Layers = ()


@carried_by(common.Features)
class Features:
    """Target features of positions start..start+count-1: bytes of rows, or where to fetch them."""

    start: Position
    count: Position
    dtype: Annotated[str, Among(("", "float32", "bfloat16"))] = "float32"
    inline: bytes | None = None
    ref: FeatureRef | None = None


@carried_by(common.Grammar)
class Grammar:
    """What a whole answer must be: a JSON schema, a regex, a JSON list of texts, or a grammar in llguidance's Lark."""

    kind: Annotated[str, Among(("json", "regex", "choice", "lark"))]
    text: Annotated[str, Length(1, limits.MAX_GRAMMAR_CHARS)]


@carried_by(common.Rejection)
class Rejection:
    """Where the walk left the tree, and the token that the target chose there (SpecBlock, section 3.4)."""

    position: Position
    parent: Node
    target_id: TokenId


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    return {name: value for name, value in params if name != "seed" or name in params.model_fields_set}


def _read_sampling(owner: Any, name: str, path: str) -> SamplingParams:
    """The SamplingParams of a message; unset they are greedy."""
    message = getattr(owner, name)
    limits.check_range("sampling.temperature", message.temperature, 0, limits.MAX_TEMPERATURE)
    limits.check_count("sampling.logit_bias", len(message.logit_bias), 0, limits.MAX_BIASES)
    unset = {field for field in ("top_p", "repetition_penalty", "seed") if not message.HasField(field)}
    fields = {field: getattr(message, field) for field in SamplingParams.model_fields if field not in unset}
    try:
        return SamplingParams(**fields | {"logit_bias": dict(message.logit_bias)})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidField(f"sampling.{first['loc'][0]}", first["msg"]) from None


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidField on a biased id at or above the logits width; 0 means that any id will do."""
    if params.logit_bias:
        limits.check_ids("sampling.logit_bias", list(params.logit_bias), vocab_size)


def _read_tree(owner: Any, name: str, path: str) -> DraftTree:
    """An unjudged DraftTree whose three lists are equally long."""
    message = getattr(owner, name)
    tokens, parents, log_probs = message.tokens, message.parents, message.log_probs
    limits.check_count(f"{path}{name}.tokens", len(tokens), 0, limits.MAX_TREE_NODES)
    if not len(tokens) == len(parents) == len(log_probs):
        raise InvalidField(path + name, "tokens, parents and log_probs differ in length")
    return DraftTree(array(tokens, np.int64), array(parents, np.int64), array(log_probs, np.float32))


def rows_of(tree: str) -> Conversion:
    """Float32 rows (n, vocab) as little-endian bytes, one row for each node of the field `tree`."""

    def read(owner: Any, name: str, path: str) -> NDArray[np.float32] | None:
        if not owner.HasField(name):
            return None
        data, nodes = getattr(owner, name), len(getattr(owner, tree).tokens)
        if nodes == 0 or len(data) % (4 * nodes):
            raise InvalidField(path + name, f"{len(data)} bytes are not {nodes} equal float32 rows")
        return np.frombuffer(data, dtype="<f4").reshape(nodes, -1)

    return Conversion(lambda rows: rows.astype("<f4").tobytes(), read)


Sampling = Annotated[SamplingParams, Conversion(_sampling_fields, _read_sampling)]
Tree = Annotated[
    DraftTree,
    Conversion(lambda tree: {name: getattr(tree, name).tolist() for name in DraftTree.__slots__}, _read_tree),
]
DefaultPenalty = Annotated[
    float,
    Within(0, limits.MAX_REPETITION_PENALTY),
    Conversion(None, lambda owner, name, path: getattr(owner, name) or 1.0),
]
"""The repetition penalty of requests that set none, as a server describes it; one that knows of none has 1."""


read_frame: Callable[[bytes], Any] = common.Frame.FromString


def control_item(**fields: Any) -> tuple[bytes, ...]:
    """An item that begins or ends a session, by the names of its fields, as a part of a frame."""
    return (common.Frame(items=[common.Item(**fields)]).SerializeToString(),)


def message_item(session: int, *message: bytes) -> tuple[bytes, ...]:
    """A message of a session, which comes in parts, as parts of a frame: protobuf would copy it three times."""
    size = sum(map(len, message))
    header = b"\x08" + varint(session) + b"\x22" + varint(size)  # Item.session and Item.message
    return b"\x0a" + varint(len(header) + size) + header, *message  # of Frame.items

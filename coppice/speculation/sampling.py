"""The decoding operator G and keyed noise: which token stands at a position is a function of row, seed and position.

Bias and penalties, which look at the text before a row, come first; they are in `penalties`.

The noise of a token is a Gumbel variable read from a hash of (seed, absolute position, token id), so whoever draws from
the same row draws the same token, in whatever step, tree or process. `sampling_torch` is the twin on tensors.
"""

from __future__ import annotations

import math
import secrets
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from coppice.limits import LEAST_REPETITION_PENALTY, MAX_BIAS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION_PENALTY

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Row = tuple[IntArray, FloatArray]
"""A row after G: (K,) ids of its support, ascending, and their (K,) log-probabilities."""

# Streams of one seed; each use of randomness at a position has its own.
TOKEN_STREAM = 0  # the draw from the target's row, and coupled drafting
ACCEPT_STREAM = 1  # the accept tests of the p/q rule
RESIDUAL_STREAM = 2  # the next root under the p/q rule
DRAFT_STREAM = 3  # drafts that are sampled for the p/q rule

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1

# Masses within rounding of top_p count as having reached it, so that numpy, torch and a GPU keep the same ids of a
# row with equal entries.
TOP_P_SLACK = 1e-9

_SEED_BITS = 53  # of a drawn one: JSON keeps such numbers


class SamplingParams(BaseModel):
    """The decoding policy of a request. Unusable values raise pydantic's ValidationError, which names the field.

    An unset repetition_penalty is the deployment's, which it has from the target's generation_config.json.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus mass kept after top_k")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="most probable ids kept; 0 keeps all")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, description="least share of the best id's probability")] = 0.0
    repetition_penalty: Annotated[
        float | None,
        Field(
            ge=LEAST_REPETITION_PENALTY,
            le=MAX_REPETITION_PENALTY,
            description="of ids in prompt and answer: divides logits above 0, multiplies those below; 1 changes none",
        ),
    ] = None
    frequency_penalty: Annotated[
        float,
        Field(ge=-MAX_PENALTY, le=MAX_PENALTY, description="taken off an id's logit for each time it was generated"),
    ] = 0.0
    presence_penalty: Annotated[
        float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, description="taken off the logits of ids that were generated")
    ] = 0.0
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
        Field(max_length=MAX_BIASES, description="added to the logits of ids"),
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, le=MASK_64, description="seed of the draws; unset, the server draws one")] = 0

    def with_defaults(self, repetition_penalty: float) -> SamplingParams:
        """The same with what is unset as a deployment has it."""
        return self.model_copy(
            update={} if self.repetition_penalty is not None else {"repetition_penalty": repetition_penalty}
        )

    def with_seed(self) -> SamplingParams:
        """The same with a seed: a random one unless one was set."""
        if "seed" in self.model_fields_set:
            return self
        return self.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})

    def __hash__(self) -> int:
        """Of all fields; the bias is one of them and has no hash of its own."""
        fields = dict(self)
        return hash((frozenset(fields.pop("logit_bias").items()), *fields.values()))


def decode_row(logits_row: NDArray[np.floating], params: SamplingParams) -> Row:
    """G: temperature, then top-k, top-p and min-p of a (V,) row of logits, renormalised.

    That is the order of transformers' warpers; vLLM applies min-p first. As in transformers, ids that tie with the k-th
    are kept; of ids that tie at the edge of the nucleus the lower ones are. Greedy keeps the argmax alone, of several
    the lowest id. Raises ValueError on a row with NaN, with +inf or with nothing finite.
    """
    best = int(np.argmax(logits_row))
    highest = float(logits_row[best])
    if not np.isfinite(highest):
        raise ValueError(f"the highest logit of the row is {highest}")
    if params.temperature == 0:
        return np.array([best]), np.zeros(1)
    keep = logits_row > -np.inf
    if 0 < params.top_k < logits_row.size:
        kth = logits_row.size - params.top_k
        keep &= logits_row >= np.partition(logits_row, kth)[kth]
    ids = np.flatnonzero(keep)
    # The highest is taken off first: then a tiny temperature gives -inf, never inf - inf.
    with np.errstate(over="ignore"):
        scores = (logits_row[ids].astype(np.float64) - highest) / params.temperature
    if params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
        ids, scores = ids[kept], scores[kept]
    if params.min_p > 0:  # the best id's score is 0
        likely = scores >= math.log(params.min_p)
        ids, scores = ids[likely], scores[likely]
    log_probs = scores - np.log(np.exp(scores).sum())
    possible = log_probs > -np.inf
    return (ids, log_probs) if possible.all() else (ids[possible], log_probs[possible])


def _nucleus(scores: FloatArray, top_p: float) -> IntArray:
    """Indices, ascending, of the fewest most probable of (K,) scores whose mass reaches top_p."""
    probs = np.exp(scores)
    probs /= probs.sum()
    # All entries up to (1 - top_p) / K weigh at most 1 - top_p together, so the nucleus lies above; this spares
    # sorting a whole vocabulary.
    likely = np.flatnonzero(probs > (1 - top_p - TOP_P_SLACK) / probs.size)
    order = likely[np.argsort(-probs[likely], kind="stable")]
    sorted_probs = probs[order]
    mass_before = np.cumsum(sorted_probs) - sorted_probs
    count = max(1, int(np.count_nonzero(mass_before < top_p - TOP_P_SLACK)))
    return np.sort(order[:count])


def mix(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every input bit moves every output bit."""
    value = (value ^ value >> 30) * MULTIPLIER_1 & MASK_64
    value = (value ^ value >> 27) * MULTIPLIER_2 & MASK_64
    return value ^ value >> 31


def position_key(seed: int, position: int, stream: int) -> int:
    """The 64-bit key of all noise of one stream at one absolute position.

    Each level is finalised before the next is added, so two (seed, stream, position) share a part of their token
    sequences only if two 64-bit hashes happen to lie within V steps of GAMMA.
    """
    return mix(_stream_key(seed, stream) + position * GAMMA & MASK_64)


@lru_cache(1 << 12)
def _stream_key(seed: int, stream: int) -> int:
    """The part of a key that all positions of a text share."""
    return mix(mix(seed + GAMMA & MASK_64) + stream * GAMMA & MASK_64)


def hash_u64(seed: int, position: int, token_ids: IntArray, stream: int = TOKEN_STREAM) -> NDArray[np.uint64]:
    """(K,) hashes of the (K,) token ids at an absolute position. Distinct ids of one position never collide."""
    h = token_ids.astype(np.uint64)
    h *= np.uint64(GAMMA)
    h += np.uint64(position_key(seed, position, stream))
    h ^= h >> np.uint64(30)
    h *= np.uint64(MULTIPLIER_1)
    h ^= h >> np.uint64(27)
    h *= np.uint64(MULTIPLIER_2)
    h ^= h >> np.uint64(31)
    return h


def noise(seed: int, position: int, token_ids: IntArray, stream: int = TOKEN_STREAM) -> FloatArray:
    """(K,) standard Gumbel noise of the token ids at an absolute position."""
    # 52 bits: with 53, adding a half would round the topmost value up to 1 and its noise to infinity.
    u = (hash_u64(seed, position, token_ids, stream) >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    gumbel: FloatArray = -np.log(-np.log(u))
    return gumbel


def uniform(seed: int, position: int, stream: int) -> float:
    """One number in (0, 1), both ends excluded, of a stream at an absolute position."""
    return ((mix(position_key(seed, position, stream)) >> 12) + 0.5) * 2.0**-52


def draw(ids: IntArray, log_probs: FloatArray, seed: int, position: int, stream: int = TOKEN_STREAM) -> int:
    """The token of a row at an absolute position: argmax of log-probability plus noise, an exact sample of the row.

    Of equal values the first is taken, which is the lowest id of a row as `decode_row` returns it.
    """
    if ids.size == 1:
        return int(ids[0])
    return int(ids[np.argmax(log_probs + noise(seed, position, ids, stream))])

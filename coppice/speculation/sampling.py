"""The decoding operator G and keyed noise: which token stands at a position is a function of row, seed and position.

Bias, penalties and a least length, which look at the text before a row, come first (`Penalties`), in the order of
transformers' processors and of vLLM's sampler: bias, then the penalties for repetition, frequency and presence, in
float32. Repetition is counted over prompt and answer (Keskar et al., CTRL, arXiv 1909.05858, section 4.1), frequency
and presence over the answer alone, as OpenAI and vLLM define them. Below the least length no id that ends a text can
be drawn.

The noise of a token is a Gumbel variable read from a hash of (seed, absolute position, token id), so whoever draws from
the same row draws the same token, in whatever step, tree or process. `heads.tree.torch_noise` is the twin on tensors.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Annotated, Self

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
MAX_UINT32 = (1 << 32) - 1  # as messages hold ids and top_k

# Masses within rounding of top_p count as having reached it, so that numpy, torch and a GPU keep the same ids of a
# row with equal entries.
TOP_P_SLACK = 1e-9

_SEED_BITS = 53  # of a drawn one: JSON keeps such numbers
_COLUMN = 64  # values of which one is looked at first
_NUCLEI = (256, 8192)  # ids that are sorted first, of a nucleus
_FEW = 4096  # ids whose noise takes no longer than to find out which of it matters
_NEAR = 64
_CLOSE = 1e-6  # scores and sums of noise are tens, so rounded to 1e-14


class SamplingParams(BaseModel):
    """The decoding policy of a request. Unusable values raise pydantic's ValidationError, which names the field.

    An unset repetition_penalty is the deployment's, which it has from the target's generation_config.json.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus mass kept after top_k")] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_UINT32, description="most probable ids kept; 0 keeps all")] = 0
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
        dict[Annotated[int, Field(ge=0, le=MAX_UINT32)], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
        Field(max_length=MAX_BIASES, description="added to the logits of ids"),
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, le=MASK_64, description="seed of the draws; unset, the server draws one")] = 0

    def with_defaults(self, repetition_penalty: float) -> Self:
        """The same with what is unset as a deployment has it."""
        unset = self.repetition_penalty is None
        return self.model_copy(update={"repetition_penalty": repetition_penalty}) if unset else self

    def with_seed(self) -> Self:
        """The same with a seed: a random one unless one was set."""
        if "seed" in self.model_fields_set:
            return self
        return self.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})

    def keeps_all(self, vocab_size: int) -> bool:
        """Whether any id of a vocabulary can be drawn that has a probability."""
        some = 0 < self.top_k < vocab_size
        return self.temperature > 0 and self.top_p == 1 and not self.min_p and not some

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
    ids = largest(logits_row, params.top_k or logits_row.size)
    logits = logits_row[ids] if len(ids) < logits_row.size else logits_row
    possible = logits > -np.inf
    if not possible.all():
        ids, logits = ids[possible], logits[possible]
    scores = _scores(logits, highest, params.temperature)
    if params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
        ids, scores = ids[kept], scores[kept]
    if params.min_p > 0:  # the best id's score is 0
        likely = scores >= math.log(params.min_p)
        ids, scores = ids[likely], scores[likely]
    log_probs = scores - np.log(np.exp(scores).sum())
    possible = log_probs > -np.inf
    return (ids, log_probs) if possible.all() else (ids[possible], log_probs[possible])


def _scores(logits: NDArray[np.floating], highest: float, temperature: float) -> FloatArray:
    """Log-probabilities but for a constant; the highest logit's is 0."""
    # It is taken off first: then a tiny temperature gives -inf, never inf - inf.
    scores: FloatArray = logits.astype(np.float64)
    scores -= highest
    if temperature != 1:
        with np.errstate(over="ignore"):
            scores /= temperature
    return scores


def largest(values: NDArray[np.floating], count: int) -> IntArray:
    """Indices, ascending, of the `count` largest of (K,) values and of those that tie with the last of them.

    None is NaN. A large vocabulary is cut into columns first: as many columns as are asked for hold a value that is not
    below the least of these columns' largest, so the rest of the values need no sorting.
    """
    if count >= values.size:
        return np.arange(values.size)
    columns = values.size // _COLUMN
    if columns <= count:
        return np.flatnonzero(values >= np.partition(values, -count)[-count])
    tops = values[: columns * _COLUMN].reshape(_COLUMN, columns).max(0)
    among: IntArray = np.flatnonzero(values >= np.partition(tops, -count)[-count])
    chosen = values[among]
    best: IntArray = among[chosen >= np.partition(chosen, -count)[-count]]
    return best


def _nucleus(scores: FloatArray, top_p: float) -> IntArray:
    """Indices, ascending, of the fewest most probable of (K,) scores whose mass reaches top_p."""
    probs = np.exp(scores)
    probs /= probs.sum()
    # All entries up to (1 - top_p) / K weigh at most 1 - top_p together, so the nucleus lies above. Most are small:
    # sorting a whole vocabulary would take longer than all the rest.
    above = int(np.count_nonzero(probs > (1 - top_p - TOP_P_SLACK) / probs.size))
    for most in (*_NUCLEI, above):
        likely = largest(probs, min(most, above))
        sorted_probs = np.sort(probs[likely])[::-1]
        mass_before = np.cumsum(sorted_probs) - sorted_probs
        if mass_before[-1] >= top_p:
            break
    count = max(1, int(np.count_nonzero(mass_before < top_p - TOP_P_SLACK)))
    least = sorted_probs[count - 1]
    kept = likely[probs[likely] >= least]
    ties = np.flatnonzero(probs[kept] == least)
    return np.delete(kept, ties[len(ties) - (len(kept) - count) :])


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


def position_keys(seeds: Sequence[int], counts: Sequence[int], positions: IntArray) -> NDArray[np.uint64]:
    """(P,) keys as of `position_key` at (P,) absolute positions; each seed is that of its count of them."""
    keys = np.array([_stream_key(seed, TOKEN_STREAM) for seed in seeds], np.uint64)
    return _mixed(_steps(positions), np.repeat(keys, counts))


@lru_cache(1 << 12)
def _stream_key(seed: int, stream: int) -> int:
    """The part of a key that all positions of a text share."""
    return mix(mix(seed + GAMMA & MASK_64) + stream * GAMMA & MASK_64)


def hash_u64(seed: int, position: int, token_ids: IntArray, stream: int = TOKEN_STREAM) -> NDArray[np.uint64]:
    """(K,) hashes of the (K,) token ids at an absolute position. Distinct ids of one position never collide."""
    return _mixed(_steps(token_ids), np.uint64(position_key(seed, position, stream)))


def _steps(token_ids: IntArray) -> NDArray[np.uint64]:
    """What ids add to a key."""
    return token_ids.astype(np.uint64) * np.uint64(GAMMA)


@lru_cache(2)
def _all_steps(size: int) -> NDArray[np.uint64]:
    """Those of the ids of a vocabulary."""
    return _steps(np.arange(size))


def _mixed(steps: NDArray[np.uint64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of each step behind the key, or behind its key."""
    h = steps + key
    shifted = h >> np.uint64(30)
    h ^= shifted
    h *= np.uint64(MULTIPLIER_1)
    h ^= np.right_shift(h, np.uint64(27), out=shifted)
    h *= np.uint64(MULTIPLIER_2)
    h ^= np.right_shift(h, np.uint64(31), out=shifted)
    return h


def noise(seed: int, position: int, token_ids: IntArray, stream: int = TOKEN_STREAM) -> FloatArray:
    """(K,) standard Gumbel noise of the token ids at an absolute position."""
    return _gumbel(hash_u64(seed, position, token_ids, stream))


def _gumbel(hashes: NDArray[np.uint64]) -> FloatArray:
    """(K,) noise of (K,) hashes: never falling."""
    # 52 bits: with 53, adding a half would round the topmost value up to 1 and its noise to infinity.
    u = (hashes >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    gumbel: FloatArray = -np.log(-np.log(u))
    return gumbel


def uniform(seed: int, position: int, stream: int) -> float:
    """One number in (0, 1), both ends excluded, of a stream at an absolute position."""
    return ((mix(position_key(seed, position, stream)) >> 12) + 0.5) * 2.0**-52


def draw(ids: IntArray, log_probs: FloatArray, seed: int, position: int, stream: int = TOKEN_STREAM) -> int:
    """An exact sample of a row at a position: argmax of log-probability plus noise, of equals the lowest id."""
    if ids.size == 1:
        return int(ids[0])
    return int(ids[np.argmax(log_probs + noise(seed, position, ids, stream))])


def draw_logits(logits_row: NDArray[np.floating], params: SamplingParams, position: int) -> int:
    """The token that `draw` takes from the row that `decode_row` makes of (V,) logits, at an absolute position.

    Where G keeps the whole vocabulary neither the row nor most of its noise is needed. The largest sum of score and
    noise among the ids of the highest scores is a bound: another id reaches it only by noise that makes up for its
    score, which is not above the least of these. To compare its hash with that noise's is cheaper than logarithms.
    Raises ValueError as `decode_row` does.
    """
    highest = float(logits_row[np.argmax(logits_row)])
    if np.isfinite(highest) and np.count_nonzero(logits_row > -np.inf) > _FEW and params.keeps_all(logits_row.size):
        key = np.uint64(position_key(params.seed, position, TOKEN_STREAM))
        hashes = _mixed(_all_steps(logits_row.size), key)
        near = largest(logits_row, _NEAR)
        if near.size > 2 * _NEAR:  # of many that tie, few are enough for a bound
            near = near[np.argpartition(logits_row[near], -_NEAR)[-_NEAR:]]
        scores = _scores(logits_row[near], highest, params.temperature)
        enough = (scores + _gumbel(hashes[near])).max() - scores.min() - _CLOSE
        least = math.exp(-math.exp(-enough)) - 2.0**-40  # of the numbers in (0, 1) that the noise is made from
        likely = np.union1d(near, np.flatnonzero(hashes >= np.uint64(max(0, int(least * 2.0**64)))))
        sums = _scores(logits_row[likely], highest, params.temperature) + _gumbel(hashes[likely])
        best = int(np.argmax(sums))
        # A row's log-probabilities are these scores less one number, and rounded: what is close they may order anew.
        if np.count_nonzero(sums > sums[best] - _CLOSE) == 1:
            return int(likely[best])
    return draw(*decode_row(logits_row, params), params.seed, position)


class Penalties:
    """How often each id occurs in one text, and what that and the bias do to the text's rows."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: int,
        vocab_size: int,
        stop_ids: Collection[int] = (),
        min_len: int = 0,
    ) -> None:
        """The first `prompt_tokens` ids of the text are the prompt, those behind them were generated. None of
        `stop_ids` is among its first `min_len`, prompt included.
        """
        ends = [token for token in stop_ids if token < vocab_size]  # others cannot be drawn
        self._ends, self._min_len, self._length = np.array(ends, np.int64), min_len, 0
        self._repetition = np.float32(params.repetition_penalty or 1)
        self._frequency, self._presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._prompt_left = prompt_tokens
        counted = bool(self._repetition != 1 or self._frequency or self._presence)
        self.change_rows = counted or bool(params.logit_bias) or min_len > prompt_tokens
        """whether anything changes a row"""
        self._occurs = np.zeros(vocab_size if counted else 0, np.bool_)
        self._generated = np.zeros(vocab_size if counted else 0, np.int32)  # how often
        self._ids = np.flatnonzero(self._occurs)

    def append(self, ids: Sequence[int]) -> None:
        """Count the next ids of the text."""
        self._length += len(ids)
        if self._occurs.size:
            self._occurs[np.array(ids, np.int64)] = True
            self._ids = np.flatnonzero(self._occurs)
            np.add.at(self._generated, np.array(ids[self._prompt_left :], np.int64), 1)
        self._prompt_left = max(0, self._prompt_left - len(ids))

    def adjusted(self, row: NDArray[np.floating], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """The (V,) logits behind the text and the generated ids of `path`, adjusted; `row` stays as it is."""
        adjusted: NDArray[np.float32] = row.astype(np.float32)
        adjusted[self._biased] += self._bias
        if self._length + len(path) < self._min_len:
            adjusted[self._ends] = -np.inf
        if not self._occurs.size:
            return adjusted
        behind = np.array(path, np.int64)
        ids = np.concatenate([self._ids, np.unique(behind[~self._occurs[behind]])])
        np.add.at(self._generated, behind, 1)
        generated = self._generated[ids].astype(np.float32)
        np.subtract.at(self._generated, behind, 1)
        logits = adjusted[ids]
        logits = np.where(logits < 0, logits * self._repetition, logits / self._repetition)
        adjusted[ids] = logits - self._frequency * generated - self._presence * (generated > 0)
        return adjusted

"""A tabular target so small that the probability of every continuation of three tokens is known.

The pipeline's own parts decode it in process: coupled and uncoupled draft trees, routing and merging, the accept walk,
and the keyed draw of roots.

`python -m tests.law` decodes SAMPLES texts by every rule and says the p-value of each, the least bias of a token that
such counts refute, and that a planted bias of one percentage point is found and none is not.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, stats

from coppice.heads.base import DraftJob
from coppice.heads.lm import sample
from coppice.machine import usable_cores
from coppice.speculation.policy import POLICIES, Policy
from coppice.speculation.sampling import Row, SamplingParams, decode_row, draw, noise, uniform
from coppice.speculation.tree import DraftTree
from orchestrator.heads import Calibration, offers
from services.verifier.session import pq_draws, walk
from tests import reference
from tests.reference import dense, keyed, text_at

VOCAB = 4
LENGTH = 3  # tokens whose joint law is checked: 64 cells
HEADS = ("a", "b")
_PLANTED_STREAM = 7

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tables:
    """A target and two drafters: logits of the next token after the last two, (V, V, V) each."""

    target: FloatArray
    drafters: tuple[FloatArray, ...]

    @classmethod
    def random(cls, seed: int) -> Tables:
        """A target of moderate entropy and drafters that are wrong in different ways."""
        rng = np.random.default_rng(seed)
        target = rng.normal(0, 1.2, (VOCAB,) * 3)
        return cls(target, tuple(target + rng.normal(0, 1.0, (VOCAB,) * 3) for _ in HEADS))

    def exact(self, params: SamplingParams, prompt: tuple[int, int]) -> dict[tuple[int, ...], float]:
        """The probability of every continuation of three tokens; impossible ones are left out."""
        paths = itertools.product(range(VOCAB), repeat=LENGTH)
        probabilities = {path: self._path(params, prompt, path) for path in paths}
        return {path: probability for path, probability in probabilities.items() if probability > 0}

    def rows(self, tree: DraftTree, text: Sequence[int], params: SamplingParams) -> Callable[[int], Row]:
        """The target's rows behind the nodes of a tree, whose root is the last token of a text."""
        return lambda node: self.row((*text, *text_at(tree, node)), params)

    def row(self, text: Sequence[int], params: SamplingParams) -> Row:
        """The target's row behind a text."""
        return _row(self, tuple(text[-2:]), params.temperature, params.top_p)

    def _path(self, params: SamplingParams, prompt: tuple[int, int], path: tuple[int, ...]) -> float:
        text, probability = list(prompt), 1.0
        for token in path:
            ids, log_probs = self.row(text, params)
            probability *= float(np.exp(log_probs[ids == token].sum())) if token in ids else 0.0
            text.append(token)
        return probability


@cache
def _row(tables: Tables, text: tuple[int, ...], temperature: float, top_p: float) -> Row:
    return decode_row(tables.target[text], SamplingParams(temperature=temperature, top_p=top_p))


def draft_tree(table: FloatArray, text: list[int], params: SamplingParams, coupled: bool, width: int = 2) -> DraftTree:
    """The top `width` children of every node to depth 2, scored as every head scores (coppice.heads.base)."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    level = [(0, text, 0.0)]
    for depth in (1, 2):
        grown = []
        for node, so_far, score in level:
            row = _draft_row(table, so_far, params, coupled, len(text) - 1 + depth)
            for token in np.argsort(-row, kind="stable")[:width].tolist():
                tokens.append(token)
                parents.append(node)
                scores.append(score + float(row[token]))
                grown.append((len(tokens), [*so_far, token], scores[-1]))
        level = grown
    return DraftTree(np.array(tokens), np.array(parents), np.array(scores, np.float32))


def _draft_row(table: FloatArray, text: list[int], params: SamplingParams, coupled: bool, position: int) -> FloatArray:
    row = _log_softmax(table[text[-2], text[-1]] / (params.temperature or 1.0))
    if coupled and params.temperature:
        row = _log_softmax(row + noise(params.seed, position, np.arange(VOCAB)))
    return row


def _log_softmax(scores: FloatArray) -> FloatArray:
    shifted = scores - scores.max()
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def decode(tables: Tables, policy: Policy, params: SamplingParams, prompt: tuple[int, int], coupled: bool) -> list[int]:
    """Three tokens by speculative decoding under a policy."""
    text = list(prompt)
    text.append(_root(tables, text, params))
    calibrations = [Calibration() for _ in policy.heads]
    while len(text) < len(prompt) + LENGTH:
        trees = [draft_tree(tables.drafters[HEADS.index(head)], text, params, coupled) for head in policy.heads]
        tree = policy.choose([one.of(tree) for one, tree in zip(calibrations, trees, strict=True)], budget=4).tree
        outcome = walk(tree, keyed(tree, tables.rows(tree, text, params), params, len(text) - 1))
        accepted = [int(tree.tokens[node - 1]) for node in outcome[0]]
        text += accepted
        text.append(_root(tables, text, params))
        for calibration, own in zip(calibrations, trees, strict=True):
            calibration.observe([(offer[3], offer[5]) for offer in offers(own, [*accepted, text[-1]])])
    return text[len(prompt) : len(prompt) + LENGTH]


def decode_pq(tables: Tables, params: SamplingParams, prompt: tuple[int, int], sampled: Sampled) -> list[int]:
    """Three tokens by p/q rejection of a chain of two that a head sampled."""
    text = list(prompt)
    text.append(_root(tables, text, params))
    while len(text) < len(prompt) + LENGTH:
        chain, q_rows = sampled(tables.drafters[0], text, params)
        row_at = tables.rows(chain, text, params)
        outcome = walk(chain, pq_draws(chain, row_at, q_rows, params.seed, len(text) - 1))
        assert outcome[1] is not None
        text += [*(int(chain.tokens[node - 1]) for node in outcome[0]), outcome[1]]
    return text[len(prompt) : len(prompt) + LENGTH]


def lm_chain(table: FloatArray, text: list[int], params: SamplingParams) -> tuple[DraftTree, NDArray[np.float32]]:
    """Two tokens as heads that are language models sample them."""
    job = DraftJob(0, text[-1], len(text) - 1, 2, params, want_q_rows=True)
    so_far, rows = list(text), []
    for depth in (1, 2):
        token, q = sample(torch.from_numpy(table[so_far[-2], so_far[-1]]), job, depth)
        so_far.append(token)
        rows.append(q.astype(np.float32))
    return DraftTree.chain(so_far[len(text) :], np.zeros(2, np.float32)), np.array(rows)


Sampled = Callable[[FloatArray, list[int], SamplingParams], tuple[DraftTree, NDArray[np.float32]]]
CHAINS: dict[str, Sampled] = {"lm": lm_chain}


def pq_step(tables: Tables, params: SamplingParams, prompt: tuple[int, int], sampled: Sampled) -> tuple[int, int]:
    """The first token that a head drafts behind the prompt, and the one that p/q rejection puts there."""
    text = list(prompt)
    chain, q_rows = sampled(tables.drafters[0], text, params)
    outcome = walk(chain, pq_draws(chain, tables.rows(chain, text, params), q_rows, params.seed, len(text) - 1))
    drafted = int(chain.tokens[0])
    return drafted, drafted if outcome[0] else outcome[1] or 0


def exact_pq_step(
    tables: Tables, params: SamplingParams, prompt: tuple[int, int], sampled: Sampled
) -> dict[tuple[int, int], float]:
    """The probability of each such pair, by the rule as it was published."""
    p = dense(tables.row(prompt, params), VOCAB)
    q = sampled(tables.drafters[0], list(prompt), params)[1][0]
    residual = np.maximum(p - q, 0)
    pairs = np.outer(np.maximum(q - p, 0), residual / residual.sum()) + np.diag(np.minimum(p, q))
    return {pair: float(pairs[pair]) for pair in np.ndindex(pairs.shape) if pairs[pair] > 1e-12}


def _root(tables: Tables, text: list[int], params: SamplingParams) -> int:
    return draw(*tables.row(text, params), params.seed, len(text))


# What is decoded, and what its counts can say.

PROMPT = (0, 1)
SETTINGS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9))
TABLES = Tables.random(20)
SAMPLES = 200_000
LEVEL, POWER = 1e-6, 0.99
"""A bias is found where a p-value is below LEVEL; counts are said to refute one that is found with this POWER."""

Decode = Callable[[SamplingParams], Sequence[int]]
Law = Mapping[tuple[int, ...], float]


def exact_rules() -> dict[str, Decode]:
    """Every way to decode that promises the target's law, by name; `auto` plays the others in turns."""
    rules: dict[str, Decode] = {}
    for name in ("plain", "single:a", *(name for name in POLICIES[1:] if name != "auto")):
        policy = Policy.parse(name, HEADS)
        for coupled in (True, False) if policy.heads else (True,):
            label = name if coupled else f"{name} uncoupled"
            rules[label] = partial(decode, TABLES, policy, prompt=PROMPT, coupled=coupled)
    for head, sampled in CHAINS.items():
        rules[f"single:a p/q, {head}"] = partial(decode_pq, TABLES, prompt=PROMPT, sampled=sampled)
    return rules


def counted(decode: Decode, params: SamplingParams, samples: int, first_seed: int = 0) -> Counter[tuple[int, ...]]:
    """How often each text was decoded, with as many seeds."""
    seeds = range(first_seed, first_seed + samples)
    return Counter(tuple(decode(params.model_copy(update={"seed": seed}))) for seed in seeds)


def marginal(values: Mapping[tuple[int, ...], float], at: int) -> dict[int, float]:
    """The sums over all texts with the same token at a place."""
    sums: dict[int, float] = {}
    for text, value in values.items():
        sums[text[at]] = sums.get(text[at], 0) + value
    return sums


def refuted(counts: Mapping[tuple[int, ...], int], law: Law) -> float:
    """The p-value of a law, by the joint counts and by those of the token at each place, Bonferroni."""
    places = [(marginal(counts, at), marginal(law, at)) for at in range(LENGTH)]
    joint = reference.p_value(counts, law)
    return min(1.0, (1 + LENGTH) * min(joint, *(reference.p_value(*place) for place in places)))  # type: ignore[arg-type]


def least_bias(law: Law, samples: int) -> float:
    """The least probability that may be taken from one token of a place and given to another, and is found."""
    worst = 0.0
    for at in range(LENGTH):
        first, second = sorted(marginal(law, at).values())[-2:]
        freedom = len(marginal(law, at)) - 1
        bound = stats.chi2.isf(LEVEL / (1 + LENGTH), freedom)
        shift = optimize.brentq(lambda x: stats.ncx2.sf(bound, freedom, x) - POWER, 1e-3, 1e4)  # noqa: B023
        worst = max(worst, float(np.sqrt(shift / (samples * (1 / first + 1 / second)))))
    return worst


def biased_law(law: Law, bias: float) -> dict[tuple[int, ...], float]:
    """The law of what `biased` decodes."""
    first = marginal(law, 0)
    likeliest, second = sorted(first, key=lambda token: -first[token])[:2]
    factors = {likeliest: 1 - bias / first[likeliest], second: 1 + bias / first[second]}
    return {text: probability * factors.get(text[0], 1.0) for text, probability in law.items()}


def biased(decode: Decode, law: Law, bias: float) -> Decode:
    """The same rule, but that it says the second likeliest first token for the likeliest with this probability."""
    first = marginal(law, 0)
    likeliest, second = sorted(first, key=lambda token: -first[token])[:2]

    def planted(params: SamplingParams) -> Sequence[int]:
        text, seed = decode(params), params.seed
        if text[0] == likeliest and uniform(seed, 0, _PLANTED_STREAM) < bias / first[likeliest]:
            while text[0] != second:
                seed += 1 << 40
                text = decode(params.model_copy(update={"seed": seed}))
        return text

    return planted


def p_of_step(head: str, params: SamplingParams, samples: int, first_seed: int = 0) -> float:
    """The p-value of what a head drafts and p/q rejection makes of it, where they are seen together."""
    told = {"prompt": PROMPT, "sampled": CHAINS[head]}
    counts = counted(partial(pq_step, TABLES, **told), params, samples, first_seed)
    return reference.p_value(counts, exact_pq_step(TABLES, params, **told))  # type: ignore[arg-type]


def p_of(number: int, name: str, params: SamplingParams, samples: int) -> float:
    """The p-value of a rule by its number and name, of the planted bias, or of what p/q rejection makes of a chain."""
    seeds, rules = (params, samples, number * samples), exact_rules()
    if name in CHAINS:
        return p_of_step(name, *seeds)
    law = TABLES.exact(params, PROMPT)
    return refuted(counted(rules.get(name) or biased(rules["plain"], law, 0.01), *seeds), law)


def main(samples: int) -> bool:
    """Print what every rule's counts say; whether only the planted bias was found."""
    held, names = True, [*exact_rules(), *CHAINS, "planted"]
    with ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("spawn")) as processes:
        for params in SETTINGS:
            say, bias = (
                f"T={params.temperature:g} top_p={params.top_p:g}",
                least_bias(TABLES.exact(params, PROMPT), samples),
            )
            print(f"{say}: {samples} texts a rule refute a bias of {100 * bias:.2f} percentage points")
            found = processes.map(p_of, itertools.count(), names, itertools.repeat(params), itertools.repeat(samples))
            for name, p in zip(names, found, strict=False):
                held = held and (p < LEVEL) == (name == "planted")
                print(f"{say}: {name}: p = {p:.2g}", flush=True)
    print("ok only the planted bias was found" if held else "FAILED")
    return held


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1]) if sys.argv[1:] else SAMPLES))

"""Sampled text follows the target's law under every policy; a rule that does not is seen."""

from __future__ import annotations

import os
from functools import partial
from itertools import product

import numpy as np
import pytest

from coppice.speculation.sampling import SamplingParams
from tests import law
from tests.law import PROMPT, SETTINGS, TABLES, Decode
from tests.reference import p_value

PROOF = os.environ.get("COPPICE_PROOF") == "1"
SAMPLES = 20_000 if PROOF else 1000
FALSE_ALARM = 0.001  # of all checks together, Bonferroni
RULES = law.exact_rules()
BOUND = FALSE_ALARM / ((len(RULES) + len(law.CHAINS)) * len(SETTINGS))
PLAYED = [
    (rule, params)
    for number, rule in enumerate(RULES)
    for params in (SETTINGS if PROOF else SETTINGS[number // 2 % 2 :][:1])
]
DRAWN = [*product(law.CHAINS, SETTINGS)]
"""each rule under one of the settings in turns, at full counts under both; each head under both"""


def p_of(decode: Decode, params: SamplingParams, first_seed: int) -> float:
    """The p-value of SAMPLES decoded continuations under the target's exact law."""
    return p_value(law.counted(decode, params, SAMPLES, first_seed), TABLES.exact(params, PROMPT))


p_of_step = partial(law.p_of_step, samples=4 * SAMPLES)


@pytest.mark.parametrize(("rule", "params"), PLAYED)
def test_the_joint_law_of_three_tokens_is_the_targets(rule: str, params: SamplingParams) -> None:
    # Each rule has its own seeds: with the same ones all policies give the same texts, which are one sample.
    assert p_of(RULES[rule], params, list(RULES).index(rule) * SAMPLES) >= BOUND


@pytest.mark.parametrize(("head", "params"), DRAWN)
def test_what_replaces_a_rejected_draft_does_not_depend_on_how_it_was_drawn(head: str, params: SamplingParams) -> None:
    assert p_of_step(head, params) >= BOUND


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: f"T={params.temperature:g}")
def test_a_bias_of_one_percentage_point_is_found_at_the_counts_of_the_proof(params: SamplingParams) -> None:
    exact = TABLES.exact(params, PROMPT)
    assert law.least_bias(exact, law.SAMPLES) <= 0.01
    rng = np.random.default_rng(1)

    def found(said: law.Law) -> int:
        drawn = [rng.multinomial(law.SAMPLES, np.array(list(said.values())) / sum(said.values())) for _ in range(50)]
        counts = [{text: int(count) for text, count in zip(said, one, strict=True) if count} for one in drawn]
        return sum(law.refuted(one, exact) < law.LEVEL for one in counts)

    assert found(exact) == 0
    assert found(law.biased_law(exact, 0.01)) >= 48

"""Sampled text follows the target's law under every policy; a rule that does not is seen."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from coppice.speculation.policy import POLICIES, Policy
from coppice.speculation.sampling import SamplingParams
from tests import law
from tests.reference import p_value

SAMPLES = 20_000 if os.environ.get("COPPICE_PROOF") else 1000
FALSE_ALARM = 0.001  # of all checks together, Bonferroni
PROMPT = (0, 1)
SETTINGS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9))
TABLES = law.Tables.random(20)

Decode = Callable[[SamplingParams], list[int]]


def exact_rules() -> dict[str, Decode]:
    """Every way to decode that promises the target's law, by name; `auto` plays the others in turns."""
    rules: dict[str, Decode] = {}
    for name in ("plain", "single:a", *(name for name in POLICIES[1:] if name != "auto")):
        policy = Policy.parse(name, law.HEADS)
        for coupled in (True, False) if policy.heads else (True,):
            label = name if coupled else f"{name} uncoupled"
            rules[label] = partial(law.decode, TABLES, policy, prompt=PROMPT, coupled=coupled)
    for head, sampled in law.CHAINS.items():
        rules[f"single:a p/q, {head}"] = partial(law.decode_pq, TABLES, prompt=PROMPT, sampled=sampled)
    return rules


RULES = exact_rules()
BOUND = FALSE_ALARM / (len(RULES) * len(SETTINGS))


def p_of(decode: Decode, params: SamplingParams, first_seed: int) -> float:
    """The p-value of SAMPLES decoded continuations under the target's exact law."""
    seeds = range(first_seed, first_seed + SAMPLES)
    answers = Counter(tuple(decode(params.model_copy(update={"seed": seed}))) for seed in seeds)
    return p_value(answers, TABLES.exact(params, PROMPT))


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: f"T={params.temperature:g}")
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_of_three_tokens_is_the_targets(rule: str, params: SamplingParams) -> None:
    # Each rule has its own seeds: with the same ones all policies give the same texts, which are one sample.
    assert p_of(RULES[rule], params, list(RULES).index(rule) * SAMPLES) >= BOUND


def test_a_rule_that_accepts_nodes_independently_is_caught() -> None:
    assert p_of(partial(law.decode_independent, TABLES, prompt=PROMPT), SETTINGS[0], 0) < BOUND

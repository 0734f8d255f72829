"""`coppice bench sampling`: sampled text follows the target's law, and over gRPC it is plain decoding's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from coppice.bench import law
from coppice.bench.report import Check
from coppice.client.client import Client
from coppice.speculation.policy import POLICIES, Policy
from coppice.speculation.sampling import SamplingParams

FALSE_ALARM = 0.001  # of the whole family of checks, Bonferroni
_TABLES_SEED = 20
_PROMPT = (0, 1)
_SETTINGS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9))

Decode = Callable[[SamplingParams], list[int]]


def law_checks(samples: int) -> list[Check]:
    """The joint law of three tokens under every policy, coupled and not, and the control that must fail."""
    tables = law.Tables.random(_TABLES_SEED)
    names = ["plain", "single:a", *(name for name in POLICIES[1:] if name != "auto")]  # auto is these in turns
    exact: dict[str, Decode] = {}
    for name in names:
        policy = Policy.parse(name, law.HEADS)
        for coupled in (True, False) if policy.heads else (True,):
            label = name if coupled else f"{name} uncoupled"
            exact[label] = partial(_keyed, tables, policy, coupled)
    exact["single:a p/q"] = partial(_pq, tables)
    bound = FALSE_ALARM / (len(exact) * len(_SETTINGS))
    checks = []
    for params in _SETTINGS:
        for number, (label, decode) in enumerate(exact.items()):
            # Seeds of its own for each: with the same ones all policies give the same texts, and one sample.
            p_value = _p_value(tables, decode, params, range(number * samples, (number + 1) * samples))
            name = f"law of {label} at T={params.temperature:g}, top-p {params.top_p:g}: p-value"
            checks.append(Check(name, p_value, f">= {bound:.1e}", p_value >= bound))
    p_value = _p_value(tables, partial(_independent, tables), _SETTINGS[0], range(samples))
    checks.append(Check("law of the independent-node rule: p-value", p_value, f"< {bound:.1e}", p_value < bound))
    return checks


def _keyed(tables: law.Tables, policy: Policy, coupled: bool, params: SamplingParams) -> list[int]:
    return law.decode(tables, policy, params, _PROMPT, coupled)


def _pq(tables: law.Tables, params: SamplingParams) -> list[int]:
    return law.decode_pq(tables, params, _PROMPT)


def _independent(tables: law.Tables, params: SamplingParams) -> list[int]:
    return law.decode_independent(tables, params, _PROMPT)


def _p_value(tables: law.Tables, decode: Decode, params: SamplingParams, seeds: range) -> float:
    answers = [decode(params.model_copy(update={"seed": seed})) for seed in seeds]
    return law.chi_square(law.counts(answers), tables.exact(params, _PROMPT))


def wire_check(client: Client, sessions: int, new_tokens: int, seed: int) -> Check:
    """Sampled sessions over gRPC under random policies and settings, compared with plain decoding of the same seed."""
    model = client.describe()
    rng = random.Random(seed)  # noqa: S311
    different = 0
    for number in range(sessions):
        prompt = [rng.randrange(model.vocab_size) for _ in range(rng.randrange(1, 24))]
        sampling = SamplingParams(
            temperature=rng.choice([0.7, 1.0, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            seed=number,
        )
        told: dict[str, Any] = {"sampling": sampling, "max_new_tokens": new_tokens, "ignore_eos": True}
        plain = client.generate(prompt, policy="plain", **told)
        other = client.generate(
            prompt, policy=rng.choice(model.policies[1:] or ("plain",)), budget=rng.choice([1, 8, 31, 60]), **told
        )
        different += plain.ids != other.ids
    return Check(f"sampled sessions over gRPC that differ from plain, of {sessions}", different, "0", different == 0)

"""Sampled sessions over gRPC give plain decoding's own text, whatever the policy, the budget and the settings are."""

from __future__ import annotations

import os
import random
from typing import Any

from coppice.client.client import Client
from coppice.speculation.sampling import SamplingParams
from tests.stacks import serving

SESSIONS = 1000 if os.environ.get("COPPICE_PROOF") else 12
NEW = 16


def test_sampled_sessions_are_plain_decodings_own() -> None:
    rng, different = random.Random(1), []
    with serving() as stack, Client(stack.address) as client:
        model = client.describe()
        for number in range(SESSIONS):
            prompt = [rng.randrange(model.vocab_size) for _ in range(rng.randrange(1, 24))]
            sampling = SamplingParams(
                temperature=rng.choice([0.7, 1.0, 1.3]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                seed=number,
            )
            told: dict[str, Any] = {"sampling": sampling, "max_new_tokens": NEW, "ignore_eos": True}
            plain = client.generate(prompt, policy="plain", **told)
            policy, budget = rng.choice(model.policies[1:]), rng.choice([1, 8, 31, 60])
            if client.generate(prompt, policy=policy, budget=budget, **told).ids != plain.ids:
                different.append((number, policy, budget))
    assert not different

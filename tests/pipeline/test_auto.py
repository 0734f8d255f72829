"""`auto` beside a head that knows nothing: plain decoding's text at nearly plain decoding's steps."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.client.client import Client
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from tests.pipeline.conftest import VOCAB
from tests.tiny import make_target
from tests.tiny_stack import serving

PROMPTS = [tuple(random.Random(n).randrange(VOCAB) for _ in range(12)) for n in range(2)]
NEW = 240


@pytest.fixture(scope="module")
def stack(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A head with other random weights than the target's."""
    random_head = make_target(tmp_path_factory.mktemp("random"), VOCAB, layers=2, seed=1)
    with serving(tmp_path_factory.mktemp("logs"), target, HeadSpec("random", "lm", random_head)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_random_head_is_soon_left_alone_and_the_text_is_plains(
    client: Client, stack: Stack, temperature: float
) -> None:
    told = {"max_new_tokens": NEW, "ignore_eos": True, "sampling": SamplingParams(temperature=temperature, seed=3)}
    for number, prompt in enumerate(PROMPTS):
        answer = client.generate(prompt, policy="auto", **told)
        assert answer.ids == client.generate(prompt, policy="plain", **told).ids
        drafted = sum(routed >= 0 for routed in answer.routed)
        assert drafted < (0.5, 0.15)[number] * answer.steps
    with urllib.request.urlopen(f"http://{stack.orchestrator.metrics}/metrics") as page:
        assert 'coppice_auto_choices_total{choice="plain"}' in page.read().decode()


def test_what_is_left_out_changes_no_text_and_a_named_budget_is_kept(client: Client) -> None:
    told = {"policy": "single:random", "max_new_tokens": NEW, "ignore_eos": True}
    named = client.generate(PROMPTS[0], budget=31, **told)
    free = client.generate(PROMPTS[0], **told)
    assert free.ids == named.ids
    assert min(named.verified_nodes[:-1]) == 31
    assert sum(free.verified_nodes) <= sum(named.verified_nodes)

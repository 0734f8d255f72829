"""The reference in a process of its own: it says the same, and it ends with whoever asks, however that ends."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.errors import Unavailable
from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import Reference
from lab.reference_process import ReferenceProcess
from tests.tiny import make_target

PROMPT, NEW = tuple(range(20)) * 2, 24
SAMPLED = SamplingParams(temperature=0.8, top_k=40, seed=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target."""
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def beside(target: Path) -> Iterator[ReferenceProcess]:
    """The process of it."""
    with ReferenceProcess(target, "float32", threads=1) as reference:
        yield reference


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_it_says_what_the_reference_says(target: Path, beside: ReferenceProcess, sampling: SamplingParams) -> None:
    here = Reference(target, "float32", threads=1)
    own = here.generate(PROMPT, NEW, sampling)
    look_up = {"prompt_lookup_num_tokens": 4}
    assisted = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    for told in ((), (None, look_up), (target, assisted)):
        answers = [each.generate(PROMPT, NEW, sampling, *told) for each in (here, beside)]
        assert answers[0].ids == answers[1].ids
        assert answers[0].accept_lengths == answers[1].accept_lengths
        assert answers[1].decode_s > 0
    assert answers[1].steps < own.steps  # the target itself assisted
    assert beside.greedy(PROMPT, NEW).ids == here.greedy(PROMPT, NEW).ids
    for ids in (own.ids, (*own.ids[:-1], (own.ids[-1] + 1) % 300)):
        assert beside.judge(PROMPT, ids, sampling, own.ids) == here.judge(PROMPT, ids, sampling, own.ids)
    assert beside.redraw(PROMPT, own.ids, sampling) == here.redraw(PROMPT, own.ids, sampling)
    assert beside.text.encode("abc") == here.text.encode("abc")


def test_the_next_call_starts_another_where_it_was_killed(target: Path) -> None:
    before = set(multiprocessing.active_children())
    with ReferenceProcess(target, "float32", threads=1) as reference:
        ids = reference.greedy((5, 6, 7), 8).ids
        (child,) = set(multiprocessing.active_children()) - before
        child.kill()
        with pytest.raises(Unavailable, match="the process of transformers ended with -9"):
            reference.greedy((5, 6, 7), 8)
        assert reference.greedy((5, 6, 7), 8).ids == ids
    assert set(multiprocessing.active_children()) <= before

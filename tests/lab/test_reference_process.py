"""The reference in a process of its own: it says the same, and it ends with whoever asks, however that ends."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from coppice.errors import Unavailable
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from lab.measuring import ReferenceProcess
from tests.tiny import make_target

PROMPT, NEW = tuple(range(20)) * 2, 16


def test_it_says_what_the_reference_says_and_that_it_was_killed(tmp_path: Path) -> None:
    target, before = make_target(tmp_path), set(multiprocessing.active_children())
    here = Reference(target, "float32", threads=1)
    with ReferenceProcess(StackSpec(target=target, dtype="float32", verifier_threads=1)) as beside:
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_k=40, seed=5)):
            own, other = (each.generate(PROMPT, NEW, sampling) for each in (here, beside))
            assert (own.ids, own.accept_lengths) == (other.ids, other.accept_lengths)
            for ids in (own.ids, (*own.ids[:-1], (own.ids[-1] + 1) % 300)):
                assert beside.judge(PROMPT, ids, sampling, own.ids) == here.judge(PROMPT, ids, sampling, own.ids)
            assert beside.redraw(PROMPT, own.ids, sampling) == here.redraw(PROMPT, own.ids, sampling)
        assert beside.text.encode("abc") == here.text.encode("abc")
        (child,) = set(multiprocessing.active_children()) - before
        child.kill()
        with pytest.raises(Unavailable, match="the process of transformers ended with -9"):
            beside.greedy(PROMPT, NEW)
    assert set(multiprocessing.active_children()) <= before

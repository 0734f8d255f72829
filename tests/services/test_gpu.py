"""What only a CUDA device can tell: its texts are the CPU's, and its kernels compute what their torch forms do.

`pytest -m gpu` runs these with the other tests that need one.
"""

from __future__ import annotations

import random
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coppice.config.sections import VerifierSettings
from coppice.engine import kernels
from coppice.engine.engine import Engine
from coppice.engine.self_check import self_check
from coppice.speculation.sampling import SamplingParams
from tests.kernels import Shape, attend, filled_pool, random_batch, random_rows, tree_attention
from tests.services.test_device import SAMPLINGS, Verifier, junk_tree, opened, seeded, step, target, written

__all__ = ["target"]  # the fixture
pytestmark = pytest.mark.gpu
SESSIONS, IDS = 40, 60
LAWS = {f"T={t:g}": [SamplingParams(temperature=t)] for t in (0.0, 0.7, 1.0)} | {"mixed": SAMPLINGS["mixed"]}


class OnCuda(Verifier):
    """A worker whose target is on the CUDA device and replays graphs."""

    def _load(self, settings: VerifierSettings) -> Engine:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
        engine = Engine(model.to("cuda"), kv_tokens=settings.kv_tokens)
        assert engine.capture() == ""
        self_check(engine)
        return engine


@pytest.mark.parametrize("law", LAWS)
async def test_texts_are_the_cpus(target: Path, law: str) -> None:
    """Plain ones, and those of drafted trees, of which some nodes are right."""
    samplings = seeded(LAWS[law], SESSIONS)
    expected = await written(Verifier(target, None), samplings, IDS)
    assert await written(OnCuda(target, None), samplings, IDS) == expected
    drafted = await opened(OnCuda(target, None), samplings)
    begun, rng = [len(text.ids) for text in drafted], random.Random(0)
    for _ in range(IDS // 5):
        done = [len(text.ids) - at for text, at in zip(drafted, begun, strict=True)]
        await step(drafted, [junk_tree(rng, ids[at + 1 :], 30) for ids, at in zip(expected, done, strict=True)])
    for text, at, ids in zip(drafted, begun, expected, strict=True):
        made = [*text.ids[at:], text.root]
        assert len(made) > IDS // 5
        assert made[: len(ids)] == ids[: len(made)]


def on_cuda(*arguments: Any) -> Tensor:
    """The operator's kernel, with what is given on the CPU."""
    *rows, inputs, layer = arguments
    there = copy(inputs)
    there.__dict__.update({name: part.cuda() for name, part in vars(inputs).items() if isinstance(part, Tensor)})
    sinks = None if layer.sinks is None else layer.sinks.cuda()
    return kernels.tree_attention(*(part.cuda() for part in rows), there, layer._replace(sinks=sinks)).cpu()


HALVED = Shape(dtype=torch.bfloat16)
SHAPES = Shape(), HALVED, Shape(window=20, softcap=30.0), replace(HALVED, heads=8, sinks=True)


@pytest.mark.parametrize("shape", SHAPES, ids=["float32", "bfloat16", "window", "sinks"])
def test_the_kernel_computes_what_its_torch_form_does(shape: Shape) -> None:
    rng = random.Random(0)
    for _ in range(50):
        pool = filled_pool(shape, 4096)
        sizes = [(rng.randrange(200), rng.randrange(1, 70), 0) for _ in range(rng.randrange(1, 9))]
        batch = random_batch(pool, sizes, rng)
        layer = random_rows(shape, len(batch.tokens))
        here, there = (attend(form, batch, layer, pool, shape).float() for form in (tree_attention, on_cuda))
        bound = 1e-5 if shape.dtype is torch.float32 else 2e-2
        assert (here - there).abs().max() <= bound * here.abs().max()

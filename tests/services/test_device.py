"""The verifier's work around the forward on a device, which is pretended: what it launches, copies and waits for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coppice.config.sections import VerifierSettings
from coppice.engine import steps
from coppice.engine.batching import settle
from coppice.engine.engine import Engine
from coppice.engine.rows import Piece, pack
from coppice.engine.self_check import self_check
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, union
from coppice.telemetry import SessionMetrics
from coppice.wire.common import Grammar
from coppice.wire.verifier import OpenSession, Verdict, VerifyStep
from services.verifier import worker
from services.verifier.worker import Worker
from tests.kernels import Shape, attend, filled_pool, random_batch, random_rows, tree_attention
from tests.pretend import Counts, pretending
from tests.sessions import VerifierClient, junk_tree

VOCAB, LAYERS, FEATURES = 1100, 4, (0, 2)
TINY_TARGET = {"vocab": VOCAB, "layers": LAYERS}
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=3)
GUIDED = {"grammar": Grammar("regex", "[a-z]{300}")}


class Verifier:
    """A worker without its thread: everything that was asked is served at once, in one forward."""

    def __init__(self, target: Path, counts: Counts | None) -> None:
        """`counts`: of the device it is on; None: on the CPU."""
        torch.set_num_threads(1)
        self.counts, self.inside, self.around = counts, Counts(), Counts()
        settings = VerifierSettings(target=str(target), threads=1, kv_tokens=32_768, prune=False)
        self.worker = Worker(settings, SessionMetrics("verifier"))
        self.worker.loop = asyncio.get_running_loop()
        with patch.object(worker, "load", self._load), patch.object(worker, "WARM_ROWS", 1):
            self.worker.load()

    def _load(self, settings: VerifierSettings) -> Engine:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
        if self.counts is None:
            return Engine(model, kv_tokens=settings.kv_tokens)
        engine, counts = Engine(model.to("cuda"), kv_tokens=settings.kv_tokens), self.counts
        forward = engine.forward

        def counted(*told: Any) -> Any:
            counts.clear()
            output = forward(*told)
            self.inside = replace(counts)
            counts.clear()
            return output

        engine.forward = counted  # type: ignore[method-assign]
        return engine

    async def serve(self, asked: Sequence[Any]) -> list[Any]:
        """The answers to what was asked, and in `around` what the device did for them beside the forward."""
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(0)
        while self.worker._inbox.qsize() < len(asked):  # noqa: ASYNC110 - grammars are compiled
            await asyncio.sleep(0.001)
        while not self.worker._inbox.empty():
            self.worker._inbox.get()()
        while not self.worker.idle():
            self.worker.serve()
        self.worker.serve()
        if self.counts is not None:
            self.around = replace(self.counts)
        return await asyncio.gather(*tasks)


class Text(VerifierClient):
    """A session whose messages go to the worker without a stream."""

    def __init__(self, verifier: Verifier, key: int, ids: Sequence[int], sampling: SamplingParams, **told: Any) -> None:
        told = {"max_len": len(ids) + 100, "feature_layers": FEATURES} | told
        super().__init__(SimpleNamespace(Verify=lambda: None), f"text-{key}", ids, sampling=sampling, **told)
        self.verifier, self.key = verifier, key

    async def ask(self, request: OpenSession | VerifyStep) -> Any:
        worker, now = self.verifier.worker, time.perf_counter_ns()
        if isinstance(request, OpenSession):
            return await worker.open(self.key, request, now)
        verdict = asyncio.get_running_loop().create_future()
        worker.verify(self.key, request, now, partial(settle, verdict))
        return await verdict


async def opened(
    verifier: Verifier, samplings: Sequence[SamplingParams], options: Sequence[dict[str, Any]] = ()
) -> list[Text]:
    """A session for each of the samplings, with options of its own if there are any, all at their first root."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(5 + at)] for at in range(len(samplings))]
    texts = [
        Text(verifier, at, *both, **(options[at] if options else {}))
        for at, both in enumerate(zip(prompts, samplings, strict=True))
    ]
    await verifier.serve([text.open() for text in texts])
    return texts


async def step(texts: Sequence[Text], trees: Sequence[DraftTree]) -> list[Verdict]:
    """All texts' steps in one forward."""
    return await texts[0].verifier.serve([text.verify(tree) for text, tree in zip(texts, trees, strict=True)])


async def written(
    verifier: Verifier, samplings: Sequence[SamplingParams], count: int, options: Sequence[dict[str, Any]] = ()
) -> list[list[int]]:
    """Ids behind each prompt by plain decoding, roots included."""
    texts = await opened(verifier, samplings, options)
    begun = [len(text.committed) for text in texts]
    for _ in range(count):
        await step(texts, [DraftTree.empty()] * len(texts))
    for text in texts:
        verifier.worker.close(text.key)
    await verifier.serve([])
    return [[*text.committed[at:], text.root] for text, at in zip(texts, begun, strict=True)]


def seeded(samplings: Sequence[SamplingParams], sessions: int) -> list[SamplingParams]:
    """One for each session, in turn, with a seed of its own."""
    return [samplings[seed % len(samplings)].model_copy(update={"seed": seed}) for seed in range(sessions)]


SAMPLINGS = {
    "greedy": [GREEDY],
    "sampled": [SAMPLED],
    "guided": [GREEDY, SAMPLED],
    "mixed": [
        *(GREEDY, SAMPLED, SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(temperature=1.2)),
        *(SamplingParams(temperature=1.0, min_p=0.02), SamplingParams(temperature=1.0, top_p=0.8)),
    ],
}


@pytest.mark.parametrize(("name", "sessions"), [("greedy", 1), *((name, 8) for name in SAMPLINGS)])
async def test_what_a_step_copies_does_not_depend_on_how_many_sessions_it_has(
    target: Path, sessions: int, name: str
) -> None:
    samplings, options = seeded(SAMPLINGS[name], sessions), [GUIDED] * sessions if name == "guided" else []
    plain = await written(Verifier(target, None), samplings, 40, options)
    with pretending() as counts:
        verifier = Verifier(target, counts)
        texts = await opened(verifier, samplings, options)
        for _ in range(2):  # the first one makes the inputs
            await step(texts, [DraftTree.empty()] * sessions)
        # The rows of features, and how sampled and guided ones are drawn; then ids and features come back.
        assert (verifier.inside.copies, verifier.inside.waits) == ((1, 0), 0)
        assert (verifier.around.to_host, verifier.around.waits) == (2, 0)
        assert verifier.around.to_device <= 2
        rng = random.Random(7)
        first = await step(texts, [junk_tree(rng, ids[3:], 30) for ids in plain])
        begun = [3 + 1 + len(verdict.accepted) for verdict in first]
        trees = [junk_tree(rng, ids[at:], 30) for ids, at in zip(plain, begun, strict=True)]
        verdicts = await step(texts, trees)
    accepted = [len(verdict.accepted) for verdict in verdicts]
    assert min(accepted) > 0
    if name != "guided":  # trees that lose nodes to a grammar have other sizes, and new inputs
        assert (verifier.inside.copies, verifier.inside.waits) == ((1, 0), 0)
    assert (verifier.around.to_host, verifier.around.waits) == (2, 0)
    assert verifier.around.to_device <= 3  # the slots of accepted KV, too
    # The draws and 64 float32 features for each committed row; no row of logits.
    rows = sum([1 + (len(verdict.verified) if verdict.pruned else 30) for verdict in verdicts])
    assert verifier.around.host_bytes == 8 * rows + 4 * 64 * sum(accepted) + 4 * 64 * sessions
    if name in ("greedy", "sampled"):  # no row is sorted or masked
        assert verifier.around.launches < 20


async def test_inputs_are_filled_again_once_they_were_copied(target: Path) -> None:
    """By an event where nothing of a forward was read, as of a prompt's first chunks."""
    with pretending() as counts:
        verifier = Verifier(target, counts)
        engine, batches = verifier.worker.engine, []
        for start in (0, 4):
            table = engine.pool.allocate(f"prompt-{start}", 8)
            batches.append(pack([Piece.chain(table, 0, [5 + start] * 4, [3])]))
        engine.forward(batches[0])
        engine.forward(batches[1])
        assert verifier.inside.waits == 1
        engine.forward(batches[0]).logits.cpu()
        engine.forward(batches[1])
        assert (verifier.inside.copies, verifier.inside.waits) == ((1, 0), 0)


def twice(rng: random.Random, good: Sequence[int], nodes: int) -> DraftTree:
    """A union in which every node of a tree may have twins, as when several heads draft."""
    trees = [junk_tree(rng, good, nodes), junk_tree(rng, good, nodes // 2)]
    return union(trees)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"feature_layers": ()},
    {"want_log_probs": True, "top_log_probs": 3},
    {"stop_ids": frozenset(range(0, VOCAB, 7))},
    GUIDED,
    {"max_len": 0},
]
"""the last one stands for a text that ends soon"""
LAWS = [
    *SAMPLINGS["mixed"],
    SamplingParams(temperature=1.0, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(logit_bias={5: 3.0}),
]


async def test_verdicts_and_texts_are_those_of_the_cpu(target: Path) -> None:
    """Over random unions, sessions of all laws under all options in each forward."""
    samplings = seeded(LAWS, len(LAWS) * len(OPTIONS))
    options = [OPTIONS[at // len(LAWS)] for at in range(len(samplings))]
    options = [{"max_len": 5 + at + 9} if "max_len" in told else told for at, told in enumerate(options)]
    here = Verifier(target, None)
    plain = await written(here, samplings, 20)
    with pretending() as counts:
        there = Verifier(target, counts)
        both = [await opened(verifier, samplings, options) for verifier in (here, there)]
        rng, accepted = random.Random(3), 0
        for _ in range(6):
            live = [at for at, text in enumerate(both[0]) if text.root >= 0]
            made = {at: len(both[0][at].committed) - 5 - at for at in live}
            trees = [twice(rng, plain[at][made[at] + 1 :], rng.choice([0, 4, 30])) for at in live]
            if not live:
                break
            verdicts = [await step([texts[at] for at in live], trees) for texts in both]
            for on_cpu, on_device in zip(*verdicts, strict=True):
                accepted += len(on_cpu.accepted)
                assert on_device.accepted == on_cpu.accepted
                assert on_device.log_probs == pytest.approx(on_cpu.log_probs, abs=1e-4)
            texts_of = [[(text.committed, text.root) for text in texts] for texts in both]
            assert texts_of[0] == texts_of[1]
        for on_cpu, on_device in zip(*both, strict=True):
            sessions = [text.verifier.worker._sessions[text.key] for text in (on_cpu, on_device)]
            used = [session.table.num_tokens for session in sessions]
            assert used[0] == used[1] == len(on_cpu.committed)
            windows = [
                np.concatenate(held.since(0, held.end)[1]) for held in (one.features for one in sessions) if held.end
            ]
            if windows:
                torch.testing.assert_close(*windows, atol=1e-4, rtol=1e-4)
    assert accepted > 150


async def test_a_step_that_the_host_judges_takes_nothing_from_those_beside_it(target: Path) -> None:
    """p/q chains, whose rows the host needs, in one forward with trees."""
    samplings, rng = seeded([SAMPLED], 4), random.Random(11)
    q_rows = np.full((3, VOCAB), 1 / VOCAB, np.float32)
    here = Verifier(target, None)
    plain = await written(here, samplings, 20)
    with pretending() as counts:
        both = [await opened(verifier, samplings) for verifier in (here, Verifier(target, counts))]
        for _ in range(5):
            made = [len(text.committed) - 5 - at for at, text in enumerate(both[0])]
            chains = [DraftTree.chain([rng.randrange(VOCAB) for _ in range(3)], [-1.0, -2.0, -3.0]) for _ in range(2)]
            trees = [junk_tree(rng, ids[at + 1 :], 20) for ids, at in zip(plain[2:], made[2:], strict=True)]
            for texts in both:
                asked = [text.verify(tree, q_rows=q_rows) for text, tree in zip(texts, chains, strict=False)]
                asked += [text.verify(tree) for text, tree in zip(texts[2:], trees, strict=True)]
                await texts[0].verifier.serve(asked)
            texts_of = [[(text.committed, text.root) for text in texts] for texts in both]
            assert texts_of[0] == texts_of[1]


# What only a CUDA device can tell: its texts are the CPU's, and its kernels compute what their torch forms do.
# `pytest -m gpu` runs these with the other tests of one; where there is none it is pretended.

SESSIONS, IDS = (40, 60) if torch.cuda.is_available() else (6, 15)
LAWS_APART = {f"T={t:g}": [SamplingParams(temperature=t)] for t in (0.0, 0.7, 1.0)} | {"mixed": SAMPLINGS["mixed"]}


class OnCuda(Verifier):
    """A worker whose target is on the CUDA device and replays graphs."""

    def _load(self, settings: VerifierSettings) -> Engine:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
        engine = Engine(model.to("cuda"), kv_tokens=settings.kv_tokens)
        assert engine.capture() == ""
        self_check(engine)
        return engine


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS_APART)
async def test_texts_are_the_cpus(target: Path, law: str) -> None:
    """Plain ones, and those of drafted trees, of which some nodes are right."""
    samplings = seeded(LAWS_APART[law], SESSIONS)
    expected = await written(Verifier(target, None), samplings, IDS)
    on_cuda = OnCuda(target, None)
    assert await written(on_cuda, samplings, IDS) == expected
    drafted = await opened(on_cuda, samplings)
    begun, rng = [len(text.committed) for text in drafted], random.Random(0)
    for _ in range(IDS // 5):
        done = [len(text.committed) - at for text, at in zip(drafted, begun, strict=True)]
        await step(drafted, [junk_tree(rng, ids[at + 1 :], 30) for ids, at in zip(expected, done, strict=True)])
    for text, at, ids in zip(drafted, begun, expected, strict=True):
        made = [*text.committed[at:], text.root]
        assert len(made) > IDS // 5
        assert made[: len(ids)] == ids[: len(made)]


def on_cuda(*arguments: Any) -> Tensor:
    """The operator's kernel, with what is given on the CPU."""
    *rows, inputs, layer = arguments
    there = copy(inputs)
    there.__dict__.update({name: part.cuda() for name, part in vars(inputs).items() if isinstance(part, Tensor)})
    sinks = None if layer.sinks is None else layer.sinks.cuda()
    return steps.tree_attention(*(part.cuda() for part in rows), there, layer._replace(sinks=sinks)).cpu()


HALVED = Shape(dtype=torch.bfloat16)
SHAPES = Shape(), HALVED, Shape(window=20, softcap=30.0), replace(HALVED, heads=8, sinks=True)


@pytest.mark.gpu
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

"""Every planted bug of tests/mutants.py is found by its check, and without one nothing is found.

`python -m tests.faults.planted --json FILE` prints which check finds each, and writes it for `make nightly`.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

from coppice.client.client import AsyncClient
from coppice.config.settings import Settings
from coppice.engine.batching import settle
from coppice.engine.engine import Engine
from coppice.errors import StaleFence, Unavailable
from coppice.heads.base import served_head
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.telemetry import SessionMetrics, configure_logging
from coppice.testing.reference import Reference
from coppice.wire.common import FeatureRef, Fence, committed_hash
from coppice.wire.verifier import OpenSession, Verdict, VerifyStep
from lab.identity import Ids, Question, Way, ask, compare, drawn_by, questions
from orchestrator.heads import HeadPool
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.service import GenerationServicer
from orchestrator.targets import Replica, TargetPool
from services.verifier.service import VerifierServicer
from services.verifier.worker import Worker as Verifier
from tests.fake_service import SERVICES
from tests.mutants import MUTANTS
from tests.recorder import drafter_of, server_of
from tests.services import test_states
from tests.sessions import hidden_states, values
from tests.tiny import make_target
from tests.unit import test_law, test_weights
from tests.unit.test_feature_heads import HIDDEN
from tests.unit.test_feature_heads import VOCAB as HEADS_VOCAB

VOCAB, WINDOW, PROMPTS, NEW = 64, 24, 10, 36


def lose_sessions(patch: pytest.MonkeyPatch) -> None:
    """Let verifiers lose the session of every third step."""
    verify, steps = Verifier.verify, itertools.count(1)

    def lost(self: Verifier, *arguments: Any) -> None:
        if next(steps) % 3 == 0:
            raise Unavailable("lost")
        verify(self, *arguments)

    patch.setattr(Verifier, "verify", lost)


def break_streams(patch: pytest.MonkeyPatch) -> None:
    """Let orchestrators lose every answer that was not resumed, after some tokens."""
    answers = GenerationServicer.answers

    async def lost(self: GenerationServicer, messages: Any, *arguments: Any) -> AsyncIterator[Any]:
        async with aclosing(answers(self, messages, *arguments)) as parts:
            count = 0
            async for part in parts:
                if not messages[0].resume_ids and count > 3:
                    raise Unavailable("lost")
                count += 1
                yield part

    patch.setattr(GenerationServicer, "answers", lost)


WAYS = {
    "plain": Way("plain", sessions=4),
    "single": Way("single:self", 8, 4),
    "merge": Way("merge", 16, 4),
    "sessions lost": Way("merge", 16, 4),
    "streams lost": Way("plain", sessions=4),
}
BREAKS = {"sessions lost": lose_sessions, "streams lost": break_streams}  # what happens to the pipeline in some ways
TAU = 4.0  # of a head that is the target itself, six deep, at T=1: less only where a text ends


@asynccontextmanager
async def pipeline(target: Path, heads: Mapping[str, Path]) -> AsyncIterator[tuple[str, Verifier]]:
    """Two verifiers of a target, a drafter for each language model in `heads`, and an orchestrator, all of them inside
    this process: what is patched here is patched in every service. Gives its address, and a verifier.
    """
    told: Any = {"threads": 1, "dtype": "float32", "kv_tokens": 8192}
    settings = Settings(
        verifier={**told, "target": str(target), "name": "tiny", "prune": False},  # type: ignore[arg-type]
        orchestrator={"draft_deadline_ms": 5000.0, "budget": 8},  # type: ignore[arg-type]
    )
    at, drafters_at = list[str](), dict[str, str]()
    async with AsyncExitStack() as close:
        for _ in range(2):
            worker = Verifier(settings.verifier, SessionMetrics("verifier"))
            await worker.start()
            close.push_async_callback(worker.stop)
            servicer = VerifierServicer(settings, worker)
            at.append((await close.enter_async_context(server_of(SERVICES["verifier"], servicer))).address)
        for name, path in heads.items():
            drafter = settings.drafter.model_copy(update={**told, "name": name, "kind": "lm", "path": str(path)})
            drafters_at[name] = (await close.enter_async_context(drafter_of(served_head(drafter)))).address
        metrics, dialer = OrchestratorMetrics(), Dialer()
        pool = TargetPool(at, dialer)
        description = await pool.first_target()
        pools = {
            name: HeadPool(name, [address], dialer, metrics, description.layers)
            for name, address in drafters_at.items()
        }
        watching = [asyncio.create_task(one.watch()) for one in (pool, *pools.values())]
        await asyncio.gather(*(each.look_at_all() for each in pools.values()))
        orchestrator = GenerationServicer(settings, description, pool, pools, None, metrics)
        server = await close.enter_async_context(server_of(SERVICES["orchestrator"], orchestrator))
        yield server.address, worker
        for task in watching:
            task.cancel()


@dataclass
class Rig:
    """A pipeline that runs, and what plain decoding says to the questions."""

    runner: asyncio.Runner
    address: str
    worker: Verifier
    folder: Path
    asked: list[Question]
    expected: list[Ids] = field(default_factory=list)

    def find(self, check: str) -> tuple[int, str]:
        """Tokens until something was found, and what; 0 and nothing when all is well."""
        if check in WAYS:
            return self.runner.run(self.identity(check))
        if check.startswith("law"):
            return self.law(check.rpartition(" ")[2])
        if check in ("weights", "states"):
            return self.weights() if check == "weights" else self.states()
        return self.runner.run({"tau": self.tau, "features": self.features, "fence": self.fence}[check]())

    async def identity(self, name: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            if name in BREAKS:
                BREAKS[name](patch)
            said = await asyncio.to_thread(ask, self.address, self.asked, WAYS[name], NEW)
        line = compare(name, self.expected, said)
        assert "UNAVAILABLE" not in line["difference"], f"nobody answered, which finds nothing: {line['difference']}"
        return (line["compared"], line["difference"]) if line["difference"] else (0, "")

    def law(self, head: str) -> tuple[int, str]:
        """A law is refuted at the level of test_law."""
        for number, params in enumerate(test_law.SETTINGS, 1):
            try:
                p = test_law.p_of_step(head, params)
            except AssertionError:  # an outcome that the law does not have
                p = 0.0
            if p < test_law.BOUND:
                return 4 * number * test_law.SAMPLES, f"p = {p:.0e}"
        return 0, ""

    def weights(self) -> tuple[int, str]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            target = make_target(Path(folder) / "target", HEADS_VOCAB, layers=8, hidden=HIDDEN)
            try:
                test_weights.test_after_a_swap_a_head_drafts_as_a_new_one("specblock", "float32", target, Path(folder))
            except AssertionError as error:
                return 1, str(error).partition("\n")[0] or "another draft"
        return 0, ""

    def states(self) -> tuple[int, str]:
        """What a hybrid says through trees; the self-check, which may refuse it first, is not asked."""
        engine = Engine(copy.deepcopy(test_states.texts_of("qwen3_5_text")[0]), kv_tokens=2048)
        for said, _ in test_states.differences("qwen3_5_text", engine):
            return len(said), "another text"
        return 0, ""

    async def tau(self) -> tuple[int, str]:
        """What coupled drafts of the target itself are worth."""
        steps = tokens = 0
        async with AsyncClient(self.address) as client:
            for seed in range(3):
                prompt, _ = self.asked[seed]
                sampling = SamplingParams(temperature=1.0, seed=seed)
                told = {"policy": "single:self", "budget": 24, "max_new_tokens": NEW}
                answer = await client.generate(prompt, sampling=sampling, ignore_eos=True, **told)  # type: ignore[arg-type]
                steps, tokens = steps + answer.steps, tokens + sum(answer.accept_lengths)
        return (0, "") if tokens >= TAU * steps else (tokens, f"tau {tokens / steps:.2f}, expected {TAU:g}")

    async def verified(self, key: int, step: VerifyStep) -> Verdict:
        """One step of a session of the verifier."""
        verdict = asyncio.get_running_loop().create_future()
        self.worker.verify(key, step, 0, partial(settle, verdict))
        return await verdict  # type: ignore[no-any-return]

    async def features(self) -> tuple[int, str]:
        """A step's features are the hidden states of what it commits."""
        prompt, drafted = list(range(1, 20)), [5, 6, 7]
        model = AutoModelForCausalLM.from_pretrained(self.folder / "target").eval()
        await self.worker.open(-1, OpenSession("features", prompt, SamplingParams(), frozenset(), 60, (0, 1)), 0)
        try:
            fence = Fence(1, len(prompt), committed_hash(prompt))
            tree = DraftTree(np.array(drafted), np.zeros(3, np.int64), np.full(3, -1, np.float32))
            verdict = await self.verified(-1, VerifyStep(fence, 4, tree))
            count = 1 + len(verdict.accepted)
            feed = self.worker.follow(FeatureRef("", "features", len(prompt), count))
            rows = await anext(aiter(feed))
            feed.cancel()
        finally:
            self.worker.close(-1)
        path = [4, *(drafted[node - 1] for node in verdict.accepted)]
        expected = hidden_states(model, [*prompt, *path], (0, 1))[len(prompt) :]
        return (0, "") if torch.allclose(values([rows]), expected, atol=1e-4) else (count, "other features")

    async def fence(self) -> tuple[int, str]:
        """A step on other tokens than are committed is refused."""
        await self.worker.open(-2, OpenSession("fence", [1, 2, 3], SamplingParams(), frozenset(), 60), 0)
        try:
            await self.verified(-2, VerifyStep(Fence(1, 3, 7), 4, DraftTree.empty()))
        except StaleFence:
            return 0, ""
        finally:
            self.worker.close(-2)
        return 1, "a stale step is verified"


@contextmanager
def rigged(folder: Path) -> Iterator[Rig]:
    """Start a pipeline and ask plain decoding; what it says is what transformers draws, far from any rounding."""
    target = make_target(folder / "target", VOCAB, window=WINDOW, tokenizer=False)
    other = make_target(folder / "other", VOCAB, seed=1, tokenizer=False)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(50)) for _ in range(PROMPTS)]
    logged = structlog.get_config()
    configure_logging(as_json=False)  # as a service does; otherwise a traceback takes seconds
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(Replica, "cool_down", lambda self: True)  # a session that is lost on purpose says nothing
        opened = pipeline(target, {"self": target, "other": other})
        rig = Rig(runner, *runner.run(opened.__aenter__()), folder, questions(prompts, PROMPTS, 1))
        try:
            said = runner.run(asyncio.to_thread(ask, rig.address, rig.asked, WAYS["plain"], NEW))
            reference = Reference(target, "float32", threads=1)
            pairs = zip(rig.asked, said, strict=True)
            kept = [(one, own) for one, ids in pairs if (own := drawn_by(reference, one, ids)) is not None]
            rig.asked, rig.expected = [one for one, _ in kept], [own for _, own in kept]
            yield rig
        finally:
            runner.run(opened.__aexit__(None, None, None))
            structlog.configure(**logged)


def rows() -> list[dict[str, object]]:
    """Plant every bug, and say what found it after how many tokens; before that no check finds anything."""
    made: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="coppice-mutants-") as folder, rigged(Path(folder)) as rig:
        for check in dict.fromkeys(mutant.check for mutant in MUTANTS.values()):
            assert rig.find(check) == (0, ""), check
        for name, mutant in MUTANTS.items():
            with pytest.MonkeyPatch.context() as patch:
                mutant.plant(patch)
                tokens, found = rig.find(mutant.check)
            made.append({"mutant": name, "check": mutant.check, "tokens": tokens, "found": found, "ok": tokens > 0})
    return made


if __name__ == "__main__":
    made = rows()
    for row in made:
        print("{mutant}: {check}, {tokens} tokens: {found}".format(**row) if row["ok"] else f"FAILED {row['mutant']}")
    if sys.argv[1:2] == ["--json"]:
        Path(sys.argv[2]).write_text(json.dumps({"rows": made}), encoding="utf-8")
    sys.exit(not all(row["ok"] for row in made))

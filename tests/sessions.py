"""Sessions of a verifier and of a drafter as an orchestrator holds them, and what plain transformers say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
from torch import Tensor

from coppice.errors import CoppiceError, from_rpc_error
from coppice.rpc.channels import Dialer, Stub
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from coppice.speculation.tree import DraftTree, extend
from coppice.v1 import drafter_pb2, verifier_pb2
from coppice.wire import drafter, verifier
from coppice.wire.common import FeatureRef, Features, Fence, committed_hash

VOCAB = 1100  # more ids than a row may hold
IDS = [random.Random(0).randrange(VOCAB) for _ in range(21)]
TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 9, 5, 1, 2]  # of a drafter's session


@asynccontextmanager
async def verifying(service: Any) -> AsyncIterator[Any]:
    async with Dialer().open(service.address) as channel:
        yield Stub(channel, verifier_pb2)


class _Client:
    """A session of either service, as the orchestrator holds it."""

    def __init__(self, call: Any, ids: Sequence[int]) -> None:
        self.call, self.committed, self.step_number = call, list(ids), 0

    def fence(self, step: int) -> Fence:
        return Fence(step, len(self.committed), committed_hash(self.committed))

    async def message(self) -> Any:
        """The next message of the service. Raises the error that the call ended with."""
        with suppress(grpc.aio.AioRpcError):
            if (message := await self.call.read()) is not grpc.aio.EOF:
                return message
        raise await self.ending()

    async def ending(self) -> CoppiceError:
        code, details = await self.call.code(), await self.call.details()
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


class VerifierClient(_Client):
    """One session of a verifier."""

    def __init__(self, stub: Any, session: str = "s", ids: Sequence[int] = IDS, **options: Any) -> None:
        super().__init__(stub.Verify(), ids)
        self.sampling = options.pop("sampling", SamplingParams())
        stop_ids = frozenset(options.pop("stop_ids", ()))
        max_len = options.pop("max_len", len(ids) + 64)
        self.opening = verifier.OpenSession(session, list(ids), self.sampling, stop_ids, max_len, **options)
        self.root = -1

    async def open(self) -> VerifierClient:
        opened = await self.ask(self.opening)
        assert isinstance(opened, verifier.SessionOpened)
        assert opened.fence == self.fence(0)
        self.opened, self.root = opened, self.draw(opened)
        return self

    def draw(self, said: verifier.SessionOpened | verifier.Verdict) -> int:
        """The next root, drawn here unless the verifier drew it."""
        assert said.next is not None
        if said.next.row is None:
            return said.next.drawn_id
        return draw(said.next.row.ids, said.next.row.log_probs, self.sampling.seed, len(self.committed))

    async def verify(self, tree: DraftTree | None = None, **changes: Any) -> verifier.Verdict:
        """One step: commit the root and what is accepted, and draw the next root. The whole tree is verified."""
        tree = DraftTree.empty() if tree is None else tree
        step = verifier.VerifyStep(self.fence(self.step_number + 1), self.root, tree, whole_tree=True)
        verdict = await self.ask(replace(step, **changes))
        assert isinstance(verdict, verifier.Verdict)
        self.step_number += 1
        self.committed += [self.root, *(int(tree.tokens[node - 1]) for node in verdict.accepted)]
        assert verdict.fence == self.fence(self.step_number)
        self.root = -1 if verdict.next is None else self.draw(verdict)
        return verdict

    async def ask(
        self, request: verifier.OpenSession | verifier.VerifyStep
    ) -> verifier.SessionOpened | verifier.Verdict:
        return await self.say(verifier.verify_request_to_wire(request))

    async def say(self, message: Any) -> verifier.SessionOpened | verifier.Verdict:
        try:
            await self.call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self.ending() from None
        return await self.read()

    async def read(self) -> verifier.SessionOpened | verifier.Verdict:
        return verifier.read_verify_response(await self.message())


async def target_of(stub: Any) -> verifier.TargetDescription:
    return verifier.read_target(await stub.DescribeTarget(verifier_pb2.DescribeTargetRequest()))


async def described(service: Any, idle: bool = False) -> verifier.TargetDescription:
    """What a verifier says of itself; when it is idle, if that is asked for."""
    async with verifying(service) as stub:
        return await (until_idle if idle else target_of)(stub)


async def until_idle(stub: Any) -> verifier.TargetDescription:
    """What the verifier says when all sessions are closed and their KV is free."""
    for _ in range(1000):
        now = await target_of(stub)
        if not now.sessions and not now.kv_tokens_used:
            break
        await asyncio.sleep(0.01)
    return now


async def rows_to(call: Any, end: int) -> list[Features]:
    """Feature rows of a stream up to a position."""
    parts: list[Features] = []
    while not parts or parts[-1].start + parts[-1].count < end:
        item = verifier.read_fed(await call.read(), 0)
        assert isinstance(item, Features)
        parts.append(item)
    return parts


async def fetch(stub: Any, ref: FeatureRef) -> list[Features]:
    """Feature rows of a window; what the session commits is not waited for."""
    try:
        return await rows_to(stub.FetchFeatures(verifier.fetch_to_wire(ref)), ref.start + ref.count)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def values(parts: Sequence[Features]) -> Tensor:
    """(n, F) float32 rows of inline features."""
    rows = b"".join(part.inline or b"" for part in parts)
    return torch.frombuffer(bytearray(rows), dtype=torch.float32).view(sum(part.count for part in parts), -1)


def hidden_states(model: Any, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """(n, F) of a plain forward."""
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0] for layer in layers], dim=-1)


def last_row(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


def continuation(model: Any, ids: Sequence[int], count: int, sampling: SamplingParams | None = None) -> list[int]:
    """What plain decoding says: `generate` when greedy, else one keyed draw for each position."""
    if sampling is None:
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, eos_token_id=None)
        return out[0, len(ids) :].tolist()
    text = list(ids)
    for _ in range(count):
        text.append(draw(*decode_row(last_row(model, text).numpy(), sampling), sampling.seed, len(text)))
    return text[len(ids) :]


def junk_tree(random: random.Random, good: Sequence[int], nodes: int, vocab_size: int = VOCAB) -> DraftTree:
    """A random tree into which the true continuation may be woven; scores fall along paths."""
    tokens: list[int] = []
    parents: list[int] = []
    scores = [0.0]
    spine = 0  # the node that spells the longest true prefix so far, and its depth
    depth = 0
    for node in range(1, nodes + 1):
        if depth < len(good) and random.random() < 0.2:
            parent, token = spine, good[depth]
            spine, depth = node, depth + 1
        else:
            parent, token = random.randrange(max(0, node - 6), node), random.randrange(vocab_size)
        tokens.append(token)
        parents.append(parent)
        scores.append(scores[parent] - random.random())
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores[1:], np.float32))


@asynccontextmanager
async def drafting(service: Any) -> AsyncIterator[Any]:
    async with Dialer().open(service.address) as channel:
        yield Stub(channel, drafter_pb2)


class DrafterClient(_Client):
    """One session of a drafter."""

    def __init__(self, stub: Any, ids: Sequence[int] = TEXT, **options: Any) -> None:
        super().__init__(stub.Draft(), ids)
        self.opening = drafter.OpenDraft("s", list(ids), options.pop("sampling", SamplingParams()), **options)

    async def open(self) -> DrafterClient:
        await self.call.write(drafter.draft_request_to_wire(self.opening))
        self.opened: Any = await self.read()
        assert isinstance(self.opened, drafter.DraftOpened)
        return self

    async def send(self, root: int, commit: Sequence[int] = (), budget: int = 16, **changes: Any) -> None:
        self.committed += commit
        self.step_number += 1
        advance = drafter.Advance(list(commit), changes.pop("features", None), changes.pop("rejection", None))
        step = drafter.DraftStep(replace(self.fence(self.step_number), **changes), root, budget, advance)
        await self.call.write(drafter.draft_request_to_wire(step))

    async def read(self) -> drafter.TreeDelta | drafter.DraftOpened:
        return drafter.read_draft_response(await self.message())

    async def tree(self) -> drafter.TreeDelta:
        """Deltas up to the last, as one."""
        nodes, q_rows = DraftTree.empty(), None
        while True:
            delta = await self.read()
            assert isinstance(delta, drafter.TreeDelta)
            nodes = extend(nodes, delta.nodes)
            q_rows = delta.q_rows
            if delta.last:
                return drafter.TreeDelta(delta.fence, nodes, True, delta.forward_ns, delta.total_ns, q_rows)

    async def draft(self, root: int, commit: Sequence[int] = (), budget: int = 16) -> drafter.TreeDelta:
        await self.send(root, commit, budget)
        return await self.tree()


async def head_of(stub: Any) -> drafter.HeadDescription:
    return drafter.read_head(await stub.DescribeHead(drafter_pb2.DescribeHeadRequest()))


async def drafter_idle(stub: Any) -> drafter.HeadDescription:
    """What the drafter says when all sessions are closed."""
    for _ in range(500):
        if not (head := await head_of(stub)).sessions:
            break
        await asyncio.sleep(0.01)
    return head


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends, its messages read and dropped."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()

"""A day's traffic as 200,000 short requests: clients of all kinds at once, every text plain's own, and nothing grows.

`REQUESTS=5000 pytest tests/nightly/test_day_at_length.py` is a shorter day.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import pytest

from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Accumulator
from coppice.errors import CoppiceError, InvalidField
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.telemetry import metric
from coppice.testing import tiny_models
from coppice.testing.reference import Reference
from lab.identity import SAMPLINGS, drawn_by
from tests.faults.test_fuzz import State, lets_go
from tests.stacks import serving
from tests.tiny import CHAT_TEMPLATE, make_target, make_tokenizer
from tests.unit.test_feature_heads import save_random

REQUESTS = int(os.environ.get("REQUESTS", 100_000))  # to each of two targets
QUESTIONS, CLIENTS, VOCAB, WARM_UP, LOOK_S, SAY_S = 240, 48, 300, 0.05, 2.0, 60.0
GROWTH = 24.0  # MiB, of a process in the second half of the requests, by a line through its sizes
TRAINING = {"adapter.policy": "always", "adapter.interval": 50, "adapter.cpu_share": 0.2}
TWICE: Any = {"verifiers": 2, "orchestrators": 2, "replicas": 2, "http_port": 0}
GRAMMARS: Any = ({"choice": ["yes", "no", "nobody"]}, {"regex": "[0-9]{2,6}"}, {"json": {"type": "object"}})
REFUSED: Any = (
    *({"temperature": -1}, {"n": 0}, {"min_p": 2}, {"policy": "single:nobody"}, {"budget": 10**6}),
    *({"max_tokens": -3}, {"unknown": 1}, {"stop_token_ids": [-1]}, {"guided_regex": "(", "ignore_eos": False}),
)
pytestmark = pytest.mark.timeout(0)


class Question(NamedTuple):
    """What is asked, and what plain decoding answers."""

    prompt: Any
    options: dict[str, Any]
    ids: tuple[int, ...]
    text: str


def questions(address: str, reference: Reference) -> Iterator[Question]:
    """Prompts of all kinds that share beginnings; greedy, sampled, in grammars; none whose text rounding decides."""
    rng = random.Random(1)
    beginnings = [[rng.randrange(1, 257) for _ in range(40)] for _ in range(6)]
    with Client(address) as client:
        for number in range(QUESTIONS):
            words = f"The lamp of {number % 7} is {number}."
            ids = rng.choice(beginnings) + [rng.randrange(1, 257) for _ in range(rng.randrange(1, 9))]
            prompt: Any = (ids, ids, words, [{"role": "user", "content": words}])[number % 4]
            sampling = SAMPLINGS[number % len(SAMPLINGS)].model_copy(update={"seed": number})
            new_tokens = 1 + number % 8 if number % 12 else 32  # the adapter learns from longer ones
            options = {"sampling": sampling, "max_new_tokens": new_tokens, "ignore_eos": number % 6 != 5}
            options |= {"structured_outputs": GRAMMARS[number // 6 % 3]} if number % 6 == 5 else {}
            plain = client.generate(prompt, policy="plain", **options)
            encoded = tuple(ids) if number % 4 < 2 else reference.text.encode(words, chat=number % 4 == 3)
            drawn = plain.ids if number % 6 == 5 else drawn_by(reference, (encoded, sampling), plain.ids)
            assert drawn in (plain.ids, None), (prompt, options)
            if drawn is not None:
                yield Question(prompt, options, plain.ids, plain.text)


class Traffic:
    """Clients of one stack, and what became of their requests."""

    def __init__(self, stack: Stack, target: Path) -> None:
        self._stack, self._random = stack, random.Random(2)
        self._questions = list(questions(stack.address, Reference(target, "float32", threads=1)))
        assert len(self._questions) > 0.9 * QUESTIONS
        with Client(stack.address) as client:
            self._policies = client.describe().policies
        self._fronts = cycle([ready.http for ready in stack.services.values() if ready.role == "orchestrator"])
        self.ways, self.wrong, self.failed = Counter[str](), list[str](), list[str]()

    async def run(self, count: int) -> None:
        """So many requests."""
        numbers = iter(range(count))

        async def client() -> None:
            for _ in numbers:
                await self._ask()

        async with AsyncClient(self._stack.address) as self._sdk, aiohttp.ClientSession() as self._http:
            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _ask(self) -> None:
        asked, way = self._random.choice(self._questions), self._random.choice(WAYS)
        drafting = {"policy": self._random.choice(self._policies), "budget": self._random.choice((None, 1, 8, 31))}
        self.ways[way.__name__] += 1
        try:
            async with asyncio.timeout(60):
                ids, text = await way(self, asked, drafting)
        except (CoppiceError, aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            self.failed.append(f"{way.__name__} {asked} {drafting}: {error!r}")
            return
        if ids != asked.ids[: len(ids)] or (text is not None and (ids, text) != (asked.ids, asked.text)):
            self.wrong.append(f"{way.__name__} {asked} {drafting}: {ids} {text!r}")

    # Each way gives the ids that came and the text, None if the client left or was refused.

    async def whole(self, asked: Question, drafting: Any) -> Any:
        answer = await self._sdk.generate(asked.prompt, **asked.options, **drafting)
        return answer.ids, answer.text

    async def streamed(self, asked: Question, drafting: Any) -> Any:
        answer, last = Accumulator(), self._random.choice(LEAVES)
        async with contextlib.aclosing(self._sdk.stream(asked.prompt, **asked.options, **drafting)) as stream:  # type: ignore[type-var]
            async for event in stream:
                answer.add(event)
                if (last := last - 1) == 0:
                    return answer.completion().ids, None
        return answer.completion().ids, answer.completion().text

    async def refused(self, asked: Question, drafting: Any) -> Any:
        with pytest.raises(InvalidField, match=r"prompt|ids"):
            await self._sdk.generate([VOCAB], **asked.options, **drafting)
        return (), None

    @contextlib.asynccontextmanager
    async def _posted(self, asked: Question, drafting: Any, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        options = dict(asked.options)
        sampling, is_chat = options.pop("sampling"), isinstance(asked.prompt[0], dict)
        body = {"messages" if is_chat else "prompt": asked.prompt, "max_tokens": options.pop("max_new_tokens")}
        body |= sampling.model_dump(include={"temperature", "top_p", "top_k", "seed"})
        body |= {"return_token_ids": True, **options, **drafting, **fields}
        path = "chat/completions" if is_chat else "completions"
        async with self._http.post(f"http://{next(self._fronts)}/v1/{path}", json=body) as response:
            yield response

    async def http_whole(self, asked: Question, drafting: Any) -> Any:
        async with self._posted(asked, drafting) as response:
            (choice,) = json.loads(await response.read())["choices"]
        return tuple(choice["token_ids"]), choice["text"] if "text" in choice else choice["message"]["content"]

    async def http_streamed(self, asked: Question, drafting: Any) -> Any:
        ids, text, last = list[int](), "", self._random.choice(LEAVES)
        async with self._posted(asked, drafting, stream=True) as response:
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    return tuple(ids), text
                if line.startswith(b"data: "):
                    (choice,) = json.loads(line[6:])["choices"]
                    ids += choice.get("token_ids", ())
                    text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    if (last := last - 1) == 0:
                        return tuple(ids), None
        raise ValueError(f"a stream ends behind {text!r}")

    async def http_refused(self, asked: Question, drafting: Any) -> Any:
        bad = self._random.choice(REFUSED)
        async with self._posted(asked, drafting, **bad) as response:
            error = json.loads(await response.read())["error"]
        if response.status != 400 or error["param"].partition(".")[0] not in bad:
            raise ValueError(f"{bad} gets {error}")
        return (), None


WHOLE, STREAMED = (Traffic.whole, Traffic.http_whole), (Traffic.streamed, Traffic.http_streamed)
WAYS = (*WHOLE * 4, *STREAMED * 5, Traffic.refused, Traffic.http_refused)
LEAVES = (0, 0, 0, 0, 0, 1, 2, 3)  # behind so many events of a stream; 0: not at all


async def watch(stack: Stack, say: Callable[[str], None], sizes: dict[str, list[float]]) -> None:
    """Note the time and the resident memory of every process, MiB, for ever; say the latest once a minute."""
    pids = {name: ready.pid for name, ready in stack.services.items()} | {"redis": stack.redis.pid}  # type: ignore[union-attr]
    began = said = time.monotonic()
    while True:
        sizes["s"].append(time.monotonic() - began)
        for name, pid in pids.items():
            sizes[name].append(psutil.Process(pid).memory_info().rss / 2**20)
        if time.monotonic() - said > SAY_S:
            said += SAY_S
            say(", ".join(f"{name} {size[-1]:.0f}" for name, size in sizes.items()))
        await asyncio.sleep(LOOK_S)


async def at_rest(stack: Stack) -> tuple[dict[str, State], float]:
    """What every process holds when no client is there, and how many records in Redis nobody has read yet."""
    for ready in stack.services.values():
        await lets_go(ready)
    await asyncio.sleep(2 * LOOK_S)  # connections end, and the adapter reads what was sent last
    pages = {name: ready.metrics for name, ready in stack.services.items()}
    sent = sum(metric(page, "coppice_signals_sent_total") for page in pages.values())
    read = sum(metric(pages["adapter"], f"coppice_adapter_records_{name}_total") for name in ("read", "lost"))
    return {name: State.of(ready) for name, ready in stack.services.items()}, sent - read


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
async def test_a_day_leaves_everything_as_it_was(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(line: str) -> None:
        counts = f"{traffic.ways.total()} requests, {len(traffic.wrong)} wrong, {len(traffic.failed)} failed"
        with capsys.disabled():
            print(f"\n{kind}: {counts}; {line}", end="", flush=True)

    target = tmp_path / "target"
    if kind == "llama":
        make_target(target, VOCAB, layers=4)
    else:
        monkeypatch.setitem(tiny_models._SIZES, "vocab_size", VOCAB)
        tiny_models.save_tiny(kind, "", target)
        make_tokenizer(target, 256, CHAT_TEMPLATE)
    block = save_random(tmp_path / "block", "specblock", vocab_size=VOCAB, feature_layers=(1, 2, 3))
    heads = HeadSpec("block", "specblock", block), HeadSpec("lookup", "lookup")
    extra = {"verifier": {"verifier.kv_tokens": 8192}, "adapter": TRAINING}
    with serving(tmp_path, target, *heads, adapt=True, extra=extra, **TWICE) as stack:
        traffic = await asyncio.to_thread(Traffic, stack, target)
        await traffic.run(int(WARM_UP * REQUESTS))
        (before, unread), sizes = await at_rest(stack), defaultdict[str, list[float]](list)
        watching = asyncio.create_task(watch(stack, say, sizes))
        await traffic.run(REQUESTS - traffic.ways.total())
        watching.cancel()
        times = sizes.pop("s")
        half = times[len(times) // 2 :]  # whose growth a line through it tells
        slopes = {name: np.polyfit(half, size[-len(half) :], 1)[0] for name, size in sizes.items()}
        grown = {name: round(float(slope) * (half[-1] - half[0]), 1) for name, slope in slopes.items()}
        say(f"{times[-1]:.0f} s, {dict(traffic.ways)}, MiB grown {grown}")
        after, unread_now = await at_rest(stack)
        trained = metric(stack.services["adapter"].metrics, "coppice_adapter_updates_total")
        stack.check()
        log = "".join(file.read_text() for file in tmp_path.glob("*.log"))  # noqa: ASYNC240
    assert (traffic.wrong[:5], traffic.failed[:5]) == ([], [])
    assert grown.pop("redis") < 256  # its streams fill up to a bound of their own
    assert max(grown.values()) < GROWTH, grown
    assert all(state.has_not_grown(before[name], 1 << 40) for name, state in after.items()), (before, after)
    assert (unread_now, trained > 0) == (unread, True)
    assert not re.search(r"unexpected error|Traceback|forward failed|drafting failed|goes on without", log), log[-3000:]

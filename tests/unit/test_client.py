"""The SDK: requests as built, events as folded, errors as typed, and what importing it costs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

import coppice
from coppice import errors
from coppice.client import client as client_module
from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Accumulator
from coppice.client.request import build_request
from coppice.errors import Cancelled, CoppiceError, DeadlineExceeded, InvalidField, NotFound, Overloaded, Unavailable
from coppice.speculation.sampling import SamplingParams
from coppice.wire.generation import ChatMessage, Chunk, Finished, GenerationRequest, Origin, Started, StepTree, Timings
from tests.fake_service import echo_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon, and a server soon taken for lost."""
    for name, seconds in {"PAUSE_S": 0.05, "SILENCE_S": 0.3, "ALIVE_S": 0.3}.items():
        monkeypatch.setattr(client_module, name, seconds)


def test_everything_public_is_at_the_top_and_listed() -> None:
    own = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CoppiceError)]
    assert {kind.__name__ for kind in own} < set(coppice.__all__) <= set(dir(coppice))
    assert all(getattr(coppice, name) for name in coppice.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        coppice.Server  # noqa: B018


# --- requests ---


def test_a_prompt_is_text_ids_or_messages() -> None:
    assert build_request("hi").text == "hi"
    assert build_request([1, 2]).ids == build_request(np.array([1, 2])).ids == (1, 2)
    message, named = ChatMessage("user", "hi"), ChatMessage("assistant", "", "so", "bob")
    assert build_request([message]).chat == build_request([{"role": "user", "content": "hi"}]).chat == (message,)
    assert build_request([asdict(named)]).chat == (named,)


def test_every_option_reaches_the_request() -> None:
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {4: -100}}
    sampling: Any = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, **penalties}
    same: Any = {"max_new_tokens": 5, "policy": "plain", "budget": 0, "ignore_eos": True, "pq": True, "coupled": False}
    request = build_request("hi", **sampling, **same, stop="end", log_probs=True, resume_ids=[4])
    wanted = GenerationRequest("hi", resume_ids=(4,), stop=("end",), want_log_probs=True, **same)
    assert request == replace(wanted, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([{"role": "user"}], {}, "prompt"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}, "prompt"),
        ([{"role": "user", "content": "hi", "tool_calls": []}], {}, "prompt"),
        ([ChatMessage("user", "hi"), "hi"], {}, "prompt"),
        ("hi", {"top_k": 1 << 32}, "top_k"),
        ("hi", {"seed": 1 << 64}, "seed"),
        ("hi", {"temperature": -1}, "temperature"),
        ("hi", {"logit_bias": {4: 1000}}, "logit_bias"),
        ("hi", {"sampling": SamplingParams(), "seed": 3}, "sampling"),
        ("hi", {"budget": 1000}, "budget"),
        ("hi", {"resume_ids": [-1]}, "resume_ids"),
    ],
)
def test_an_unusable_value_is_named(prompt: object, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as error:
        build_request(prompt, **options)  # type: ignore[arg-type]
    assert error.value.field == field


@pytest.mark.parametrize(
    ("called", "option", "hint"),
    [
        ("generate", "max_tokens", "; did you mean max_new_tokens?"),
        ("stream", "temprature", "; did you mean temperature?"),
        ("generate", "best_of", ""),
    ],
)
def test_an_unknown_option_is_a_type_error_of_what_was_called(called: str, option: str, hint: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError) as error:
        getattr(client, called)("hi", **{option: 1})
    assert str(error.value) == f"{called}() got an unexpected keyword argument {option!r}{hint}"


# --- folding ---


def test_events_fold_into_a_completion_a_cancelled_one_if_they_are_cut_short() -> None:
    draft, root = Origin.DRAFT, Origin.ROOT
    ticks = iter([10.0, 10.5, 11.0, 12.0])
    answer = Accumulator(clock=lambda: next(ticks))
    answer.add(Started(3, "route", ("a", "b"), 31, 7))
    answer.add(Chunk("x", (1,), (root,), ("x",), (-1.0,)))
    answer.add(Chunk("yz", (2, 3, 4), (draft, draft, root), ("y", "", "z"), (-2.0, -3.0, -4.0)))
    cut = answer.completion()
    assert (cut.finish_reason, cut.ids, cut.new_tokens) == ("cancelled", (1, 2, 3, 4), 4)
    assert (cut.steps, cut.tau) == (0, 1.0)
    answer.add(Chunk("!", (5,), (root,), ("!",), (-5.0,)))
    answer.add(Finished("eos", 3, 5, [3, 1], [1, -1], [9, 0], 1, 2, Timings(queue_ns=1, decode_ns=2 * 10**9), 6, 7))
    whole = answer.completion()
    assert (whole.text, whole.ids, whole.log_probs) == ("xyz!", (1, 2, 3, 4, 5), (-1.0, -2.0, -3.0, -4.0, -5.0))
    assert whole.origins == (root, draft, draft, root, root)
    assert (whole.steps, whole.tau, whole.ttft_s, whole.decode_s, whole.tokens_per_s) == (2, 2.0, 0.5, 2.0, 2.0)
    assert (whole.routed, whole.verified_nodes, whole.late_drafts, whole.bad_drafts) == ([1, -1], [9, 0], 1, 2)
    shown = whole.to_json()
    assert (shown["seed"], shown["tau"], shown["ids"]) == (7, 2.0, [1, 2, 3, 4, 5])
    assert sum(shown["timings_ns"].values()) == shown["timings_ns"]["queue"] == 1
    assert whole._repr_html_().startswith('<pre style="white-space: pre-wrap">x<u>y</u>z!</pre><p>5 tokens, tau 2.00, ')


def test_a_notebook_shows_an_answer_with_its_trees_as_text_that_is_no_markup() -> None:
    answer = Accumulator()
    tree = StepTree(7, (8,), (0,), (-1.0,), (1,), ("<b>",), (1,), "r")
    answer.add(Chunk("<b>!", (8, 12), (Origin.DRAFT, Origin.ROOT), ("<b>", "!"), (), tree))
    shown = answer.completion()._repr_html_()
    assert "<u>&lt;b&gt;</u>!</pre>" in shown
    assert "<li><b>&#x27;&lt;b&gt;&#x27;</b></li>" in shown
    assert "step 1: &#x27;r&#x27;, 1 of 1 drafted tokens accepted" in shown


# --- calls ---


def test_leaving_a_stream_cancels_the_call_and_a_deadline_says_how_long_it_was() -> None:
    with echo_server() as (address, echo), Client(address) as client:
        for event in client.stream("wait"):
            if isinstance(event, Chunk):
                break
        assert echo.cancelled.wait(5)
        echo.cancelled.clear()
        with pytest.raises(DeadlineExceeded, match=r"not done within 0\.3 s"):
            client.generate("wait", timeout=0.3)


def test_an_async_client_is_made_outside_of_a_loop_and_says_when_it_is_closed() -> None:
    async def ask() -> None:
        async with client:
            assert (await client.generate("hi")).text == "hi"
        for call in (client.generate("hi"), client.describe()):
            with pytest.raises(Cancelled, match="closed"):
                await call

    with echo_server() as (address, _):
        client = AsyncClient(address)
        asyncio.run(ask())


@pytest.mark.parametrize(("prompt", "kind"), [("busy", Overloaded), ("lost", NotFound)])
def test_failures_are_typed_and_not_tried_again(prompt: str, kind: type[CoppiceError]) -> None:
    with echo_server() as (address, echo), Client(address) as client, pytest.raises(kind):
        client.generate(prompt)
    assert echo.calls == 1


def test_a_stream_that_breaks_goes_on_from_the_tokens_held() -> None:
    with echo_server() as (address, echo), Client(address) as client:
        told = client.generate("break", resume_ids=list(b"b"))
        assert (told.text, told.resumed) == ("reak", 0)
        told = client.generate("break")
    assert (told.text, told.ids, told.new_tokens, told.resumed) == ("break", tuple(b"break"), 5, 1)
    assert [request.resume_ids for request in echo.requests] == [(98,), (), (98,)]
    assert told.tau == 1.5  # of the second stream: 2 and 1 tokens behind its first


def test_a_request_without_a_seed_is_given_one_and_goes_on_with_it() -> None:
    with echo_server() as (address, echo), Client(address) as client:
        seeds = [client.generate("break", temperature=1.0, seed=seed).seed for seed in (None, None, 0, 9)]
        assert client.generate("hi", sampling=SamplingParams(temperature=1.0)).seed != 0
        assert client.generate("hi", sampling=SamplingParams(temperature=1.0, seed=0)).seed == 0
    samplings = [request.sampling for request in echo.requests[:8]]
    assert ["seed" in sampling.model_fields_set for sampling in samplings[:4]] == [False, True, False, True]
    assert [sampling.seed for sampling in samplings[1::2]] == seeds == [*seeds[:2], 0, 9]
    assert seeds[0] != seeds[1]


def test_another_server_goes_on_where_one_is_lost_full_or_away() -> None:
    with echo_server() as (one, first), echo_server() as (two, second), Client(f"127.0.0.1:1,{one},{two}") as client:
        assert [client.generate(text).text for text in ("break", "break", "hi")] == ["break", "break", "hi"]
        assert {request.resume_ids for request in (*first.requests, *second.requests)} == {(), (98,)}
        for calls in range(first.calls + second.calls, first.calls + second.calls + 6, 2):  # begun with each of them
            with pytest.raises(Overloaded):
                client.generate("busy")
            assert first.calls + second.calls == calls + 2


def test_a_server_that_says_nothing_any_more_is_left() -> None:
    with echo_server() as (one, first), echo_server() as (two, second), Client([one, two]) as client:
        told = client.generate("mute")
        assert (told.text, told.resumed) == ("mute", 1)
        assert (first.calls, second.calls) == (1, 1)


def test_unavailable_before_the_first_event_is_tried_again() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.generate("hi")
    with echo_server(refusals=2) as (address, echo), Client(address) as client:
        assert client.generate("hi").text == "hi"
    assert echo.calls == 3


async def test_the_async_client_answers_as_the_sync_one_does() -> None:
    with echo_server(refusals=1) as (address, echo):
        async with AsyncClient(address) as client:
            assert (await client.describe()).name == "echo"
            answer = await client.generate("hello", seed=3, temperature=1.0, log_probs=True)
            assert (answer.text, answer.tau, answer.seed, answer.heads) == ("hello", 2.0, 3, ("a", "b"))
            assert len(answer.log_probs) == len(answer.origins) == 5
            with pytest.raises(Overloaded):
                await client.generate("busy")
            with pytest.raises(DeadlineExceeded):
                await client.generate("wait", timeout=0.3)
            echo.cancelled.clear()
            async with contextlib.aclosing(client.stream("wait")) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        break
            assert await asyncio.to_thread(echo.cancelled.wait, 5)

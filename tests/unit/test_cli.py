"""The command line: what it prints, its exit codes, what it loads; the SDK: requests as built, events as folded."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import coppice
from coppice import errors
from coppice.cli import exit_code, main
from coppice.client import client as client_module
from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Accumulator
from coppice.client.request import build_request
from coppice.errors import Cancelled, CoppiceError, DeadlineExceeded, InvalidField, NotFound, Overloaded
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import SHIPPED_HEADS
from coppice.wire.generation import ChatMessage, Chunk, Finished, GenerationRequest, Origin, Started, Timings
from tests.fake_service import MAX_LEN, Echo, echo_server

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of `coppice WORDS`."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coppice", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    """A server that answers a prompt with itself, at the address of COPPICE_ADDRESS."""
    with echo_server() as (address, server):
        monkeypatch.setenv("COPPICE_ADDRESS", address)
        yield server


LIGHT = {"torch", "transformers", "tokenizers"}
HELPS = """
import sys, coppice.cli
for words in ("", "generate", "up", "bench run", "train head"):
    sys.argv = ["coppice", *words.split(), "--help"]
    try: coppice.cli.main()
    except SystemExit: print(*sys.modules, file=sys.stderr)
"""
COMPLETES = """
import sys, coppice.cli
sys.argv = ["coppice"]
try: coppice.cli.main()
except SystemExit: print(*sys.modules, file=sys.stderr)
"""
COMPLETING = {"_COPPICE_COMPLETE": "complete_bash", "COMP_WORDS": "coppice bench run --he", "COMP_CWORD": "3"}


@pytest.mark.parametrize(
    ("code", "variables", "shown"),
    [(HELPS, {}, ["Usage: coppice train head"]), (COMPLETES, COMPLETING, ["--head", "--help"])],
    ids=["help", "completion"],
)
def test_help_and_completion_load_no_framework(code: str, variables: dict[str, str], shown: list[str]) -> None:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert all(text in ended.stdout for text in shown)
    assert "typer" in ended.stderr.split()
    assert LIGHT.isdisjoint(ended.stderr.split())


WRONG = """
nonsense -> No such command 'nonsense'
generate -> PROMPT: give exactly one of
generate hi --ids 1 -> PROMPT: give exactly one of
generate --ids 1,x -> --ids: '1,x' is not ids
generate --prompt-file /missing -> --prompt-file: [Errno 2]
generate --prompt-file {yaml} --prediction-file /missing -> --prediction-file: [Errno 2]
generate hi --temperature -1 -> temperature: Input should be greater than or equal to 0
generate hi --budget 300 -> budget: 300 is outside 0..256
generate hi --logit-bias five -> --logit-bias: is not ID=BIAS
generate hi --no-such-option -> No such option: --no-such-option
generate hi --address 127.0.0.1:1 -> 3: no server answers at 127.0.0.1:1; start one with `coppice up`
adapter rollback --version -1 -> --version
serve adviser -> No such command 'adviser'
train head --kind hydra --data a=b --out x --target y -> --kind
bench exact --head a=bigram,b -> --head
bench exact --methods plain,nonsense -> methods: 'nonsense' is not one of plain, route
bench run --category cooking -> categories there: code, maths, story
bench run --json /missing/x.json -> /missing/x.json cannot be written
up --target /missing -> --target: /missing holds no model (no config.json)
up /missing/model -> MODEL: /missing/model is neither a folder nor a name such as
up {gguf}/m.gguf -> MODEL: {gguf}/m.gguf
up {gguf} -> MODEL: {gguf} holds no model (no config.json); name its GGUF file, {gguf}/m.gguf
up {model} --head small=lm:n.gguf -> --head: n.gguf: no such file
up {pickled} -> MODEL: {pickled} holds no model that is loaded (its weights are pickles
up {model} --target {model} -> MODEL: is the same thing as --target
up {model} --revision main -> revision: is a MODEL's of the Hub
up {model} --head a=b:/missing -> --head: 'b' is no kind; there are bigram, lookup
up {model} --head nameless -> --head: 'nameless' is neither NAME=KIND[:DIR] nor one of dspark-code
up {model} --head a.b=lookup -> --head: the name 'a.b' must be 1 to 64 of
up {model} --head a=bigram --head a=lookup -> --head: a is given twice
up {target} --head small=lm:{words} -> head: small: {words}: its tokenizer is not the target's: they differ in token
up {model} --port 50999 --http-port 50999 -> two of these services would listen on 50999
up {model} --dtype int4 -> --dtype: 'int4' is not one of float32, bfloat16
up {model} --device tpu -> verifier.device: 'tpu' is no device here
up {model} --policy single:x -> --policy: there is no head 'x'; heads are bigram, lookup
up {model} --token é -> token: is not printable ASCII without spaces
up {model} --chat-template /missing -> --chat-template
up {model} --chat-template {yaml} -> chat-template: {model} has no tokenizer.json, so that no chats are served
up {model} --one-process --drafters 2 -> --one-process: serves each head once
up {model} --adapt -> --adapt: no head can be adapted
up {model} --log-dir {yaml} -> --log-dir
up {model} --config {yaml} -> unable to parse string as an integer (in {yaml})
COPPICE_VERIFIER__KV_TOKENS=1000000000000 up {target} -> target: 1 x (0.1 GiB of weights
COPPICE_VERIFIER__KV_TOKEN=1 up {model} -> no such setting; did you mean COPPICE_VERIFIER__KV_TOKENS?
COPPICE_SERVER__PRODUCTION=true up some/model -> MODEL: some/model is no folder, and in production
"""
"""[VARIABLE=VALUE] COMMAND -> [EXIT CODE, else 2: ]what is said"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders and files that are no good, and a target that is."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("model", "gguf", "pickled", "words"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
    (folder / "gguf" / "config.json").unlink()
    for file in ("gguf/m.gguf", "pickled/pytorch_model.bin"):
        (folder / file).touch()
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "words" / "tokenizer.json"))
    (folder / "yaml").write_text("verifier: {kv_tokens: many}")
    return {each.name: each for each in folder.iterdir()} | {"target": ROOT / "models/demo/target"}


@pytest.mark.parametrize("case", WRONG.strip().splitlines())
def test_a_wrong_input_is_said_in_a_line_with_its_exit_code_and_starts_nothing(
    case: str, places: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("COPPICE_CONFIG", "")  # which --config sets
    monkeypatch.setattr("coppice.stack.process.fork", None)
    line, said = case.format(**places).split(" -> ")
    code, _, text = said.partition(": ") if said[:1].isdecimal() else ("2", "", said)
    words = line.split()
    if "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    if words[0] == "up":
        words += [f"{option}=0" for option in ("--port", "--http-port") if option not in words]
    ended, out, err = run(*words)
    assert (ended, out, text in err) == (int(code), "", True), err


def test_up_warns_of_a_head_that_does_not_pay(tmp_path: Path, run: Run) -> None:
    config = {"model_type": "llama", "acceptance": {"texts": {"code": [0.02]}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    *_, err = run("up", "--target", str(tmp_path), "--head", f"mine=dspark:{tmp_path}", "--device", "tpu")
    assert "coppice: head mine: expected tau 1.02: drafting with it costs time\n" in err


def test_errors_have_their_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version") == (0, f"coppice {coppice.__version__}\n", "")
    for code, kinds in {
        2: (errors.NotFound, errors.Unauthenticated, errors.PermissionDenied),
        3: (errors.Unavailable, errors.DeadlineExceeded, errors.Overloaded),
        1: (errors.InternalError,),
    }.items():
        assert {exit_code(kind("a")) for kind in kinds} == {code}
    monkeypatch.setattr("coppice.cli.import_module", Mock(side_effect=ModuleNotFoundError("torch", name="torch")))
    code, _, err = run("train", "head")
    assert (code, "pip install '.[serve]'" in err) == (2, True)


def test_generate_prints_the_text_or_one_object_and_nothing_else(run: Run, echo: Echo) -> None:
    assert run("generate", "hello") == (0, "hello\n", "")
    code, out, err = run("generate", "--ids", "72,73,74", "--seed", "5", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert (answer["ids"], answer["seed"], answer["tau"], answer["tokens_per_s"]) == ([72, 73, 74], 5, 2.0, 2.0)
    assert 0 < answer["ttft_s"] < 60
    assert echo.requests[-1].ids == (72, 73, 74)
    assert run("generate", "busy", "--json") == (3, "", "coppice: busy\n")  # no half object


def test_a_prompt_file_is_answered_line_by_line(tmp_path: Path, run: Run, echo: Echo) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n\n{"ids": [65, 66]}\n')
    told = ("generate", "--prompt-file", str(file))
    assert run(*told) == (0, "one\nAB\n", "")  # of a conversation the first turn
    code, out, _ = run(*told, "--chat", "--json")
    assert (code, [json.loads(line)["text"] for line in out.splitlines()]) == (0, ["one", "AB"])
    file.write_text('{"turns": ["one"]}\n{"turns": []}\n')
    code, _, err = run(*told)
    assert (code, "line 2" in err) == (2, True)


def test_a_prompt_without_room_ends_the_file(tmp_path: Path, run: Run, echo: Echo) -> None:
    file = tmp_path / "prompts.jsonl"
    long = json.dumps({"question_id": 82, "turns": ["x" * MAX_LEN]})
    file.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n')
    code, out, err = run("generate", "--prompt-file", str(file))
    assert (code, out) == (2, "one\n")
    assert f"line 2 (question 82): {MAX_LEN} tokens leave no room" in err


def test_the_page_of_settings_is_what_the_command_prints(run: Run) -> None:
    assert run("settings") == (0, (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), "")


def test_doctor_lists_the_models_and_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COPPICE_ADDRESS", raising=False)
    code, out, err = run("doctor", "--address", "127.0.0.1:1")
    assert (code, err) == (3, "coppice: none answers at 127.0.0.1:1\n")
    assert all(re.search(rf"model {name} .*{kind}", out) for name, kind in SHIPPED_HEADS.items())
    assert "try: coppice up\n" in out
    with echo_server() as (address, _):
        code, out, _ = run("doctor", "--address", address)
    assert (code, 'try: coppice generate "Once upon a time"\n' in out) == (0, True)


# --- the SDK ---


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon, and a server soon taken for lost."""
    for name, seconds in {"PAUSE_S": 0.05, "SILENCE_S": 0.3, "ALIVE_S": 0.3}.items():
        monkeypatch.setattr(client_module, name, seconds)


def test_everything_public_is_at_the_top_and_listed() -> None:
    own = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CoppiceError)]
    assert {kind.__name__ for kind in own} < set(coppice.__all__) <= set(dir(coppice))
    assert all(getattr(coppice, name) for name in coppice.__all__)


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
        *((prompt, {}, "prompt") for prompt in ("", [], [1.5], [{"role": "user"}], [ChatMessage("user", "hi"), "hi"])),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}, "prompt"),
        ("hi", {"seed": 1 << 64}, "seed"),
        ("hi", {"sampling": SamplingParams(), "seed": 3}, "sampling"),
        ("hi", {"budget": 1000}, "budget"),
        ("hi", {"resume_ids": [-1]}, "resume_ids"),
    ],
)
def test_an_unusable_value_is_named(prompt: object, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as error:
        build_request(prompt, **options)  # type: ignore[arg-type]
    assert error.value.field == field


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
    answer.add(Chunk("<b>", (5,), (root,), ("<b>",), (-5.0,)))
    answer.add(Finished("eos", 3, 5, [3, 1], [1, -1], [9, 0], 1, 2, Timings(queue_ns=1, decode_ns=2 * 10**9), 6, 7))
    whole = answer.completion()
    assert (whole.text, whole.ids, whole.log_probs) == ("xyz<b>", (1, 2, 3, 4, 5), (-1.0, -2.0, -3.0, -4.0, -5.0))
    assert whole.origins == (root, draft, draft, root, root)
    assert (whole.steps, whole.tau, whole.ttft_s, whole.decode_s, whole.tokens_per_s) == (2, 2.0, 0.5, 2.0, 2.0)
    assert (whole.routed, whole.verified_nodes, whole.late_drafts, whole.bad_drafts) == ([1, -1], [9, 0], 1, 2)
    shown = whole.to_json()
    assert (shown["seed"], shown["tau"], shown["ids"]) == (7, 2.0, [1, 2, 3, 4, 5])
    assert sum(shown["timings_ns"].values()) == shown["timings_ns"]["queue"] == 1


# --- calls ---


def test_an_unknown_option_is_a_type_error_of_what_was_called() -> None:
    for called, option, hint in (
        ("generate", "max_tokens", "; did you mean max_new_tokens?"),
        ("stream", "best_of", ""),
    ):
        with Client("127.0.0.1:1") as client, pytest.raises(TypeError) as error:
            getattr(client, called)("hi", **{option: 1})
        assert str(error.value) == f"{called}() got an unexpected keyword argument {option!r}{hint}"


def test_failures_are_typed_and_not_tried_again() -> None:
    with echo_server() as (address, echo), Client(address) as client:
        for prompt, kind in (("busy", Overloaded), ("lost", NotFound)):
            with pytest.raises(kind):
                client.generate(prompt)
    assert echo.calls == 2


def test_leaving_a_stream_cancels_the_call_and_a_deadline_says_how_long_it_was() -> None:
    with echo_server() as (address, echo), Client(address) as client:
        for event in client.stream("wait"):
            if isinstance(event, Chunk):
                break
        assert echo.cancelled.wait(5)
        echo.cancelled.clear()
        with pytest.raises(DeadlineExceeded, match=r"not done within 0\.3 s"):
            client.generate("wait", timeout=0.3)


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
    with echo_server(refusals=2) as (address, echo), Client(address) as client:
        assert client.generate("hi").text == "hi"
    assert echo.calls == 3


async def test_the_async_client_answers_as_the_sync_one_does() -> None:
    with echo_server(refusals=1) as (address, echo):
        async with AsyncClient(address) as client:
            assert (await client.describe()).name == "echo"
            answer = await client.generate("hello", seed=3, temperature=1.0, log_probs=True)
            assert (answer.text, answer.tau, answer.seed, answer.heads) == ("hello", 2.0, 3, ("a", "b"))
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
        with pytest.raises(Cancelled, match="closed"):
            await client.generate("hi")

"""The command line: what it prints, its exit codes, and what it loads."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import coppice
from coppice import errors
from coppice.cli import exit_code, main
from coppice.stack.spec import SHIPPED_HEADS
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


LIGHT = {"torch", "transformers", "tokenizers", "matplotlib"}
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
generate --prompt-file {model} -> --prompt-file: [Errno 21] Is a directory
generate --prompt-file {yaml} --prediction-file /missing -> --prediction-file: [Errno 2]
generate hi --temperature -1 -> temperature: Input should be greater than or equal to 0
generate hi --budget 300 -> budget: 300 is outside 0..256
generate hi --logit-bias five -> --logit-bias: is not ID=BIAS
generate hi --address , -> address: names no HOST:PORT
generate hi --no-such-option -> No such option: --no-such-option
generate hi --address 127.0.0.1:1 -> 3: no server answers at 127.0.0.1:1; start one with `coppice up`
adapter status --plot x.gif -> x.gif does not end in .png or .svg
adapter rollback --version -1 -> --version
top --address 127.0.0.1:1 -> 3: no metrics at 127.0.0.1:1; start a server with `coppice up`, or name yours
serve adviser -> No such command 'adviser'
train head --kind hydra --data a=b --out x --target y -> --kind
bench exact --head a=bigram,b -> --head
bench exact --methods plain,nonsense -> methods: 'nonsense' is not one of plain, route
bench run --category cooking -> categories there: code, maths, story
bench run --sessions 1,0 -> sessions: 0 is outside 1
bench adapt --methods never,bad -> methods: 'bad'
bench run --json /missing/x.json -> /missing/x.json cannot be written
up --target /missing -> --target: /missing holds no model (no config.json)
up /missing/model -> MODEL: /missing/model is neither a folder nor a name such as
up {gguf}/m.gguf -> MODEL: {gguf}/m.gguf
up {gguf}/n.gguf -> MODEL: {gguf}/n.gguf: no such file; one of the Hugging Face Hub is ORG/REPO:FILE.gguf
up {gguf} -> MODEL: {gguf} holds no model (no config.json); name its GGUF file, {gguf}/m.gguf
up {model} --head small=lm:n.gguf -> --head: n.gguf: no such file
up {pickled} -> MODEL: {pickled} holds no model that is loaded (its weights are pickles
up {yaml} -> MODEL: {yaml} holds no model
up {model} --target {model} -> MODEL: is the same thing as --target
up {model} --revision main -> revision: is a MODEL's of the Hub
up {model} {model} -> unexpected extra argument
up {model} --head a=b:/missing -> --head: 'b' is no kind; there are bigram, lookup
up {model} --head small=lm:/missing -> --head: small: /missing holds no model
up {model} --head small=lm -> --head: small: names no model folder: write NAME=KIND:DIR
up {model} --head nameless -> --head: 'nameless' is neither NAME=KIND[:DIR] nor one of dspark-code
up {model} --head a.b=lookup -> --head: the name 'a.b' must be 1 to 64 of
up {model} --head a=bigram --head a=lookup -> --head: a is given twice
up {target} --head small=lm:{words} -> head: small: {words}: its tokenizer is not the target's: they differ in token
up {model} --port 50999 --http-port 50999 -> two of these services would listen on 50999
up {model} --dtype int4 -> --dtype: 'int4' is not one of float32, bfloat16
up {model} --device tpu -> verifier.device: 'tpu' is no device here
up {model} --policy best -> --policy: 'best' is not one of plain, route
up {model} --policy single:x -> --policy: there is no head 'x'; heads are bigram, lookup
up {model} --token é -> token: is not printable ASCII without spaces
up {model} --name a,,b -> verifier.name: 'a,,b' is not names with commas between
up {model} --chat-template /missing -> --chat-template
up {model} --chat-template {yaml} -> chat-template: {model} has no tokenizer.json, so that no chats are served
up {model} --one-process --drafters 2 -> --one-process: serves each head once
up {model} --adapt -> --adapt: no head can be adapted
up {model} --log-dir {yaml} -> --log-dir
up {model} --ready-file /missing/x -> /missing/x cannot be written
up {model} --config {yaml} -> unable to parse string as an integer (in {yaml})
COPPICE_VERIFIER__KV_TOKENS=1000000000000 up {target} -> target: 1 x (0.1 GiB of weights
COPPICE_VERIFIER__KV_TOKEN=1 up {model} -> no such setting; did you mean COPPICE_VERIFIER__KV_TOKENS?
COPPICE_VERIFIER__DRAFTERS=look up {model} -> COPPICE_VERIFIER__DRAFTERS: is no JSON
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
    assert exit_code(errors.InvalidField("a", "b")) == 2

    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named 'torch' for {name}", name="torch")

    monkeypatch.setattr("coppice.cli.import_module", missing)
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


def test_chat_keeps_the_conversation_and_ends_with_its_input_or_a_bad_option(run: Run, echo: Echo) -> None:
    lines = f"one\n\n{'x' * MAX_LEN}\ntwo\n/quit\nthree\n"
    code, out, err = run("chat", "--policy", "merge", "--seed", "3", stdin=lines)
    assert (code, out) == (0, "one\noneonetwo\n")
    assert (err.count("\n"), "leave no room" in err) == (1, True)
    last = echo.requests[-1]
    turns = [(message.role, message.content) for message in last.chat or ()]
    assert turns == [("user", "one"), ("assistant", "one"), ("user", "two")]
    assert (last.policy, last.sampling.seed) == ("merge", 3)
    assert run("chat", stdin="one") == (0, "one\n", "")
    code, out, err = run("chat", "--temperature", "-1", stdin="one\ntwo\n")
    assert (code, out, err.count("temperature")) == (2, "", 1)


def test_a_prompt_file_is_answered_line_by_line(tmp_path: Path, run: Run, echo: Echo) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n\n{"ids": [65, 66]}\n')
    told = ("generate", "--prompt-file", str(file))
    assert run(*told) == (0, "one\noneone\n\ntwo\n\nAB\n", "")  # both turns, the first answer before the second
    code, out, _ = run(*told, "--chat", "--json")
    first, second, _ = (json.loads(line) for line in out.splitlines())
    assert (code, first["text"], second["text"]) == (0, "one", "oneonetwo")
    file.write_text('{"turns": ["one"]}\n{"turns": []}\n')
    code, _, err = run(*told)
    assert (code, "line 2" in err) == (2, True)


def test_a_prompt_without_room_ends_the_file_unless_such_are_left_out(tmp_path: Path, run: Run, echo: Echo) -> None:
    file = tmp_path / "prompts.jsonl"
    long = json.dumps({"question_id": 82, "turns": ["x" * MAX_LEN]})
    talk = json.dumps({"turns": ["y" * (MAX_LEN - 20), "z" * 18]})
    file.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n{talk}\n')
    code, out, err = run("generate", "--prompt-file", str(file))
    assert (code, out) == (2, "one\n")
    assert f"line 2 (question 82): {MAX_LEN} tokens leave no room" in err
    code, out, err = run("generate", "--prompt-file", str(file), "--skip-long")
    assert (code, out) == (0, f"one\ntwo\n{'y' * (MAX_LEN - 20)}\n")
    assert (err.count("left out"), "line 4: " in err) == (2, True)


def test_the_page_of_settings_is_what_the_command_prints(run: Run) -> None:
    assert run("settings") == (0, (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), "")


def test_doctor_lists_the_models_and_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COPPICE_ADDRESS", raising=False)
    code, out, err = run("doctor", "--address", "127.0.0.1:1")
    assert (code, err) == (3, "coppice: none answers at 127.0.0.1:1\n")
    for name, kind in SHIPPED_HEADS.items():
        assert re.search(rf"model {name} .*{kind}", out)
    assert re.search(r"memory .*GiB, [\d.]+ free", out)
    assert "try: coppice up\n" in out
    with echo_server() as (address, _):
        code, out, _ = run("doctor", "--address", address)
    assert (code, 'try: coppice generate "Once upon a time"\n' in out) == (0, True)

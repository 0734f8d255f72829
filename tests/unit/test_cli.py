"""The command line: exit codes, usage errors that name their option, and what goes to which stream."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coppice
from coppice import errors
from coppice.cli import exit_code, main
from coppice.commands.serve import ROLES
from coppice.config.settings import Settings
from coppice.stack.spec import SHIPPED_HEADS
from coppice.wire.generation import ChatMessage
from orchestrator.text import ChatTemplate
from tests.fake_service import MAX_LEN, echo_server

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `coppice ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["coppice", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_version_prints_name_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, capsys, "--version") == (0, f"coppice {coppice.__version__}\n", "")


LIGHT = ("torch", "transformers", "tokenizers", "matplotlib")


def loads(words: list[str], modules: tuple[str, ...], **variables: str) -> tuple[str, list[str]]:
    """What `coppice WORDS` prints in a fresh process, and which of the modules it has loaded in the end."""
    code = (
        f"import sys; sys.argv = {['coppice', *words]!r}\nimport coppice.cli\n"
        "try: coppice.cli.main()\nexcept SystemExit: pass\n"
        f"print(*(name for name in {modules} if name in sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "COLUMNS": "200", **variables}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return told.stdout, told.stderr.split()


@pytest.mark.parametrize(
    ("words", "unloaded"),
    [
        ([], ("numpy", "grpc", *LIGHT)),
        (["generate"], LIGHT),
        (["up"], LIGHT),
        (["bench", "run"], LIGHT),
        (["train", "head"], LIGHT),
    ],
)
def test_help_imports_nothing_heavy(words: list[str], unloaded: tuple[str, ...]) -> None:
    out, loaded = loads([*words, "--help"], unloaded)
    assert (" ".join(["Usage: coppice", *words]) in out, loaded) == (True, [])


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("coppice ge", ["generate"]),
        ("coppice bench run --he", ["--head", "--help"]),
        ("coppice serve verifier --verifier.k", ["--verifier.kv_tokens"]),
    ],
)
def test_every_command_is_completed_and_loads_no_framework(line: str, completed: list[str]) -> None:
    number = str(line.count(" "))
    out, loaded = loads([], LIGHT, _COPPICE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number)
    assert (out.split(), loaded) == (completed, [])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--ids", "1"], "PROMPT"),
        (["generate", "--ids", "1,x"], "--ids"),
        (["generate", "--prompt-file", "/missing"], "--prompt-file"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--logit-bias", "5=1000"], "logit_bias"),
        (["serve", "adviser"], "No such command 'adviser'"),
        (["bench", "exact", "--head", "a=bigram,b"], "--head"),
        (["train", "head", "--kind", "hydra", "--data", "a=b", "--out", "x", "--target", "y"], "--kind"),
        (["up", "--target", "/missing"], "--target"),
        (["up", "--head", "a=b:/missing"], "--head"),
        (["up", "--port", "70000"], "--port"),
    ],
)
def test_a_bad_value_is_a_usage_error_that_names_it(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert named in err


@pytest.mark.parametrize(
    "option", [["--dtype", "int4"], ["--policy", "best"], ["--head", "a=bigram", "--head", "a=lookup"]]
)
def test_a_bad_value_beside_a_good_target_is_named_too(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = run(monkeypatch, capsys, "up", "--target", str(tmp_path), *option)
    assert code == 2
    assert option[0] in err


def test_up_warns_of_a_head_that_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "acceptance": {"texts": {"code": [0.02]}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = ("--target", str(tmp_path), "--head", f"mine=dspark:{tmp_path}", "--ready-file", str(tmp_path / "no" / "x"))
    _, _, err = run(monkeypatch, capsys, "up", *told)
    assert "coppice: head mine: expected tau 1.02: drafting with it costs time\n" in err


def test_errors_have_their_exit_codes() -> None:
    assert exit_code(errors.InvalidField("a", "b")) == 2
    assert exit_code(errors.NotFound()) == 2
    assert exit_code(errors.Unauthenticated()) == 2
    assert exit_code(errors.PermissionDenied()) == 2
    assert exit_code(errors.Unavailable()) == 3
    assert exit_code(errors.DeadlineExceeded()) == 3
    assert exit_code(errors.Overloaded("full")) == 3
    assert exit_code(errors.InternalError()) == 1


def test_nobody_at_the_address_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "generate", "hi", "--address", "127.0.0.1:1")
    assert (code, out) == (3, "")
    start = "start one with `coppice up`, or name yours with --address"
    assert err == f"coppice: no server answers at 127.0.0.1:1; {start}\n"
    for words in (("adapter", "status"), ("chat",)):
        assert run(monkeypatch, capsys, *words, "--address", "127.0.0.1:1") == (3, "", err)
    code, _, err = run(monkeypatch, capsys, "generate", "hi", "--address", "nobody.invalid:1")
    assert (code, err) == (3, f"coppice: no server answers at nobody.invalid:1; {start}\n")


def test_generate_prints_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with echo_server() as (address, _):
        assert run(monkeypatch, capsys, "generate", "hello", "--address", address) == (0, "hello\n", "")


def test_generate_json_prints_one_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with echo_server() as (address, echo):
        monkeypatch.setenv("COPPICE_ADDRESS", address)
        code, out, err = run(monkeypatch, capsys, "generate", "--ids", "72,73,74", "--seed", "5", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert (told["ids"], told["seed"], told["tau"], told["tokens_per_s"]) == ([72, 73, 74], 5, 2.0, 2.0)
    assert 0 < told["ttft_s"] < 60
    assert echo.requests[0].ids == (72, 73, 74)


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = f"one\n\n{'x' * MAX_LEN}\ntwo\n/quit\nthree\n"
    with echo_server() as (address, echo):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code, out, err = run(monkeypatch, capsys, "chat", "--policy", "merge", "--seed", "3", "--address", address)
    assert (code, out) == (0, "one\noneonetwo\n")
    assert (err.count("\n"), "leave no room" in err) == (1, True)
    last = echo.requests[-1]
    assert [(message.role, message.content) for message in last.chat or ()] == [
        ("user", "one"),
        ("assistant", "one"),
        ("user", "two"),
    ]
    assert (last.policy, last.sampling.seed) == ("merge", 3)


def test_chat_ends_with_its_input_and_with_a_bad_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with echo_server() as (address, _):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
        assert run(monkeypatch, capsys, "chat", "--address", address) == (0, "one\n", "")
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        code, out, err = run(monkeypatch, capsys, "chat", "--temperature", "-1", "--address", address)
    assert (code, out, err.count("temperature")) == (2, "", 1)


def test_a_prompt_file_is_answered_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n\n{"ids": [65, 66]}\n')
    with echo_server() as (address, _):
        told = run(monkeypatch, capsys, "generate", "--prompt-file", str(file), "--address", address)
        assert told == (0, "one\noneone\n\ntwo\n\nAB\n", "")  # both turns, the first answer before the second
        code, out, _ = run(
            monkeypatch, capsys, "generate", "--chat", "--prompt-file", str(file), "--address", address, "--json"
        )
        first, second, _ = (json.loads(line) for line in out.splitlines())
        assert (code, first["text"], second["text"]) == (0, "one", "oneonetwo")
    file.write_text('{"turns": ["one"]}\n{"turns": []}\n')
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt-file", str(file))
    assert code == 2
    assert "line 2" in err


def test_prompts_without_room_are_named_before_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    long = json.dumps({"question_id": 82, "turns": ["x" * MAX_LEN]})
    talk = json.dumps({"turns": ["y" * (MAX_LEN - 20), "z" * 18]})
    file.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n{talk}\n')
    with echo_server() as (address, echo):
        told = ("generate", "--prompt-file", str(file), "--address", address)
        code, out, err = run(monkeypatch, capsys, *told)
        assert (code, out) == (2, "")
        assert f"line 2 (question 82): {MAX_LEN} tokens leave no room" in err
        assert "line 4: " in err
        assert "line 1" not in err
        assert all(request.resume_ids for request in echo.requests)  # nothing was answered
        code, out, err = run(monkeypatch, capsys, *told, "--skip-long")
    assert (code, out) == (0, "one\ntwo\n")
    assert err.count("left out") == 2


def test_a_failing_call_prints_no_half_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with echo_server() as (address, _):
        code, out, err = run(monkeypatch, capsys, "generate", "busy", "--json", "--address", address)
    assert (code, out, err) == (3, "", "coppice: busy\n")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "coppice.training.cli", None)

    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named 'torch' for {name}", name="torch")

    monkeypatch.setattr("coppice.cli.import_module", missing)
    code, _, err = run(monkeypatch, capsys, "train", "head")
    assert code == 2
    assert "pip install '.[serve]'" in err


@pytest.mark.parametrize("role", ROLES)
def test_a_role_shows_the_settings_that_it_reads_and_no_others(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "serve", role, "--help")
    assert (code, err) == (0, "")
    folder = ROOT / ("orchestrator" if role == "orchestrator" else f"services/{role}")
    code_of_role = "".join(file.read_text() for file in folder.glob("*.py") if file.name != "ray_app.py")
    read = {name for name in re.findall(r"settings\.(\w+)", code_of_role) if name in Settings.model_fields}
    read |= {"directory"} if "own_registries(" in code_of_role else set()
    read |= {"drafter", "adaptation"} if "heads_beside(" in code_of_role else set()
    assert set(re.findall(r"--(\w+)\.", out)) == read
    for section in read:
        for name, field in type(Settings.model_fields[section].default).model_fields.items():
            assert f"--{section}.{name} " in out
            assert str(field.description).split()[0] in out
    assert "65536" in out or role in ("orchestrator", "adapter")


@pytest.mark.parametrize(
    ("module", "flags", "why"),
    [
        (
            "services.verifier",
            ["--verifier.target", "/missing"],
            "verifier.target: /missing holds no model (no config.json)",
        ),
        ("services.drafter", ["--drafter.kind", "specblock"], "drafter.path: names no model folder"),
        ("services.adapter", [], "adaptation.redis: the adapter reads from Redis"),
        ("orchestrator", ["--orchestrator.budgets", "3"], "did you mean --orchestrator.budget?"),
    ],
)
def test_a_service_checks_its_settings_before_it_loads_torch(module: str, flags: list[str], why: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", module, *flags]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines() if line.startswith("import time")}
    said = [line for line in told.stderr.splitlines() if not line.startswith("import time")]
    assert told.returncode == 2
    assert (len(said), why in said[0]) == (1, True), said
    assert "grpc" in imported
    assert imported.isdisjoint({"torch", "transformers"})


def test_doctor_lists_the_models_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COPPICE_ADDRESS", raising=False)
    code, out, err = run(monkeypatch, capsys, "doctor", "--address", "127.0.0.1:1")
    assert (code, err) == (3, "coppice: none answers at 127.0.0.1:1\n")
    for name, kind in SHIPPED_HEADS.items():
        assert re.search(rf"model {name} .*{kind}", out)
    assert re.search(r"memory .*GiB, [\d.]+ free", out)
    assert "try: coppice up\n" in out
    with echo_server() as (address, _):
        code, out, _ = run(monkeypatch, capsys, "doctor", "--address", address)
    assert (code, 'try: coppice generate "Once upon a time"\n' in out) == (0, True)


def test_a_template_gets_the_names_and_the_reasoning_that_are_there(tmp_path: Path) -> None:
    shutil.copy(ROOT / "models" / "demo" / "target" / "tokenizer.json", tmp_path)
    source = "{% for m in messages %}{{ m.name or '-' }}{{ m.reasoning_content is defined }}{{ m.content }};{%endfor%}"
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = [ChatMessage("user", "Hi", name="eve"), ChatMessage("assistant", "", "because")]
    assert ChatTemplate(tmp_path).render(chat) == "eveFalseHi;-True;"

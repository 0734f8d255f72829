"""The command line: exit codes, usage errors that name their option, and what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import coppice
from coppice import errors
from coppice.cli import exit_code, main
from tests.fake_service import MAX_LEN, echo_server


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


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['coppice', '--help']\nimport coppice.cli\n"
        "try: coppice.cli.main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'grpc', 'pydantic', 'transformers') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--ids", "1"], "PROMPT"),
        (["generate", "--ids", "1,x"], "--ids"),
        (["generate", "--prompt-file", "/missing"], "--prompt-file"),
        (["generate", "hi", "--seed", "x"], "--seed"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--logit-bias", "5"], "--logit-bias"),
        (["generate", "hi", "--logit-bias", "5=1000"], "logit_bias"),
        (["serve", "adviser"], "ROLE"),
        (["up", "--target", "/missing"], "--target"),
        (["up", "--head", "nonsense"], "--head"),
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


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--kinds", "verifier")])
def test_the_fault_campaign_is_no_command_any_more(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "faults", *arguments)
    assert (code, out) == (2, "")
    assert err == "coppice: the fault campaign is a test: run python -m tests.faults in a checkout\n"


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
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err


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
    assert (told["ids"], told["seed"], told["tau"]) == ([72, 73, 74], 5, 2.0)
    assert echo.requests[0].ids == (72, 73, 74)


def test_chat_sends_the_prompt_as_the_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with echo_server() as (address, echo):
        run(monkeypatch, capsys, "generate", "hello", "--chat", "--address", address)
    chat = echo.requests[0].chat
    assert chat is not None
    assert [(message.role, message.content) for message in chat] == [("user", "hello")]


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
    code, _, err = run(monkeypatch, capsys, "train", "target")
    assert code == 2
    assert "coppice-serve[serve]" in err

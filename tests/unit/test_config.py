"""Settings: flag over variable over YAML over default, and whatever is wrong is named; failpoints, which are some."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from coppice import failpoints
from coppice.config.settings import Settings, load_settings
from coppice.errors import Backoff, InvalidField
from coppice.heads.base import with_tree_shape


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's, and nothing left behind: `--config` sets COPPICE_CONFIG."""
    for name in [name for name in os.environ if name.upper().startswith("COPPICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COPPICE_CONFIG", "")


def read(settings: Settings, name: str) -> object:
    section, _, field = name.partition(".")
    return getattr(getattr(settings, section), field)


def variable_of(name: str) -> str:
    return f"COPPICE_{name.replace('.', '__')}".upper()


def in_file(file: Path, text: str) -> list[str]:
    """The arguments that name a YAML file of this text."""
    file.write_text(text, encoding="latin-1")
    return ["--config", str(file)]


# A setting of each type: its default, then what YAML, a variable and a flag say, each as a person writes it.
WAYS = {
    "verifier.threads": (0, "1", "2", "3"),
    "limits.queue_s": (30.0, "1.5", "2.5", "3"),
    "server.host": ("127.0.0.1", "yaml", "variable", "flag"),
    "drafter.kind": ("lookup", "bigram", "lm", "bigram"),
    "server.log_json": (False, "true", "false", "true"),
    "orchestrator.verifiers": ([], "[a:1]", '["b:2"]', "c:3"),
}


@pytest.mark.parametrize("name", WAYS)
def test_flags_beat_variables_beat_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, in_yaml, in_variable, in_flag = WAYS[name]
    section, _, field = name.partition(".")

    def expected(text: str) -> object:
        value = yaml.safe_load(text)
        return [value] if isinstance(default, list) and not isinstance(value, list) else value

    assert read(load_settings([]), name) == default
    config = in_file(tmp_path / "c.yaml", f"{section}:\n  {field}: {in_yaml}\n")
    assert read(load_settings(config), name) == expected(in_yaml)
    monkeypatch.setenv(variable_of(name), in_variable)
    assert read(load_settings(config), name) == expected(in_variable)
    assert read(load_settings([*config, f"--{name}", in_flag]), name) == expected(in_flag)
    assert read(load_settings([f"--{name}={in_flag}", *config]), name) == expected(in_flag)


def test_a_launchers_defaults_hold_where_nobody_says_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COPPICE_ADAPTER_ADDRESS", "COPPICE_ADDRESS", "COPPICE_PROOF"):
        monkeypatch.setenv(variable, "1")  # of other parts: no settings
    config = in_file(tmp_path / "c.yaml", "verifier: {threads: 1}\n")
    settings = load_settings(config, {"verifier": {"threads": 8, "dtype": "bfloat16"}}).verifier
    assert (settings.threads, settings.dtype) == (1, "bfloat16")
    assert load_settings([]).verifier.dtype == "float32"
    monkeypatch.setenv("COPPICE_VERIFIER__DEVICE", "cuda:1")
    assert load_settings([]).verifier.dtype == "bfloat16"
    assert load_settings(["--verifier.dtype", "float32"]).verifier.dtype == "float32"


def ways(name: str, value: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Settings]]:
    """Reading settings with a value said by flag, by variable and in a file."""
    section, _, field = name.partition(".")
    yield lambda: load_settings([f"--{name}", value])
    yield lambda: load_settings([f"--{name}={value}"])
    with monkeypatch.context() as inner:
        inner.setenv(variable_of(name), value)
        yield lambda: load_settings([])
    yield lambda: load_settings(in_file(file, f"{section}: {{{field}: {value!r}}}"))


WRONG = {
    ("verifier.threads", "many"): "valid integer",
    ("verifier.dtype", "float64"): "float32",
    ("server.port", "70000"): "65535",
    ("drafter.kind", "oracle"): "is no kind",
    ("orchestrator.budget", "257"): "256",
    ("orchestrator.heads", "nameless:50051"): "NAME=VALUE|JSON|list",
    ("verifier.threds", "1"): r"no such setting; did you mean .*(verifier.threads|VERIFIER__THREADS)\?",
    ("limits.kv_tokens", "1"): "no such setting",
    ("bandit.patience", "3"): "no such setting",
}


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_is_wrong_is_named(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load in ways(name, value, tmp_path / "c.yaml", monkeypatch):
        with pytest.raises(InvalidField, match=WRONG[name, value]) as refused:
            load()
        assert refused.value.field.removeprefix("--") in (name, variable_of(name), name.partition(".")[0])


ARGUMENTS: list[tuple[Any, str, str]] = [
    (["--confg", "3"], "--confg", r"did you mean --config\?"),
    ("verifer: {threads: 1}", "verifer", r"did you mean verifier\?"),
    ("threads: 1", "threads", "no such setting"),
    ("a: [", "config", "is no YAML"),
    ("a: \xff", "config", "is no YAML"),
    ("- 1", "config", "not a mapping"),
    ("verifier: 3", "verifier", "dictionary"),
    (["--config", "/no/such.yaml"], "config", "no such file"),
    (["--config"], "config", "write --config FILE, once"),
    (["--config=/no/such.yaml"], "config", "write --config FILE, once"),
]


@pytest.mark.parametrize(("told", "field", "reason"), ARGUMENTS)
def test_a_file_or_a_flag_that_cannot_be_read_is_named(told: Any, field: str, reason: str, tmp_path: Path) -> None:
    arguments = in_file(tmp_path / "c.yaml", told) if isinstance(told, str) else told
    with pytest.raises(InvalidField) as refused:
        load_settings(arguments)
    assert refused.value.field == field
    assert re.search(reason, str(refused.value))


def test_every_setting_says_what_it_is_and_cannot_be_changed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings([])
    for section in Settings.model_fields:
        part = getattr(settings, section)
        assert isinstance(part, BaseModel)
        assert (part.model_config["frozen"], part.model_config["extra"]) == (True, "forbid")
        assert [name for name, field in type(part).model_fields.items() if not field.description] == []
    monkeypatch.setenv("COPPICE_ADRESS", "1")
    with pytest.raises(InvalidField, match="did you mean COPPICE_ADDRESS"):
        load_settings([])


@pytest.mark.parametrize(
    ("flags", "drafted"),
    [([], (8, 6)), (["--drafter.kind", "eagle3"], (10, 8)), (["--drafter.kind", "specblock"], (8, 6))],
)
def test_a_head_drafts_as_its_kind_does_unless_told(flags: list[str], drafted: tuple[int, int]) -> None:
    settings = with_tree_shape(load_settings(flags).drafter)
    assert (settings.top_k, settings.depth) == drafted
    shallow = with_tree_shape(load_settings([*flags, "--drafter.depth", "3"]).drafter)
    assert (shallow.top_k, shallow.depth) == (drafted[0], 3)


# --- failpoints: nothing unless enabled, refused in production, and each does what it says; pauses ---


@pytest.fixture(autouse=True)
def none_stay_enabled() -> Iterator[None]:
    yield
    failpoints.enable("")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drafter.fast=1", "drafter.fast"),
        ("drafter.slow", "NAME=NUMBER"),
        ("drafter.slow=0", "delay"),
        ("drafter.slow=nan", "delay"),
        ("drafter.garbage=2", "share"),
        ("adapter.push=1.5", "whole"),
        ("drafter.slow=0.1;adapter.push=0", "whole"),
    ],
)
def test_what_is_no_failpoint_is_named(text: str, named: str) -> None:
    with pytest.raises(InvalidField, match=named) as error:
        load_settings(["--server.failpoints", text])
    assert error.value.field == "server.failpoints"


def test_they_are_refused_in_production() -> None:
    flags = ["--server.failpoints", "drafter.slow=0.2; drafter.garbage=1"]
    assert load_settings(flags).server.failpoints
    with pytest.raises(InvalidField, match=r"server\.failpoints: .*refused in production"):
        load_settings([*flags, "--server.production", "true"])
    assert load_settings(["--server.production", "true"]).server.production


def test_a_delay_is_waited_for_and_garbage_is_evenly_spread() -> None:
    failpoints.enable("drafter.slow=0.05;drafter.garbage=0.25")
    began = time.perf_counter()
    assert not failpoints.hit("drafter.slow")
    assert time.perf_counter() - began >= 0.05
    assert [failpoints.hit("drafter.garbage") for _ in range(8)] == 2 * [False, False, False, True]
    assert not failpoints.hit("drafter.stale")


# --- pauses before something that failed is tried again ---


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.fresh
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.fresh
    backoff.succeed()
    assert backoff.fresh
    assert backoff.fail() == 0.5

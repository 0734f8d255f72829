"""Settings: flag over variable over YAML over default, and whatever is wrong is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from coppice.config.settings import Settings, load_settings
from coppice.errors import InvalidField
from coppice.heads.base import with_tree_shape


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's, and nothing left behind: `--config` sets COPPICE_CONFIG."""
    for name in [name for name in os.environ if name.upper().startswith("COPPICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COPPICE_CONFIG", "")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "coppice.yaml"


def read(settings: Settings, name: str) -> object:
    section, _, field = name.partition(".")
    return getattr(getattr(settings, section), field)


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
def test_a_flag_beats_a_variable_beats_yaml_beats_the_default(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, in_yaml, in_variable, in_flag = WAYS[name]
    section, _, field = name.partition(".")

    def expected(text: str) -> object:
        value = yaml.safe_load(text)
        return [value] if isinstance(default, list) and not isinstance(value, list) else value

    assert read(load_settings([]), name) == default
    file.write_text(f"{section}:\n  {field}: {in_yaml}\n")
    config = ["--config", str(file)]
    assert read(load_settings(config), name) == expected(in_yaml)
    monkeypatch.setenv(f"COPPICE_{section}__{field}".upper(), in_variable)
    assert read(load_settings(config), name) == expected(in_variable)
    assert read(load_settings([*config, f"--{name}", in_flag]), name) == expected(in_flag)
    assert read(load_settings([f"--{name}={in_flag}", *config]), name) == expected(in_flag)


def test_a_launchers_defaults_hold_where_nobody_says_anything(file: Path) -> None:
    file.write_text("verifier: {threads: 1}\n")
    defaults = {"verifier": {"threads": 8, "dtype": "bfloat16"}}
    told = load_settings(["--config", str(file)], defaults).verifier
    assert (told.threads, told.dtype) == (1, "bfloat16")
    assert load_settings([]).verifier.dtype == "float32"


@pytest.mark.parametrize("variable", ["COPPICE_ADAPTER_ADDRESS", "COPPICE_ADDRESS", "COPPICE_PROOF"])
def test_variables_of_other_parts_are_no_settings(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    load_settings([])


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("COPPICE_VERIFIER__THREDS", "COPPICE_VERIFIER__THREADS"),
        ("COPPICE_ADRESS", "COPPICE_ADDRESS"),
    ],
)
def test_an_unknown_variable_is_an_error_with_a_hint(variable: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InvalidField, match=f"no such setting; did you mean {hint}") as refused:
        load_settings([])
    assert refused.value.field == variable


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("verifier: {threds: 1}", "verifier.threds", "verifier.threads"),
        ("verifer: {threads: 1}", "verifer", "verifier"),
        ("threads: 1", "threads", ""),
    ],
)
def test_an_unknown_yaml_key_is_an_error_with_a_hint(file: Path, text: str, key: str, hint: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidField, match=f"did you mean {hint}\\?" if hint else "no such setting") as refused:
        load_settings(["--config", str(file)])
    assert refused.value.field == key


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--verifier.thread", "--verifier.threads"),
        ("--confg", "--config"),
        ("--limits.kv_tokens", ""),
    ],
)
def test_an_unknown_flag_is_an_error_with_a_hint(flag: str, hint: str) -> None:
    with pytest.raises(InvalidField, match=f"did you mean {hint}\\?" if hint else "no such setting") as refused:
        load_settings([flag, "3"])
    assert refused.value.field == flag.partition("=")[0]


ALWAYS = "what was its default always holds"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bandit.patience", "set adapter.policy and adapter.interval"),
        ("verifier.block_size", ALWAYS),
        ("limits.message_bytes", ALWAYS),
        ("drafter.chain", "set drafter.top_k to 1"),
    ],
)
def test_a_setting_that_is_gone_says_what_stands_in_for_it(
    name: str, why: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, field = name.partition(".")
    file.write_text(f"{section}: {{{field}: 3}}")
    with monkeypatch.context() as inner:
        inner.setenv(f"COPPICE_{section}__{field}".upper(), "3")
        with pytest.raises(InvalidField, match=f"is no setting any more: {why}$"):
            load_settings([])
    for arguments in ([f"--{name}", "3"], [f"--{name}=3"], ["--config", str(file)]):
        with pytest.raises(InvalidField, match=f"is no setting any more: {why}$"):
            load_settings(arguments)


BAD = {
    "verifier.threads": "many",
    "verifier.dtype": "float64",
    "server.port": "70000",
    "drafter.kind": "oracle",
    "orchestrator.budget": "257",
    "orchestrator.heads": "nameless:50051",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_names_its_setting_however_it_was_said(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, field = name.partition(".")
    with pytest.raises(InvalidField) as by_flag:
        load_settings([f"--{name}", BAD[name]])
    variable = f"COPPICE_{section}__{field}".upper()
    with monkeypatch.context() as inner:
        inner.setenv(variable, BAD[name])
        with pytest.raises(InvalidField) as by_variable:
            load_settings([])
    file.write_text(f"{section}: {{{field}: {BAD[name]!r}}}")
    with pytest.raises(InvalidField) as by_file:
        load_settings(["--config", str(file)])
    assert by_flag.value.field == by_file.value.field == name
    assert by_variable.value.field in (name, variable)  # a list that is no JSON is named by its variable


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: [", "is no YAML"), ("- 1", "not a mapping"), ("verifier: 3", "dictionary"), ("\udcff", "YAML")],
)
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(file: Path, text: str, why: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidField, match=why) as refused:
        load_settings(["--config", str(file)])
    assert refused.value.field in ("config", "verifier")


@pytest.mark.parametrize("arguments", [["--config", "/no/such.yaml"], ["--config"], ["--config=/no/such.yaml"]])
def test_a_file_that_is_not_there_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(InvalidField) as refused:
        load_settings(arguments)
    assert refused.value.field == "config"


def test_every_setting_says_what_it_is_and_cannot_be_changed_later() -> None:
    settings = load_settings([])
    for section in Settings.model_fields:
        part = getattr(settings, section)
        assert isinstance(part, BaseModel)
        assert part.model_config["frozen"]
        assert part.model_config["extra"] == "forbid"
        assert [name for name, field in type(part).model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("flags", "drafted"),
    [([], (8, 6)), (["--drafter.kind", "eagle3"], (10, 8)), (["--drafter.kind", "specblock"], (8, 6))],
)
def test_a_head_drafts_as_its_kind_does_unless_told(flags: list[str], drafted: tuple[int, int]) -> None:
    settings = with_tree_shape(load_settings(flags).drafter)
    assert (settings.top_k, settings.depth) == drafted
    shallow = with_tree_shape(load_settings([*flags, "--drafter.depth", "3"]).drafter)
    assert (shallow.top_k, shallow.depth) == (drafted[0], 3)

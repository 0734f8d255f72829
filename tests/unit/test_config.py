"""Settings: flag over variable over YAML over default, and whatever is wrong is named; failpoints, which are some; and
what is found before anything is started: ports, devices, memory, folders and paths.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coppice import failpoints
from coppice.cli import main
from coppice.commands.doctor import find
from coppice.config.model import GIB, ModelSize, disagreements, ends_line, text_ends
from coppice.config.settings import Settings, load_settings
from coppice.engine.loading import load_engine
from coppice.errors import Backoff, InvalidField
from coppice.heads.base import with_tree_shape
from coppice.stack import spec as spec_module
from coppice.stack.spec import PORTS, StackSpec, check_target, preflight, target_warnings
from coppice.testing.tiny_models import save_tiny
from tests.tiny import make_target


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine's, and nothing left behind: `--config` sets COPPICE_CONFIG, and failpoints stay on."""
    for name in [name for name in os.environ if name.upper().startswith("COPPICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COPPICE_CONFIG", "")
    yield
    failpoints.enable("")


def variable_of(name: str) -> str:
    return f"COPPICE_{name.replace('.', '__')}".upper()


def in_file(file: Path, text: str) -> list[str]:
    """The arguments that name a YAML file of this text."""
    file.write_text(text, encoding="latin-1")
    return ["--config", str(file)]


# A setting of each type: its default, then what YAML, a variable and a flag say, each as a person writes it.
WAYS = {
    "limits.queue_s": (30.0, "1.5", "2.5", "3"),
    "server.host": ("127.0.0.1", "yaml", "variable", "flag"),
    "server.log_json": (False, "true", "false", "true"),
    "orchestrator.verifiers": ([], "[a:1]", '["b:2"]', "c:3"),
}


@pytest.mark.parametrize("name", WAYS)
def test_flags_beat_variables_beat_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, in_yaml, in_variable, in_flag = WAYS[name]
    section, _, field = name.partition(".")

    def check(arguments: list[str], text: str) -> None:
        value = yaml.safe_load(text)
        expected = [value] if isinstance(default, list) and not isinstance(value, list) else value
        assert getattr(getattr(load_settings(arguments), section), field) == expected

    check([], str(default))
    config = in_file(tmp_path / "c.yaml", f"{section}:\n  {field}: {in_yaml}\n")
    check(config, in_yaml)
    monkeypatch.setenv(variable_of(name), in_variable)
    check(config, in_variable)
    check([*config, f"--{name}", in_flag], in_flag)
    check([f"--{name}={in_flag}", *config], in_flag)


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
    with monkeypatch.context() as inner:
        inner.setenv(variable_of(name), value)
        yield lambda: load_settings([])
    yield lambda: load_settings(in_file(file, f"{section}: {{{field}: {value!r}}}"))


WRONG = {
    ("verifier.threads", "many"): "valid integer",
    ("verifier.dtype", "float64"): "float32",
    ("server.port", "70000"): "65535",
    ("drafter.kind", "oracle"): "is no kind",
    ("orchestrator.heads", "nameless:50051"): "NAME=VALUE|JSON|list",
    ("verifier.threds", "1"): r"no such setting; did you mean .*(verifier.threads|VERIFIER__THREADS)\?",
    ("bandit.patience", "3"): "no such setting",
}


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_is_wrong_is_named(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load in ways(name, value, tmp_path / "c.yaml", monkeypatch):
        with pytest.raises(InvalidField, match=WRONG[name, value]) as refused:
            load()
        assert refused.value.field.removeprefix("--") in (name, variable_of(name), name.partition(".")[0])


UNREADABLE: list[tuple[Any, str, str]] = [
    (["--confg", "3"], "--confg", r"did you mean --config\?"),
    ("verifer: {threads: 1}", "verifer", r"did you mean verifier\?"),
    ("threads: 1", "threads", "no such setting"),
    ("a: \xff", "config", "is no YAML"),
    ("- 1", "config", "not a mapping"),
    ("verifier: 3", "verifier", "dictionary"),
    (["--config", "/no/such.yaml"], "config", "no such file"),
    (["--config"], "config", "write --config FILE, once"),
    # failpoints, which are refused in production
    *((["--server.failpoints", text], "server.failpoints", "delay") for text in ("drafter.slow=0", "drafter.slow=nan")),
    (["--server.failpoints", "drafter.fast=1"], "server.failpoints", "drafter.fast"),
    (["--server.failpoints", "drafter.slow"], "server.failpoints", "NAME=NUMBER"),
    (["--server.failpoints", "drafter.garbage=2"], "server.failpoints", "share"),
    (["--server.failpoints", "drafter.slow=0.1;adapter.push=0"], "server.failpoints", "whole"),
    (
        ["--server.failpoints", "drafter.slow=0.2; drafter.garbage=1", "--server.production", "true"],
        *("server.failpoints", "refused in production"),
    ),
]


@pytest.mark.parametrize(("told", "field", "reason"), UNREADABLE)
def test_a_file_or_a_flag_that_cannot_be_read_is_named(told: Any, field: str, reason: str, tmp_path: Path) -> None:
    arguments = in_file(tmp_path / "c.yaml", told) if isinstance(told, str) else told
    with pytest.raises(InvalidField, match=reason) as refused:
        load_settings(arguments)
    assert refused.value.field == field


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


def test_a_head_drafts_as_its_kind_does_unless_told() -> None:
    for kind, drafted in {"lookup": (8, 6), "eagle3": (10, 8), "specblock": (8, 6)}.items():
        flags = ["--drafter.kind", kind]
        settings = with_tree_shape(load_settings(flags).drafter)
        shallow = with_tree_shape(load_settings([*flags, "--drafter.depth", "3"]).drafter)
        assert (settings.top_k, settings.depth) == drafted
        assert (shallow.top_k, shallow.depth) == (drafted[0], 3)


def test_a_delay_is_waited_for_and_garbage_is_evenly_spread() -> None:
    failpoints.enable("drafter.slow=0.05;drafter.garbage=0.25")
    began = time.perf_counter()
    assert not failpoints.hit("drafter.slow")
    assert time.perf_counter() - began >= 0.05
    assert [failpoints.hit("drafter.garbage") for _ in range(8)] == 2 * [False, False, False, True]
    assert not failpoints.hit("drafter.stale")


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.fresh
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.fresh
    backoff.succeed()
    assert backoff.fail() == 0.5


# --- before anything is started ---


Up = Callable[..., str]
TINY_TARGET = {"vocab": 40, "tokenizer": False}


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Up:
    """What `coppice up ARGUMENTS` says when it ends with exit code 2; `http_port` is the usual one."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("coppice.stack.process.fork", None)  # nothing is started

    def run(*arguments: object, http_port: int = 0) -> str:
        monkeypatch.setattr("coppice.commands.up.DEFAULT_HTTP_PORT", http_port)
        monkeypatch.setattr(sys, "argv", ["coppice", "up", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert (ended.value.code, output.out) == (2, "")
        return output.err

    return run


def test_a_taken_port_is_named_and_http_goes_elsewhere(target: Path, up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = f"127.0.0.1:{port} cannot be used (address already in use)"
        lines = up(target, "--port", port, http_port=port)
        assert f"HTTP takes a free port: {taken}\ncoppice: server.port: {taken}; choose another port" in lines
        assert f"orchestrator.http_port: {taken}" in up(target, "--port", 0, "--http-port", port)
        for name in PORTS:
            spec = StackSpec(target=target, extra={"orchestrator": {name: port}})
            with pytest.raises(InvalidField, match=f"{name}: 127.0.0.1:{port} cannot be used"):
                preflight(spec, spec.settings())


def test_the_need_is_the_models_own(target: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    size = ModelSize.of(target, "bfloat16")
    assert size.weights == 2 * sum(each.numel() for each in model.parameters())
    assert (size.kv, size.kv_heads) == (2 * 2 * 2 * 2 * 8, 2)  # bytes, keys and values, layers, heads, their size
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    for config in ({}, {"num_attention_heads": 0, "hidden_size": 4}, {"text_config": []}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert ModelSize.of(tmp_path, "float32") == ModelSize(0, 0, 0)


@pytest.mark.parametrize(
    ("device", "room", "ranks", "tokens", "most"),
    [
        ("cpu", 100, 1, 65_536, 393_216),
        ("cpu", 8, 1, 16_384, 16_384),  # half of the 4 GiB beside the weights
        ("cuda", 10, 1, 16_384, 32_768),  # 2 GiB are a forward's
        ("cuda", 80, 1, 65_536, 68 * 8192),  # 0.9 of it
        ("cuda", 6, 2, 16_384, 32_768),
    ],
)
def test_kv_takes_half_of_what_the_weights_leave(device: str, room: int, ranks: int, tokens: int, most: int) -> None:
    size = ModelSize(weights=4 * GIB, kv=128 * 1024, kv_heads=8)
    assert size.fit_kv(65_536, device, room * GIB, ranks=ranks) == tokens
    assert size.fit_kv(512, device, room * GIB, ranks=ranks) == 512
    assert ModelSize(0, 0, 0).fit_kv(65_536, device, 0) == 65_536  # its shape is not known
    assert size.fit_kv(0, device, room * GIB, ranks=ranks) == most
    assert size.fit_kv(0, device, room * GIB, ranks=ranks, heads=2 * GIB) < most
    for hopeless in (ModelSize(0, 0, 0), replace(size, weights=room * ranks * GIB)):
        with pytest.raises(InvalidField, match=r"verifier.kv_tokens: 0 takes what the device has left for KV, and"):
            hopeless.fit_kv(0, device, room * GIB, ranks=ranks)


def test_each_verifier_has_the_kv_that_memory_has_room_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, spec = ModelSize.of(target, "float32"), StackSpec(target=target, dtype="float32", verifiers=2)
    monkeypatch.setattr(spec_module.model, "free_memory", lambda _: 2.0 * (size.weights + 2 * 5000 * size.kv))
    assert check_target(spec, spec.settings()) == 5000
    monkeypatch.setenv("COPPICE_VERIFIER__KV_TOKENS", "7000")
    assert check_target(spec, spec.settings()) == 7000


def test_a_hybrid_leaves_room_for_the_states_of_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_5_text", "", tmp_path)
    spec, size = StackSpec(target=tmp_path, dtype="float32"), ModelSize.of(tmp_path, "float32")
    monkeypatch.setattr(
        spec_module.model, "free_memory", lambda _: 2.0 * 5000 * size.kv + size.weights + 128 * size.states
    )
    assert check_target(spec, spec.settings()) == 5000
    monkeypatch.setenv("COPPICE_LIMITS__SESSIONS", "64")
    assert check_target(spec, spec.settings()) == 5000 + 32 * size.states // size.kv
    with pytest.raises(InvalidField, match=r"of 4000000 sessions' states \+ .* a lower limits.s"):
        size.fit_kv(65_536, "cpu", GIB, sessions=4_000_000)
    lines = {finding.name: finding.value for finding in find(None, tmp_path)}
    assert lines["states of texts"] == "0.01 MiB for each of 64 sessions, and no prefix cache"


def test_folders_without_a_config_are_refused(target: Path, tmp_path: Path, up: Up) -> None:
    for config in (b"", b"{", b'{"model_type": 3}', b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(config)
        for option, arguments in (("MODEL", [tmp_path]), ("--head", [target, "--head", f"x=lm:{tmp_path}"])):
            lines = up(*arguments)
            assert (option in lines, "holds no model" in lines) == (True, True)


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    """Its shape and as many numbers, in a sparse file."""
    shape = {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    count = 70 * 10**9
    tensor = {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}
    header = json.dumps({"all.weight": tensor}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * count)
    return tmp_path


def test_up_and_doctor_say_how_many_ranks_are_needed(llama_70b: Path, up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (79 * GIB, 79 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "not here")
    monkeypatch.setenv("COPPICE_VERIFIER__DEVICE", "cuda")
    monkeypatch.setenv("COPPICE_DRAFTER__DEVICE", "cpu")

    def doctor() -> tuple[str, bool | None]:
        (finding,) = (finding for finding in find("127.0.0.1:1", llama_70b) if finding.name == "target")
        return finding.value, finding.ok

    too_large = (
        "verifier.ranks: 1 x (130.4 GiB of weights + 20.0 GiB of KV) are more than the 79.0 GiB of memory on "
        "cuda, of which 2 are kept for forwards; 2 ranks on as many such devices would hold them; a lower "
        "verifier.kv_tokens, bfloat16 or a smaller target takes less"
    )
    assert up(llama_70b, "--port", 0) == f"coppice: {too_large}\n"
    assert doctor() == (too_large, False)
    for ranks, reason in (("3", "3 ranks cannot share the model's 8 KV heads"), ("8", "'cuda' for 8 ranks is not h")):
        monkeypatch.setenv("COPPICE_VERIFIER__RANKS", ranks)
        assert reason in up(llama_70b, "--port", 0)
    monkeypatch.setenv("COPPICE_VERIFIER__RANKS", "2")
    spec = StackSpec(target=llama_70b)
    assert preflight(spec, spec.settings()) == 38690
    assert doctor() == (f"{llama_70b} fits 2 x cuda with 38690 KV tokens in bfloat16", True)


def with_files(folder: Path, **files: object) -> Path:
    """The folder, with what is given of its JSON files put over what they hold."""
    for name, values in files.items():
        file = folder / f"{name}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and isinstance(values, dict) else {}
        file.write_text(json.dumps(old | values if isinstance(values, dict) else values), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("chatty") / "target")


@pytest.fixture
def chatty(tokenized: Path, tmp_path: Path) -> Path:
    """A target with a tokenizer, whose id 0 is <|end|>, and a chat template."""
    return Path(shutil.copytree(tokenized, tmp_path / "chatty"))


SILENT = {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": None}}
ENDS: list[tuple[dict[str, object], str]] = [
    ({}, "a text ends at 0, by generation_config.json"),
    (
        {"generation_config": {"eos_token_id": [5, 0]}, "config": {"eos_token_id": 7}},
        "a text ends at 0, 5, by generation_config.json; config.json says 7; tokenizer_config.json says 0",
    ),
    (
        {**SILENT, "config": {"eos_token_id": [7], "text_config": {"eos_token_id": 8}}},
        "a text ends at 7, by config.json; text_config of config.json says 8; tokenizer_config.json says 0",
    ),
    (SILENT, "a text ends at 0, by tokenizer_config.json"),
    (
        {**SILENT, "tokenizer_config": {"eos_token": "not in the vocabulary"}},
        "no file of the model names an id that ends a text",
    ),
]


@pytest.mark.parametrize(("files", "line"), ENDS, ids=["all", "generation", "config", "tokenizer", "nobody"])
def test_what_ends_a_text_is_decided_from_all_files_and_said(files: dict[str, object], line: str, chatty: Path) -> None:
    ends = text_ends(with_files(chatty, **files))
    assert ends_line(ends) == line
    if "0, 5" in line:
        assert [finding.value for finding in find("127.0.0.1:1", chatty) if finding.name == "end of texts"] == [line]
        assert list(load_engine(chatty, kv_tokens=512).info.eos_ids) == list(next(iter(ends.values())))


@pytest.mark.parametrize(
    ("eos", "reason"),
    [
        (list(range(200_000)), " in .*, generation_config.json: has 200000 entries, allowed are 0 to 64"),
        *((eos, f": {eos} in .*, is not in 0..2147483647") for eos in (2**31, -1, True)),
    ],
)
def test_unusable_ends_of_texts_are_refused(eos: object, reason: str, target: Path, tmp_path: Path, up: Up) -> None:
    folder = with_files(Path(shutil.copytree(target, tmp_path / "copy")), generation_config={"eos_token_id": eos})
    assert re.fullmatch(f"coppice: eos_token_id{reason}\n", up(folder, "--port", 0))
    with pytest.raises(InvalidField, match=f"^eos_token_id{reason}"):
        load_engine(folder, kv_tokens=512)
    with pytest.raises(InvalidField, match=r"^target: .*generation_config.json is no JSON object"):
        load_engine(with_files(folder, generation_config="no object"), kv_tokens=512)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DISAGREE: list[tuple[dict[str, object], str]] = [
    ({"config": {"rope_scaling": None, "torch_dtype": "float32", "rope_theta": 1e4}}, ""),
    (
        {"config": {"rope_scaling": {"type": "linear", "factor": 8.0, "rope_theta": 1e4}, "rope_parameters": LINEAR}},
        "rope_parameters, factor is 4.0, but rope_scaling says 8.0, which counts",
    ),
    (
        {"config": {"text_config": {"vocab_size": 999, "model_type": "other", "hidden_size": 32}}},
        "vocab_size is 300, but text_config of config.json says 999, which counts",
    ),
]


def test_what_two_fields_say_differently_is_said(tokenized: Path, tmp_path: Path) -> None:
    for number, (files, line) in enumerate(DISAGREE):
        folder = with_files(Path(shutil.copytree(tokenized, tmp_path / str(number))), **files)
        assert list(disagreements(folder)) == ([f"{folder}: {line}"] if line else [])


REFUSED = "chats will be refused: chat.messages: this target's chat template cannot be used: "
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% for m in messages %}", f"{REFUSED}TemplateSyntaxError: "),
        (CHATML, "the chat template ends turns with <|im_end|> (257), but a text ends at 0, by generation_config.json"),
        (CHATML.replace("im_end", "end"), ""),
    ],
    ids=["fails", "ends no text", "ends a text"],
)
def test_a_chat_template_is_tried_before_anything_loads(template: str, line: str, chatty: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chatty / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(chatty / "tokenizer.json"))
    (chatty / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert [warning[: len(line)] for warning in target_warnings(chatty)] == ([line] if line else [])

"""What is found before anything is started: ports, devices, memory, folders and paths."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coppice.cli import main
from coppice.commands.doctor import find
from coppice.config.model import GIB, ModelSize, disagreements, ends_line, head_bytes, text_config, text_ends
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.stack import spec as spec_module
from coppice.stack.spec import PORTS, StackSpec, check_target, preflight, target_warnings
from coppice.testing.tiny_models import save_tiny
from tests.tiny import make_target

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


def test_a_taken_port_is_named_and_http_goes_elsewhere(target: Path, up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = f"127.0.0.1:{port} cannot be used (address already in use)"
        choose = "choose another port, or 0 for a free one\n"
        lines = up(target, "--port", port, http_port=port)
        assert lines == f"coppice: HTTP takes a free port: {taken}\ncoppice: server.port: {taken}; {choose}"
        named = f"coppice: orchestrator.http_port: {taken}; {choose}"
        assert up(target, "--port", 0, "--http-port", port) == named
        monkeypatch.setenv("COPPICE_ORCHESTRATOR__HTTP_PORT", str(port))
        assert up(target, "--port", 0, http_port=port) == named
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


def test_states_of_all_sessions_are_counted_as_weights_are() -> None:
    size, without = ModelSize(2 * GIB, 128 * 1024, 8, states=GIB // 64), ModelSize(4 * GIB, 128 * 1024, 8)
    for device, tokens in (("cpu", 65_536), ("cpu", 0), ("cuda", 0)):
        assert size.fit_kv(tokens, device, 12 * GIB, sessions=128) == without.fit_kv(tokens, device, 12 * GIB)
    with pytest.raises(
        InvalidField, match=r"2.0 GiB of weights \+ 16.0 GiB of 1024 sessions' states \+ .* a lower limits.s"
    ):
        size.fit_kv(65_536, "cpu", 12 * GIB, sessions=1024)


def test_heads_beside_a_target_take_their_weights_and_its_embedding(target: Path) -> None:
    size, folder = ModelSize.of(target, "bfloat16"), text_config(target)
    embedding = 2 * folder["vocab_size"] * folder["hidden_size"]
    heads = ["own=lookup", f"small=lm:{target}"]
    assert head_bytes(heads, target, "bfloat16") == size.weights + 65_536 * size.kv + embedding


def test_each_verifier_has_the_kv_that_memory_has_room_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, spec = ModelSize.of(target, "float32"), StackSpec(target=target, dtype="float32", verifiers=2)
    monkeypatch.setattr(spec_module.model, "free_memory", lambda _: 2.0 * (size.weights + 2 * 5000 * size.kv))
    assert check_target(spec, spec.settings()) == 5000
    monkeypatch.setenv("COPPICE_VERIFIER__KV_TOKENS", "7000")
    assert check_target(spec, spec.settings()) == 7000
    spec = replace(spec, extra={"verifier": {"verifier.kv_tokens": 6000}})
    assert check_target(spec, spec.settings()) == 6000


def test_a_hybrid_leaves_room_for_the_states_of_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_5_text", "", tmp_path)
    spec, size = StackSpec(target=tmp_path, dtype="float32"), ModelSize.of(tmp_path, "float32")
    monkeypatch.setattr(
        spec_module.model, "free_memory", lambda _: 2.0 * 5000 * size.kv + size.weights + 128 * size.states
    )
    assert check_target(spec, spec.settings()) == 5000
    monkeypatch.setenv("COPPICE_LIMITS__SESSIONS", "64")
    assert check_target(spec, spec.settings()) == 5000 + 32 * size.states // size.kv
    lines = {finding.name: finding.value for finding in find(None, tmp_path)}
    assert lines["states of texts"] == "0.01 MiB for each of 64 sessions, and no prefix cache"


@pytest.mark.parametrize("config", [None, "{", '{"model_type": 3}', b"\xff\xfe"])
def test_folders_without_a_config_are_refused(config: str | bytes | None, target: Path, tmp_path: Path, up: Up) -> None:
    if config is not None:
        (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    for option, arguments in (("MODEL", [tmp_path]), ("--head", [target, "--head", f"x=lm:{tmp_path}"])):
        lines = up(*arguments)
        assert option in lines
        assert "holds no model" in lines


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
        ([0, 2**31], ": 2147483648 in .*, generation_config.json, is not in 0..2147483647"),
        (-1, ": -1 in .*, is not in 0..2147483647"),
        (True, ": True in .*, is not in 0..2147483647"),
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
    ({"config": {"torch_dtype": "float16"}}, "torch_dtype is float16, but dtype says float32, which counts"),
    (
        {"tokenizer_config": {"model_max_length": 4096}},
        "model_max_length (tokenizer_config.json) is 4096, but max_position_embeddings says 512, which counts",
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

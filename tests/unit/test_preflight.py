"""What is found before anything is started: ports, devices, memory, folders and paths."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coppice.cli import main
from coppice.commands.doctor import find
from coppice.config.model import GIB, ModelSize, disagreements, ends_line, text_ends
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.stack import preflight as preflight_module
from coppice.stack.preflight import check_target, preflight, target_warnings
from coppice.stack.spec import StackSpec
from tests.tiny import make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model"), 40, tokenizer=False)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object, http_port: int = 0
) -> str:
    """What `coppice up ARGUMENTS` says when it ends with exit code 2. http_port: the usual one."""
    monkeypatch.setattr("coppice.stack.spec.DEFAULT_HTTP_PORT", http_port)
    monkeypatch.setattr(sys, "argv", ["coppice", "up", *map(str, arguments)])
    monkeypatch.setattr("coppice.stack.process.spawn", None)  # nothing is started
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    return told.err


def test_http_goes_elsewhere_when_its_usual_port_is_taken_and_nobody_asked_for_it(
    target: Path, taken: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, target, "--port", taken, http_port=taken)
    here = f"127.0.0.1:{taken} cannot be used (address already in use)"
    choose = "choose another port, or 0 for a free one\n"
    assert said == f"coppice: HTTP takes a free port: {here}\ncoppice: server.port: {here}; {choose}"
    named = f"coppice: orchestrator.http_port: {here}; {choose}"
    assert refused(monkeypatch, capsys, target, "--port", 0, "--http-port", taken) == named
    monkeypatch.setenv("COPPICE_ORCHESTRATOR__HTTP_PORT", str(taken))
    assert refused(monkeypatch, capsys, target, "--port", 0, http_port=taken) == named


@pytest.mark.parametrize("name", ["server.port", "server.health_port", "server.metrics_port", "orchestrator.http_port"])
def test_every_fixed_port_is_tried(target: Path, taken: int, name: str) -> None:
    spec = StackSpec(target=target, extra={"orchestrator": {name: taken}})
    with pytest.raises(InvalidField, match=f"{name}: 127.0.0.1:{taken} cannot be used"):
        preflight(spec, spec.settings())


@pytest.mark.parametrize("device", ["tpu9", "cuda:99"])
def test_a_device_that_is_not_here_is_one_line(
    target: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, target, "--port", 0, "--device", device)
    assert said.startswith(f"coppice: verifier.device: '{device}' is ")
    assert said.count("\n") == 1


def test_a_target_and_kv_that_memory_cannot_hold_are_one_line(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COPPICE_VERIFIER__KV_TOKENS", str(10**12))
    said = refused(monkeypatch, capsys, target, "--port", 0)
    assert "coppice: target: 1 x (0.0 GiB of weights + 238418.6 GiB of KV) are more than the" in said
    assert said.count("\n") == 1


def test_the_need_is_the_models_own(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    size = ModelSize.of(target, "bfloat16")
    assert size.weights == 2 * sum(one.numel() for one in model.parameters())
    assert (size.kv, size.kv_heads) == (2 * 2 * 2 * 2 * 8, 2)  # bytes, keys and values, layers, heads, their size


@pytest.mark.parametrize(
    ("device", "room", "ranks", "copies", "tokens"),
    [
        ("cpu", 100, 1, 1, 65_536),
        ("cpu", 8, 1, 1, 16_384),  # half of the 4 GiB beside the weights
        ("cuda", 10, 1, 1, 16_384),  # 2 GiB are a forward's
        ("cuda", 6, 2, 1, 16_384),
    ],
)
def test_kv_that_nobody_sizes_takes_half_of_what_the_weights_leave(
    device: str, room: int, ranks: int, copies: int, tokens: int
) -> None:
    size = ModelSize(weights=4 * GIB, kv=128 * 1024, kv_heads=8)
    assert size.fit_kv(65_536, device, room * GIB, ranks=ranks, copies=copies) == tokens
    assert size.fit_kv(512, device, room * GIB, ranks=ranks) == 512
    assert ModelSize(0, 0, 0).fit_kv(65_536, device, 0) == 65_536  # its shape is not known


def test_each_verifier_has_the_kv_that_memory_has_room_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, spec = ModelSize.of(target, "float32"), StackSpec(target=target, dtype="float32", verifiers=2)
    monkeypatch.setattr(preflight_module, "free_memory", lambda _: 2.0 * (size.weights + 2 * 5000 * size.kv))
    assert check_target(spec, spec.settings()) == 5000
    monkeypatch.setenv("COPPICE_VERIFIER__KV_TOKENS", "7000")
    assert check_target(spec, spec.settings()) == 7000
    spec = replace(spec, extra={"verifier": {"verifier.kv_tokens": 6000}})
    assert check_target(spec, spec.settings()) == 6000


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 0, "hidden_size": 4}, {"text_config": []}])
def test_a_shape_in_other_words_needs_nothing_that_is_known(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert ModelSize.of(tmp_path, "float32") == ModelSize(0, 0, 0)


@pytest.mark.parametrize("config", [None, "{", '{"model_type": 3}', b"\xff\xfe"])
@pytest.mark.parametrize("what", ["target", "head"])
def test_a_folder_without_a_usable_config_is_a_usage_error(
    what: str,
    config: str | bytes | None,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    monkeypatch.setenv("COLUMNS", "400")
    arguments = [tmp_path] if what == "target" else [target, "--head", f"x=lm:{tmp_path}"]
    said = refused(monkeypatch, capsys, *arguments)
    assert f"--{what}" in said
    assert "holds no model" in said


@pytest.mark.parametrize(("file", "why"), [("m.gguf", "m.gguf is a GGUF file"), ("pytorch_model.bin", "are pickles")])
def test_weights_in_a_form_that_is_not_loaded_are_one_line(
    file: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / file).touch()
    if file.endswith(".bin"):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert why in refused(monkeypatch, capsys, tmp_path)
    if file.endswith(".gguf"):
        assert why in refused(monkeypatch, capsys, tmp_path / file)


@pytest.mark.parametrize(
    ("option", "path"), [("--ready-file", "missing/ready"), ("--ready-file", "file/ready"), ("--log-dir", "file/logs")]
)
def test_a_path_that_cannot_be_written_is_one_line(
    option: str,
    path: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    said = refused(monkeypatch, capsys, target, "--port", 0, option, tmp_path / path)
    assert said.count("\n") == 1
    assert str(tmp_path / path) in said


class Devices:
    """CUDA devices that are not here, of so many GiB each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, gib: int) -> None:
        memory = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (gib * 2**30, gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "not here")
        monkeypatch.setenv("COPPICE_VERIFIER__DEVICE", "cuda")
        monkeypatch.setenv("COPPICE_DRAFTER__DEVICE", "cpu")


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


def test_up_says_how_many_ranks_a_target_needs_before_it_loads(
    llama_70b: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Devices(monkeypatch, 4, 79)
    said = refused(monkeypatch, capsys, llama_70b, "--port", 0)
    assert said == (
        "coppice: verifier.ranks: 1 x (130.4 GiB of weights + 20.0 GiB of KV) are more than the 79.0 GiB of memory on "
        "cuda, of which 2 are kept for forwards; 2 ranks on as many such devices would hold them; a lower "
        "verifier.kv_tokens, bfloat16 or a smaller target takes less\n"
    )
    monkeypatch.setenv("COPPICE_VERIFIER__RANKS", "3")
    assert "3 ranks cannot share the model's 8 KV heads" in refused(monkeypatch, capsys, llama_70b, "--port", 0)
    monkeypatch.setenv("COPPICE_VERIFIER__RANKS", "8")
    assert "'cuda' for 8 ranks is not here" in refused(monkeypatch, capsys, llama_70b, "--port", 0)
    monkeypatch.setenv("COPPICE_VERIFIER__RANKS", "2")
    spec = StackSpec(target=llama_70b)
    preflight(spec, spec.settings())


def test_doctor_says_the_same_of_a_target(llama_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, 2, 79)
    (small,) = (finding for finding in find(None, llama_70b) if finding.name == "target")
    assert small.ok is False
    assert "2 ranks on as many such devices" in small.value
    monkeypatch.setenv("COPPICE_VERIFIER__RANKS", "2")
    (enough,) = (finding for finding in find(None, llama_70b) if finding.name == "target")
    assert (enough.ok, enough.value) == (True, f"{llama_70b} fits 2 x cuda with 38690 KV tokens in bfloat16")


def with_files(folder: Path, **files: object) -> Path:
    """The folder, with what is given of its JSON files put over what they hold."""
    for name, values in files.items():
        file = folder / f"{name}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and isinstance(values, dict) else {}
        file.write_text(json.dumps(old | values if isinstance(values, dict) else values), encoding="utf-8")
    return folder


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A target with a tokenizer, whose id 0 is <|end|>, and a chat template."""
    return make_target(tmp_path / "chatty")


ENDS: dict[str, tuple[dict[str, object], str]] = {
    "all say the same": ({}, "a text ends at 0, by generation_config.json"),
    "generation_config.json counts": (
        {"generation_config": {"eos_token_id": [5, 0]}, "config": {"eos_token_id": 7}},
        "a text ends at 0, 5, by generation_config.json; config.json says 7; tokenizer_config.json says 0",
    ),
    "else config.json": (
        {
            "generation_config": {"eos_token_id": None},
            "config": {"eos_token_id": [7], "text_config": {"eos_token_id": 8}},
        },
        "a text ends at 7, by config.json; text_config of config.json says 8; tokenizer_config.json says 0",
    ),
    "else the tokenizer's": (
        {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": None}},
        "a text ends at 0, by tokenizer_config.json",
    ),
    "nobody": (
        {
            "generation_config": {"eos_token_id": None},
            "config": {"eos_token_id": None},
            "tokenizer_config": {"eos_token": "not in the vocabulary"},
        },
        "no file of the model names an id that ends a text",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_text_is_decided_from_all_files_and_said(case: str, chatty: Path) -> None:
    files, line = ENDS[case]
    ends = text_ends(with_files(chatty, **files))
    assert ends_line(ends) == line
    if case == "generation_config.json counts":
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
def test_ends_that_no_service_takes_are_refused_before_anything_loads(
    eos: object,
    reason: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = with_files(Path(shutil.copytree(target, tmp_path / "copy")), generation_config={"eos_token_id": eos})
    line = refused(monkeypatch, capsys, folder, "--port", 0)
    assert re.fullmatch(f"coppice: eos_token_id{reason}\n", line)
    with pytest.raises(InvalidField, match=f"^eos_token_id{reason}"):
        load_engine(folder, kv_tokens=512)


def test_a_generation_config_that_is_no_json_is_not_passed_over(target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "copy"))
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidField, match=r"^target: .*generation_config.json is no JSON object"):
        load_engine(folder, kv_tokens=512)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DISAGREE: dict[str, tuple[dict[str, object], list[str]]] = {
    "nothing": ({"config": {"rope_scaling": None, "torch_dtype": "float32", "rope_theta": 1e4}}, []),
    "rotations": (
        {"config": {"rope_scaling": {"type": "linear", "factor": 8.0, "rope_theta": 1e4}, "rope_parameters": LINEAR}},
        ["rope_parameters, factor is 4.0, but rope_scaling says 8.0, which counts"],
    ),
    "a rotation that is lost": (
        {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": LINEAR}},
        ["rope_parameters, rope_theta is 10000.0, but rope_scaling says nothing, which counts"],
    ),
    "dtypes": (
        {"config": {"torch_dtype": "float16"}},
        ["torch_dtype is float16, but dtype says float32, which counts"],
    ),
    "lengths": (
        {"tokenizer_config": {"model_max_length": 4096}},
        ["model_max_length (tokenizer_config.json) is 4096, but max_position_embeddings says 512, which counts"],
    ),
    "a tokenizer without a length": ({"tokenizer_config": {"model_max_length": int(1e30)}}, []),
    "a model in another": (
        {"config": {"text_config": {"vocab_size": 999, "model_type": "other", "hidden_size": 32}}},
        ["vocab_size is 300, but text_config of config.json says 999, which counts"],
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_what_two_fields_say_differently_is_said(case: str, chatty: Path) -> None:
    files, lines = DISAGREE[case]
    assert list(disagreements(with_files(chatty, **files))) == [f"{chatty}: {line}" for line in lines]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATS = {
    "a template that fails": (
        "{% for m in messages %}",
        "chats will be refused: chat.messages: this target's chat template cannot be used: TemplateSyntaxError: ",
    ),
    "one that loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "chats will be refused: chat.messages: this target's chat template cannot be used: TimeoutError: ",
    ),
    "a turn that ends no text": (
        CHATML,
        "the chat template ends turns with <|im_end|> (257), but a text ends at 0, by generation_config.json: ",
    ),
    "a turn that ends a text": (CHATML.replace("im_end", "end"), ""),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_template_is_tried_before_anything_loads(case: str, chatty: Path) -> None:
    template, line = CHATS[case]
    tokenizer = Tokenizer.from_file(str(chatty / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(chatty / "tokenizer.json"))
    (chatty / "chat_template.jinja").write_text(template, encoding="utf-8")
    warnings = list(target_warnings(chatty))
    assert [warning[: len(line)] for warning in warnings] == ([line] if line else [])

"""GGUF files: a folder of one holds what llama.cpp wrote into it, and what cannot be read is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.config.gguf import as_folder, make_folder
from coppice.config.settings import load_settings
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.testing.reference import TargetText
from tests.tiny import make_gguf, make_target

gguf = pytest.importorskip("gguf")
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coppice"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose positions are scaled as those of Llama 3.1."""
    folder = make_target(tmp_path_factory.mktemp("model"), tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {**SCALED, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q5_0", "BF16"])
def test_a_folder_has_the_numbers_of_the_file(kind: str, target: Path, tmp_path: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(target)
    block = gguf.GGMLQuantizationType[kind]
    for weight in (each for each in original.parameters() if each.dim() > 1):
        weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), block), block))
    folder = tmp_path / "tiny"
    assert make_folder(make_gguf(target, tmp_path / "tiny.gguf", kind), folder) == ""
    ids = torch.arange(200)[None]
    with torch.inference_mode():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, original(ids).logits)
    assert load_engine(folder, kv_tokens=1024, dtype="bfloat16").info.eos_ids == (1, 3)  # <|im_end|> ends a turn
    text, codes = TargetText(folder), [2 + 2 + byte for byte in "ö".encode()]
    assert text.encode("aö<|im_end|>")[-4:] == (260, *codes, 3)
    assert text.encode("a", chat=True)


@pytest.mark.timeout(600)  # processes of their own read it
def test_a_file_is_unpacked_once_until_it_changes(
    target: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_gguf(target, tmp_path / "tiny.gguf")
    first = as_folder("target", file)  # by a process of its own
    made = (first / "config.json").stat().st_mtime_ns
    spec = StackSpec(target=file, heads=(HeadSpec("small", "lm", file),))
    flags = (f"--{role}.target={file}" for role in ("verifier", "drafter", "orchestrator", "adapter"))
    settings = load_settings([*flags, "--drafter.kind=lm", f"--drafter.path={file}"])
    folders = {settings.verifier.target, settings.drafter.target, settings.orchestrator.target, settings.adapter.target}
    assert {*folders, settings.drafter.path, str(spec.target), str(spec.heads[0].path)} == {str(first)}
    assert (first / "config.json").stat().st_mtime_ns == made

    def run(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout=make_folder(Path(command[-2]), Path(command[-1])).encode())

    monkeypatch.setattr("coppice.config.gguf.subprocess.run", run)
    file = make_gguf(target, file, "F32")
    with ThreadPoolExecutor(2) as pool:
        second, same = pool.map(partial(as_folder, "target"), [file, file])
    assert second == same != first
    assert len([*cache.glob("*/*/config.json")]) == 2


def cut(size: int) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[:size])


REFUSED: dict[str, tuple[dict[str, object], Callable[[Path], object]]] = {
    "it is cut off, or no GGUF file": ({}, cut(-500)),
    "it is cut off, or no GGUF file ": ({}, cut(3000)),
    "it is cut off, or no GGUF file (": ({}, cut(0)),
    "no GGUF file (GGUF magic invalid)": ({}, lambda file: file.write_text("nonsense" * 9)),
    "architecture nonsense is not supported yet": ({"architecture": "nonsense"}, Path.stat),
    "it is one of 3 parts": ({"count": 3}, Path.stat),
    "positions are scaled as yarn, which is not read": ({"type": "yarn"}, Path.stat),
    "it holds other weights than transformers' LlamaForCausalLM": ({"block_count": 1}, Path.stat),
    "LlamaForCausalLM, ['model.layers.2.input_layernorm": ({"block_count": 3}, Path.stat),
    "LlamaForCausalLM, ['model.layers.0.self_attn.k_proj": ({"head_count_kv": 4}, Path.stat),
    "Cannot build a tokenizer": ({"model": "bert"}, Path.stat),
    "KeyError: 'tokens'": ({"tokens": None}, Path.stat),
}


def test_what_cannot_be_read_is_one_line_and_leaves_nothing(target: Path, tmp_path: Path) -> None:
    for reason, (fields, spoil) in REFUSED.items():
        spoil(file := make_gguf(target, tmp_path / "bad.gguf", **fields))
        refused = make_folder(file, tmp_path / "new" / "folder")
        assert reason in refused
        assert "\n" not in refused
        assert [each.name for each in (tmp_path / "new").iterdir()] == ["lock"]


def test_a_missing_package_is_one_line_that_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gguf.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    (file := tmp_path / "m.gguf").touch()
    with pytest.raises(InvalidField) as refused:
        load_settings([f"--verifier.target={file}"])
    hint = "ModuleNotFoundError: No module named 'no_such_package'; in a checkout pip install '.[gguf]'"
    assert str(refused.value) == f"verifier.target: {file} cannot be read: {hint}"

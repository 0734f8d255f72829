"""Training on real, tiny models: exact resumption, and a target from end to end."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice.training import heads
from coppice.training.cli import command_line
from coppice.training.heads import Recipe
from lab.pretrain.target import HOW, target_run

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "small", "birds", "near", "my", "old", "tree")
SIZES = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
HYBRID = (
    SIZES
    | {"model_type": "qwen3_5_text", "full_attention_interval": 2}
    | {
        name: 16 if name.endswith("dim") else 2
        for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
    }
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(200)]
    path = tmp_path / "texts.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def recipe(tokens: int) -> Recipe:
    return Recipe(tokens, length=32, long_length=64, batch=64, small_batch=64, eval_tokens=256)


def train(lines: list[str], work: Path, tokens: int, **options: bool) -> bool:
    return target_run(lines, work, recipe(tokens), SIZES, **options).train()


def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    lines = [f"words={text}"]
    assert train(lines, tmp_path / "whole", 1024)
    stopped = []

    class Stopper(heads.Progress):
        def reach(self, done: int, total: int) -> None:
            if done >= 512 and not stopped:
                stopped.append(done)
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "Progress", Stopper)
        assert not train(lines, tmp_path / "parts", 1024)
        assert train(lines, tmp_path / "parts", 1024, resume=True)
    whole, parts = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("sizes", [SIZES, HYBRID])
def test_a_target_is_trained_and_exported(sizes: dict[str, object], text: Path, tmp_path: Path) -> None:
    lines, work, out = [f"words={text}:0.5"], tmp_path / "target.work", tmp_path / "target"
    command = command_line("target", lines, {"out": out.name, "tokens": "768"})
    run = target_run(lines, work, recipe(768), sizes)
    assert run.train()
    run.export(out, "A target", command, HOW)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.dtype, model.config.model_type) == (torch.bfloat16, sizes["model_type"])
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= {
        path.name for path in out.iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer("the cat  saw\n    two.")["input_ids"]) == "the cat  saw\n    two."
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "--data 'words=texts.txt:0.5'" in card
    assert str(tmp_path) not in card

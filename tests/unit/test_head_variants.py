"""EAGLE-3 heads as their trainers configure them, against the layer and the tree search written from the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob
from coppice.heads.block_head import Eagle3Head
from coppice.heads.checkpoints import read_head, save_head
from tests.unit.test_feature_heads import GREEDY, Slow, Text, Tokens, drafted, opened
from tests.unit.test_layouts import DIM, DRAFT, HEADS, KV, VOCAB, H, eagle3, eagle3_of_speculators, random, written

LENGTH = 12
EPS = 1e-5


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


class ByDefinition(Slow):
    """One EAGLE-3 layer over a whole text at once, in float64, from the tensors of a file and from switches.

    The tree is EAGLE-2's topK_genrate as EAGLE-3 calls it.
    """

    def __init__(
        self, tensors: dict[str, Tensor], embedding: Tensor, depth: int, width: int, scale: float = 1, **switches: bool
    ) -> None:
        self.tensors = {name.replace("layers.0.", "midlayer."): t.double() for name, t in tensors.items()}
        self.embedding, self.scale, self.switches = embedding.double(), scale, switches
        self.ids, self.depth, self.said = torch.arange(DRAFT) + tensors["d2t"], depth, {}
        self.settings = DrafterSettings(kind="eagle3", top_k=width)

    def linear(self, states: Tensor, name: str) -> Tensor:
        return F.linear(states, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / self.scale * 5e5 ** -(torch.arange(0, DIM, 2).double() / DIM)
        cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
        return states * cos + torch.cat((-states[..., DIM // 2 :], states[..., : DIM // 2]), -1) * sin

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        self.behind: dict[Tokens, Tensor] = self.behind if path else {}
        fused = self.linear(text.features[:LENGTH].double(), "fc")
        hidden = torch.stack([*fused, *(self.behind[path[:at]] for at in range(len(path)))])
        state = self.behind[path] = self.state(hidden, torch.tensor([*text.ids[1:LENGTH], job.root, *path]))
        return self.linear(
            state if self.switches.get("norm_output") else norm(state, self.tensors["norm.weight"]), "lm_head"
        )

    def state(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(H,) what the last of (N, H) rows in a row hands on."""
        own, layer = self.tensors, "midlayer."
        normed = norm(hidden, own[layer + "hidden_norm.weight"])
        embedded = norm(self.embedding[tokens], own[layer + "input_layernorm.weight"])
        inputs = torch.cat((embedded, normed), -1)
        query, key, value = (
            self.linear(inputs, f"{layer}self_attn.{name}_proj").view(len(hidden), -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        if self.switches.get("qk_norm"):
            query = norm(query, own[layer + "self_attn.q_norm.weight"])
            key = norm(key, own[layer + "self_attn.k_norm.weight"])
        positions = torch.arange(len(hidden)).double()
        query, key = self.turned(query, positions)[:, -1:], self.turned(key, positions)
        scores = query @ key.repeat_interleave(HEADS // KV, 0).transpose(1, 2) / DIM**0.5
        seen = scores.softmax(-1) @ value.repeat_interleave(HEADS // KV, 0)
        residual = normed if self.switches.get("norm_before_residual") else hidden
        state = residual[-1] + self.linear(seen.flatten(), layer + "self_attn.o_proj")
        inner = norm(state, own[layer + "post_attention_layernorm.weight"])
        gated = F.silu(self.linear(inner, layer + "mlp.gate_proj")) * self.linear(inner, layer + "mlp.up_proj")
        state = state + self.linear(gated, layer + "mlp.down_proj")
        return norm(state, own["norm.weight"]) if self.switches.get("norm_output") else state


TEXT = Text.random(40, 3)


JOB = DraftJob(1, TEXT.ids[LENGTH], LENGTH, 30, GREEDY)


def tree_of(folder: Path, target: Path) -> dict[Tokens, float]:
    """What the served head drafts."""
    shape = {"kv_tokens": 2048, "threads": 1, "depth": 3, "top_k": 4}
    head = Eagle3Head(DrafterSettings(kind="eagle3", path=str(folder), target=str(target), **shape))
    opened(head, 1, TEXT, LENGTH)
    return drafted(head, [JOB])[0]


LINEAR = {"type": "linear", "factor": 4.0}
CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "as it is": ({}, {}),
    "legacy rope_scaling": ({"rope_scaling": LINEAR, "rope_parameters": LINEAR}, {}),
    "norm_output": ({"norm_output": True}, {"norm_output": True}),
    "Qwen3's layers": ({"model_type": "qwen3"}, {"qk_norm": True}),
    "attention_bias": ({"attention_bias": True}, {}),
    "an embedding of its own": ({}, {}),
}


@pytest.mark.parametrize("name", CONFIGURED)
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_configured_heads_draft_by_their_definition(name: str, layout: str, target: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config, tensors = eagle3() if layout == "eagle3" else eagle3_of_speculators()
    change, switches = CONFIGURED[name]
    prefix, own = ("midlayer.", config) if layout == "eagle3" else ("layers.0.", config["transformer_layer_config"])
    (config if "norm_output" in change else own).update(change)
    if layout == "speculators":
        switches = switches | {"norm_before_residual": True}
    for weight in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[weight] = 1 + torch.rand(H) / 2
    if name == "Qwen3's layers":
        tensors |= {f"{prefix}self_attn.{part}_norm.weight": 1 + torch.rand(DIM) for part in "qk"}
    elif name == "attention_bias":
        rows = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM, "o": H}
        tensors |= {f"{prefix}self_attn.{part}_proj.bias": torch.randn(size) / 2 for part, size in rows.items()}
    tensors.pop("embed_tokens.weight", None)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if name == "an embedding of its own":
        tensors["embed_tokens.weight"] = embedding = random(VOCAB, H)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 4
    slow = ByDefinition(tensors, embedding, 3, 4, 4 if "rope_scaling" in change else 1, **switches)
    folder = written(tmp_path / "in", (config, tensors))
    expected = slow.tree(TEXT, 0, JOB)
    served = tree_of(folder, target)
    assert served == pytest.approx(expected, abs=2e-3)
    model = read_head(folder)
    save_head(tmp_path / "out", model, model.config)
    assert tree_of(tmp_path / "out", target) == pytest.approx(served, abs=1e-5)

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
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob
from coppice.heads.block_head import Eagle3Head
from coppice.heads.checkpoints import load_head, read_head, save_head
from tests.tiny import make_target
from tests.unit.test_feature_heads import GREEDY, Text, drafted, opened
from tests.unit.test_layouts import DIM, DRAFT, HEADS, KV, VOCAB, H, eagle3, random, speculators, written

LENGTH = 12
EPS = 1e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=H, tokenizer=False)


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


class ByDefinition:
    """One EAGLE-3 layer over a whole text at once, in float64, from the tensors of a file and from switches."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, scale: float = 1.0, **switches: bool) -> None:
        self.tensors = {name.replace("layers.0.", "midlayer."): t.double() for name, t in tensors.items()}
        self.embedding, self.scale, self.switches = embedding.double(), scale, switches
        self.ids = torch.arange(DRAFT) + tensors["d2t"]

    def linear(self, states: Tensor, name: str) -> Tensor:
        return F.linear(states, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / self.scale * 5e5 ** -(torch.arange(0, DIM, 2).double() / DIM)
        cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
        return states * cos + torch.cat((-states[..., DIM // 2 :], states[..., : DIM // 2]), -1) * sin

    def states(self, hidden: Tensor, tokens: Tensor, sees: Tensor, positions: Tensor) -> Tensor:
        """(N, H) what each row hands on, of the (N, H) rows that it may see (N, N)."""
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
        query, key = self.turned(query, positions), self.turned(key, positions)
        scores = query @ key.repeat_interleave(HEADS // KV, 0).transpose(1, 2) / DIM**0.5
        seen = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value.repeat_interleave(HEADS // KV, 0)
        residual = normed if self.switches.get("norm_before_residual") else hidden
        states = residual + self.linear(seen.transpose(0, 1).flatten(1), layer + "self_attn.o_proj")
        inner = norm(states, own[layer + "post_attention_layernorm.weight"])
        gated = F.silu(self.linear(inner, layer + "mlp.gate_proj")) * self.linear(inner, layer + "mlp.up_proj")
        states = states + self.linear(gated, layer + "mlp.down_proj")
        return norm(states, own["norm.weight"]) if self.switches.get("norm_output") else states

    def scores(self, states: Tensor) -> Tensor:
        """(N, draft vocabulary) log-probabilities."""
        normed = states if self.switches.get("norm_output") else norm(states, self.tensors["norm.weight"])
        return self.linear(normed, "lm_head").log_softmax(-1)

    def rows(self, text: Text) -> tuple[Tensor, Tensor]:
        """The fused features and the tokens of the committed rows, the root among the latter."""
        return self.linear(text.features[:LENGTH].double(), "fc"), torch.tensor(text.ids[1 : LENGTH + 1])

    def tree(self, text: Text, nodes: int, depth: int, width: int) -> dict[tuple[int, ...], float]:
        """EAGLE-2's topK_genrate as EAGLE-3 calls it: one level, then `depth` more; the best of all are kept.

        Every level recomputes all rows of the text and of the tree so far.
        """
        hidden, tokens = self.rows(text)
        positions = torch.arange(LENGTH).double()
        sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        out = self.states(hidden, tokens, sees, positions)
        best = self.scores(out[-1:]).topk(width)
        frontier = [
            ((int(self.ids[at]),), float(score), LENGTH - 1, [])
            for at, score in zip(best.indices[0].tolist(), best.values[0].tolist(), strict=True)
        ]
        found = {path: score for path, score, _, _ in frontier}
        for level in range(1, depth + 1):
            first = len(hidden)
            hidden = torch.cat([hidden, *(out[by][None] for _, _, by, _ in frontier)])
            tokens = torch.cat((tokens, torch.tensor([path[-1] for path, _, _, _ in frontier])))
            positions = torch.cat((positions, torch.full((len(frontier),), LENGTH - 1.0 + level)))
            wider = torch.zeros(len(hidden), len(hidden), dtype=torch.bool)
            wider[:first, :first] = sees
            for row, (_, _, _, ancestors) in enumerate(frontier, first):
                wider[row, [*range(LENGTH), *ancestors, row]] = True
            sees, out = wider, self.states(hidden, tokens, wider, positions)
            best = self.scores(out[first:]).topk(width)
            children = [
                ((*path, int(self.ids[at])), score + more, row, [*ancestors, row])
                for row, (path, score, _, ancestors) in enumerate(frontier, first)
                for at, more in zip(best.indices[row - first].tolist(), best.values[row - first].tolist(), strict=True)
            ]
            found |= {path: score for path, score, _, _ in children}
            frontier = sorted(children, key=lambda child: -child[1])[:width]
        return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


def head(folder: Path, target: Path, **more: Any) -> Eagle3Head:
    made = Eagle3Head(
        DrafterSettings(kind="eagle3", path=str(folder), target=str(target), kv_tokens=2048, threads=1, **more)
    )
    opened(made, 1, Text.random(40, 3), LENGTH)
    return made


def tree_of(made: Eagle3Head, budget: int) -> dict[tuple[int, ...], float]:
    text = Text.random(40, 3)
    (tree,) = drafted(made, [DraftJob(1, text.ids[LENGTH], LENGTH, budget, GREEDY)])
    return tree


def bias(tensors: dict[str, Tensor], prefix: str) -> None:
    for name, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM), ("o", H)):
        tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.randn(rows) / 2


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
def test_a_configured_head_drafts_what_its_definition_says(
    name: str, layout: str, target: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    config, tensors = eagle3() if layout == "eagle3" else speculators()
    change, switches = CONFIGURED[name]
    prefix, own = ("midlayer.", config) if layout == "eagle3" else ("layers.0.", config["transformer_layer_config"])
    (config if "norm_output" in change else own).update(change)
    if layout == "speculators":
        switches = switches | {"norm_before_residual": True}
    for weight in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[weight] = 1 + torch.rand(H) / 2
    if name == "Qwen3's layers":
        tensors |= {f"{prefix}self_attn.{one}_norm.weight": 1 + torch.rand(DIM) for one in "qk"}
    elif name == "attention_bias":
        bias(tensors, prefix)
    tensors.pop("embed_tokens.weight", None)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if name == "an embedding of its own":
        tensors["embed_tokens.weight"] = embedding = random(VOCAB, H)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 4
    slow = ByDefinition(tensors, embedding, 4.0 if "rope_scaling" in change else 1.0, **switches)
    folder = written(tmp_path / "in", (config, tensors))
    wanted = slow.tree(Text.random(40, 3), 30, depth=2, width=4)
    served = tree_of(head(folder, target, depth=3, top_k=4), 30)
    assert served.keys() == wanted.keys()
    assert served == pytest.approx(wanted, abs=2e-3)
    model = read_head(folder)
    save_head(tmp_path / "out", model, model.config)
    assert tree_of(head(tmp_path / "out", target, depth=3, top_k=4), 30) == pytest.approx(served, abs=1e-5)


def test_the_default_tree_of_a_sharp_head_is_the_published_one(target: Path, tmp_path: Path) -> None:
    """EAGLE-3's "total tokens 60, depth 7, top-k 10" are the root and 59 nodes on 1 + 7 levels."""
    torch.manual_seed(0)
    config, tensors = eagle3()
    tensors["lm_head.weight"] *= 12  # sharp: the tree is deep
    slow = ByDefinition(tensors, load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    wanted = slow.tree(Text.random(40, 3), 60 - 1, depth=7, width=10)
    assert max(map(len, wanted)) == 8
    served = tree_of(head(written(tmp_path, (config, tensors)), target), 59)
    assert served.keys() == wanted.keys()
    assert served == pytest.approx(wanted, abs=5e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type 'linear' and rope_type 'yarn'",
        ),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "unknown type 'su'"),
        ({"rope_scaling": {"type": "linear"}}, "Missing required keys.*'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        ({"eagle_config": {"hidden_size": 8}}, "contradicts itself: hidden_size is 32, hidden_size is 8"),
        (
            {"feature_layers": [1, 2], "eagle_aux_hidden_state_layer_ids": [1, 3]},
            r"contradicts itself: feature_layers is \[1, 2\], eagle_aux_hidden_state_layer_ids is \[1, 3\]",
        ),
        ({"fc_norm": True}, "fc_norm is true"),
        ({"is_causal": False}, "is_causal is false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    ],
)
def test_what_a_configuration_asks_for_and_nobody_can_do_is_named(
    change: dict[str, Any], why: str, target: Path, tmp_path: Path
) -> None:
    config, tensors = eagle3()
    with pytest.raises(InvalidField, match=why) as refused:
        load_head("eagle3", written(tmp_path, (config | change, tensors)), target)
    assert "\n" not in str(refused.value)


def test_the_feature_layers_of_an_eagle_config_are_read(target: Path, tmp_path: Path) -> None:
    config, tensors = eagle3()
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "use_aux_hidden_state": True}
    assert load_head("eagle3", written(tmp_path, (config, tensors)), target).config.feature_layers == (2, 3, 6)

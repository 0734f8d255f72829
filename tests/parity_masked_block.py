"""Heads that fill a block of masks against their authors' own modules:
`python -m tests.parity_masked_block --dflash CHECKOUT --jetspec CHECKOUT --deepspec CHECKOUT --speculators CHECKOUT`.

Each draft model is made tiny and random and writes its own checkpoint, which `load_head` loads. Both are asked for the
logits of one block behind features of a random target. Then a served head drafts a tree, whose scores are made of such
logits. It prints the largest difference over the largest value
of each, and exits with 1 when one is above 1e-5.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, with_tree_shape
from coppice.heads.checkpoints import Loaded, kind_in, load_head
from coppice.heads.registry import build_head
from coppice.speculation.sampling import SamplingParams
from tests.tiny import make_target
from tests.unit.test_feature_heads import Text, drafted, opened

VOCAB, DRAFT, LAYERS, HIDDEN, BLOCK, MASK, IDS = 96, 40, 12, 32, 6, 95, [-1, 2, 8]
CONTEXT = 17
LIMIT = 1e-5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "max_position_embeddings": 32,
}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True}


@dataclass
class Case:
    """A block to fill: its text, the target and what an author's functions make of them."""

    target: Any
    ids: Tensor
    """(1, C + 1), the root last"""
    states: tuple[Tensor, ...]
    """(1, C, hidden) of the target's embedding and of each layer"""

    @property
    def block(self) -> Tensor:
        """(1, B) ids."""
        return torch.cat((self.ids[:, -1:], torch.full((1, BLOCK - 1), MASK)), dim=1)

    @property
    def positions(self) -> Tensor:
        """(1, C + B)."""
        return torch.arange(CONTEXT + BLOCK)[None]


Ask = Callable[[Any, Case, Tensor], tuple[Tensor, Tensor | None]]
"""a model and the (slots,) tokens before its slots -> (slots, draft vocabulary) logits, and (slots,) confidences"""


@dataclass
class Author:
    """A draft model of an author's making, and how it is asked."""

    name: str
    model: Any
    ask: Ask


def zlab_config(**inner: Any) -> Qwen3Config:
    """Make the config of z-lab's and JetSpec's models."""
    inner["mask_token_id"] = MASK
    return Qwen3Config(**SIZES, num_target_layers=LAYERS, block_size=BLOCK, dflash_config=inner)


def zlab(case: Case) -> list[Author]:
    """Make z-lab's model."""
    from dflash.model import DFlashDraftModel, extract_context_feature

    def ask(model: Any, case: Case, previous: Tensor) -> tuple[Tensor, None]:
        states = model(
            target_hidden=extract_context_feature(case.states, model.target_layer_ids),
            noise_embedding=case.target.model.embed_tokens(case.block),
            position_ids=case.positions,
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )
        return case.target.lm_head(states[0, 1 - BLOCK :]), None

    return [Author("z-lab", DFlashDraftModel(zlab_config(target_layer_ids=IDS)), ask)]


def jetspec(case: Case) -> list[Author]:
    """Make JetSpec's models: one with a causal block, and one without that names no layers."""
    from jetspec.draft_head_adapter import DraftHeadTreeDrafter
    from jetspec.models.draft_head import DFlashDraftModel, extract_context_feature

    def ask(model: Any, case: Case, previous: Tensor) -> tuple[Tensor, None]:
        drafter = DraftHeadTreeDrafter(model, case.target, BLOCK, model.target_layer_ids)
        features = extract_context_feature(case.states, model.target_layer_ids)
        return drafter.propose_logits(case.ids, BLOCK - 1, features)[0], None

    DynamicCache.crop = lambda *_: None  # type: ignore[method-assign]  # transformers 5.23 takes no length to keep
    told = {"causal": {"causal_head": True, "target_layer_ids": IDS}, "bidirectional, default layers": {}}
    return [Author(f"JetSpec, {name}", DFlashDraftModel(zlab_config(**inner)), ask) for name, inner in told.items()]


def deepspec(case: Case) -> list[Author]:
    """Make DeepSpec's model, with a Markov table and without."""
    from deepspec.modeling.dspark.common import extract_context_feature
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
    from deepspec.modeling.dspark.qwen3.config import build_draft_config

    def ask(model: Any, case: Case, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        states = model._forward_backbone(
            target_hidden_states=extract_context_feature(case.states, model.target_layer_ids),
            noise_embedding=model.embed_tokens(case.block),
            position_ids=case.positions,
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )[0]
        logits = model.compute_logits(states)
        if model.markov_head is None:
            return logits, None
        logits = model.markov_head.apply_step_logits(logits, token_ids=previous, hidden_states=states)
        return logits, model.predict_confidence_step(states, previous).flatten()

    def made(**more: Any) -> Any:
        args = argparse.Namespace(
            num_draft_layers=3, target_layer_ids=IDS, block_size=BLOCK, mask_token_id=MASK, num_anchors=4, **more
        )
        config = build_draft_config(Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS}), args)
        config._attn_implementation = "sdpa"  # flex_attention needs a compiler here
        return Qwen3DSparkModel(config)

    return [
        Author("DeepSpec, Markov", made(confidence_head_alpha=1.0, **MARKOV), ask),
        Author("DeepSpec, plain", made(confidence_head_alpha=0.0, markov_rank=0), ask),
    ]


def speculators(case: Case) -> list[Author]:
    """Make speculators' models, with a reduced vocabulary and a whole one; they are asked as in training."""
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "speculators" else real(name)  # type: ignore[assignment]
    sys.modules |= {name: MagicMock() for name in ("datasets", "hs_connectors", "loguru")}
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    def ask(model: Any, case: Case, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        length = CONTEXT + 2 * BLOCK + 1  # what follows the root is not seen
        features = torch.cat([case.states[layer] for layer in model.target_layer_ids], dim=-1)
        features = torch.cat((features, torch.randn(1, length - CONTEXT, features.shape[-1])), dim=1)
        ids = torch.cat((case.ids, torch.zeros(1, length - CONTEXT - 1, dtype=torch.int64)), dim=1)
        here = (torch.arange(length) == CONTEXT)[None]
        hidden = torch.zeros(1, length, HIDDEN)
        documents = torch.zeros(1, length, dtype=torch.int64)
        states, logits, *_ = model._backbone_forward(features, ids, here, hidden, documents, max_anchors=1)
        first = not model.config.sample_from_anchor
        states, logits = states[0, first:], logits[0, first:]
        if getattr(model, "markov_head", None) is None:
            return logits, None
        logits = logits + model.markov_head.block_bias(prev_token_ids=previous[None], hidden_states=states[None])[0]
        return logits, model.confidence_head(torch.cat((states, model.markov_head.prev_embeddings(previous)), dim=-1))

    def made(model: Any, config: Any, vocab: int, **more: Any) -> Any:
        layer = Qwen3Config(**SIZES)
        layer._attn_implementation = "eager"
        built = model(
            config(
                transformer_layer_config=layer,
                draft_vocab_size=vocab,
                block_size=BLOCK,
                mask_token_id=MASK,
                aux_hidden_state_layer_ids=[one + 1 for one in IDS],
                **more,
            )
        )
        if vocab < VOCAB:
            known = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.randperm(VOCAB)[:vocab], True)
            built.load_vocab_mappings(known, known.nonzero().flatten() - torch.arange(vocab))
        return built

    dspark = DSparkDraftModel, DSparkSpeculatorConfig
    return [
        Author("speculators, DFlash", made(DFlashDraftModel, DFlashSpeculatorConfig, VOCAB), ask),
        Author("speculators, DSpark, 40 ids", made(*dspark, DRAFT, markov_rank=8), ask),
        Author(
            "speculators, DSpark whose root does not predict",
            made(*dspark, VOCAB, markov_rank=8, sample_from_anchor=False),
            ask,
        ),
    ]


def ours(loaded: Loaded, case: Case, previous: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what our model says of a case, in one full forward."""
    model, config = loaded.model, loaded.config
    features = torch.cat([case.states[layer] for layer in config.feature_layers], dim=-1)
    sees = torch.ones(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
    if config.causal:
        sees = sees.tril(CONTEXT)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, sees, enable_gqa=True)
        return attended.transpose(1, 2)

    rope = model.rope(case.positions, torch.float32)
    block = loaded.embedding[case.block]
    states = model(model.condition(features), block, rope, [attend] * config.num_hidden_layers)
    logits, normed = model.read(states[0, BLOCK - config.slots :])
    bias = model.bias(previous)
    return logits if bias is None else logits + bias, model.confidence(normed, previous) if config.confidence else None


def served(
    author: Author, loaded: Loaded, case: Case, folder: Path, target: Path
) -> tuple[dict[tuple[int, ...], float], Tensor]:
    """Return a served head's tree, and the scores of its nodes by the author's logits."""
    settings = DrafterSettings(kind=kind_in(folder), path=str(folder), target=str(target), kv_tokens=512, threads=1)
    head: Any = build_head(with_tree_shape(settings))
    ids, features = case.ids[0].tolist(), torch.cat([case.states[one] for one in loaded.config.feature_layers], dim=-1)
    opened(head, 0, Text(ids, features[0]), CONTEXT)
    tree = drafted(head, [DraftJob(0, ids[-1], CONTEXT, 40, SamplingParams())])[0]
    draft_ids = (torch.arange(loaded.config.draft_vocab_size) + loaded.model.d2t).tolist()
    wanted = []
    for path in tree:
        previous = torch.tensor([ids[-1], *path, *[0] * BLOCK])[: loaded.config.slots]
        rows = author.ask(author.model, case, previous)[0].log_softmax(-1)
        wanted.append(sum(rows[depth, draft_ids.index(token)] for depth, token in enumerate(path)))
    return tree, torch.tensor(wanted)


def apart(given: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest value."""
    assert given.shape == wanted.shape
    return float((given - wanted).abs().max() / wanted.abs().max())


def randomise(model: Any) -> None:
    """Give a model random weights, so large that its slots differ and are sure of themselves."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 3.0 if name == "norm.weight" else 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)


def compare(author: Author, case: Case, folder: Path, target: Path) -> dict[str, float]:
    """Return how far ours is from an author's model by what was compared."""
    randomise(author.model)
    author.model.eval().save_pretrained(folder / "theirs")
    loaded = load_head(kind_in(folder / "theirs"), folder / "theirs", target)
    previous = torch.cat((case.ids[0, -1:], torch.randint(VOCAB, (BLOCK,))))[: loaded.config.slots]
    wanted, sure = author.ask(author.model, case, previous)
    given, confidence = ours(loaded, case, previous)
    figures = {"logits": apart(given, wanted)}
    if sure is not None and confidence is not None:
        figures["confidence"] = apart(confidence, sure)
    tree, scores = served(author, loaded, case, folder / "theirs", target)
    figures[f"served tree of depth {max(map(len, tree))}"] = apart(torch.tensor(list(tree.values())), scores)
    return figures


@torch.no_grad()
def main() -> int:
    """Compare with the authors whose checkouts were named; return 1 when one is too far."""
    parser = argparse.ArgumentParser(description=__doc__)
    authors = {"dflash": zlab, "jetspec": jetspec, "deepspec": deepspec, "speculators": speculators}
    for name in authors:
        parser.add_argument(f"--{name}", type=Path, metavar="CHECKOUT")
    told = vars(parser.parse_args())
    disable_progress_bar()
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        torch.manual_seed(0)
        target = make_target(Path(temporary) / "target", VOCAB, layers=LAYERS, hidden=HIDDEN, tokenizer=False)
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        ids = torch.randint(VOCAB, (1, CONTEXT + 1))
        case = Case(model, ids, model(ids[:, :-1], output_hidden_states=True).hidden_states)
        for name, make in authors.items():
            if told[name] is None:
                continue
            sys.path[:0] = [str(told[name]), str(told[name] / "src")]
            for number, author in enumerate(make(case)):
                figures = compare(author, case, Path(temporary) / f"{name}{number}", target)
                print(f"{author.name}: {', '.join(f'{what} {figure:.1e}' for what, figure in figures.items())}")
                worst = max(worst, *figures.values())
    return int(not 0 < worst < LIMIT)


if __name__ == "__main__":
    sys.exit(main())

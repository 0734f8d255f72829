"""Training heads that read features: a small draft model learns from a target's features and distributions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from coppice.engine.engine import default_feature_layers
from coppice.errors import InvalidField
from coppice.heads.checkpoints import MASKED_KINDS, TargetParts, read_output, read_target, save_head, shape_of
from coppice.heads.models.expectation import expectation
from coppice.heads.models.layers import HeadConfig
from coppice.training.answers import TargetAnswers
from coppice.training.data import held_out_batches
from coppice.training.heads import HeadInTraining, TrainingConfig
from coppice.training.losses import DECAY, Acceptance, HeadLoss, Student, Teacher, l1_loss, measure
from coppice.training.run_folder import read_run, write_card

REPORT = "report.json"


def write_report(folder: Path, acceptance: Acceptance, log: list[dict[str, Any]]) -> None:
    """Write report.json: alpha by block and slot, the accepted length, the rank head's table and the run's log."""
    report = {
        "accepted_length": acceptance.length,
        "alpha": list(acceptance.alphas.values()),
        "alpha_by_block_and_slot": [
            {"block": block + 1, "slot": slot + 1, "alpha": alpha, "rows": acceptance.rows[block, slot]}
            for (block, slot), alpha in acceptance.alphas.items()
        ],
        "rank_head": acceptance.ranks() if int(acceptance.confusion.sum()) else [],
        "log": log,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


DRAFT_VOCAB = 4096
RANK_AFTER = 0.1
"""share of the run after which the rank head learns"""
MASK_AFTER = 0.5
"""share of the run after which SpecBlock's valid-prefix mask holds: the later slots of a head that is often wrong would
see too few rows; without it they never learn what follows the block's own tokens"""
STEPS = 7
"""of drafting that an EAGLE-3 head learns"""
LATER_ROWS = 3
"""later blocks learn from one row in so many"""
SLOT_DECAY = math.exp(-1 / 4)
"""weight of a slot of a block of masks over the one before (DSpark, arXiv 2607.05147, section 5)"""
ANCHOR_ROWS = 4
"""blocks of masks learn from one row in so many"""
LOSSES: Mapping[str, dict[str, Any]] = {
    "specblock": {"blocks": 3, "valid_prefix": True, "every": LATER_ROWS},
    "eagle3": {"blocks": STEPS, "decay": DECAY},
    **{kind: {"distance": l1_loss, "decay": SLOT_DECAY, "every": ANCHOR_ROWS} for kind in MASKED_KINDS},
}
"""what a kind of head learns by"""
MEASURED_ROWS = 12
LENGTH = "accepted length"
"""the figure that the best weights have the highest of"""
HEAD = "head.json"
"""in a run's work folder: configuration and draft vocabulary"""


def head_config(
    kind: str, config: Any, parts: TargetParts, draft_vocab: int, layers: tuple[int, ...] = (), **more: Any
) -> Any:
    """Return a head's configuration in the shape of the target's layers; `config` is the target's own.

    layers: those that the head reads; empty: the default ones. `more` are fields of the kind's own. Raises InvalidField
    for one that there is not, or whose value does not fit.
    """
    of_target = {
        "hidden_size": parts.hidden_size,
        "target_hidden_size": parts.hidden_size,
        "vocab_size": parts.vocab_size,
        "draft_vocab_size": min(draft_vocab, parts.vocab_size),
        "feature_layers": layers or default_feature_layers(parts.layers),
        "num_target_layers": parts.layers,
    }
    shape = {
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or parts.hidden_size // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": head_rope(config) | {name: more[name] for name in ("rope_theta",) if name in more},
    }
    if kind == "specblock":
        shape |= {"rank_norm_topk": None, "block_rope_advance": True, "prefix_broadcast": True}
    fields = shape_of(kind)[0]
    own = {field.alias or name for name, field in fields.model_fields.items()} - of_target.keys()
    for name in sorted(more.keys() - own):
        raise InvalidField("--shape", f"{name} is no field of a {kind} head that training can choose")
    return fields.checked(shape | of_target | more, "--shape")


def head_rope(config: Any) -> dict[str, Any]:
    """Return how a new head for a target turns positions: all of a state, as the target does or its full attention."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        given = given.get("full_attention") or {}
    partial = given.get("partial_rotary_factor") not in (None, 1)
    return {"rope_theta": given.get("rope_theta", 10_000.0)} if partial or not given else dict(given)


def check_shape(kind: str, target: Path, layers: tuple[int, ...], shape: Mapping[str, Any]) -> str:
    """Raise InvalidField unless a head of this shape, that reads these layers, can be made for the target.

    Returns what else to know: where it does not turn positions as the target does.
    """
    config = AutoConfig.from_pretrained(target).get_text_config()
    made = head_config(kind, config, read_target(target), DRAFT_VOCAB, layers, **shape)
    if made.rope_parameters == getattr(config, "rope_parameters", None):
        return ""
    return f"the target's layers do not all turn positions alike; the head's rope_parameters: {made.rope_parameters}"


def build_student(config: HeadConfig, embedding: Tensor, output: Tensor, draft_ids: Tensor, seed: int) -> Student:
    """Make a fresh draft model whose output layer starts as the target's."""
    torch.manual_seed(seed)
    model: Any = shape_of(config.kind)[1](config)
    model.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight", "head.proj.weight")):
                parameter.zero_()
            elif name.endswith("position_queries.weight"):
                nn.init.normal_(parameter, std=0.02)
            elif name.startswith("shift_proj"):  # starts as the identity: slot k of the layer before
                parameter.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
            elif name.endswith("lm_head.weight"):
                parameter.copy_(output[draft_ids])
    if not model.own_output:
        model.lm_head.weight = output[draft_ids].float()
    return Student(model, embedding.float())


class FeatureHeadInTraining(Student, HeadInTraining):
    """A head that reads the answers' layers, of a kind of ours."""

    best_by = LENGTH

    def __init__(
        self, config: TrainingConfig, draft_vocab: int = DRAFT_VOCAB, learns_by: Mapping[str, Any] | None = None
    ) -> None:
        """`learns_by` are fields of the HeadLoss of a kind that LOSSES does not have.

        Raises InvalidField as `head_config` does, and for answers of other layers than a resumed run's head.
        """
        kind, answers, options = config.kind, config.answers, config.options
        parts, output = read_target(config.target), read_output(config.target)
        draft_ids = draft_vocabulary(answers, parts.vocab_size, draft_vocab)
        if options.resume and (config.work / HEAD).exists():  # more answers may be there now, but the vocabulary stays
            begun = json.loads((config.work / HEAD).read_text(encoding="utf-8"))
            _check_layers(begun["config"], answers)
            draft_ids = torch.tensor(begun["draft_ids"])
        more = dict(config.shape)
        if kind in MASKED_KINDS:  # the row of the embedding that the text needs least
            more = {"mask_token_id": int(torch.bincount(answers.ids(), minlength=parts.vocab_size).argmin())} | more
        target = AutoConfig.from_pretrained(config.target).get_text_config()
        sizes = head_config(kind, target, parts, len(draft_ids), answers.layers, **more)
        fresh = build_student(sizes, parts.embedding_of(kind), output, draft_ids, options.seed)
        super().__init__(fresh.model, cast(Tensor, fresh.embedding))
        record = {"config": sizes.model_dump(by_alias=True), "draft_ids": draft_ids.tolist()}
        config.work.mkdir(parents=True, exist_ok=True)
        (config.work / HEAD).write_text(json.dumps(record) + "\n", encoding="utf-8")
        self.config, self.teacher = config, Teacher(answers.read, output.to(options.device), draft_ids)
        self.trained = HeadLoss(self.teacher, **(learns_by or LOSSES[kind]))
        # The mask admits more and harder rows as a head learns, so a masked loss rises when the head gets better.
        self.judge = replace(self.trained.whole(sizes.slots, STEPS), valid_prefix=False, rank_on=lambda: False)
        self.texts = held_out(answers, options.device)

    def begin(self, share: Callable[[], float]) -> None:
        """Let the rank head and the mask start when so much of the run is done."""
        self.trained.rank_on = lambda: share() >= RANK_AFTER
        self.trained.mask_on = lambda: share() >= MASK_AFTER

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the kind's loss."""
        return self.trained(self, rows, rows)

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the loss without a mask."""
        return self.judge(self, rows, rows)

    def figures(self) -> dict[str, float]:
        """Measure the accepted length."""
        return {LENGTH: measure(self, self.trained, list(chain.from_iterable(self.texts.values()))).length}

    def export(self, folder: Path) -> None:
        """Write the head in its public layout, with card and report."""
        kind, run = self.config.kind, read_run(self.config.work)
        self.bfloat16().float()  # what is measured is what is shipped: the rounded weights
        model = cast(Any, self.model)
        domains = {name: [measure(self, self.trained, [text]) for text in texts] for name, texts in self.texts.items()}
        acceptance = sum(chain.from_iterable(domains.values()), Acceptance())
        expected = expectation({name: [text.counts for text in texts] for name, texts in domains.items()})
        log = [json.loads(line) for line in (self.config.work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        save_head(folder, model.cpu().bfloat16(), model.config.model_copy(update={"acceptance": expected}))
        write_report(folder, acceptance, log)
        write_card(folder, f"A {kind} draft head for {run.target}", model, run, more=acceptance.markdown())


def _check_layers(config: Mapping[str, Any], answers: TargetAnswers) -> None:
    """Raise InvalidField unless the answers have the features of the layers that a head in training reads."""
    reads = tuple(config["feature_layers"])
    if reads != answers.layers:
        raise InvalidField(
            "--lessons", f"{answers.folder} holds features of layers {answers.layers}, the head reads {reads}"
        )


def draft_vocabulary(answers: TargetAnswers, vocab: int, size: int) -> Tensor:
    """Return the (size,) ids that are most frequent in the answers, ascending."""
    counts = torch.bincount(answers.ids(), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def held_out(answers: TargetAnswers, device: str) -> dict[str, list[Tensor]]:
    """Return positions of held-out texts, (N + 1,) each, by the name of their domain."""
    batches = held_out_batches(answers.domains(), MEASURED_ROWS, min(128, answers.plan.length))
    return {name: list(batch[:, :-1].to(device)) for name, batch in batches.items()}

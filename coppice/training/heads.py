"""What a kind of head gives to training, and the kinds that read features."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from coppice.engine.engine import default_feature_layers
from coppice.errors import InvalidField
from coppice.heads.checkpoints import MASKED_KINDS, SHAPES, TargetParts, save_head, shape_of
from coppice.heads.layers import HeadConfig
from coppice.training import losses
from coppice.training.answers import TargetAnswers
from coppice.training.data import held_out_batches

DRAFT_VOCAB, DRAFT_SHARE = 4096, 16
"""ids of the draft vocabulary: so many, or where that is more one in so many of the target's"""
MEASURED_ROWS = 12
LENGTH = "accepted length"  # the figure that the best weights have the highest of
HEAD = "head.json"  # in a run's work folder: configuration and draft vocabulary
LEAST_SIZE = 1e-6  # of a feature: smaller ones are as good as none


@dataclass(frozen=True)
class TrainingConfig:
    """What a head is built from before it is trained."""

    kind: str
    target: Path  # folder of the target
    answers: TargetAnswers  # what the target wrote; `answers.layers` are those of the features
    work: Path  # folder of the run, which is not shipped
    shape: Mapping[str, int] = field(default_factory=dict)  # fields of `--shape`
    resume: bool = False  # whether the run goes on from its checkpoint
    device: str = "cpu"
    seed: int = 0


class HeadInTraining(nn.Module):
    """A head in training. A kind makes one of a TrainingConfig: ours, or an entry point of `coppice.training`."""

    best_by: ClassVar[str] = ""  # the figure that is highest for the best weights; empty: the held-out loss is lowest
    share: float = 0.0  # how much of the run is done, 0 to 1; the trainer says it before each step

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the mean loss over (B, T) positions, each row a stretch of one text: see `answers.read(rows)`."""
        raise NotImplementedError

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return a loss that compares over the whole run, without gradients."""
        return self.loss(answers, rows)

    def figures(self) -> dict[str, float]:
        """Measure more on held-out text, by name."""
        return {}

    def export(self, folder: Path) -> str | None:
        """Write what this kind is served from into an empty folder. May return a further section of the model card."""
        raise NotImplementedError


def head_config(kind: str, parts: TargetParts, layers: tuple[int, ...] = (), **more: Any) -> Any:
    """Return a head's configuration in the shape of the target's layers.

    layers: those that the head reads; empty: the default ones. `more` are fields of the kind's own. Raises InvalidField
    for one that there is not, or whose value does not fit.
    """
    config: Any = parts.config
    of_target = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "vocab_size": parts.vocab_size,
        "feature_layers": layers or default_feature_layers(config.num_hidden_layers),
        "num_target_layers": config.num_hidden_layers,
    }
    copied = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    shape = {name: getattr(config, name) for name in (*copied, "max_position_embeddings")} | {
        "draft_vocab_size": min(max(DRAFT_VOCAB, parts.vocab_size // DRAFT_SHARE), parts.vocab_size),
        "shared_output": kind in SHAPES,
        "scaled_features": kind in SHAPES,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_parameters": head_rope(config) | {name: more[name] for name in ("rope_theta",) if name in more},
        "markov_drafts": kind == "dspark",
    }
    if kind == "specblock":
        shape |= {"rank_norm_topk": None, "block_rope_advance": True}
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
    """Raise InvalidField unless such a head can be made for the target; returns where it turns positions otherwise."""
    parts = TargetParts(target)
    head = head_config(kind, parts, layers, **shape)
    if head.rope_parameters == getattr(parts.config, "rope_parameters", None):
        return ""
    return f"the target's layers do not all turn positions alike; the head's rope_parameters: {head.rope_parameters}"


def build_student(
    config: HeadConfig, parts: TargetParts, draft_ids: Tensor, seed: int, dtype: torch.dtype = torch.float32
) -> losses.Student:
    """Make a fresh draft model whose output layer starts as the target's, or is it, then in `dtype`."""
    torch.manual_seed(seed)
    model: Any = shape_of(config.kind)[1](config)
    model.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.removesuffix(".weight")
            if part.endswith(("o_proj", "down_proj", "markov_w2", "head.proj", "residual")):
                parameter.zero_()
            elif part.endswith(("position_queries", "mask_tokens")):
                nn.init.normal_(parameter, std=0.02)
            elif part.startswith("shift_proj"):  # starts as the identity: slot k of the layer before
                parameter.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
            elif part.endswith("markov_w1") and len(parameter) == len(draft_ids) + 1:  # like tokens, like rows
                rows = parts.embedding[draft_ids].float()
                rows = rows @ torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -parameter.shape[1] :]
                parameter[:-1, : rows.shape[1]] = rows / rows.std(0).clamp_min(LEAST_SIZE) * parameter.shape[1] ** -0.5
            elif part.endswith("lm_head"):
                parameter.copy_(parts.output[draft_ids])
    if not model.own_output:
        model.lm_head.weight = parts.output[draft_ids].to(dtype)
    model.embedding_scale = parts.scale_of(config.kind)
    return losses.Student(model, parts.embedding.float())


@torch.no_grad()
def fit_scales(model: Any, answers: TargetAnswers) -> None:
    """Let a fresh model read features at one size, and write states as large as those that the output layer knows.

    They are measured on the first text of each domain: a target's values may differ by thousands.
    """
    first = np.stack([domain.train[: answers.plan.length] for domain in answers.domains()])
    sample = answers.read(torch.from_numpy(first))
    if model.config.scaled_features:
        sizes = sample.features.abs().mean((0, 1))
        model.feature_scale.copy_((1 / sizes.clamp_min(LEAST_SIZE)).bfloat16())
    if not model.own_output:
        model.norm.weight.copy_(sample.final.square().mean((0, 1)).sqrt())


class FeatureHeadInTraining(losses.Student, HeadInTraining):
    """A head that reads the answers' layers, of a kind of ours."""

    best_by = LENGTH

    def __init__(self, config: TrainingConfig, learns_by: Mapping[str, Any] | None = None) -> None:
        """`learns_by` are fields of the HeadLoss of a kind that LOSSES does not have.

        Raises InvalidField as `head_config` does, and for answers of other layers than a resumed run's head.
        """
        kind, answers, record = config.kind, config.answers, config.work / HEAD
        parts = TargetParts(config.target)
        counts, more = torch.bincount(answers.ids(), minlength=parts.vocab_size), dict(config.shape)
        if kind in MASKED_KINDS:  # the row of the embedding that the text needs least
            more = {"mask_token_id": int(counts.argmin())} | more
        sizes = head_config(kind, parts, answers.layers, **more)
        draft_ids = counts.argsort(descending=True, stable=True)[: sizes.draft_vocab_size].sort().values
        if config.resume and record.exists():  # more answers may be there now, but the vocabulary stays
            begun = json.loads(record.read_text(encoding="utf-8"))
            draft_ids, reads = torch.tensor(begun["draft_ids"]), tuple(begun["config"]["feature_layers"])
            if reads != answers.layers:
                reason = f"{answers.folder} holds features of layers {answers.layers}, the head reads {reads}"
                raise InvalidField("--lessons", reason)
            sizes = shape_of(kind)[0].checked(begun["config"], "--resume")
            for name, value in config.shape.items():
                if value != (has := begun["config"].get(name)):
                    raise InvalidField("--shape", f"{name} is {value}, and {has} of the head that {record} began")
        dtype = losses.fast_dtype(torch.device(config.device))
        fresh = build_student(sizes, parts, draft_ids, config.seed, dtype)
        fit_scales(fresh.model, answers)
        super().__init__(fresh.model, cast(Tensor, fresh.embedding))
        config.work.mkdir(parents=True, exist_ok=True)
        begun = {"config": sizes.model_dump(by_alias=True), "draft_ids": draft_ids.tolist()}
        record.write_text(json.dumps(begun) + "\n", encoding="utf-8")
        teacher = losses.Teacher(parts.output.to(config.device), draft_ids, dtype)
        self.trained = losses.HeadLoss(teacher, **(learns_by or losses.LOSSES[kind]))
        batches = held_out_batches(answers.domains(), MEASURED_ROWS, min(128, answers.plan.length))
        self.texts = {name: answers.read(batch[:, :-1].to(config.device)) for name, batch in batches.items()}
        """held-out texts, by the name of their domain"""

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        return self.trained(self, answers.read(rows), self.share)

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the loss without a mask, which admits more and harder rows as a head gets better."""
        return self.trained.held_out(self, answers.read(rows))

    def figures(self) -> dict[str, float]:
        measured = [losses.measure(self, self.trained, texts) for texts in self.texts.values()]
        return {LENGTH: losses.accepted_length(torch.cat(measured))}

    def export(self, folder: Path) -> str:
        """Write the head in its public layout, with what is expected of it. Returns its acceptance for the card."""
        self.model.bfloat16().float()  # what is measured is what is shipped: the rounded weights
        model = cast(Any, self.model)
        measured = {name: losses.measure(self, self.trained, texts) for name, texts in self.texts.items()}
        config = model.config.model_copy(update={"acceptance": losses.expectation(measured)})
        save_head(folder, model.cpu().bfloat16(), config)
        texts = torch.cat(list(measured.values()))
        shares = [f"{alpha:.3f}" for alpha in losses.alphas(texts)]
        return (
            "## Acceptance\nOn held-out text, how often the k-th greedy draft token is right when those before were; "
            f"a greedy chain would commit {losses.accepted_length(texts):.2f} tokens a step.\n\n"
            f"| k | {' | '.join(str(k) for k in range(1, len(shares) + 1))} |\n|---|{'---|' * len(shares)}\n"
            f"| alpha | {' | '.join(shares)} |"
        )

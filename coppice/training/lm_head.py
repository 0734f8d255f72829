"""Training a draft head of kind `lm`: a small causal LM that is taught by the target on the target's own words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from coppice.training.answers import AnswerPlan, answer_prefixes, read_answers
from coppice.training.corpora import Corpus, is_held_out, load_corpus, parse_specs
from coppice.training.dtype import autocast, fast_dtype
from coppice.training.losses import soft_target_loss
from coppice.training.packing import Packed, load_packed, open_prepared, prepare
from coppice.training.progress import Progress
from coppice.training.schedule import Schedule
from coppice.training.target import Shape, build_model
from coppice.training.tokenizer import copy_tokenizer, load_tokenizer
from coppice.training.trainer import Rates, Trainer
from coppice.training.workers import LossFunction

ANSWERS = "answers"
ANSWERS_WEIGHT = 0.6
"""Share of the training tokens that are the target's answers; the corpora have the rest."""
ANSWERS_SHARE = 0.2
"""Tokens generated for a token of training: each answer is read about three times."""
LM_SHAPE = Shape(hidden=128, layers=2, intermediate=384, heads=2, kv_heads=2, head_dim=64)
LM_RATES = Rates(muon=0.02, adam=4e-3, eval_tokens=50_000)


def lm_schedule(tokens: int) -> Schedule:
    """A short run in small steps."""
    return Schedule(tokens=tokens, warmup=20_000, batch=2048)


def load_target(folder: Path, device: str) -> Any:
    """The target for answering and teaching, in the format that is fast on `device`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=fast_dtype(torch.device(device)))
    model.to(device)
    model.eval()
    model.requires_grad_(False)
    return model


def build_student(target: Any, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """A small Llama over the target's vocabulary whose embeddings start as the target's main components."""
    vocab, positions = target.config.vocab_size, target.config.max_position_embeddings
    student = build_model(shape.model_copy(update={"vocab": vocab, "positions": positions}), seed)
    with torch.no_grad():
        weight: Tensor = target.get_input_embeddings().weight
        wide = weight.float().cpu()
        left, strength, _ = torch.linalg.svd(wide - wide.mean(0), full_matrices=False)
        width = min(shape.hidden, len(strength))
        start = left[:, :width] * strength[:width]
        student.model.embed_tokens.weight[:, :width] = start * (0.02 / start.std().clamp_min(1e-8))
    return student


def distillation_loss(target: Any) -> LossFunction:
    """The student's loss against what `target` believes at every position of the same inputs."""

    def loss(student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        with torch.no_grad():
            taught = target.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        with autocast(inputs.device):
            hidden = student.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            return soft_target_loss(hidden, student.lm_head.weight, taught, target.lm_head.weight)

    return loss


def prepare_lessons(
    lines: list[str], target: PreTrainedModel, target_folder: Path, work: Path, plan: AnswerPlan, num_workers: int = 1
) -> list[Packed]:
    """The corpora in the target's tokens and, as one more domain, the target's answers to their prefixes."""
    folder, record = work / "data", work / "data" / "lines.json"
    if not (record.exists() and json.loads(record.read_text(encoding="utf-8")) == lines):
        corpora: list[Corpus] = [load_corpus(spec) for spec in parse_specs(lines)]
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer(target_folder, folder)
        prepare(corpora, load_tokenizer(folder), folder)
        record.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    domains = open_prepared(folder)
    answers = folder / "answers.jsonl"
    answer_prefixes(target, domains, plan, answers, num_workers)
    _pack_answers(answers, folder)
    total = sum(d.weight for d in domains)
    rest = (1 - ANSWERS_WEIGHT) / total
    shared = [Packed(d.name, d.weight * rest, d.train, d.held_out) for d in domains]
    return [*shared, load_packed(ANSWERS, ANSWERS_WEIGHT, folder)]


def _pack_answers(path: Path, folder: Path) -> None:
    """Split the answers by the held-out rule and write them as the domain ANSWERS."""
    tokenizer = load_tokenizer(folder)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for ids in read_answers(path):
        parts[is_held_out(tokenizer.decode(ids.tolist(), skip_special_tokens=False))].append(ids)
    for held_out, arrays in parts.items():
        joined = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint16)
        np.save(folder / f"{ANSWERS}.{'held_out' if held_out else 'train'}.npy", joined)


def train_lm(
    lines: list[str],
    target_folder: Path,
    work: Path,
    schedule: Schedule,
    *,
    shape: Shape = LM_SHAPE,
    rates: Rates = LM_RATES,
    plan: AnswerPlan | None = None,
    resume: bool = False,
    device: str = "cpu",
    num_workers: int = 1,
    seed: int = 0,
) -> bool:
    """Train into `work`; False when a signal stopped the run before its end."""
    target = load_target(target_folder, device)
    plan = plan or AnswerPlan(tokens=int(schedule.tokens * ANSWERS_SHARE), seed=seed)
    domains = prepare_lessons(lines, target, target_folder, work, plan, num_workers)
    student: Any = build_student(target, shape, seed)
    student.to(device)
    student.config.save_pretrained(work)
    trainer = Trainer(student, distillation_loss(target), domains, schedule, work, rates, seed, num_workers)
    if resume:
        trainer.resume()
    return trainer.train(Progress("lm"))

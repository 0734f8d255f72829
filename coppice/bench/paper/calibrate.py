"""`coppice bench calibrate`: how far a head's logits, and how far the noise, say what the target draws at T > 0.

A coupled draft gives a token c the score log_softmax_c(alpha * logits / T + beta * noise). Both are fitted by maximum
likelihood to what the target drew in texts whose noise is known: a multinomial logit of two coefficients, which has one
maximum. Rows count whose ancestors a chain at (1, 1) would have right: a draft has no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coppice.bench.paper.rank import answers
from coppice.bench.report import Report
from coppice.heads.checkpoints import load_head, read_output
from coppice.heads.ranking import target_ids
from coppice.speculation.sampling_torch import noise
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.training.data.answerer import Answer, as_positions
from coppice.training.data.teacher import Teacher
from coppice.training.losses.feature_losses import Student, right_rows
from coppice.training.losses.walk import Targets, walk
from coppice.training.progress import Progress

SEED = 1
DEPTH = 8
"""levels of a head that drafts a level at a time"""
SPINED = ("specblock", "falcon")
"""kinds whose block goes on from its greedy token, whatever the noise prefers"""
CLOSE, MOST = 1e-4, 50
"""change of a coefficient that ends a fit, and the steps after which it ends anyway"""

Texts = list[tuple[Answer, int]]
"""with the tokens of each one's prompt"""


@dataclass(frozen=True)
class Rows:
    """What a head said at one depth of one text."""

    logits: Tensor  # (n, D), over the temperature
    noise: Tensor  # (n, D)
    gold: Tensor  # (n,) draft ids
    tokens: Tensor  # (n,) which token of all texts it is: rows of several depths may be of the same one


@dataclass(frozen=True)
class Fit:
    """The coefficients, (2,) each with alpha first, and the mean nats of a row."""

    coefficients: Tensor
    errors: Tensor
    """standard errors; rows of the same token count as one observation, and the model may be wrong"""
    nats: float
    nats_at_one: float
    """with both coefficients 1"""


def run_calibrate(
    spec: StackSpec,
    report: Report,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperatures: Sequence[float],
) -> None:
    """Fit the coefficients of every head at each temperature along the target's own keyed texts."""
    lines = []
    written: dict[tuple[float, tuple[int, ...]], Texts] = {}
    with Progress("fits", len(spec.heads) * len(temperatures)) as progress:
        for head in spec.heads:
            assert head.path is not None
            layers = load_head(head.kind, head.path, spec.target).config.feature_layers
            for temperature in temperatures:
                texts = written.get((temperature, layers))
                if texts is None:
                    progress.say(f"the target answers, T={temperature:g}")
                    texts = answers(spec.target, prompts, new_tokens, layers, temperature, SEED)
                    written[temperature, layers] = texts
                progress.say(f"{head.name}, T={temperature:g}")
                lines.append(calibrated(head, spec.target, texts, temperature))
                progress.add()
    formats = dict.fromkeys(("alpha", "alpha_error", "beta", "beta_error", "nats_at_one", "nats"), ".3f")
    report.add_figures("calibration", "what tells best what the target draws", lines, formats)


def calibrated(head: HeadSpec, target: Path, texts: Texts, temperature: float) -> dict[str, Any]:
    """One head's coefficients, with standard errors, the nats of a row before and after, and the rows.

    `outside` are rows, left out of the fit, whose token is not in the draft vocabulary.
    """
    assert head.path is not None
    loaded = load_head(head.kind, head.path, target)
    read, positions = as_positions([text for text, _ in texts])
    teacher = Teacher(read, read_output(target).float(), target_ids(loaded.model, loaded.config))
    student = Student(loaded.model, loaded.embedding.float())
    rows, outside = list[Rows](), 0
    for seed, of_text, (_, prompt) in zip(count(SEED), positions, texts, strict=False):
        more, missing = rows_along(student, teacher, of_text, prompt, temperature, seed, head.kind in SPINED)
        rows, outside = rows + more, outside + missing
    fitted = fit(rows)
    (alpha, beta), (alpha_error, beta_error) = fitted.coefficients.tolist(), fitted.errors.tolist()
    return {
        "head": head.name,
        "temperature": temperature,
        "alpha": alpha,
        "alpha_error": alpha_error,
        "beta": beta,
        "beta_error": beta_error,
        "nats_at_one": fitted.nats_at_one,
        "nats": fitted.nats,
        "rows": sum(len(part.gold) for part in rows),
        "outside": outside,
    }


@torch.no_grad()
def rows_along(
    student: Any, teacher: Teacher, text: Tensor, prompt: int, temperature: float, seed: int, spined: bool = False
) -> tuple[list[Rows], int]:
    """Return the rows of a text at (T,) positions whose tokens behind the prompt were drawn with a seed, by depth.

    Also returns how many more there were whose token is outside the draft vocabulary. A draft begins behind every drawn
    token. `spined`: the slots of a block are told only while the block's own greedy tokens are right, too.
    """
    answer, slots = teacher.read(text[None]), student.model.config.slots
    targets = Targets.of(answer, teacher)
    alive, rows, outside = (targets.rows >= prompt - 1)[None], list[Rows](), 0
    blocks = walk(student, answer, targets, targets.rows, [slots] * (DEPTH if slots == 1 else 2))
    for depth, states in enumerate(slot for block in blocks for slot in block.unbind(2)):
        outside += targets.outside(alive, depth)
        admitted, gold = targets.admit(alive, depth)
        if not len(gold):
            break
        logits, _ = student.model.read_behind(states[admitted], targets.token(depth)[admitted], depth % slots)
        places = admitted[0].nonzero()[:, 0] + depth + 2
        told = noise(seed, places, teacher.draft_ids).float()
        rows.append(Rows(logits.float() / temperature, told, gold, text[places]))
        alive = right_rows(admitted, rows[-1].logits + told, gold)
        if spined:
            alive &= right_rows(admitted, logits, gold)
    return rows, outside


@dataclass(frozen=True)
class _Likelihood:
    """Of n rows, at some coefficients: log-likelihood in nats, (n, 2) gradients of each, (2, 2) information of all."""

    nats: float
    gradients: Tensor
    information: Tensor

    def step(self) -> Tensor:
        """Return Newton's (2,) step."""
        found: Tensor = torch.linalg.solve(self.information, self.gradients.sum(0))
        return found


def _likelihood(rows: Sequence[Rows], coefficients: Tensor) -> _Likelihood:
    nats, gradients, information = 0.0, [], torch.zeros(2, 2, dtype=torch.float64)
    for part in rows:
        alpha, beta = coefficients.tolist()
        log_probs = (alpha * part.logits + beta * part.noise).log_softmax(-1)
        own, probs = part.gold[:, None], log_probs.exp()
        known = torch.stack((part.logits, part.noise))  # (2, n, D)
        known = known - (probs * known).sum(-1, keepdim=True)
        nats += float(log_probs.gather(-1, own).double().sum())
        gradients.append(known.gather(-1, own.expand(2, -1, 1))[..., 0].T.double())
        information += ((probs * known).flatten(1) @ known.flatten(1).T).double()
    return _Likelihood(nats, torch.cat(gradients), information)


def fit(rows: Sequence[Rows]) -> Fit:
    """Find the likeliest coefficients by Newton's method, whose steps are halved where they lead too far."""
    coefficients = torch.ones(2, dtype=torch.float64)
    first = now = _likelihood(rows, coefficients)
    step = now.step()
    for _ in range(MOST):
        if float(step.abs().max()) < CLOSE:
            break
        tried = _likelihood(rows, coefficients + step)
        if tried.nats < now.nats:
            step = step / 2
        else:
            coefficients, now = coefficients + step, tried
            step = now.step()
    tokens = torch.cat([part.tokens for part in rows])
    of_tokens = torch.zeros(int(tokens.max()) + 1, 2, dtype=torch.float64).index_add(0, tokens, now.gradients)
    spread = torch.linalg.inv(now.information)
    errors = (spread @ of_tokens.T @ of_tokens @ spread).diagonal().sqrt()
    count_of_rows = len(now.gradients)
    return Fit(coefficients, errors, -now.nats / count_of_rows, -first.nats / count_of_rows)

"""`coppice bench calibrate`: whose rows are fitted, to what, and how, against obvious references."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch import Tensor

from coppice.bench.paper.calibrate import SPINED, Rows, fit, rows_along
from coppice.bench.paper.rank import answers
from coppice.bench.reference import Reference
from coppice.heads.base import DraftJob
from coppice.heads.checkpoints import load_head, read_output
from coppice.heads.ranking import target_ids
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.sampling_torch import noise
from coppice.training.data.answerer import Answer, as_positions
from coppice.training.data.teacher import Teacher
from coppice.training.losses.feature_losses import Student
from tests.unit.test_feature_heads import HIDDEN, VOCAB, Slow, SlowMedusa, Text, build, log_scores, save_random, target

__all__ = ["target"]  # the fixture

SAMPLED = SamplingParams(temperature=0.2, seed=9)
LENGTH, PROMPT = 40, 6


def said(slow: Slow, text: Text, root: int) -> dict[tuple[int, ...], Tensor]:
    """The logits behind each path of a sampled draft from the token at `root`."""
    job = DraftJob(0, text.ids[root], root, 60, SAMPLED)
    if isinstance(slow, SlowMedusa):
        following = tuple(text.ids[root + 1 :])
        return {following[:depth]: logits for depth, logits in enumerate(slow.said(text, 0, job))}
    slow.tree(text, 0, job)
    return {path: logits for path, (_, logits) in slow.said.items()}


def choices(slow: Slow, logits: Tensor, place: int, spined: bool) -> set[int]:
    """The tokens that have to be the text's so that a chain goes on."""
    job = DraftJob(0, 0, place - 1, 1, SAMPLED)
    scores = [log_scores(logits, job, 1, slow.ids, slow.settings), *[logits] * spined]
    return {int(slow.ids[each.argmax()]) for each in scores}


@pytest.mark.parametrize("kind", ["eagle3", "falcon", "dspark"])
def test_rows_are_what_a_chain_from_each_drawn_token_says_until_it_is_wrong(
    kind: str, target: Path, tmp_path: Path
) -> None:
    folder, spined = save_random(tmp_path, kind), kind in SPINED
    loaded, (_, slow) = load_head(kind, folder, target), build(kind, folder, target, top_k=3 if spined else 1)
    text = Text.random(LENGTH, 1)
    for root in (7, 16, 25):  # where the head is right for a while
        for place in range(root + 1, root + 9):
            logits = said(slow, text, root).get(tuple(text.ids[root + 1 : place]))
            if logits is not None:
                text.ids[place] = min(choices(slow, logits, place, spined))

    expected, missing = defaultdict[int, list[tuple[int, Tensor]]](list), 0
    for root in range(PROMPT, LENGTH - 1):
        known = said(slow, text, root)
        for place in range(root + 1, LENGTH):
            logits = known.get(tuple(text.ids[root + 1 : place]))
            if logits is None:
                break
            if text.ids[place] not in slow.ids:
                missing += 1
                break
            expected[place - root - 1].append((place, logits / SAMPLED.temperature))
            if choices(slow, logits, place, spined) != {text.ids[place]}:
                break

    answer = Answer(torch.tensor(text.ids), text.features, torch.randn(LENGTH, HIDDEN))
    read, (positions,) = as_positions([answer])
    teacher = Teacher(read, read_output(target).float(), target_ids(loaded.model, loaded.config))
    student = Student(loaded.model, loaded.embedding)
    rows, outside = rows_along(student, teacher, positions, PROMPT, SAMPLED.temperature, SAMPLED.seed, spined)
    assert len(rows) == len(expected) >= 5
    assert outside == missing > 0
    for depth, part in enumerate(rows):
        places, logits_of = zip(*expected[depth], strict=True)
        assert part.tokens.tolist() == list(places)
        assert teacher.draft_ids[part.gold].tolist() == [text.ids[place] for place in places]
        torch.testing.assert_close(part.logits, torch.stack(logits_of), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(part.noise, noise(SAMPLED.seed, part.tokens, slow.ids).float())


def test_the_nth_answer_is_that_to_a_request_with_the_nth_seed(target: Path) -> None:
    prompts, reference = [[5, 80, 33], [5, 80, 33], [7, 2]], Reference(target, "float32")
    texts = [text.ids.tolist() for text, _ in answers(target, prompts, 30, (), 0.8, 4)]
    assert texts[0] != texts[1]
    for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=4):
        sampling = SamplingParams(temperature=0.8, seed=seed)
        assert reference.judge(prompt, text[len(prompt) :], sampling) == "identical"


def drawn(truth: tuple[float, float], count: int, seed: int) -> Rows:
    """Rows whose tokens have the chances that the coefficients say."""
    rng = np.random.default_rng(seed)
    logits, known = 2 * rng.standard_normal((count, VOCAB)), rng.gumbel(size=(count, VOCAB))
    gold = (truth[0] * logits + truth[1] * known + rng.gumbel(size=(count, VOCAB))).argmax(1)
    of_float = (torch.from_numpy(each).float() for each in (logits, known))
    return Rows(*of_float, torch.from_numpy(gold), 1000 * seed + torch.arange(count))


@pytest.mark.parametrize("truth", [(0.8, 1.3), (4.0, 4.5), (0.1, 0.05)])
def test_a_fit_is_the_likeliest_and_its_errors_say_how_far_off_it_is(truth: tuple[float, float]) -> None:
    parts = [drawn(truth, 500, 1), drawn(truth, 300, 2)]
    logits, known, gold = (torch.cat([getattr(part, name) for part in parts]) for name in ("logits", "noise", "gold"))

    def nats(coefficients: tuple[float, float]) -> float:
        scores = log_softmax(coefficients[0] * logits.numpy() + coefficients[1] * known.numpy(), axis=1)
        return float(-scores[np.arange(len(gold)), gold].mean())

    found, best = fit(parts), minimize(nats, truth, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9})
    np.testing.assert_allclose(found.coefficients, best.x, atol=2e-3)
    assert found.nats == pytest.approx(best.fun, abs=1e-5)
    assert found.nats_at_one == pytest.approx(nats((1.0, 1.0)), abs=1e-4)
    assert bool(((found.coefficients - torch.tensor(truth)).abs() < 4 * found.errors).all())


def test_rows_of_the_same_token_are_one_observation() -> None:
    one, other = drawn((0.8, 1.3), 400, 1), drawn((0.8, 1.3), 400, 2)
    twice = fit([one, one]).errors
    torch.testing.assert_close(twice, fit([one]).errors, rtol=1e-3, atol=0)
    torch.testing.assert_close(twice / fit([one, other]).errors, torch.full((2,), 2**0.5).double(), rtol=0.1, atol=0)

"""What the target itself says: prefixes of training documents, answered by it at several temperatures."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from coppice.training.packing import Ids, Packed
from coppice.training.progress import say
from coppice.training.workers import one_core_each

TEMPERATURES = (0.0, 0.7, 1.0)
PREFIX_LENGTHS = (16, 32, 64, 96)


@dataclass(frozen=True)
class AnswerPlan:
    """How much to generate: `tokens` in all, prefixes not counted, `batch` answers at once of up to `new_tokens`."""

    tokens: int
    batch: int = 32
    new_tokens: int = 128
    seed: int = 0


def answer_prefixes(
    target: PreTrainedModel, domains: list[Packed], plan: AnswerPlan, path: Path, num_workers: int = 1
) -> None:
    """Append JSON lines {batch, domain, temperature, prefix, ids} to `path` until it has `plan.tokens` new ids.

    Finished batches are on disk, so an interrupted run goes on with the next one. Every worker answers a batch of its
    own on one core, for the reason given in workers.py; with more than one, sampled answers differ between runs.
    """
    done, first = _progress_of(path)
    ends = {d.name: np.flatnonzero(d.train == target.config.eos_token_id) for d in domains}

    def answer(number: int) -> list[dict[str, Any]]:
        domain = domains[number % len(domains)]
        temperature = TEMPERATURES[number // len(domains) % len(TEMPERATURES)]
        rng = np.random.default_rng([plan.seed, number])
        prefixes = draw_prefixes(domain, ends[domain.name], plan.batch, rng)
        answers = generate(target, torch.from_numpy(prefixes), temperature, plan.new_tokens, plan.seed + number)
        facts = {"batch": number, "domain": domain.name, "temperature": temperature, "prefix": prefixes.shape[1]}
        return [facts | {"ids": ids} for ids in answers]

    with one_core_each(num_workers) as pool:
        while done < plan.tokens:
            for rows in pool.map(answer, range(first, first + num_workers)):
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                done += sum(len(row["ids"]) - row["prefix"] for row in rows)
            first += num_workers
            say("answers", f"{done:,}/{plan.tokens:,} tokens")


def draw_prefixes(domain: Packed, ends: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` prefixes of one length as (count, length): half from documents' beginnings, half from anywhere."""
    length = min(int(rng.choice(PREFIX_LENGTHS)), (len(domain.train) - 1) // 2)
    latest = len(domain.train) - length
    beginnings = np.concatenate([[0], ends + 1])
    beginnings = beginnings[beginnings < latest]
    starts = np.where(rng.random(count) < 0.5, rng.choice(beginnings, count), rng.integers(0, latest, count))
    return np.stack([domain.train[s : s + length] for s in starts]).astype(np.int64)


@torch.inference_mode()
def generate(model: Any, prefixes: torch.Tensor, temperature: float, new_tokens: int, seed: int) -> list[list[int]]:
    """Continue prefixes (B, T); an answer includes its prefix and ends with its first new end-of-text id."""
    torch.manual_seed(seed)
    prefixes = prefixes.to(model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    ids = model.generate(
        prefixes,
        attention_mask=torch.ones_like(prefixes),
        max_new_tokens=new_tokens,
        **(sampling or {"do_sample": False}),
    )
    end = model.config.eos_token_id
    answers = []
    for row in ids.tolist():
        tail = row[prefixes.shape[1] :]
        answers.append(row[: prefixes.shape[1]] + (tail[: tail.index(end) + 1] if end in tail else tail))
    return answers


def read_answers(path: Path) -> Iterator[Ids]:
    """The answers, prefixes included, as id arrays."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield np.array(json.loads(line)["ids"], dtype=np.uint16)


def _progress_of(path: Path) -> tuple[int, int]:
    """(new tokens, batches) that `path` already holds; a half-written batch is dropped."""
    if not path.exists():
        return 0, 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    batches = rows[-1]["batch"] if rows else 0
    kept = [row for row in rows if row["batch"] < batches]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return sum(len(row["ids"]) - row["prefix"] for row in kept), batches

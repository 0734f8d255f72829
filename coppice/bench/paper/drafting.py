"""`coppice bench drafting`: what a draft of a feature-fed head costs beside its bare forwards, in this process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coppice.bench.report import Check
from coppice.engine.batch import Piece, pack
from coppice.engine.loading import load_engine
from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead
from coppice.messages.steps import Advance, Features, OpenDraft
from coppice.prompts.files import demo_prompts
from coppice.speculation.sampling import SamplingParams

CONTEXT = 300  # tokens before the first timed draft
STRIDE = 3  # tokens committed between two drafts
BOUND = 1.15

AnyHead = FeatureHead[Any]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Medians over drafts: milliseconds of one, of its forwards alone, and their ratio."""

    name: str
    budget: int
    temperature: float
    draft_ms: float
    forwards_ms: float
    ratio: float

    def check(self) -> Check:
        """What is not the model's own computing is at most 15% on top of it."""
        ratio = round(self.ratio, 3)
        name = f"{self.name}, budget {self.budget}, T {self.temperature:g}: draft over bare forwards"
        return Check(name, ratio, f"<= {BOUND}", ratio <= BOUND)


@dataclass(frozen=True)
class Text:
    """Token ids, and the target's features of their positions."""

    ids: list[int]
    rows: Tensor  # (N, F)

    def part(self, start: int, end: int) -> Features:
        """The features of start..end-1 as they go over the wire."""
        rows = self.rows[start:end].contiguous()
        return Features(start, len(rows), str(rows.dtype)[6:], rows.view(torch.uint8).numpy().tobytes())


def read_text(target: Path, layers: tuple[int, ...], dtype: str, device: str, drafts: int) -> Text:
    """The demo's prompts one behind the other, random ids for a target without a tokenizer, for `drafts` drafts."""
    length = CONTEXT + STRIDE * drafts + 1
    engine = load_engine(target, device=device, dtype=dtype, kv_tokens=length)
    file, width = target / "tokenizer.json", engine.info.vocab_size
    if file.is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(file)).encode("\n\n".join(str(one.prompt) for one in demo_prompts())).ids
    else:
        ids = random.Random(0).choices(range(width), k=length)  # noqa: S311
    table = engine.pool.allocate("features", length)
    rows = engine.forward(pack([Piece.chain(table, 0, ids[:length], [length - 1])], layers)).features
    assert rows is not None
    return Text(ids[:length], rows.cpu())


def measure(head: AnyHead, text: Text, budget: int, temperature: float, drafts: int) -> Drafting:
    """Draft along the text; after each draft its forwards run again by themselves, on the same inputs."""
    sampling = SamplingParams(temperature=temperature, seed=1)
    opening = OpenDraft("drafting", text.ids[:CONTEXT], sampling, features=text.part(0, CONTEXT))
    for _ in head.open(0, opening):
        pass
    took: list[tuple[int, int]] = []
    try:
        for at in range(CONTEXT, CONTEXT + STRIDE * drafts, STRIDE):
            with _recorded(head) as forwards:
                began = time.perf_counter_ns()
                for _ in head.draft([DraftJob(0, text.ids[at], at, budget, sampling)]):
                    pass
                draft_ns = time.perf_counter_ns() - began
            before = head.forward_ns
            with torch.inference_mode():
                for forward in forwards:
                    forward()
            took.append((draft_ns, head.forward_ns - before))
            head.advance(0, Advance(text.ids[at : at + STRIDE], text.part(at, at + STRIDE)))
    finally:
        head.close(0)
    took = took[len(took) // 5 :]  # the first ones warm up
    draft_ms, forwards_ms = (statistics.median(part) / 1e6 for part in zip(*took, strict=True))
    ratio = statistics.median(draft_ns / forwards_ns for draft_ns, forwards_ns in took)
    return Drafting(head.description.name, budget, temperature, draft_ms, forwards_ms, ratio)


@contextmanager
def _recorded(head: AnyHead) -> Iterator[Sequence[Callable[[], object]]]:
    """The head's forwards while open, to be run again on its clock."""
    forwards: list[Callable[[], object]] = []
    timed = head.timed

    def record(work: Callable[..., Any], *inputs: Any) -> Any:
        forwards.append(partial(timed, work, *inputs))
        return timed(work, *inputs)

    head.timed = record  # type: ignore[method-assign]
    try:
        yield forwards
    finally:
        head.timed = timed  # type: ignore[method-assign]

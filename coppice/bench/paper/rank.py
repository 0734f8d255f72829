"""`coppice bench rank`: how well a SpecBlock head knows where it will be right, and what trees gain from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from coppice.bench.paper.replay import Replay, replay_all
from coppice.config.sections import DrafterSettings
from coppice.engine.loading import load_engine
from coppice.heads.checkpoints import load_specblock, read_output
from coppice.heads.feature_head import target_ids
from coppice.heads.specblock import SpecBlockHead
from coppice.training.data.target_answers import Answerer, Lesson, as_positions
from coppice.training.data.teacher import Teacher
from coppice.training.losses.acceptance import Acceptance, measure
from coppice.training.losses.feature_losses import SpecBlockLoss, Student

BUCKETS = ("rank 1", "rank 2-4", "rank 5-10", "beyond 10")
TREES: dict[str, tuple[tuple[int, int, int, int], bool]] = {
    "rank-guided 2,4,10,0 (paper)": ((2, 4, 10, 0), True),
    "rank-guided 2,4,6,4 (released)": ((2, 4, 6, 4), True),
    "rank-guided 2,4,6,10": ((2, 4, 6, 10), True),
    "uniform 4": ((4, 4, 4, 4), False),
    "cumulative score alone, 10 a slot": ((10, 10, 10, 10), False),
}
"""widths, and whether the rank head is asked; every tree is pruned to the same number of nodes"""


def answers(target: Path, prompts: Sequence[Sequence[int]], new_tokens: int, dtype: str) -> list[tuple[Lesson, int]]:
    """The target's greedy answers with its hidden states, and the length of each one's prompt."""
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    engine = load_engine(target, dtype=dtype, kv_tokens=sum(lengths) + 32 * len(lengths))
    texts = Answerer(engine).answer(prompts, lengths)
    return list(zip(texts, map(len, prompts), strict=True))


def said_along(folder: Path, target: Path, texts: Sequence[Lesson]) -> Acceptance:
    """What a SpecBlock head says along whole texts, prompts included."""
    loaded = load_specblock(folder, target)
    read, positions = as_positions(texts)
    teacher = Teacher(read, read_output(target).float(), target_ids(loaded.model, loaded.config))
    return measure(Student(loaded.model, loaded.embedding.float()), SpecBlockLoss(teacher), positions)


def tree_gains(
    folder: Path, target: Path, texts: Sequence[tuple[Lesson, int]], budget: int, threads: int = 0
) -> dict[str, Replay]:
    """Each kind of tree along the same texts at the same budget of nodes."""
    found = {}
    for name, (widths, guided) in TREES.items():
        settings = DrafterSettings(
            kind="specblock", path=str(folder), target=str(target), widths=widths, rank_guided=guided, threads=threads
        )
        found[name] = replay_all(SpecBlockHead(settings), texts, budget)
    return found


def rank_table(found: Acceptance, title: str) -> Table:
    """Table 3 of SpecBlock."""
    table = Table("bucket", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("frequency", "precision", "recall", "F1"):
        table.add_column(heading, justify="right")
    for bucket, row in zip(BUCKETS, found.ranks(), strict=True):
        table.add_row(bucket, *(f"{row[key]:.1%}" for key in ("frequency", "precision", "recall", "f1")))
    return table


def alpha_table(found: dict[str, Acceptance], title: str) -> Table:
    """alpha of each place of two blocks (or of eight steps), and what a greedy chain would commit."""
    table = Table("head", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    places = list(next(iter(found.values())).alphas)
    for block, slot in places:
        table.add_column(f"{block + 1}.{slot + 1}", justify="right")
    table.add_column("chain", justify="right")
    for name, acceptance in found.items():
        table.add_row(name, *(f"{alpha:.3f}" for alpha in acceptance.alphas.values()), f"{acceptance.length:.2f}")
    return table


def gains_table(found: dict[str, dict[str, Replay]], title: str) -> Table:
    """tau and verified nodes a step by kind of tree."""
    table = Table("head", "tree", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("tau", "nodes"):
        table.add_column(heading, justify="right")
    for head, gains in found.items():
        for name, gain in gains.items():
            table.add_row(head, name, f"{gain.tau:.3f}", f"{gain.nodes / max(1, gain.steps):.1f}")
    return table

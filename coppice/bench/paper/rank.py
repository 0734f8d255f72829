"""How well a SpecBlock head knows where it will be right, and what trees gain from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from coppice.bench.paper.replay import Replay, replay_all
from coppice.bench.progress import Progress
from coppice.bench.report import Report
from coppice.config.sections import DrafterSettings
from coppice.engine.loading import load_engine
from coppice.heads.block_head import SpecBlockHead
from coppice.heads.checkpoints import load_head, read_output
from coppice.heads.ranking import target_ids
from coppice.stack.spec import StackSpec
from coppice.training.data.answerer import Answer, Answerer, as_positions
from coppice.training.data.teacher import Teacher
from coppice.training.losses.acceptance import Acceptance, measure
from coppice.training.losses.feature_losses import HeadLoss, Student

BUCKETS = ("rank 1", "rank 2-4", "rank 5-10", "beyond 10")
TREES: dict[str, tuple[tuple[int, int, int, int], bool]] = {
    "rank-guided 2,4,10,0 (paper)": ((2, 4, 10, 0), True),
    "rank-guided 2,4,6,4 (released)": ((2, 4, 6, 4), True),
    "rank-guided 2,4,6,10": ((2, 4, 6, 10), True),
    "uniform 4": ((4, 4, 4, 4), False),
    "cumulative score alone, 10 a slot": ((10, 10, 10, 10), False),
}
"""widths, and whether the rank head is asked; every tree is pruned to the same number of nodes"""


def run_rank(spec: StackSpec, report: Report, prompts: Sequence[Sequence[int]], new_tokens: int, budget: int) -> None:
    """Measure the rank head of each SpecBlock head along the target's greedy answers, and its trees."""
    accepted, gains = {}, {}
    read: dict[tuple[int, ...], list[tuple[Answer, int]]] = {}
    with Progress("heads", len(spec.heads)) as progress:
        for head in spec.heads:
            assert head.path is not None
            layers = load_head("specblock", head.path, spec.target).config.feature_layers
            if layers not in read:
                progress.say("the target answers")
                read[layers] = answers(spec.target, prompts, new_tokens, "float32", layers)
            texts = read[layers]
            progress.say(f"{head.name} drafts along the answers")
            accepted[head.name] = accepted_along(head.path, spec.target, [text for text, _ in texts])
            gains[head.name] = tree_gains(head.path, spec.target, texts, budget)
            progress.add()
    columns = ("frequency", "precision", "recall", "f1")
    lines = [
        {"head": name, "bucket": bucket, **row}
        for name, acceptance in accepted.items()
        for bucket, row in zip(BUCKETS, acceptance.ranks(), strict=True)
    ]
    title = "does the rank head know where it is right?"
    report.add_figures("rank_head", title, lines, dict.fromkeys(columns, ".1%"))
    add_alphas(report, "alpha by block and slot along a greedy chain", accepted)
    add_trees(report, f"trees of at most {budget} nodes along the target's greedy answers", gains)


def answers(
    target: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    dtype: str,
    layers: tuple[int, ...] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[tuple[Answer, int]]:
    """The target's answers with the features of `layers` (empty: the default ones), and each prompt's length.

    At T > 0 the n-th is the answer to a request with the n-th seed from `seed` on.
    """
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    engine = load_engine(target, dtype=dtype, kv_tokens=sum(lengths) + 32 * len(lengths))
    texts = Answerer(engine, layers=layers).answer(prompts, lengths, temperature, seed, keyed=True)
    return list(zip(texts, map(len, prompts), strict=True))


def accepted_along(folder: Path, target: Path, texts: Sequence[Answer]) -> Acceptance:
    """How often a SpecBlock head is right along whole texts, prompts included."""
    loaded = load_head("specblock", folder, target)
    read, positions = as_positions(texts)
    teacher = Teacher(read, read_output(target).float(), target_ids(loaded.model, loaded.config))
    return measure(Student(loaded.model, loaded.embedding.float()), HeadLoss(teacher), positions)


def tree_gains(folder: Path, target: Path, texts: Sequence[tuple[Answer, int]], budget: int) -> dict[str, Replay]:
    """Each kind of tree along the same texts at the same budget of nodes."""
    settings = DrafterSettings(kind="specblock", path=str(folder), target=str(target))
    gains = {}
    for name, (widths, guided) in TREES.items():
        head = SpecBlockHead(settings, widths, guided)
        gains[name] = replay_all(head, texts, budget)
    return gains


def add_alphas(report: Report, title: str, accepted: Mapping[str, Acceptance]) -> None:
    """Add alpha of each place of two blocks (or of eight steps), and what a greedy chain would commit."""
    lines = []
    for name, acceptance in accepted.items():
        places = {f"{block + 1}.{slot + 1}": alpha for (block, slot), alpha in acceptance.alphas.items()}
        lines.append({"head": name, **places, "chain": acceptance.length})
    report.add_figures("alpha", title, lines, dict.fromkeys(lines[0].keys() - {"head", "chain"}, ".3f"))


def add_trees(report: Report, title: str, gains: Mapping[str, Mapping[str, Replay]]) -> None:
    """Add tau and verified nodes a step by head and kind of tree."""
    lines = [
        {"head": name, "tree": tree, "tau": gain.tau, "nodes": gain.nodes / max(1, gain.steps), "steps": gain.steps}
        for name, trees in gains.items()
        for tree, gain in trees.items()
    ]
    report.add_figures("trees", title, lines, {"tau": ".3f", "nodes": ".1f"})

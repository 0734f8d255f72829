"""`coppice bench learn`: of ways to train a head on texts that are new to it, what raises tau most for a second.

Answers of the target are recorded once, and everything is measured along them, so that recipes compare by what they
learnt alone. Seconds are processor time of one thread: what else the machine does counts little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coppice.bench.adapt.adapt import BUDGET
from coppice.bench.adapt.lanes import NEW_TOKENS
from coppice.bench.adapt.recipes import RECIPES, Recipe, train
from coppice.bench.adapt.recorded import Recorded
from coppice.bench.adapt.shift import programs, stories
from coppice.bench.paper.rank import answers
from coppice.bench.paper.replay import replay
from coppice.bench.report import Report
from coppice.bench.target_text import TargetText
from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.checkpoints import read_output
from coppice.heads.feature_head import FeatureHead
from coppice.heads.registry import served_head
from coppice.limits import check_range
from coppice.pictures.style import looks
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.training.progress import Progress
from coppice.weights.versions import Weights, pack_update

SIZES = (30, 60)
"""texts to learn from, beside all of them"""
HELD_OUT_STORIES, HELD_OUT_PROGRAMS = 40, 20
DEPLOYED = "deployed"
FIGURES = "learning"

Line = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """What is learnt from, and what tau is measured along."""

    new: list[Recorded]
    """stories"""
    familiar: list[Recorded]
    """programs, half as many, for recipes that mix them in"""
    held_out: dict[str, list[Recorded]]


def recipes_of(methods: Sequence[str] | None) -> dict[str, Recipe]:
    """The recipes of the names, all of them without any. Raises InvalidField."""
    if unknown := [name for name in methods or () if name not in RECIPES]:
        raise InvalidField("methods", f"{unknown[0]!r} is not one of {', '.join(RECIPES)}")
    return {name: RECIPES[name] for name in methods or RECIPES}


def check_texts(count: int) -> None:
    """Raise InvalidField when there are not so many stories to learn from beside those held out."""
    check_range("n", count, 1, len(stories()) - HELD_OUT_STORIES)


def run_learn(spec: StackSpec, report: Report, recipes: Mapping[str, Recipe], count: int) -> list[Line]:
    """Train a copy of the spec's head by every recipe on the first texts, up to `count`; the report gets the lines."""
    (head,) = spec.heads
    sizes = sorted({min(size, count) for size in (*SIZES, count)})
    with Progress("trainings", len(recipes) * len(sizes)) as progress:
        progress.say("the target answers")
        served = head_of(head, spec.target)
        texts = record(served, spec.target, count, HELD_OUT_STORIES, HELD_OUT_PROGRAMS)
        lines = learn(served, head, spec.target, texts, recipes, sizes, progress)
    title = f"{head.name}, tau after training on so many stories; seconds of one core"
    report.add_figures(FIGURES, title, lines, {"seconds": ".1f", "gain_per_s": ".3f"})
    best = max(lines[1:], key=lambda line: line["gain_per_s"])
    report.notes.append(f"most tau for a second: {best['recipe']}, {best['texts']} texts")
    return lines


def head_of(head: HeadSpec, target: Path) -> FeatureHead:
    """The head as a drafter with one thread serves it."""
    served = served_head(DrafterSettings(kind=head.kind, path=str(head.path), target=str(target), threads=1))
    assert isinstance(served, FeatureHead)
    return served


def record(head: FeatureHead, target: Path, count: int, held_out_stories: int, held_out_programs: int) -> Texts:
    """Let the target answer, greedily, and the head draft along what is learnt from."""
    text, layers, output = TargetText(target), head.description.feature_layers, read_output(target).float()

    def answered(prompts: Sequence[str], learnt: int) -> list[Recorded]:
        ids = [text.encode(prompt) for prompt in prompts]
        recorded = answers(target, ids, NEW_TOKENS, layers)
        return [
            Recorded(answer, prompt, replay(head, answer, prompt, BUDGET, output).misses if number < learnt else ())
            for number, (answer, prompt) in enumerate(recorded)
        ]

    new = answered(stories()[: count + held_out_stories], count)
    familiar = answered(programs()[: count // 2 + held_out_programs], 0)
    held_out = {"stories": new[count:], "code": familiar[count // 2 :]}
    return Texts(new[:count], familiar[: count // 2], held_out)


def learn(
    served: FeatureHead,
    head: HeadSpec,
    target: Path,
    texts: Texts,
    recipes: Mapping[str, Recipe],
    sizes: Sequence[int],
    progress: Progress,
) -> list[Line]:
    """A line for the head as it was deployed, and one for every recipe and number of texts."""
    assert head.path is not None
    deployed = served.weights
    before = taus(served, texts)
    lines: list[Line] = [{"recipe": DEPLOYED, "texts": 0, "seconds": 0.0, **before, "gain_per_s": None}]
    for name, recipe in recipes.items():
        for size in sizes:
            progress.say(f"{name}, {size} texts")
            trained = train(recipe, head.path, target, texts.new[:size], texts.familiar[: size // 2])
            put_to_use(served, deployed, trained.tensors)
            after = taus(served, texts)
            gain = (after["stories"] - before["stories"]) / trained.seconds
            lines.append({"recipe": name, "texts": size, "seconds": trained.seconds, **after, "gain_per_s": gain})
            progress.add()
    return lines


def taus(head: FeatureHead, texts: Texts) -> dict[str, float]:
    """tau along every kind of held-out text."""
    found = {}
    for kind, several in texts.held_out.items():
        along = [replay(head, one.text, one.prompt, BUDGET) for one in several]
        found[kind] = sum(each.tokens for each in along) / sum(each.steps for each in along)
    return found


def put_to_use(head: FeatureHead, deployed: Weights, tensors: dict[str, Tensor]) -> None:
    """Let a head draft with these tensors in the place of the deployed ones, as a push does."""
    weights = deployed.changed(tensors, head.weights.version + 1)
    if weights.hash == head.weights.hash:
        return
    header, parts = pack_update(head.description.name, deployed, weights)
    staging = head.staging(header)
    for part in parts:
        staging.add(part)
    prepared = head.prepare_swap(staging)
    prepared.swap()
    prepared.release()


def draw(lines: Sequence[Line], file: Path) -> None:
    """Draw tau of every kind of text over the seconds of training, a line for each recipe."""
    from matplotlib.figure import Figure

    deployed, *trained = lines
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = looks(dict.fromkeys(line["recipe"] for line in trained))
    for panel, kind in zip(panels, ("stories", "code"), strict=True):
        panel.axhline(deployed[kind], color="0.6", linestyle=":")
        for recipe, look in styles.items():
            own = [deployed, *(line for line in trained if line["recipe"] == recipe)]
            panel.plot([line["seconds"] for line in own], [line[kind] for line in own], label=recipe, **look.drawn)
        panel.set(title=kind, xlabel="seconds of one core", ylabel="tau")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=130)

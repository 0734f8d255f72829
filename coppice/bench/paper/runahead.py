"""`coppice bench runahead`: how often the next tree could be drafted before the verdict, and what that is worth.

The outcome of a step is its accepted leaf and the next root: the path by which the text leaves the verified tree. While
that tree is verified, its drafter can make it larger. Nodes right behind the verified ones are the outcomes that it can
prepare, drafting behind several of them in one batch. The chance of an outcome is its score, calibrated by the steps
before; in a coupled draft the noise is in it.

Nothing is prepared behind a leaf whose children the head did not predict. Whether a head that reads features drafts as
well behind an outcome, whose features are not there yet, is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product

import numpy as np

from coppice.bench.bare import settings_of
from coppice.bench.options import Options
from coppice.bench.paper.rank import answers
from coppice.bench.paper.replay import steps
from coppice.bench.report import Check, Report
from coppice.config.sections import DrafterSettings
from coppice.heads.base import Head
from coppice.heads.registry import build_head
from coppice.limits import MAX_HEAD_NODES
from coppice.speculation.calibration import Calibration, step_log_probs
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, paths
from coppice.stack.spec import StackSpec
from coppice.training.data.answerer import Answer
from coppice.training.progress import Progress

SEED = 1
PREPARED = (1, 2, 4, 8)
MOST_VERIFIED = MAX_HEAD_NODES - max(PREPARED)
"""nodes of a verified tree that leave a head room for outcomes"""
FEW, ENOUGH = 4, 0.6
"""prepared outcomes that are to hold the real one at this share of the steps"""

Path = tuple[int, ...]
Text = tuple[Answer, int]
"""with the tokens of its prompt"""


@dataclass(frozen=True)
class Outcomes:
    """Of each step the tokens that it commits, and the rank of its outcome among those that can be prepared."""

    tokens: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """from 1; 0 where it is none of them"""
    unpredicted: list[bool] = field(default_factory=list)
    """whether the head predicted nothing behind the accepted leaf"""

    def held(self, prepared: int) -> float:
        """The share of steps whose outcome is one of so many, the likeliest."""
        return float(np.mean([0 < rank <= prepared for rank in self.ranks]))


def run_runahead(
    spec: StackSpec,
    report: Report,
    prompts: Sequence[Sequence[int]],
    options: Options,
    temperatures: Sequence[float],
    budgets: Sequence[int],
) -> None:
    """Draft with every head along the target's answers, at each temperature and budget of the verified tree."""
    new_tokens, written = options.max_new_tokens, dict[tuple[float, tuple[int, ...]], list[Text]]()
    lines, shared = [], DrafterSettings(target=str(spec.target))
    with Progress("replays", len(spec.heads) * len(temperatures) * len(budgets)) as progress:
        for one in spec.heads:
            head = build_head(settings_of(one, shared))
            layers = head.description.feature_layers
            for temperature, budget in product(temperatures, budgets):
                if (temperature, layers) not in written:
                    progress.say(f"the target answers, T={temperature:g}")
                    said = answers(spec.target, prompts, new_tokens, layers, temperature, SEED)
                    written[temperature, layers] = said
                cell = f"{one.name}, T={temperature:g}, budget {budget}"
                progress.say(cell)
                outcomes = outcomes_along(head, written[temperature, layers], temperature, budget)
                held = {prepared: outcomes.held(prepared) for prepared in PREPARED}
                lines.append(
                    {"head": one.name, "temperature": temperature, "budget": budget, "steps": len(outcomes.ranks)}
                    | {"tau": float(np.mean(outcomes.tokens)), "unpredicted": float(np.mean(outcomes.unpredicted))}
                    | {f"held_{prepared}": share for prepared, share in held.items()}
                    | {f"x_{prepared}": speedup(share, options.t_m, options.t_d) for prepared, share in held.items()}
                )
                report.goals.append(Check.at_least(f"{cell}: {FEW} outcomes", held[FEW], ENOUGH))
                progress.add()
    title = f"how often prepared outcomes hold the real one; speedup at T_M {options.t_m:g} ms, T_D {options.t_d:g} ms"
    report.add_figures("outcomes", title, lines, {"temperature": "g"})


def outcomes_along(head: Head, texts: Sequence[Text], temperature: float, budget: int) -> Outcomes:
    """Draft along texts, the n-th of which was drawn with the n-th seed from SEED on."""
    found, calibration = Outcomes(), Calibration()
    for seed, (text, prompt) in zip(count(SEED), texts, strict=False):
        ids: list[int] = text.ids.tolist()
        sampling = SamplingParams(temperature=temperature, seed=seed)
        for step in steps(head, text, prompt, (budget, MAX_HEAD_NODES), sampling):
            verified, wide = step.trees
            real = tuple(ids[step.root + 1 : step.end + 1])
            if real in paths(verified):  # the text ends here, and with it what is known of the outcome
                continue
            prepared, drafted = outcomes_of(verified, calibration.of(wide)), paths(wide)
            found.tokens.append(len(real))
            found.ranks.append(prepared.index(real) + 1 if real in prepared else 0)
            found.unpredicted.append(all(path[:-1] != real[:-1] for path in drafted))
            judged = [path[:-1] == real[: len(path) - 1] and len(path) <= len(real) for path in drafted]
            right = [path == real[: len(path)] for path in drafted]
            calibration.observe(step_log_probs(wide), np.array(judged, np.bool_), np.array(right, np.bool_))
    return found


def outcomes_of(verified: DraftTree, wide: DraftTree) -> list[Path]:
    """The outcomes of verifying a tree that a larger one of the same root can tell of, the likeliest first."""
    inside = {(), *paths(verified)}
    chances = dict(zip(paths(wide), wide.log_probs.tolist(), strict=True))
    leaving = [path for path in chances if path not in inside and path[:-1] in inside]
    return sorted(leaving, key=chances.__getitem__, reverse=True)


def speedup(held: float, t_m: float, t_d: float) -> float:
    """How many times as fast steps are that find their draft prepared at a share `held` of them; times in milliseconds.

    Without, a step is a draft and a forward of the target. With it a batch of drafts begins with the forward, and the
    step ends with the later of the two; where no prepared outcome is the real one, a draft comes behind them.
    """
    return (t_m + t_d) / (max(t_m, t_d) + (1 - held) * t_d)

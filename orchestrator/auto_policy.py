"""The policy `auto` as the step loop sees it: it hands a request's steps to the choice made in orchestrator/auto."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.speculation.policy import Policy
from coppice.speculation.routing import outcomes, sum_confidence
from coppice.speculation.tree import prune
from coppice.telemetry import OrchestratorMetrics

from .auto.arms import PLAIN, SINGLE, Arm
from .auto.chooser import Chooser, StepSeen
from .auto.text_estimates import TextEstimates
from .policies import StepPolicy
from .step import Step


class AutoPolicy(StepPolicy):
    """Plays the arm that is chosen for all sessions, and tells what came of it."""

    def __init__(
        self, chooser: Chooser, text: TextEstimates, heads: Sequence[str], metrics: OrchestratorMetrics
    ) -> None:
        self._chooser, self._text, self._heads, self._metrics = chooser, text, heads, metrics
        self._arm = Arm(PLAIN, Policy(PLAIN, ()), ())
        self._learns = False  # whether the arm of the step that was observed last has several heads

    def heads(self, step: Step) -> Sequence[int]:
        """The heads of the arm; of a cascade the first one."""
        self._arm = self._chooser.decide(self._text, step.hint)
        self.policy = self._arm.policy
        return self._arm.first

    @property
    def soon(self) -> Sequence[int]:
        """The heads of what looks best for a text that begins."""
        return self._chooser.soon(self._text)

    def budget(self, most: int, hint: int | None) -> int:
        """As the verifier hints, by all texts; a prediction, and the rare tries at a hint of 0, draft all they may."""
        return min(most, hint) if hint and not self._text.is_predicted(self._arm) else most

    def more(self, step: Step) -> Sequence[int]:
        """The second head of a cascade, where the first one's tree promises too little."""
        rest = self._arm.heads[len(self._arm.first) :]
        return rest if rest and self._text.goes_on(sum_confidence(step.drafts[step.asked[0]].scored)) else ()

    def observe(self, step: Step) -> None:
        """Take in the step's seconds, and what it gained."""
        verdict = step.judged
        times = verdict.timings
        rows_ns = times.forward_ns - (times.plain_ns or times.forward_ns)
        seen = StepSeen(step.took_ns / 1e9, rows_ns / 1e9, len(verdict.accepted), step.asked, step.opening)
        self._chooser.observe(self._text, seen)
        self._learns = len(self._arm.heads) > 1
        self._metrics.auto_choices.labels(self._arm.name).inc()

    def learn(self, step: Step) -> None:
        """Take in what each head would have gained alone in a step of several."""
        verdict = step.judged
        nodes = len(verdict.verified) if verdict.pruned else step.budget
        if self._learns and nodes:  # where all of it was left out, the step says nothing of the heads
            for at in step.asked:
                tree, _ = prune(step.drafts[at].scored, nodes)
                self._text.gained(SINGLE + self._heads[at], int(outcomes(tree, step.offered)[1].sum()))

    def close(self) -> None:
        """End the text."""
        self._chooser.end(self._text)

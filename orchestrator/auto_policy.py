"""The policy `auto` as the step loop sees it: it hands a request's steps to the choice made in orchestrator/auto."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.speculation.policy import Policy
from coppice.speculation.routing import sum_confidence
from coppice.speculation.tree import prune
from coppice.telemetry import OrchestratorMetrics

from .auto.arms import PLAIN, Arm
from .auto.chooser import Chooser, StepSeen
from .auto.text_estimates import TextEstimates
from .head_session import HeadSession
from .policies import StepPolicy
from .step import Step


class AutoPolicy(StepPolicy):
    """Plays the arm that is chosen for all sessions, and tells what came of it."""

    def __init__(
        self, chooser: Chooser, text: TextEstimates, heads: Sequence[HeadSession], metrics: OrchestratorMetrics
    ) -> None:
        self._chooser, self._text, self._heads, self._metrics = chooser, text, heads, metrics
        self._arm = Arm(PLAIN, Policy(PLAIN, ()), ())
        # Of the step that was observed last: whether its arm has several heads, and its cascade's first head.
        self._learns: tuple[bool, int] = False, 0

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
        """As the verifier hints; the rare tries at a hint of 0 draft as many nodes as ever."""
        return min(most, hint) if hint else most

    def more(self, step: Step) -> Sequence[int]:
        """The second head of a cascade, where the first one's tree promises too little."""
        rest = self._arm.heads[len(self._arm.first) :]
        if rest and self._text.goes_on(sum_confidence(step.drafts[step.asked[0]].scored)):
            return rest
        return ()

    def beside(self, step: Step) -> Sequence[int]:
        """Heads that take less than half as long as the step waits anyway, so that the text may tell what they gain."""
        if self._arm.first != self._arm.heads:  # a cascade does not wait for long
            return ()
        usual = [head.pool.usual_s for head in self._heads]
        wait_s = max([usual[at] or 0.0 for at in self._arm.heads])
        return [
            at
            for at, took in enumerate(usual)
            if took is not None and took < wait_s / 2 and at not in self._arm.heads and self._hears(at)
        ]

    def _hears(self, at: int) -> bool:
        return self._chooser.hears(self._text, self._heads[at].pool.name)

    def observe(self, step: Step) -> None:
        """Take in the step's seconds, and what it gained."""
        verdict = step.judged
        times = verdict.timings
        rows_ns = times.forward_ns - (times.plain_ns or times.forward_ns)
        self._learns = len(self._arm.heads) > 1, self._text.cascade.playing.quick
        seen = StepSeen(step.took_ns / 1e9, rows_ns / 1e9, len(verdict.accepted), step.asked, step.opening)
        self._chooser.observe(self._text, seen)
        self._metrics.auto_choices.labels(self._arm.name).inc()

    def learn(self, step: Step, ids: Sequence[int]) -> None:
        """Take in what the quick head promised, and what heads would have gained that were not verified alone."""
        drafts = {at: step.drafts[at] for at in step.asked} | step.beside
        verdict = step.judged
        joint, quick = self._learns
        if quick in drafts:
            promised = sum_confidence(drafts[quick].scored)
            self._text.promised(promised, 1 + len(verdict.accepted), alone=step.asked == (quick,))
        nodes = len(verdict.verified) if verdict.pruned else step.budget
        if verdict.pruned and not nodes:  # all of it was left out, which says nothing of the heads
            return
        for at, draft in (drafts if joint else step.beside).items():
            self._text.drafted(self._heads[at].pool.name, step.start, prune(draft.scored, nodes)[0])
        self._text.committed(ids)

    def close(self) -> None:
        """The text is remembered for those that are like it."""
        self._chooser.end(self._text)

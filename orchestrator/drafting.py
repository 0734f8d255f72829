"""The heads of one request: who is asked in a step, what they answer in time, and what they hear of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from coppice.speculation.policy import UNION, outcomes, step_log_probs
from coppice.wire.common import Features
from coppice.wire.generation import Finished

from .head_session import HeadSession
from .policies import StepPolicy
from .step import NO_DRAFT, Committed, Draft, Step
from .watch import best_path


class Drafting:
    """Asks the heads that a policy picks, and waits for their trees until the deadline."""

    def __init__(self, heads: Sequence[HeadSession], policy: StepPolicy, deadline_s: float) -> None:
        """deadline_s: how long a step waits for drafts; 0: as long as the slowest asked head's drafts usually take."""
        self._heads, self._policy, self._deadline_s = heads, policy, deadline_s

    def open(self, numbers: Iterable[int], text: Committed) -> None:
        """Start the streams of some heads."""
        for at in numbers:
            self._heads[at].open(text.ids)

    def learn(self, features: Features | None) -> None:
        """Take the features of newly committed positions."""
        for head in self._heads:
            head.learn(features)

    async def draft(self, step: Step, text: Committed, meanwhile: Callable[[], None]) -> None:
        """Fill in the step's drafts. `meanwhile` is called as soon as nobody waits for this process's next message."""
        if not step.asked:
            asyncio.get_running_loop().call_soon(meanwhile)  # behind the verifier's question
            return
        await self._ask(step, step.asked, text, meanwhile)
        if more := self._policy.more(step):
            step.asked = (*step.asked, *more)
            await self._ask(step, more, text, meanwhile)
        step.at.drafted = time.perf_counter_ns()

    async def _ask(self, step: Step, numbers: Sequence[int], text: Committed, meanwhile: Callable[[], None]) -> None:
        """Wait for the trees of some heads."""
        asked = [(at, self._heads[at]) for at in numbers]
        step.opening |= any(head.still_opening for _, head in asked)
        deadline_s = self._deadline_s or max([head.pool.deadline_s for _, head in asked])
        fence = text.fence(step.number, deadline_s)
        answers = [(at, head.ask(fence, step.root, text.ids, step.budget)) for at, head in asked]
        step.at.asked = step.at.asked or time.perf_counter_ns()
        asyncio.get_running_loop().call_soon(meanwhile)  # behind the questions, which the step waits for
        if waited := [answer for _, answer in answers if answer is not None]:
            await asyncio.wait(waited, timeout=deadline_s)
        for at, answer in answers:
            if answer is not None:
                step.drafts[at] = self._heads[at].collect()

    def settle(self, step: Step) -> None:
        """Tell the heads what the step committed and what they missed."""
        for at, (head, draft) in enumerate(zip(self._heads, step.drafts, strict=True)):
            if head.opening.want_misses and step.choice.routed in (at, UNION):
                head.reject(draft, step.start, step.offered)

    def calibrate(self, step: Step) -> None:
        """Learn what the heads' confidences are worth, from every node that the text says something about.

        Those of a prediction are worth what they say, and belong to this request alone.
        """
        for at, (head, draft) in enumerate(zip(self._heads, step.drafts, strict=True)):
            if head.opening.prediction:
                if step.choice.routed in (at, UNION):
                    head.prediction.learn(step, draft)
            elif len(draft.tree):
                head.pool.calibration.observe(step_log_probs(draft.tree), *outcomes(draft.tree, step.offered))
                if draft.replica is not None and draft.replica.watch.expected and head.is_measured:
                    head.pool.judge(draft.replica, best_path(draft.tree, step.offered), draft.weights_version)

    def count(self, result: Finished) -> None:
        """Add to an answer's summary what came of its prediction."""
        for head in self._heads:
            result.accepted_prediction_tokens += head.prediction.accepted
            result.rejected_prediction_tokens += head.prediction.rejected

    def no_drafts(self) -> list[Draft]:
        """The drafts of a step that has asked nobody yet."""
        return [NO_DRAFT] * len(self._heads)

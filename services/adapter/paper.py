"""SpecBlock's own decision rule (section 3.4, appendix A.3, algorithm 1): one variant for all texts, before and after.

`paper` has the actions skip, head-only and full; `head-only` and `full-only` lack one of them, and `always` is online
speculative decoding. Pure and deterministic: no clock, no model, no Redis; its state is JSON.
"""

from __future__ import annotations

import math
import statistics

from pydantic import BaseModel

from coppice.adaptation.signals import Demand, QueryRecord
from coppice.adaptation.weights import Route, Routes
from coppice.limits import SKETCH
from coppice.speculation.sampling import uniform
from coppice.v1 import adapter_pb2 as pb

from .decide import Arm, Trained, Verdict

ARMS: dict[str, tuple[Arm, ...]] = {
    "paper": (Arm.HEAD, Arm.FULL),
    "head-only": (Arm.HEAD,),
    "full-only": (Arm.FULL,),
    "always": (Arm.FULL,),
}
GROUPS = {Arm.SKIP: 0, Arm.HEAD: 1, Arm.FULL: 2}  # the buffer of each arm
EPSILON = (0.30, 0.10)  # chance of a random arm at the first and the last event of the cold start, linear between
ALPHA = 0.10  # weight of a new reward in a value
COLD_EVENTS, WARMUP, BLOCKED, LEAST_S, WINDOWS = 8, 10, 2, 5.0, 3
_EXPLORE, _ARM = 0, 1  # streams of chance
_EVERYWHERE = 4.0  # a squared distance that no two sketches are apart


class PaperState(BaseModel):
    """All that the rule knows."""

    queries: int = 0
    last_event: int = 0  # number of the query it came after
    blocked: int = 0
    s: float = 0.0  # of the latest query
    trigger_s: float = 0.0  # of the query that filled the buffer
    variant: int = 0
    values: dict[Arm, float] = {}
    updates: dict[Arm, int] = {}
    rates: list[float] = []  # tokens/s of the latest queries on these weights
    arm: Arm = Arm.SKIP  # of the event that is measured
    before: list[float] = []  # rates before it
    taus: list[float] = []  # of the window that is filling
    windows: list[tuple[float, int]] = []  # mean tau and version of the last ones that closed


class Paper:
    """Overwrites one variant of the head, which drafts for all texts; for its methods see decide.Bandit."""

    demand: Demand = "misses"
    penalty, empties = 0.01, True

    def __init__(self, policy: str, interval: int, state: PaperState | None = None) -> None:
        """`interval`: N, queries of a measurement and of a window, and texts of an update."""
        self.state, self._arms, self._interval = state or PaperState(), ARMS[policy], interval
        self._always = policy == "always"

    def take(self, record: QueryRecord, live: bool, beside: bool) -> tuple[int, bool]:
        """Decide what a query's text is for (lines 3 to 8), and measure the query (lines 19 to 21)."""
        state = self.state
        state.queries += 1
        state.s = record.s
        arm = self._decide(record.s)
        state.taus.append(record.tau)
        if live:
            state.rates = [*state.rates, record.tokens_per_s][-self._interval :]
        if state.arm is not Arm.SKIP and len(state.rates) == self._interval:
            if state.trigger_s >= LEAST_S and state.before:  # equation 10; an arm's first observation is its value
                gain = (statistics.fmean(state.rates) - statistics.fmean(state.before)) / state.trigger_s
                state.values[state.arm] = (1 - ALPHA) * state.values.get(state.arm, gain) + ALPHA * gain
            state.arm = Arm.SKIP
        return GROUPS[arm], False

    def _decide(self, s: float) -> Arm:
        state = self.state
        blocked = state.blocked > 0 or state.queries <= min(WARMUP, self._interval)
        state.blocked = max(0, state.blocked - 1)
        if not s or (blocked and not self._always):
            return Arm.SKIP
        if self._always:
            return Arm.FULL
        first, last = EPSILON
        events = sum(state.updates.values())
        epsilon = first + (last - first) * events / (COLD_EVENTS - 1)
        if events < COLD_EVENTS and uniform(0, state.last_event, _EXPLORE) < epsilon:
            return self._arms[int(uniform(0, state.last_event, _ARM) * len(self._arms))]
        best = max(self._arms, key=lambda arm: state.values.get(arm, math.inf))
        return best if events < COLD_EVENTS or s * state.values.get(best, math.inf) > 0 else Arm.SKIP

    def settle(self, record: QueryRecord, live: int, newest: int) -> Verdict | None:
        """Go back when tau has fallen over three windows (lines 22 to 24); else the window's version is a good one."""
        state = self.state
        if len(state.taus) < self._interval:
            return None
        state.windows = [*state.windows, (statistics.fmean(state.taus), live)][-WINDOWS:]
        state.taus = []
        taus = [tau for tau, _ in state.windows]
        if len(taus) == WINDOWS and taus[0] > taus[1] > taus[2]:
            if state.windows[0][1] != live:
                return Verdict("revert", f"tau fell: {', '.join(f'{tau:.2f}' for tau in taus)}", state.windows[0][1])
            self.follow(self.routes(), live)  # the traffic has changed: measurements are void, the weights are not
        return Verdict("good", version=live)

    def choose(self, group: int, texts: int) -> Arm:
        """Choose the arm of a buffer that is full (lines 12 and 13), while no event is measured."""
        state = self.state
        measured = state.arm is Arm.SKIP and len(state.rates) >= min(WARMUP, self._interval)
        ready = texts >= self._interval and measured
        if self._always:
            ready = texts > 0 and state.queries % self._interval == 0
        if not ready:
            return Arm.SKIP
        if state.arm is Arm.SKIP:
            state.trigger_s = state.s
        return list(Arm)[group]

    def variants(self, group: int) -> tuple[int, int]:
        """Train the one variant further."""
        return self.state.variant, 1

    def trained(self, group: int, arm: Arm, result: Trained | None, variant: int, version: int) -> bool:
        """Put every update to use, and begin an event (lines 16 and 17)."""
        if result is None:
            return False
        state = self.state
        state.last_event, state.blocked, state.variant = state.queries, BLOCKED, variant
        state.updates[arm] = state.updates.get(arm, 0) + 1
        state.arm, state.before, state.rates = arm, state.rates, []
        return True

    def follow(self, routes: Routes, version: int) -> None:
        """Reset the values (line 23): earlier weights are in use again."""
        state, first = self.state, next(iter(routes.routes), None)
        state.values, state.rates, state.taus, state.windows, state.arm = {}, [], [], [], Arm.SKIP
        state.variant, state.blocked = first.variant if first else 0, BLOCKED

    def routes(self) -> Routes:
        """Let the variant draft for all texts."""
        return Routes([Route([0.0] * SKETCH, _EVERYWHERE, self.state.variant, 1.0)] if self.state.variant else [])

    def actions(self) -> list[pb.ActionStatus]:
        """Report the arms, with values in tokens/s for each unit of s."""
        state = self.state
        return [
            pb.ActionStatus(action=arm, value=state.values.get(arm), updates=state.updates.get(arm, 0))
            for arm in self._arms
        ]

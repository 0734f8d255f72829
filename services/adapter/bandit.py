"""The cost-aware bandit: whether a query's samples update a head, and which part of it (SpecBlock, section 3.4, A.3).

Pure and deterministic: no clock, no model, no Redis. Its chances follow from the seed and the number of the query, and
its state is JSON, so a restart goes on as if there had been none. Lines are those of the paper's algorithm 1.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat

from coppice.config.adaptation import BanditSettings, PolicyName
from coppice.speculation.sampling import uniform


class Action(StrEnum):
    """The use of a query's samples."""

    SKIP = "skip"
    HEAD = "head"
    FULL = "full"


# What a policy may overwrite; of equal predictions the first is taken, the cheaper one.
UPDATES: dict[PolicyName, tuple[Action, ...]] = {
    "paper": (Action.HEAD, Action.FULL),
    "always": (Action.FULL,),
    "full-only": (Action.FULL,),
    "head-only": (Action.HEAD,),
    "never": (),
}

EPSILON = (0.30, 0.10)  # chance of a random action at the first and the last event of the cold start, linear between
LEAST_SIGNAL = 5.0  # s of a trigger below which its observation is not used
BLOCKED_QUERIES = 2  # queries after an event that trigger nothing
ALWAYS_QUERIES = 8  # policy always: queries from one event to the next
LOAD_FACTOR = 1.5  # ratio of loads up to which queries are comparable
PATIENCE = 10  # intervals' worth of queries among which those of one interval must be found

# Streams of the seed, as in coppice.speculation.sampling: whether to explore, and what.
EXPLORE_STREAM = 0
ACTION_STREAM = 1


class Query(BaseModel):
    """A query that ended, as the bandit measures it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    s: NonNegativeFloat  # equation 8
    tokens_per_s: NonNegativeFloat
    version: int | None  # of the weights that drafted all of it; None if they changed meanwhile
    load: PositiveFloat = 1.0  # requests running meanwhile, the mean


class Trigger(BaseModel):
    """The query whose samples saturated a buffer (line 13)."""

    model_config = ConfigDict(frozen=True)

    action: Action
    s: float
    query: int  # its number


class Value(BaseModel):
    """An action's value v, tokens/s gained for each unit of s, and its standard error."""

    value: float
    error: float


class Rate(BaseModel):
    """The throughput of one query."""

    query: int  # its number
    tokens_per_s: float
    load: float


class Interval(BaseModel):
    """The measurement of an event (line 17): tokens/s of comparable queries, and the load they are comparable at."""

    trigger: Trigger
    opened: int  # number of the last query before the sync
    load: float
    before: list[float]  # up to the trigger
    during: list[float]  # from the trigger to the sync: what training costs the queries beside it
    after: list[float] = []


class BanditState(BaseModel):
    """All that the bandit knows, as JSON can hold it."""

    queries: int = 0
    events: int = 0
    last_event: int = 0  # number of the query it came after
    blocked: int = 0
    version: int = 0  # of the live weights
    exploring: Action | None = None  # begun at random after the cold start, until its event
    values: dict[Action, Value] = {}
    rates: list[Rate] = []  # the latest that lived wholly on the live weights
    interval: Interval | None = None
    updates: dict[Action, int] = {}


class Bandit:
    """One head's bandit.

    For each query `decide`, then `due` with what its buffer holds; `synced` when the trained weights are live.
    """

    def __init__(self, settings: BanditSettings, state: BanditState | None = None) -> None:
        self.settings, self.state = settings, state or BanditState()
        self.epsilon, self.blocked_queries = EPSILON, BLOCKED_QUERIES

    @property
    def patience(self) -> int:
        """Queries after which a measurement is given up, whatever was found."""
        return PATIENCE * self.settings.interval

    def decide(self, query: Query) -> Action:
        """Decide what a query's samples are for (lines 3 to 8), and measure the query (lines 19 to 21)."""
        self.state.queries += 1
        action = self._action(query)
        self._measure(query)
        return action

    def due(self, action: Action, query: Query, samples: int, capacity: int) -> Trigger | None:
        """Return the trigger if the buffer of `action`, with samples of `query`, is to be trained on (lines 12, 13).

        Not while an event is measured, since two would share one observation, nor before there is a throughput to
        compare with. Online speculative decoding trains after every so many queries instead, whatever there is.
        """
        state, settings = self.state, self.settings
        if settings.policy == "always":
            ready = samples > 0 and state.queries % ALWAYS_QUERIES == 0
        else:
            ready = samples >= capacity and state.interval is None and len(state.rates) >= settings.warmup_queries
        if action == Action.SKIP or not ready:
            return None
        return Trigger(action=action, s=query.s, query=state.queries)

    def synced(self, trigger: Trigger, version: int) -> None:
        """Begin an event: the weights trained after `trigger` are live as `version` (lines 16 and 17)."""
        state, settings = self.state, self.settings
        self._event(trigger)
        earlier = [rate for rate in state.rates if rate.query <= trigger.query]
        load = statistics.median(rate.load for rate in earlier[-settings.interval :]) if earlier else 0.0
        like = [rate for rate in state.rates if self._alike(rate.load, load)]
        before = [rate.tokens_per_s for rate in like if rate.query <= trigger.query][-settings.interval :]
        during = [rate.tokens_per_s for rate in like if rate.query > trigger.query]
        state.interval = Interval(trigger=trigger, opened=state.queries, load=load, before=before, during=during)
        state.version, state.rates = version, []

    def expected(self, query: Query | None) -> Action:
        """Predict what the next query's samples will be for if it is like this one; nothing changes."""
        then = copy.copy(self)
        then.state = self.state.model_copy(deep=True)
        then.state.queries += 1
        return then._action(query or Query(s=LEAST_SIGNAL, tokens_per_s=0, version=None))

    def refused(self, trigger: Trigger, old: Sequence[float], new: Sequence[float]) -> None:
        """Measure an event whose weights were never live, by tokens/s of queries on the old and on the new ones."""
        self._event(trigger)
        self._revise(Interval(trigger=trigger, opened=0, load=1.0, before=list(old), during=[], after=list(new)))

    def reverted(self, version: int) -> None:
        """Forget the values: the weights were taken back, and `version` is live (line 23)."""
        state = self.state
        state.values, state.interval, state.exploring = {}, None, None
        state.version, state.rates = version, []
        state.blocked = self.blocked_queries

    def gain(self, action: Action, s: float) -> float:
        """Predict the gain in tokens/s (equation 9), less the margin of certainty. Raises KeyError without a value."""
        known = self.state.values[action]
        return s * (known.value - self.settings.certainty * known.error)

    def _event(self, trigger: Trigger) -> None:
        state = self.state
        state.events += 1
        state.last_event = state.queries
        state.blocked = self.blocked_queries
        state.exploring = None
        state.updates[trigger.action] = state.updates.get(trigger.action, 0) + 1

    def _action(self, query: Query) -> Action:
        state, settings = self.state, self.settings
        actions = UPDATES[settings.policy]
        if settings.policy == "always":
            return actions[0] if query.s else Action.SKIP
        blocked = state.blocked > 0 or state.queries <= settings.warmup_queries
        state.blocked = max(0, state.blocked - 1)
        if blocked or not actions or query.s == 0:
            return Action.SKIP
        return self._cold(actions) if state.events < settings.cold_events else self._warm(actions, query.s)

    def _cold(self, actions: Sequence[Action]) -> Action:
        """Choose epsilon-greedily. It is drawn once for each event, as many queries fill a buffer."""
        state, settings = self.state, self.settings
        done = state.events / max(1, settings.cold_events - 1)
        first, last = self.epsilon
        epsilon = first + (last - first) * done
        if uniform(settings.seed, state.last_event, EXPLORE_STREAM) < epsilon:
            return self._any(actions, state.last_event)
        values = {action: state.values[action].value if action in state.values else math.inf for action in actions}
        return max(actions, key=values.__getitem__)

    def _warm(self, actions: Sequence[Action], s: float) -> Action:
        """Choose by value (lines 3 to 8), explore now and then, and measure what has no value yet."""
        state, settings = self.state, self.settings
        measurable = s >= LEAST_SIGNAL
        if settings.certainty and not measurable:
            return Action.SKIP  # nobody could say whether it paid, so a value gone stale would go on for ever
        if state.exploring is None and uniform(settings.seed, state.queries, EXPLORE_STREAM) < settings.exploration:
            state.exploring = self._any(actions, state.queries)
        if state.exploring is not None:
            return state.exploring
        measured = [action for action in actions if action in state.values]
        if measurable and len(measured) < len(actions):
            return next(action for action in actions if action not in state.values)
        best = max(measured, key=lambda action: self.gain(action, s), default=None)
        return best if best is not None and self.gain(best, s) > 0 else Action.SKIP

    def _any(self, actions: Sequence[Action], query: int) -> Action:
        return actions[int(uniform(self.settings.seed, query, ACTION_STREAM) * len(actions))]

    def _measure(self, query: Query) -> None:
        """Add a query to the open interval, which closes with its N-th; without N in time nothing is learnt."""
        state, settings, interval = self.state, self.settings, self.state.interval
        if query.version == state.version:
            rate = Rate(query=state.queries, tokens_per_s=query.tokens_per_s, load=query.load)
            state.rates.append(rate)
            del state.rates[: -self.patience]
            if interval is not None and self._alike(query.load, interval.load):
                interval.after.append(query.tokens_per_s)
        if interval is None:
            return
        if len(interval.after) == settings.interval:
            state.interval = None
            self._revise(interval)
        elif state.queries - interval.opened >= self.patience:
            state.interval = None

    def _revise(self, interval: Interval) -> None:
        """Revise a value (lines 19 to 21, equation 10); the first observation of an action is its value.

        The gain is the change of the mean tokens/s, less what the queries beside the training lost, spread over the
        horizon: so a value nets out the update's own cost, which is paid once, while what it gains goes on.
        """
        settings, trigger, before, after = self.settings, interval.trigger, interval.before, interval.after
        if trigger.s < LEAST_SIGNAL or min(len(before), len(after)) < 2:
            return
        beside, horizon = len(interval.during), max(settings.horizon, len(after))
        usual, spread, share = statistics.fmean(before), statistics.stdev(before), beside / horizon
        lost = sum(usual - rate for rate in interval.during) / horizon
        gained = statistics.fmean(after) - usual - lost
        error = math.hypot(
            statistics.stdev(after) / math.sqrt(len(after)),
            spread / math.sqrt(len(before)) * (1 + share),
            spread * math.sqrt(beside) / horizon,
        )
        observed = Value(value=gained / trigger.s, error=error / trigger.s)
        known, alpha = self.state.values.get(trigger.action), settings.alpha
        if known is not None:
            observed = Value(
                value=(1 - alpha) * known.value + alpha * observed.value,
                error=math.hypot((1 - alpha) * known.error, alpha * observed.error),
            )
        self.state.values[trigger.action] = observed

    def _alike(self, load: float, other: float) -> bool:
        return max(load, other) <= LOAD_FACTOR * min(load, other)

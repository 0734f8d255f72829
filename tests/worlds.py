"""Made-up machines and texts for `--policy auto`: what a step of each arm takes and commits, without any model.

A session's text has an easy and a hard state and a domain; a head accepts each further token with a chance of its own
for the domain, lower in the hard state. All sessions draft, and the verifier answers them in one forward: the nodes are
cut as the verifier cuts them, and the forward has a price by rows. Nothing here knows how auto decides.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import and_, xor

from orchestrator.auto import Arm, AutoPolicy, Rates, arms_of
from orchestrator.metrics import OrchestratorMetrics
from services.verifier.budget import CostCurve, Profile, share

DEPTH = 8
OPENING_STEPS = 2.0  # of drafting: what a head's first draft in a session takes beside
CHOICES = OrchestratorMetrics().auto_choices


def text_of(heads: Sequence[str], sampled: bool = False, predicted: Sequence[str] = ()) -> AutoPolicy:
    """A text as auto knows it."""
    return AutoPolicy(Rates(), heads, CHOICES, sampled, predicted)


@dataclass(frozen=True)
class World:
    """heads: by name, the chance of a further token by domain; times in milliseconds."""

    heads: dict[str, tuple[float, ...]]
    draft_ms: dict[str, float]
    forward_ms: float = 10.0
    row_ms: float = 0.1
    rest_ms: float = 1.0
    nodes_ms: float = 0.3  # what trees cost outside forward and draft
    contention: float = 1.3  # of two heads that draft at once
    hard: float = 0.5  # times the chance, in the hard state
    sessions: int = 1
    tokens: int = 128
    texts: int = 16  # answered one after another by each session's place
    noise: float = 0.05


@dataclass
class Text:
    """One session under way: its text, which no arm changes."""

    chances: dict[str, list[float]]  # by head, of each token
    rights: dict[str, list[bool]]
    blur: list[float]  # of routing
    estimates: AutoPolicy
    left: int
    opened: set[str] = field(default_factory=set)


@dataclass
class Drafted:
    """One session's step."""

    heads: list[str]
    opening: bool
    seconds: float
    lengths: list[int]  # of each head's right drafts
    right: int = 0  # drafts of the tree that will prove right
    scores: list[float] = field(default_factory=list)


class Machine:
    """One verifier and its sessions, as time goes by. `fixed` names an arm for all of them, None is auto."""

    def __init__(self, world: World, seed: int, fixed: str | None) -> None:
        self.world, self.names = world, tuple(world.heads)
        self.fixed = {arm.name: arm for arm in arms_of(self.names)}[fixed] if fixed else None
        self.seed, self.number, self.rng = seed, 0, random.Random(seed)
        self.price = CostCurve({rows: (world.forward_ms + world.row_ms * rows) / 1e3 for rows in (1, 64, 512)})
        self.profile, self.rates = Profile(), Rates()
        self.hint: int | None = None
        self.beside_s = 0.0

    def answer(self, domain: int) -> float:
        """One text of a domain in every session, all begun at once; returns the seconds of all of them together."""
        texts = [self._text(domain, at) for at in range(self.world.sessions)]
        self.number += 1
        spent = 0.0
        while texts:
            spent += len(texts) * self._step(texts)
            for text in texts:
                if text.left <= 0:
                    self.rates.end(text.estimates)
            texts = [text for text in texts if text.left > 0]
        return spent

    def _text(self, domain: int, at: int) -> Text:
        """The same text whatever arms are chosen."""
        world, rng = self.world, random.Random(f"{self.seed} {self.number} {at}")
        tokens = world.tokens + DEPTH + 1
        hard = list(accumulate((rng.random() < 0.1 for _ in range(tokens)), xor))
        chances = {
            name: [p[domain] * (world.hard if is_hard else 1.0) for is_hard in hard] for name, p in world.heads.items()
        }
        rights = {name: [rng.random() < chance for chance in own] for name, own in chances.items()}
        blur = [rng.gauss(0, 0.1) for _ in range(tokens)]
        return Text(chances, rights, blur, text_of(self.names), world.tokens)

    def _draft(self, text: Text, arm: Arm) -> Drafted:
        """The tree of a session's step by an arm."""
        world, at = self.world, self.world.tokens - text.left
        heads = [self.names[head] for head in arm.heads]
        opening = not text.opened.issuperset(heads)
        text.opened.update(heads)
        seconds = max((world.draft_ms[head] / 1e3 for head in heads), default=0.0)
        seconds *= (world.contention if len(heads) > 1 else 1.0) * (1 + OPENING_STEPS * opening)
        lengths = [sum(accumulate(text.rights[head][at : at + DEPTH], and_)) for head in heads]
        drafted = Drafted(heads, opening, seconds + (world.rest_ms + world.nodes_ms * bool(heads)) / 1e3, lengths)
        if heads:
            depth = min(DEPTH, self.hint or DEPTH)
            chances = [text.chances[head][at] for head in heads]
            routed = max(range(len(heads)), key=lambda head: chances[head] + head * text.blur[at])
            merged = arm.policy.name == "merge"
            drafted.right = min(depth, max(lengths) if merged else lengths[routed])
            chance = max(1e-9, max(chances) if merged else chances[routed])
            drafted.scores = [math.log(chance) * node for node in range(1, depth * (1 + merged) + 1)]
            self.profile.observe(drafted.scores)
        return drafted

    def _step(self, texts: Sequence[Text]) -> float:
        """One step of every session; returns its seconds."""
        count = len(texts)
        arms = [self.fixed or self.rates.decide(text.estimates, self.hint) for text in texts]
        steps = [self._draft(text, arm) for text, arm in zip(texts, arms, strict=True)]
        beside_s = max(step.seconds for step in steps)
        self.beside_s += 0.1 * (beside_s - self.beside_s)
        kept = share([step.scores for step in steps], count, float(count), self._seconds)
        plain_s, whole_s = self.price((count, count + sum(kept)))
        forward = whole_s * self.rng.lognormvariate(0, self.world.noise)
        rows_s = forward * (1 - plain_s / whole_s)
        self.hint = self.profile.hint(count, count, self._seconds)
        for text, step, nodes in zip(texts, steps, kept, strict=True):
            accepted = min(step.right, nodes, text.left - 1)
            text.left -= 1 + accepted
            if self.fixed is None:
                self.rates.observe(text.estimates, beside_s + forward, rows_s, accepted, step.opening)
                for head, right in zip(step.heads, step.lengths, strict=True) if len(step.heads) > 1 and nodes else ():
                    offered = min(right, nodes, accepted + 1)  # the next root may be a head's draft too
                    self.rates.gained(text.estimates, f"single:{head}", offered)
        return beside_s + forward

    def _seconds(self, rows: Sequence[int]) -> list[float]:
        return [self.beside_s + seconds for seconds in self.price(rows)]


def play(world: World, seed: int, fixed: str | None = None, warm: int = 4) -> dict[int, float]:
    """Answer `world.texts` texts with every session, the domains in turns; returns tokens a second of a session by
    domain. The first `warm` texts count nothing.
    """
    machine, tokens, seconds = Machine(world, seed, fixed), Counter[int](), defaultdict[int, float](float)
    for number in range(world.texts):
        domain = number % len(next(iter(world.heads.values())))
        took = machine.answer(domain)
        if number >= warm:
            tokens[domain] += world.tokens * world.sessions
            seconds[domain] += took
    return {domain: tokens[domain] / seconds[domain] for domain in tokens}


def against(world: World, seed: int = 0) -> tuple[float, float]:
    """Auto's speed over the best fixed arm's and over plain's, each in the domain where that is least."""
    fixed = {arm.name: play(world, seed, arm.name) for arm in arms_of(tuple(world.heads))}
    auto = play(world, seed)
    best = min(rate / max(rates[domain] for rates in fixed.values()) for domain, rate in auto.items())
    return best, min(rate / fixed["plain"][domain] for domain, rate in auto.items())


TUNING = {
    "one good head": World({"a": (0.7,)}, {"a": 3.0}),
    "a random head": World({"a": (0.02,)}, {"a": 3.0}),
    "on the edge": World({"a": (0.3,)}, {"a": 3.0}),
    "a mix": World(
        {"look": (0.55, 0.45, 0.2), "a": (0.75, 0.72, 0.35), "b": (0.35, 0.35, 0.78)},
        {"look": 1.3, "a": 6.0, "b": 6.0},
        rest_ms=1.5,
        contention=1.5,
        texts=36,
    ),
    "eight sessions": World({"a": (0.6, 0.5)}, {"a": 4.0}, row_ms=0.6, sessions=8, texts=10),
}
"""The rule was tuned on these, and loads and lengths of some were changed meanwhile."""


def held_out(seed: int) -> World:
    """A world that the rule was not tuned on: everything drawn at random, wider than in `TUNING`."""
    rng = random.Random(f"held out {seed}")
    names = ["a", "b", "c"][: rng.choice((1, 2, 2, 3))]
    domains = rng.choice((1, 2, 3))
    return World(
        heads={name: tuple(rng.uniform(0.0, 0.85) for _ in range(domains)) for name in names},
        draft_ms={name: 10 ** rng.uniform(-0.5, 1.3) for name in names},
        forward_ms=rng.choice((4.0, 10.0, 30.0)),
        row_ms=10 ** rng.uniform(-1.7, 0.0),
        rest_ms=rng.uniform(0.4, 2.0),
        nodes_ms=rng.uniform(0.1, 0.6),
        contention=rng.uniform(1.0, 1.9),
        hard=rng.uniform(0.2, 0.9),
        sessions=rng.choice((1, 1, 1, 4, 16)),
        tokens=rng.choice((64, 128)),
        texts=12 * domains,
        noise=rng.uniform(0.02, 0.15),
    )

"""Made-up machines and texts for `--policy auto`: what a step of each arm takes and commits, without any model.

A session's text has an easy and a hard state and a domain; a head accepts each further token with a chance of its own
for the domain, lower in the hard state. A session drafts, waits for the verifier and is verified with whoever else
waits: the nodes are cut as the verifier cuts them, and the forward has a price by rows. Nothing here knows how auto
decides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import and_, xor

from orchestrator.auto import Arm, Rates, arms_of
from orchestrator.auto import Text as Estimates
from services.verifier.budget import CostCurve, Profile, share

PLAIN_ARM = arms_of(())[0]
DEPTH = 8
OPENING_STEPS = 2.0  # of drafting: what a head's first draft in a session takes beside


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
    crowd: float = 0.0  # how much longer a forward of several sessions takes if all of them draft meanwhile
    hard: float = 0.5  # times the chance, in the hard state
    sessions: int = 1
    tokens: int = 128
    texts: int = 16  # answered one after another by each session's place
    noise: float = 0.05


@dataclass
class Text:
    """One session under way: its text, which no arm changes, and the step that waits for the verifier."""

    chances: dict[str, list[float]]  # by head, of each token
    rights: dict[str, list[bool]]
    blur: list[float]  # of routing
    estimates: Estimates
    left: int
    opened: set[int] = field(default_factory=set)
    arm: Arm = PLAIN_ARM
    began: float = 0.0
    ready: float = 0.0
    draft_s: float = 0.0
    asked: tuple[int, ...] = ()
    opening: bool = False
    lengths: list[int] = field(default_factory=list)  # of each head that was asked
    right: int = 0  # drafts of the tree that will prove right
    scores: list[float] = field(default_factory=list)


@dataclass
class Played:
    """What a run came to: tokens and seconds of each domain, and the choices."""

    tokens: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    choices: dict[str, int] = field(default_factory=dict)

    def rate(self, domain: int) -> float:
        """Tokens a second of one session in texts of a domain."""
        return self.tokens[domain] / self.seconds[domain]


class Machine:
    """One verifier and its sessions, as time goes by. `fixed` names an arm for all of them, None is auto."""

    def __init__(self, world: World, seed: int, fixed: str | None) -> None:
        self.world, self.names = world, tuple(world.heads)
        self.fixed = {arm.name: arm for arm in arms_of(self.names)}[fixed] if fixed else None
        self.seed, self.number, self.rng = seed, 0, random.Random(seed)
        self.price = CostCurve({rows: (world.forward_ms + world.row_ms * rows) / 1e3 for rows in (1, 64, 512)})
        self.profile, self.rates = Profile(), Rates()
        self.hint: int | None = None
        self.beside_s, self.ended = 0.0, 0.0
        self.choices: dict[str, int] = {}

    def answer(self, domain: int) -> float:
        """One text of a domain in every session, all begun at once; returns the seconds of all of them together."""
        texts = [self._text(domain, at) for at in range(self.world.sessions)]
        self.number += 1
        expected: list[Text] = []
        spent = 0.0
        for text in texts:
            self._draft(text, self.ended)
        while texts:
            start = max(self.ended, min(text.ready for text in texts))
            late = [text.ready for text in expected if start < text.ready <= start + 0.001]
            start = max([start, *late])
            batch = [text for text in texts if text.ready <= start]
            spent += self._forward(texts, batch, start)
            expected = [text for text in batch if text.left > 0]
            for text in batch:
                if text.left <= 0:
                    self.rates.end(text.estimates)
            texts = [text for text in texts if text.left > 0]
            for text in expected:
                self._draft(text, self.ended)
        return spent

    def _text(self, domain: int, at: int) -> Text:
        """The same text whatever arms are chosen."""
        world, rng = self.world, random.Random(f"{self.seed} {self.number} {at}")
        tokens = world.tokens + DEPTH + 1
        hard = list(accumulate((rng.random() < 0.1 for _ in range(tokens)), xor))
        chances = {head: [p[domain] * (world.hard if one else 1.0) for one in hard] for head, p in world.heads.items()}
        right = {head: [rng.random() < chance for chance in mine] for head, mine in chances.items()}
        blur = [rng.gauss(0, 0.1) for _ in range(tokens)]
        return Text(chances, right, blur, Estimates(self.names), world.tokens)

    def _draft(self, text: Text, now: float) -> None:
        """Choose, and make the tree; `ready` says when the step is at the verifier."""
        world, at = self.world, self.world.tokens - text.left
        text.arm = self.fixed or self.rates.decide(text.estimates, self.hint)
        self.choices[text.arm.name] = self.choices.get(text.arm.name, 0) + 1
        text.asked = text.arm.heads
        heads = [self.names[one] for one in text.asked]
        chances = [text.chances[head][at] for head in heads]
        text.lengths = lengths = [sum(accumulate(text.rights[head][at : at + DEPTH], and_)) for head in heads]
        times = [world.draft_ms[head] / 1e3 for head in heads]
        text.draft_s = max(times, default=0.0) * (world.contention if len(times) > 1 else 1.0)
        text.opening = bool(set(text.asked) - text.opened)
        text.draft_s *= 1 + OPENING_STEPS * text.opening
        text.opened |= set(text.asked)
        depth = min(DEPTH, self.hint or DEPTH)
        text.right, text.scores = 0, []
        if heads:
            routed = max(range(len(heads)), key=lambda one: chances[one] + one * text.blur[at])
            merged = text.arm.policy.name == "merge" and len(heads) > 1
            text.right = min(depth, max(lengths) if merged else lengths[routed])
            chance = max(chances) if merged else chances[routed]
            text.scores = [math.log(max(1e-9, chance)) * node for node in range(1, depth * (1 + merged) + 1)]
            self.profile.observe(text.scores)
        text.began = now
        text.ready = now + text.draft_s + (world.rest_ms + world.nodes_ms * bool(heads)) / 1e3

    def _forward(self, texts: Sequence[Text], batch: Sequence[Text], start: float) -> float:
        """Verify the batch; returns what its sessions' steps took together."""
        world, count = self.world, len(batch)
        self.beside_s += 0.1 * (start - self.ended - self.beside_s)
        gain = float(count)
        kept = share([text.scores for text in batch], count, gain, self._seconds)
        rows = count + sum(kept)
        plain_s, whole_s = self.price((count, rows))
        forward = whole_s * self.rng.lognormvariate(0, world.noise)
        if len(texts) > 1:
            forward *= 1 + world.crowd * sum(len(text.scores) > 0 for text in texts) / len(texts)
        plain = forward * plain_s / whole_s
        self.hint = self.profile.hint(count, count, self._seconds)
        self.ended = start + forward
        spent = 0.0
        for text, nodes in zip(batch, kept, strict=True):
            accepted = min(text.right, nodes, text.left - 1)
            took = self.ended - text.began
            text.left -= 1 + accepted
            spent += took
            if self.fixed is None:
                self.rates.observe(text.estimates, took, forward - plain, accepted, text.opening)
                if len(text.arm.heads) > 1 and nodes:
                    for head, right in zip(text.asked, text.lengths, strict=True):
                        offered = min(right, nodes, accepted + 1)  # the next root may be a head's draft too
                        self.rates.gained(text.estimates, f"single:{self.names[head]}", offered)
        return spent

    def _seconds(self, rows: Sequence[int]) -> list[float]:
        return [self.beside_s + seconds for seconds in self.price(rows)]


def play(world: World, seed: int, fixed: str | None = None, warm: int = 4) -> Played:
    """Answer `world.texts` texts with every session, the domains in turns. The first `warm` texts count nothing."""
    machine, played = Machine(world, seed, fixed), Played()
    for number in range(world.texts):
        domain = number % len(next(iter(world.heads.values())))
        seconds = machine.answer(domain)
        if number >= warm:
            played.tokens[domain] = played.tokens.get(domain, 0) + world.tokens * world.sessions
            played.seconds[domain] = played.seconds.get(domain, 0.0) + seconds
    played.choices = machine.choices
    return played


def against(world: World, seed: int = 0) -> tuple[float, float]:
    """Auto's speed over the best fixed arm's and over plain's, each in the domain where that is least."""
    fixed = {arm.name: play(world, seed, arm.name) for arm in arms_of(tuple(world.heads))}
    auto = play(world, seed)
    best = min(auto.rate(domain) / max(one.rate(domain) for one in fixed.values()) for domain in auto.tokens)
    return best, min(auto.rate(domain) / fixed["plain"].rate(domain) for domain in auto.tokens)


TUNING = {
    "one good head": World({"a": (0.7,)}, {"a": 3.0}),
    "a random head": World({"a": (0.02,)}, {"a": 3.0}),
    "two domains": World({"a": (0.75, 0.45), "b": (0.45, 0.75)}, {"a": 3.0, "b": 3.0}),
    "on the edge": World({"a": (0.3,)}, {"a": 3.0}),
    "a mix": World(
        {"look": (0.55, 0.45, 0.2), "a": (0.75, 0.72, 0.35), "b": (0.35, 0.35, 0.78)},
        {"look": 1.3, "a": 6.0, "b": 6.0},
        rest_ms=1.5,
        contention=1.5,
        texts=36,
    ),
    "eight sessions": World({"a": (0.6, 0.5)}, {"a": 4.0}, row_ms=0.6, crowd=0.1, sessions=8, texts=10),
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
        crowd=rng.uniform(0.0, 0.3),
        contention=rng.uniform(1.0, 1.9),
        hard=rng.uniform(0.2, 0.9),
        sessions=rng.choice((1, 1, 1, 4, 16)),
        tokens=rng.choice((64, 128)),
        texts=12 * domains,
        noise=rng.uniform(0.02, 0.15),
    )

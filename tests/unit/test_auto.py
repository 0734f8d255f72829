"""Policy auto: what it chooses in made-up worlds, on what it bases that, and what trying others costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.auto import LEARN, AutoPolicy, Rates
from tests.worlds import TUNING, World, against, held_out, text_of

Observed = tuple[float, float, int]
PLAIN_STEP: Observed = 0.013, 0.0, 0


def drafting(accepted: int, draft_s: float = 0.003) -> Observed:
    """A step whose nodes took a millisecond of its forward."""
    return 0.014 + draft_s, 0.001, accepted


def live(rates: Rates, text: AutoPolicy, gains: dict[str, int], steps: int, hint: int | None = None) -> list[str]:
    """The choices of a text: every arm gains just so much, and a head beside others as much as alone."""
    chosen = []
    for _ in range(steps):
        arm = rates.decide(text, hint)
        chosen.append(arm.name)
        rates.observe(text, *(PLAIN_STEP if arm.name == "plain" else drafting(gains.get(arm.name, 0))))
        for at in arm.heads if len(arm.heads) > 1 else ():
            head = f"single:{arm.policy.heads[at]}"
            rates.gained(text, head, gains.get(head, 0))
    return chosen


def step_together(rates: Rates, texts: Sequence[AutoPolicy], accepted: int) -> str:
    """One step of several texts; returns the arm that all of them play."""
    (name,) = {rates.decide(text, None).name for text in texts}
    for text in texts:
        rates.observe(text, *(PLAIN_STEP if name == "plain" else drafting(accepted)))
    return name


def test_a_hint_of_0_is_plain_but_for_a_run_now_and_then() -> None:
    rates, text = Rates(), text_of(("a",))
    live(rates, text, {"single:a": 3}, 100)
    drafted = live(rates, text, {"single:a": 0}, 2000, hint=0)[1000:].count("single:a")
    assert 0 < drafted <= 0.08 * 1000
    assert live(rates, text, {"single:a": 3}, 20).count("single:a") >= 19  # what it gains was not forgotten


def test_all_sessions_play_one_arm_and_at_a_new_load_plain_comes_first() -> None:
    rates, text = Rates(), text_of(("a",))
    live(rates, text, {"single:a": 3}, 60)
    texts = [text, *(text_of(("a",)) for _ in range(3))]
    chosen = [step_together(rates, texts, 3) for _ in range(12)]
    assert chosen.count("plain") >= 1
    assert chosen.count("single:a") >= 9
    for each in texts:
        rates.end(each)
    assert rates.texts == []


WORLDS = {
    **{name: (replace(TUNING[name], texts=8), 1, 0.97) for name in ("one good head", "a random head", "on the edge")},
    "a dead head": (World({"a": (0.0,)}, {"a": 20.0}, texts=8), 1, 0.97),
    "eight sessions": (replace(TUNING["eight sessions"], texts=8), 1, 0.94),
    "a mix": (TUNING["a mix"], 2, 0.9),
}
"""A world, how many seeds it is played with, and auto's least mean speed beside the best arm's of each domain"""


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_played_as_its_best_arm_would(name: str) -> None:
    world, seeds, least = WORLDS[name]
    ratios = np.array([against(world, seed) for seed in range(seeds)])
    assert ratios.mean(0).min() >= least


def test_worlds_it_was_not_tuned_on() -> None:
    ratios = np.array([against(replace(held_out(seed), texts=8, sessions=1)) for seed in range(8)])
    assert ratios[:, 0].mean() >= 0.93
    assert ratios.min() >= 0.75


def test_slow_first_plain_steps_do_not_make_a_useless_head_look_free() -> None:
    rates, text, chosen = Rates(), text_of(("a",)), list[str]()
    for _ in range(200):
        name = rates.decide(text, None).name
        slow = 5.0 if chosen.count("plain") < 3 else 1.0
        chosen.append(name)
        rates.observe(text, *((slow * PLAIN_STEP[0], 0.0, 0) if name == "plain" else drafting(0)))
    assert chosen[60:].count("single:a") < 0.1 * len(chosen[60:])


def test_what_greedy_texts_gain_says_nothing_of_sampled_ones() -> None:
    rates, greedy, sampled = Rates(), text_of(("a",)), text_of(("a",), sampled=True)
    live(rates, greedy, {"single:a": 4}, 100)
    assert rates.gain(sampled, "single:a") == Rates().gain(sampled, "single:a")
    rates.end(greedy)
    assert live(rates, sampled, {"single:a": 0}, 100).count("single:a") < 30
    assert rates.gain(text_of(("a",)), "single:a") > 3


def test_every_text_finds_the_head_that_suits_it_and_one_that_changes_is_followed() -> None:
    rates, chosen = Rates(), dict[str, list[str]](a=[], b=[])
    for number in range(20):
        suits, other = ("a", "b") if number % 2 else ("b", "a")
        text, gains = text_of(("a", "b")), {f"single:{suits}": 3, f"single:{other}": 0, "route": 1, "merge": 1}
        chosen[suits] += live(rates, text, gains, 60)[20:] if number >= 4 else []
        rates.end(text)
    for suits, arms in chosen.items():
        assert arms.count(f"single:{suits}") > 0.9 * len(arms)
    rates, text = Rates(), text_of(("a", "b"))
    live(rates, text, {"single:a": 3, "single:b": 0, "route": 2, "merge": 2}, 300)
    changed = live(rates, text, {"single:a": 0, "single:b": 3, "route": 2, "merge": 2}, 100)
    assert changed[50:].count("single:b") > 40


def test_a_new_head_is_played_for_some_steps_and_its_first_calls_do_not_say_what_it_takes() -> None:
    rates, text, chosen = Rates(), text_of(("slow", "cold")), list[str]()
    for _ in range(60):
        name = rates.decide(text, None).name
        chosen.append(name)
        cold = drafting(3, 0.5 if chosen.count(name) <= 2 else 0.003)
        rates.observe(text, *{"plain": PLAIN_STEP, "single:cold": cold}.get(name, drafting(0, 0.02)))
    assert chosen[20:].count("single:cold") > 30
    assert LEARN <= chosen.count("single:slow") < 3 * LEARN


def test_a_head_with_a_prediction_is_tried_in_each_text_and_kept_while_it_fits() -> None:
    rates, heads = Rates(), ("a", "lookup")
    for _ in range(3):  # texts without one: look-up is of no use
        before = text_of(heads)
        live(rates, before, {"single:a": 3, "single:lookup": 0}, 100)
        rates.end(before)
    for _ in range(2):
        useless = text_of(heads, predicted=("lookup",))
        chosen = live(rates, useless, {"single:a": 3, "single:lookup": 0}, 100)
        assert chosen[20:].count("single:a") > 60
        rates.end(useless)
    fits = text_of(heads, predicted=("lookup",))
    chosen = live(rates, fits, {"single:a": 3, "single:lookup": 9}, 60)
    assert chosen.count("single:lookup") > 45
    rates.end(fits)
    assert live(rates, text_of(heads), {"single:a": 3, "single:lookup": 0}, 60).count("single:a") > 45

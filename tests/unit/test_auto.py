"""Policy auto: what it chooses in made-up worlds, on what it bases that, and what trying others may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.auto.arms import Arm, arms_of
from orchestrator.auto.chooser import FIRST_SAVED_S, LEARN, TRIED, Chooser, StepSeen
from orchestrator.auto.text_estimates import TextEstimates
from tests.worlds import TUNING, World, against, held_out, play

STEP = StepSeen(0.013, 0.0, accepted=0)


class Session:
    """A text and the chooser of its process, driven as the policy drives them."""

    def __init__(
        self,
        chooser: Chooser,
        heads: Sequence[str],
        sampled: bool = False,
        prompt: Sequence[int] = (),
        predicted: Sequence[str] = (),
    ) -> None:
        self.chooser, self.text = chooser, TextEstimates(chooser.statistics, heads, sampled, prompt, predicted)

    def decide(self, hint: int | None) -> Arm:
        return self.chooser.decide(self.text, hint)

    def observe(self, step: StepSeen) -> None:
        self.chooser.observe(self.text, step)

    def close(self) -> None:
        self.chooser.end(self.text)


def drafting(accepted: int, draft_s: float = 0.003) -> StepSeen:
    """A step whose nodes took a millisecond of its forward."""
    return StepSeen(0.014 + draft_s, 0.001, accepted)


def live(session: Session, gains: dict[str, int], steps: int, hint: int | None = None) -> list[str]:
    """The choices of a text: every arm gains just so much, a cascade nothing, a head beside others as alone."""
    chosen = []
    for _ in range(steps):
        arm = session.decide(hint)
        chosen.append(arm.name)
        seen = STEP if arm.name == "plain" else drafting(gains.get(arm.name, 0))
        session.observe(replace(seen, asked=arm.first))
        for at in arm.heads if len(arm.heads) > 1 else ():
            head = f"single:{arm.policy.heads[at]}"
            session.text.gained(head, gains.get(head, 0))
    return chosen


def test_the_arms_are_plain_every_head_alone_and_all_of_them_together() -> None:
    assert [arm.name for arm in arms_of(())] == ["plain"]
    assert [arm.name for arm in arms_of(("a",))] == ["plain", "single:a"]
    both = {arm.name: arm.heads for arm in arms_of(("a", "b"))}
    joint = dict.fromkeys(("cascade", "route", "merge"), (0, 1))
    assert both == {"plain": (), "single:a": (0,), "single:b": (1,), **joint}


def test_a_head_that_pays_is_kept_and_one_that_does_not_is_left() -> None:
    good = live(Session(Chooser(), ("a",)), {"single:a": 3}, 200)
    assert good[:1] == ["plain"]  # nothing is known yet
    assert good.count("single:a") > 190
    bad = live(Session(Chooser(), ("a",)), {"single:a": 0}, 2000)
    assert bad[40:].count("single:a") < 0.03 * len(bad)


def test_what_one_text_taught_the_next_one_begins_with() -> None:
    chooser = Chooser()
    gains = {"single:a": 1, "single:b": 3, "route": 2, "merge": 2}
    first = Session(chooser, ("a", "b"))
    live(first, gains, 300)
    first.close()
    assert live(Session(chooser, ("a", "b")), gains, 60).count("single:b") >= 48  # less three runs of tries


def test_a_hint_of_0_is_plain_but_for_tries_that_the_allowance_pays() -> None:
    session = Session(Chooser(), ("a",))
    live(session, {"single:a": 3}, 100)
    hinted = live(session, {"single:a": 0}, 1000, hint=0)
    drafted = hinted.count("single:a")
    assert 0 < drafted * 0.004 <= TRIED * len(hinted) * 0.013 + FIRST_SAVED_S + 0.03  # saved before, and a run of tries
    assert live(session, {"single:a": 3}, 20).count("single:a") >= 19  # what it gains was not forgotten


def test_all_sessions_play_one_arm_and_a_closed_one_counts_no_more() -> None:
    chooser = Chooser()
    texts = [Session(chooser, ("a", "b")) for _ in range(3)]
    for _ in range(50):
        arms = {text.decide(None).name for text in texts}
        assert len(arms) == 1
        for text in texts:
            text.observe(STEP if arms == {"plain"} else drafting(2))
    for text in texts:
        text.close()
    assert chooser.texts == []


def test_what_others_drafts_take_is_no_part_of_a_plain_step() -> None:
    chooser = Chooser()
    session = Session(chooser, ("a",))
    session.decide(None)
    session.observe(replace(STEP, seconds=0.020, rows_s=0.007))
    assert chooser.statistics.plain.at(chooser.statistics.load) == pytest.approx(0.013)


def test_at_another_load_plain_steps_are_seen_at_once() -> None:
    chooser = Chooser()
    session = Session(chooser, ("a",))
    live(session, {"single:a": 3}, 60)
    others = [Session(chooser, ("a",)) for _ in range(3)]
    rounds = []
    for _ in range(12):
        rounds.append({text.decide(None).name for text in (session, *others)})
        for text in (session, *others):
            text.observe(STEP if rounds[-1] == {"plain"} else drafting(3))
    assert {"plain"} in rounds
    assert rounds.count({"single:a"}) >= 9


@pytest.mark.parametrize("name", ["one good head", "a random head", "on the edge"])
def test_a_world_with_one_head_is_played_as_its_best_arm_would(name: str) -> None:
    world = replace(TUNING[name], texts=8)
    best, plain = against(world)
    assert best >= 0.97
    assert plain >= 0.97


def test_under_load_it_is_plain_when_plain_is_best() -> None:
    world = replace(TUNING["eight sessions"], texts=8)
    best, plain = against(world)
    assert min(best, plain) >= 0.94


def test_in_a_mix_of_texts_it_finds_the_right_head_for_each_kind() -> None:
    ratios = [against(TUNING["a mix"], seed)[0] for seed in range(2)]
    assert sum(ratios) / len(ratios) >= 0.88


def test_the_same_world_is_played_the_same_way_twice() -> None:
    world = replace(TUNING["two domains"], texts=5)
    assert play(world, 1) == play(world, 1)


def test_worlds_it_was_not_tuned_on() -> None:
    ratios = np.array([against(replace(held_out(seed), texts=8, sessions=1)) for seed in range(4)])
    assert ratios[:, 0].mean() >= 0.9
    assert ratios.min() >= 0.75


def test_a_dead_head_costs_a_few_steps() -> None:
    world = World({"a": (0.0,)}, {"a": 20.0}, texts=8)
    assert against(world)[0] >= 0.97


def test_slow_first_plain_steps_do_not_make_a_useless_head_look_free() -> None:
    session, chosen = Session(Chooser(), ("a",)), []
    for _ in range(200):
        name = session.decide(None).name
        slow = 5.0 if chosen.count("plain") < 3 else 1.0
        chosen.append(name)
        session.observe(replace(STEP, seconds=slow * STEP.seconds) if name == "plain" else drafting(0))
    assert chosen[60:].count("single:a") < 0.1 * len(chosen[60:])


def test_what_greedy_texts_gain_says_nothing_of_sampled_ones() -> None:
    chooser = Chooser()
    greedy = Session(chooser, ("a",))
    live(greedy, {"single:a": 4}, 100)
    sampled = Session(chooser, ("a",), sampled=True)
    assert sampled.text.gains()["single:a"] == Session(Chooser(), ("a",)).text.gains()["single:a"]
    greedy.close()
    assert live(sampled, {"single:a": 0}, 100).count("single:a") < 30
    assert Session(chooser, ("a",)).text.gains()["single:a"] > 3


def test_every_text_finds_the_head_that_suits_it() -> None:
    chooser, chosen = Chooser(), dict[str, list[str]](a=[], b=[])
    for number in range(20):
        suits, other = ("a", "b") if number % 2 else ("b", "a")
        text = Session(chooser, ("a", "b"))
        gains = {f"single:{suits}": 3, f"single:{other}": 0, "route": 1, "merge": 1}
        chosen[suits] += live(text, gains, 60)[20:] if number >= 4 else []
        text.close()
    for suits, arms in chosen.items():
        assert arms.count(f"single:{suits}") > 0.9 * len(arms)


def test_a_text_that_changes_is_followed() -> None:
    session = Session(Chooser(), ("a", "b"))
    live(session, {"single:a": 3, "single:b": 0, "route": 2, "merge": 2}, 300)
    changed = live(session, {"single:a": 0, "single:b": 3, "route": 2, "merge": 2}, 100)
    assert changed[50:].count("single:b") > 40


def test_seconds_of_a_load_are_its_own() -> None:
    chooser = Chooser()
    session = Session(chooser, ("a",))
    live(session, {"single:a": 3}, 60)
    others = [Session(chooser, ("a",)) for _ in range(3)]
    for _ in range(40):
        played = [(text, text.decide(None).name == "plain") for text in (session, *others)]
        for text, plain in played:
            text.observe(replace(STEP if plain else drafting(3), seconds=0.02 if plain else 0.06))
    extra = chooser.statistics.arms["single:a"].extra
    assert (chooser.statistics.load, chooser.statistics.plain.at(3)) == (3, pytest.approx(0.02))
    assert (extra.at(3), extra.at(1)) == (pytest.approx(0.04, abs=0.002), pytest.approx(0.004, abs=0.0005))
    assert extra.at(4) == extra.at(3)  # where it was never seen, the nearest one's
    for text in others:
        text.close()
    assert chooser.statistics.load == 1


def test_a_new_head_is_played_for_some_steps_and_its_first_calls_do_not_say_what_it_takes() -> None:
    chooser = Chooser()
    session = Session(chooser, ("slow", "cold"))
    chosen = []
    for _ in range(60):
        name = session.decide(None).name
        chosen.append(name)
        if name == "plain":
            session.observe(STEP)
        elif name == "single:cold":
            session.observe(drafting(3, 0.5 if chosen.count(name) <= 2 else 0.003))
        else:
            session.observe(drafting(0, 0.02))
    assert min(chosen.index("single:slow"), chosen.index("single:cold")) < LEARN
    assert chosen[20:].count("single:cold") > 30
    assert LEARN <= chosen.count("single:slow") < 3 * LEARN


def test_what_all_heads_together_are_worth_is_guessed_from_each() -> None:
    chooser = Chooser()
    live(Session(chooser, ("a", "b")), {"single:a": 2, "single:b": 3, "route": 0, "merge": 0}, 12)
    known = {name: chooser.statistics.arms[name] for name in ("single:a", "single:b", "merge")}
    assert not known["merge"].extra.by_load
    gains = Session(chooser, ("a", "b")).text.gains()
    assert gains["single:b"] < gains["merge"] < 1.3 * gains["single:b"]


PROMPTS = {"code": list(range(100, 140)), "story": list(range(200, 240))}
SUITS = {"code": {"single:a": 3, "single:b": 0}, "story": {"single:a": 0, "single:b": 3}}


def answered(chooser: Chooser, kind: str, number: int, steps: int = 60) -> list[str]:
    """The choices of a text of a kind, and of one that shares half of its tokens with the others of that kind."""
    text = Session(chooser, ("a", "b"), prompt=[*PROMPTS[kind][number % 7 :: 2], *range(20)])
    chosen = live(text, {"route": 1, "merge": 1} | SUITS[kind], steps)
    text.close()
    return chosen


def test_a_text_begins_with_what_suited_texts_like_it() -> None:
    chooser = Chooser()
    for number in range(40):
        answered(chooser, ("code", "story")[number % 2], number)
    code = [arm for number in range(3) for arm in answered(chooser, "code", number)[:8]]
    story = [arm for number in range(3) for arm in answered(chooser, "story", number)[:8]]
    assert code.count("single:a") >= 16
    assert story.count("single:b") >= 16


def test_what_it_takes_to_open_a_head_is_known_and_is_over_once_it_took_in_the_text() -> None:
    chooser = Chooser()
    for number in range(2):
        text, opened = Session(chooser, ("a", "b")), set[str]()
        for _ in range(40):
            arm = text.decide(None)
            name = arm.name
            if number and name.startswith("single") and name not in opened:
                assert text.text.opening_s(name) == pytest.approx(0.047, abs=0.005)
                assert text.text.opening_s("merge") >= text.text.opening_s(name)
            opening = name.startswith("single") and name not in opened
            opened.add(name)
            gain = 3 if name.startswith("single") else 1
            seen = STEP if name == "plain" else replace(drafting(gain, 0.05 if opening else 0.003), opening=opening)
            text.observe(replace(seen, asked=arm.heads))
            assert text.text.opening_s(name) == 0
        text.close()
        assert opened & {"single:a", "single:b"}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_head_that_knows_half_of_a_text_goes_first(sampled: bool) -> None:
    """What the quick head promises comes true; the slow one is right everywhere."""
    chooser, chosen, asked = Chooser(), [], []
    for _ in range(3):
        text = Session(chooser, ("quick", "slow"), sampled)
        for step in range(120):
            arm, promised = text.decide(None), 4.0 if step // 10 % 2 else 0.0
            both = arm.heads != arm.first and text.text.goes_on(promised)
            heads = arm.heads if both else arm.first
            accepted = 3 if 1 in heads else int(promised) if heads else 0
            seconds = 0.013 + 0.001 * (0 in heads) + 0.009 * (1 in heads)
            text.observe(StepSeen(seconds, 0.0, accepted, heads))
            for at in heads if len(arm.heads) > 1 else ():
                text.text.gained(("single:quick", "single:slow")[at], (int(promised), 3)[at])
            chosen.append(arm.name)
            asked += [(promised, both)] if arm.name == "cascade" else []
        text.close()
    assert chosen[120:].count("cascade") > 150
    assert {promised for promised, both in asked if both} == {0.0}


def test_several_texts_are_not_played_so() -> None:
    chooser = Chooser()
    texts = [Session(chooser, ("quick", "slow")) for _ in range(2)]
    for _ in range(100):
        for text, arm in [(text, text.decide(None)) for text in texts]:
            assert arm.name != "cascade"
            text.observe(replace(STEP if arm.name == "plain" else drafting(2), asked=arm.heads))


def test_in_made_up_texts_a_cascade_is_faster_than_any_arm() -> None:
    world = World(
        {"look": (0.9,), "a": (0.75,)}, {"look": 1.0, "a": 9.0}, hard=0.8, blind=("look",), contention=1.5, texts=24
    )
    assert sum(against(world, seed)[0] for seed in range(2)) / 2 > 1.0

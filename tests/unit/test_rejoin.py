"""Sessions that were answered together wait for one another, and for nobody who usually stays away for longer."""

from __future__ import annotations

from coppice.engine.batching import Rejoin


def _play(rejoin: Rejoin, away: dict[str, list[float]]) -> float:
    """Rounds in which every session comes back after its own times; rejoin when the last answers went out."""
    now = 0.0
    for round_ in range(max(map(len, away.values()))):
        rejoin.answered(away, now)
        for key, took in away.items():
            rejoin.came(key, now + took[round_])
        now += 1.0
    rejoin.answered(away, now)
    return now


def test_a_batch_waits_for_those_of_the_last_one_that_are_usually_back_in_time() -> None:
    rejoin = Rejoin()
    now = _play(rejoin, {"a": [0.01] * 20, "b": [0.03] * 20, "slow": [0.5] * 20})
    assert rejoin.missing({"a"}, now + 0.1)
    assert not rejoin.missing({"a", "b"}, now + 0.1)  # slow would come too late for this batch
    assert not rejoin.missing({"a"}, now + 0.02)  # and so would b


def test_one_long_time_away_says_nothing_and_three_of_five_do() -> None:
    rejoin = Rejoin()
    now = _play(rejoin, {"once": [0.02, 0.02, 0.02, 0.02, 9.0], "changed": [0.02, 0.02, 9.0, 9.0, 9.0]})
    assert rejoin.missing({"changed"}, now + 0.03)
    assert not rejoin.missing({"once"}, now + 0.03)


def test_a_session_without_a_past_is_waited_for_and_one_that_closed_is_not() -> None:
    rejoin = Rejoin()
    rejoin.answered(["old", "new"], 1.0)
    rejoin.came("old", 1.01)
    assert rejoin.missing({"old"}, 1.2)
    rejoin.closed("new")
    assert rejoin.expected == {"old"}
    assert not rejoin.missing({"old"}, 1.2)
    rejoin.came("new", 1.3)  # a step on its way when the session ended


def test_only_the_last_batch_is_expected() -> None:
    rejoin = Rejoin()
    now = _play(rejoin, {"a": [0.01] * 5, "b": [0.01] * 5})
    rejoin.answered(["a"], now + 0.02)
    assert rejoin.missing({"b"}, now + 1)
    assert not rejoin.missing({"a"}, now + 1)


def _batches(away: dict[str, list[float]], batch_s: float, begin: dict[str, float]) -> list[set[str]]:
    """Whom batches held, one for each time away; a batch's time does not depend on its size."""
    rejoin, coming, now = Rejoin(), dict(begin), 0.0
    batches: list[set[str]] = []
    for times in zip(*away.values(), strict=True):
        now = max(now, min(coming.values()))
        latest = now + batch_s
        here: set[str] = set()
        while True:
            for key in sorted(key for key in coming.keys() - here if coming[key] <= now):
                here.add(key)
                rejoin.came(key, coming[key])
            if now == latest or not rejoin.missing(here, latest):
                break
            now = min(latest, *(coming[key] for key in coming.keys() - here))
        now += batch_s
        rejoin.answered(here, now)
        coming |= {key: now + took for key, took in zip(away, times, strict=True) if key in here}
        batches.append(here)
    return batches


def test_sessions_in_two_groups_find_together_though_their_times_away_vary() -> None:
    away = {"a": [0.009, 0.013] * 6, "b": [0.013, 0.009] * 6, "c": [0.009, 0.009, 0.013] * 4}
    batches = _batches(away, 0.014, {"a": 0.0, "b": 0.090, "c": 0.091})
    assert batches[0] == {"a"}
    assert batches[-1] == batches[-2] == {"a", "b", "c"}

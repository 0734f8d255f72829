"""Sessions that were answered together wait for one another, and for nobody who usually stays away for longer."""

from __future__ import annotations

from coppice.returns import Returns


def _play(returns: Returns, away: dict[str, list[float]]) -> float:
    """Rounds in which every session comes back after its own times; returns when the last answers went out."""
    now = 0.0
    for round_ in range(max(map(len, away.values()))):
        returns.answered(away, now)
        for key, took in away.items():
            returns.came(key, now + took[round_])
        now += 1.0
    returns.answered(away, now)
    return now


def test_a_batch_waits_for_those_of_the_last_one_that_are_usually_back_in_time() -> None:
    returns = Returns()
    now = _play(returns, {"a": [0.01] * 20, "b": [0.03] * 20, "slow": [0.5] * 20})
    assert returns.missing({"a"}, now + 0.1)
    assert not returns.missing({"a", "b"}, now + 0.1)  # slow would come too late for this batch
    assert not returns.missing({"a"}, now + 0.02)  # and so would b


def test_one_long_time_away_says_nothing_and_three_of_five_do() -> None:
    returns = Returns()
    now = _play(returns, {"once": [0.02, 0.02, 0.02, 0.02, 9.0], "changed": [0.02, 0.02, 9.0, 9.0, 9.0]})
    assert returns.missing({"changed"}, now + 0.03)
    assert not returns.missing({"once"}, now + 0.03)


def test_a_session_without_a_past_is_waited_for_and_one_that_closed_is_not() -> None:
    returns = Returns()
    returns.answered(["old", "new"], 1.0)
    returns.came("old", 1.01)
    assert returns.missing({"old"}, 1.2)
    returns.closed("new")
    assert returns.expected == {"old"}
    assert not returns.missing({"old"}, 1.2)
    returns.came("new", 1.3)  # a step on its way when the session ended


def test_only_the_last_batch_is_expected() -> None:
    returns = Returns()
    now = _play(returns, {"a": [0.01] * 5, "b": [0.01] * 5})
    returns.answered(["a"], now + 0.02)
    assert returns.missing({"b"}, now + 1)
    assert not returns.missing({"a"}, now + 1)

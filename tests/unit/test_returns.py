"""Sessions that were answered together wait for one another, and for nobody who usually stays away for longer."""

from __future__ import annotations

import pytest

from coppice.returns import LEAST_S, Returns


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


def test_a_batch_waits_until_the_slowest_of_those_that_are_back_in_time() -> None:
    returns = Returns()
    now = _play(returns, {"a": [0.01] * 20, "b": [0.03] * 20, "slow": [0.5] * 20})
    until = returns.wait_until({"a"}, now + 0.1)
    assert until == pytest.approx(now + 0.03 + LEAST_S, abs=1e-3)
    assert returns.wait_until({"a", "b"}, now + 0.1) == 0.0
    assert returns.wait_until({"a"}, now + 0.02) == 0.0  # b would come too late for this batch


def test_who_varies_is_waited_for_longer() -> None:
    returns = Returns()
    now = _play(returns, {"steady": [0.02] * 40, "varied": [0.01, 0.03] * 20})
    steady = returns.wait_until({"varied"}, now + 1) - now
    varied = returns.wait_until({"steady"}, now + 1) - now
    assert 0.02 < steady < 0.022
    assert 0.03 < varied < 0.06


def test_a_session_without_a_past_is_waited_for_to_the_end_and_one_that_closed_not_at_all() -> None:
    returns = Returns()
    returns.answered(["old", "new"], 1.0)
    returns.came("old", 1.01)
    assert returns.wait_until({"old"}, 1.2) == 1.2
    returns.closed("new")
    assert returns.expected == {"old"}
    assert returns.wait_until({"old"}, 1.2) == 0.0
    returns.came("new", 1.3)  # a step on its way when the session ended


def test_only_the_last_batch_is_expected() -> None:
    returns = Returns()
    now = _play(returns, {"a": [0.01] * 5, "b": [0.01] * 5})
    returns.answered(["a"], now + 0.02)
    assert returns.wait_until(set(), now + 1) == pytest.approx(now + 0.02 + 0.01 + LEAST_S, abs=1e-3)

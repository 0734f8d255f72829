"""Pauses before something that failed is tried again."""

from __future__ import annotations

from coppice.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.fresh
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.fresh
    backoff.succeed()
    assert backoff.fresh
    assert backoff.fail() == 0.5

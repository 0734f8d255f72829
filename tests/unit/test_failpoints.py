"""Failpoints: nothing unless enabled, refused in production, and each action does what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from coppice import failpoints
from coppice.config.settings import load_settings
from coppice.errors import Backoff, InvalidField


@pytest.fixture(autouse=True)
def none_stay_enabled() -> Iterator[None]:
    yield
    failpoints.enable("")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drafter.fast=1", "drafter.fast"),
        ("drafter.slow", "NAME=NUMBER"),
        ("drafter.slow=0", "delay"),
        ("drafter.slow=nan", "delay"),
        ("drafter.garbage=2", "share"),
        ("adapter.push=1.5", "whole"),
        ("drafter.slow=0.1;adapter.push=0", "whole"),
    ],
)
def test_what_is_no_failpoint_is_named(text: str, named: str) -> None:
    with pytest.raises(InvalidField, match=named) as error:
        load_settings(["--server.failpoints", text])
    assert error.value.field == "server.failpoints"


def test_they_are_refused_in_production() -> None:
    flags = ["--server.failpoints", "drafter.slow=0.2; drafter.garbage=1"]
    assert load_settings(flags).server.failpoints
    with pytest.raises(InvalidField, match=r"server\.failpoints: .*refused in production"):
        load_settings([*flags, "--server.production", "true"])
    assert load_settings(["--server.production", "true"]).server.production


def test_a_delay_is_waited_for_and_garbage_is_evenly_spread() -> None:
    failpoints.enable("drafter.slow=0.05;drafter.garbage=0.25")
    began = time.perf_counter()
    assert not failpoints.hit("drafter.slow")
    assert time.perf_counter() - began >= 0.05
    assert [failpoints.hit("drafter.garbage") for _ in range(8)] == 2 * [False, False, False, True]
    assert not failpoints.hit("drafter.stale")


def test_an_exit_is_a_kill_at_the_hit_that_was_named() -> None:
    code = (
        "from coppice import failpoints\nfailpoints.enable('adapter.push=3')\n"
        "for count in range(9):\n    print(count, flush=True)\n    failpoints.hit('adapter.push')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (-9, ["0", "1", "2"])


# --- pauses before something that failed is tried again ---


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.fresh
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.fresh
    backoff.succeed()
    assert backoff.fresh
    assert backoff.fail() == 0.5

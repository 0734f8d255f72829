"""What the demo shows of an answer, and which prompts it takes."""

from __future__ import annotations

import io
import os
import time

import pytest
from rich.console import Console

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.prompts import FilePrompt, demo_prompts
from coppice.training.progress import Progress
from lab.demo import PROMPTS, stream_coloured
from lab.measuring import others_s, timed
from tests.fake_service import echo_server
from tests.lab.conftest import completion

GREEN, RED = "\x1b[32m", "\x1b[31m"


@pytest.mark.parametrize("terminal", [True, False])
def test_accepted_drafts_are_green_and_roots_red_and_the_text_is_counted(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    with echo_server() as (address, _), Client(address) as client:
        stream_coloured(console, client, FilePrompt("abcde", "code"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    if terminal:
        assert all(sign in shown for sign in (f"{RED}a", f"{GREEN}b", f"{RED}c", f"{GREEN}d", f"{RED}e"))
    else:
        figures = "5 tokens, tau 2.00, 4.0 tokens/s, route, 40% drafted"
        assert shown.splitlines()[1:] == ["code: abcde", "abcde", figures]


def test_the_demo_takes_one_prompt_of_each_category() -> None:
    taken = [prompt for prompt in demo_prompts() if prompt.question_id in PROMPTS]
    assert [prompt.category for prompt in taken] == ["code", "maths", "story"]


def test_a_comparison_whose_time_is_over_begins_no_other_prompt() -> None:
    asked: list[tuple[int, ...]] = []

    def ask(prompts: object, sampling: object) -> list[Completion]:
        asked.extend(prompts)  # type: ignore[call-overload]
        return [completion([1], 1.0)]

    with Progress("answers", 4) as progress:
        answers = timed({"plain": ask}, [(1,), (2,), (3,)], progress, most_s=0)
    assert (len(answers["plain"]), asked) == (1, [(1,), (1,)])  # the first, and its warm-up


def test_what_others_compute_grows_by_less_than_time_and_not_by_what_this_process_does() -> None:
    before, began_at, used = others_s(), time.monotonic(), time.process_time()
    while time.process_time() - used < 0.5:
        pass
    assert -0.1 < others_s() - before < time.monotonic() - began_at - 0.4 / (os.cpu_count() or 1) + 0.1

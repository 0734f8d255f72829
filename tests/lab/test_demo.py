"""What the demo shows of an answer, and which prompts it takes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coppice.client.client import Client
from coppice.prompts import FilePrompt, demo_prompts
from lab.demo import PROMPTS, stream_coloured
from tests.fake_service import echo_server

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

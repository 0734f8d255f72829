"""What the demo shows of an answer, and which prompts it takes."""

from __future__ import annotations

import io

from rich.console import Console

from coppice.client.client import Client
from coppice.prompts.files import FilePrompt, demo_prompts
from lab.demo import PROMPTS, stream_coloured
from tests.fake_service import echo_server

GREEN, RED = "\x1b[32m", "\x1b[31m"


def _shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    with echo_server() as (address, _), Client(address) as client:
        stream_coloured(console, client, FilePrompt("abcde", "code"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_accepted_drafts_are_green_and_roots_red() -> None:
    shown = _shown(terminal=True)
    for sign, colour in zip("abcde", (RED, GREEN, RED, GREEN, RED), strict=True):
        assert f"{colour}{sign}" in shown


def test_without_colour_the_text_stands_alone_and_is_counted() -> None:
    lines = _shown(terminal=False).splitlines()
    assert lines[1:] == ["code: abcde", "abcde", "5 tokens, tau 2.00, 4.0 tokens/s, route, 40% drafted"]


def test_the_demo_takes_one_prompt_of_each_category() -> None:
    taken = [prompt for prompt in demo_prompts() if prompt.question_id in PROMPTS]
    assert [prompt.category for prompt in taken] == ["code", "maths", "story"]

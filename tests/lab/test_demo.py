"""What the demo shows of an answer, and which prompts it takes."""

from __future__ import annotations

import io

from rich.console import Console

from coppice.client.client import Client
from coppice.prompts import FilePrompt, demo_prompts
from lab.demo import PROMPTS, stream_coloured
from tests.fake_service import echo_server


def test_the_demo_streams_one_prompt_of_each_category_with_its_figures() -> None:
    taken = [prompt for prompt in demo_prompts() if prompt.question_id in PROMPTS]
    assert [prompt.category for prompt in taken] == ["code", "maths", "story"]
    shown = io.StringIO()
    with echo_server() as (address, _), Client(address) as client:
        stream_coloured(Console(file=shown, color_system=None), client, FilePrompt("abcde", "code"))
    figures = "5 tokens, tau 2.00, 4.0 tokens/s, route, 40% drafted"
    assert shown.getvalue().splitlines()[1:] == ["code: abcde", "abcde", figures]

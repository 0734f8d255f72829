"""`coppice chat`: a conversation on the terminal, of which the target is told all at each turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from coppice.client.client import Client, Options
from coppice.client.completion import Accumulator
from coppice.commands.answers import print_answer
from coppice.errors import InvalidField

QUIT = "/quit"


def chat(client: Client, options: Options) -> None:
    """Answer each line that is typed until /quit or the end of the input. Ctrl-C ends an answer, and what there is of
    it stays in the conversation.

    Raises InvalidField for a target without a chat template.
    """
    if not client.describe().has_chat_template:
        raise InvalidField("chat", "this target has no chat template")
    messages: list[dict[str, str]] = []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        answer = Accumulator()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                print_answer(client, messages, options, answer)
        except InvalidField as error:
            if error.field != "prompt":
                raise
            print(f"coppice: {error}", file=sys.stderr)  # such as one turn too many for the context
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer.completion().text})


def _lines() -> Iterator[str]:
    """What people type, empty lines left out."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then knows the arrow keys
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{QUIT} or Ctrl-D ends it", file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return
        if line == QUIT:
            return
        if line:
            yield line

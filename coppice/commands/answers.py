"""What `coppice generate` and `coppice chat` print: answers as they come, and a line of figures behind each."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from coppice.client.client import Client, Options
from coppice.client.completion import Accumulator, Completion
from coppice.errors import InvalidField
from coppice.prompts.files import FilePrompt, read_prompts
from coppice.wire.generation import Chunk, Origin

QUIT = "/quit"


def prompts_of(prompt: str | None, ids: str | None, file: Path | None) -> list[FilePrompt]:
    """The prompts of the options, of which exactly one is given."""
    if sum(source is not None for source in (prompt, ids, file)) != 1:
        raise typer.BadParameter("give exactly one of PROMPT, --ids and --prompt-file", param_hint="PROMPT")
    if prompt is not None:
        return [FilePrompt(prompt)]
    if ids is not None:
        try:
            return [FilePrompt(tuple(int(token) for token in ids.split(",")))]
        except ValueError:
            raise typer.BadParameter(f"{ids!r} is not ids with commas between", param_hint="--ids") from None
    assert file
    if file.suffix in (".jsonl", ".txt"):
        return read_prompts(file)
    return [FilePrompt(read_text(file, "--prompt-file"), where=str(file))]


def read_text(file: Path, option: str) -> str:
    """The text of the file that an option names. Raises BadParameter."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def fitting(client: Client, prompts: Iterable[FilePrompt], chat: bool, new_tokens: int, skip: bool) -> list[FilePrompt]:
    """The prompts that fit into the server's context, a conversation with all its answers of `new_tokens`.

    Raises InvalidField naming those that do not, unless they are to be skipped: then they are named on stderr.
    """
    fit, long, room = [], [], client.describe().max_len
    for one in prompts:
        try:
            talk = _Conversation(one, chat)
            for _ in one.later:
                talk.go_on("")
            tokens = client.prompt_tokens(talk.prompt) + len(one.later) * new_tokens
            if tokens >= room:
                raise InvalidField("prompt", f"{tokens} tokens leave no room in a context of {room}")
            fit.append(one)
        except InvalidField as error:
            if error.field != "prompt":
                raise
            long.append(f"{one.name}: {str(error).partition(': ')[2]}")
    if long and not skip:
        raise InvalidField("prompt-file", f"--skip-long goes on without {'; '.join(long)}")
    for line in long:
        print(f"coppice: left out: {line}", file=sys.stderr)
    return fit


def answers_of(client: Client, one: FilePrompt, chat: bool, options: Options, as_json: bool) -> Iterable[Completion]:
    """Print and give the answer to a prompt, then those to the questions behind it."""
    talk = _Conversation(one, chat)
    answer = print_answer(client, talk.prompt, options, Accumulator(), as_json)
    yield answer
    for _ in one.later:
        talk.go_on(answer.text)
        answer = print_answer(client, talk.prompt, options, Accumulator(), as_json)
        yield answer


class _Conversation:
    """A prompt with the answers so far: messages, or a text whose paragraphs take turns."""

    def __init__(self, one: FilePrompt, chat: bool) -> None:
        self._later = iter(one.later)
        text = isinstance(one.prompt, str)
        self.prompt: Any = [{"role": "user", "content": one.prompt}] if chat and text else one.prompt

    def go_on(self, answer: str) -> None:
        """Take in an answer and the next question."""
        question = next(self._later)
        if isinstance(self.prompt, str):
            self.prompt += f"{answer}\n\n{question}\n"
        else:
            said = {"role": "assistant", "content": answer}
            self.prompt = [*self.prompt, said, {"role": "user", "content": question}]


def print_answer(
    client: Client, prompt: Any, options: Options, answer: Accumulator, as_json: bool = False
) -> Completion:
    """Print one answer: its text as it comes, or its JSON object at the end; Ctrl-C leaves what there is in `answer`.

    On a terminal a dim line of figures follows on stderr.
    """
    try:
        for event in client.stream(prompt, **options):
            answer.add(event)
            if isinstance(event, Chunk) and not as_json:
                print(event.text, end="", flush=True)
    finally:
        completion = answer.completion()
        if as_json and completion.policy:  # else the call failed before it began
            print(json.dumps(completion.to_json()))
        elif not as_json and completion.ids:
            # A target without a tokenizer answers in ids only.
            print("" if completion.text else ",".join(map(str, completion.ids)))
            console = Console(stderr=True)
            if console.is_terminal:
                console.print(figures(completion), style="dim", highlight=False)
    return completion


def figures(answer: Completion) -> str:
    """An answer's speed, and how much of it was drafted, as one line."""
    drafted = sum(origin is Origin.DRAFT for origin in answer.origins) / answer.new_tokens
    speed = f"{answer.new_tokens} tokens, tau {answer.tau:.2f}, {answer.tokens_per_s:.1f} tokens/s"
    return f"{speed}, {answer.policy}, {drafted:.0%} drafted"


def talk(client: Client, options: Options) -> None:
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

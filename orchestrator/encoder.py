"""Encodes prompts. Chats are rendered in a process of their own, since a chat template is a program that comes with a
model, and long texts are encoded in another, since a tokenizer holds the interpreter's lock while it works.

`python -m orchestrator.encoder ROLE FOLDER` is such a process. As `render` or `encode` it writes a line when it has
loaded, and answers each line of its input, both in JSON, until the input ends. As `check` it prints what is wrong with
the folder's chat template, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from coppice.config.model_folder import added_tokens, ends_line, text_ends
from coppice.errors import InvalidField, Unavailable
from coppice.limits import MAX_CHAT_MESSAGES, Limits, check_count
from coppice.rpc.access import client_salt
from coppice.rpc.admission import Admission
from coppice.wire.generation import ChatMessage

from .tokenizer import ChatTemplate, TextCodec, no_room

SHORT_CHARS = 4096  # a text of this length is encoded in a few milliseconds
ANSWER_S = 5.0  # for an exchange with a process, and _ANSWER_S_A_MIB more for each MiB of the question
TEMPLATE_S = 1.0  # of computing, for a chat template to render a conversation
_START_S, _ANSWER_S_A_MIB = 60.0, 10.0
_MOST_BYTES = 4 << 30  # of a process
_NICENESS = 5  # of the one for long texts: running sessions come first
_LONGEST_LINE = 1 << 28  # bytes of an answer


class Encoder:
    """A target's tokenizer and chat template for prompts of any length. For one event loop."""

    def __init__(self, codec: TextCodec, most_ids: int, limits: Limits, answer_s: float = ANSWER_S) -> None:
        """most_ids: of a prompt that the target has room for. limits: how many may wait for a process, and how long."""
        self._codec, self._most_ids = codec, most_ids
        self._render, self._encode = (
            _Process((role, str(codec.folder)), limits, answer_s) for role in ("render", "encode")
        )

    async def start(self) -> None:
        """Start the process for chats, if there will be any; it loads in the background."""
        if self._codec.has_chat_template:
            await self._render.start()

    async def encode(self, prompt: str | Sequence[ChatMessage], bare: bool = False) -> list[int]:
        """Ids of a text or of a conversation; the clients that `client_salt` tells apart take turns at the processes.

        bare: without the special tokens around a prompt. Raises InvalidField, before any work when it is hopelessly
        long, Overloaded and Unavailable.
        """
        if not isinstance(prompt, str):
            check_count("chat.messages", len(prompt), 1, MAX_CHAT_MESSAGES)
            self._check_length(sum(map(len, chain.from_iterable(message.fields.values() for message in prompt))))
            if not self._codec.has_chat_template:
                raise InvalidField("chat", "this target has no chat template")
            try:
                text: str = await self._render.ask([message.fields for message in prompt])
            except TimeoutError:
                raise InvalidField("chat.messages", "this target's chat template does not end") from None
            prompt, bare = text, True
        self._check_length(len(prompt))
        if len(prompt) <= SHORT_CHARS:
            return self._codec.encode(prompt, bare)
        try:
            ids: list[int] = await self._encode.ask([prompt, bare])
        except TimeoutError:
            raise Unavailable("the tokenizer's process does not answer") from None
        if len(ids) >= self._most_ids:
            raise no_room(len(ids), self._most_ids)
        return ids

    def _check_length(self, chars: int) -> None:
        if chars > self._most_ids * self._codec.longest:
            raise InvalidField("prompt", f"{chars} characters are more than {self._most_ids} tokens hold")

    async def stop(self) -> None:
        """End the processes."""
        await self._render.stop()
        await self._encode.stop()


class _Process:
    """A process that answers one question after another; who asks waits for a turn."""

    def __init__(self, arguments: Sequence[str], limits: Limits, answer_s: float) -> None:
        self._arguments, self._answer_s = arguments, answer_s
        self._turns = Admission("turns of the tokenizer's process", 1, limits.queued, limits.queue_s)
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False

    async def start(self) -> asyncio.subprocess.Process:
        """The process, started if there is none."""
        if self._process is None:
            self._loaded = False
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", __name__, *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
        return self._process

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def ask(self, question: object) -> Any:
        """The answer. Who leaves before its turn leaves the line; a question that was asked is answered in any case.

        Raises InvalidField, Overloaded, Unavailable, and TimeoutError when two processes do not answer in time.
        """
        asked = asyncio.Event()
        answering = asyncio.create_task(self._ask_in_turn(json.dumps(question).encode() + b"\n", asked))
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer, *refused = json.loads(await asyncio.shield(answering))
        except asyncio.CancelledError:
            if not asked.is_set():
                answering.cancel()
            raise
        if refused:
            raise InvalidField(*refused)
        return answer

    async def _ask_in_turn(self, question: bytes, asked: asyncio.Event) -> bytes:
        async with self._turns.admit(client=client_salt()):
            asked.set()
            for _ in range(2):  # it may have been killed, or hang
                try:
                    return await self._exchange(question)
                except (OSError, EOFError) as error:
                    late = isinstance(error, TimeoutError)
                    await self.stop()
        if late:
            raise TimeoutError
        raise Unavailable("the tokenizer's process ended")

    async def _exchange(self, question: bytes) -> bytes:
        process = await self.start()
        stdin, stdout = process.stdin, process.stdout
        assert stdin
        assert stdout
        if not self._loaded:
            async with asyncio.timeout(_START_S):
                await stdout.readuntil()
            self._loaded = True
        async with asyncio.timeout(self._answer_s + _ANSWER_S_A_MIB * len(question) / 2**20):
            stdin.write(question)
            await stdin.drain()
            return await stdout.readuntil()


@contextmanager
def _in_time() -> Iterator[None]:
    """Have the block raise TimeoutError when it has computed for TEMPLATE_S."""
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it computes for more than {TEMPLATE_S:g} s")


def _check(folder: Path) -> Iterator[str]:
    """What is wrong with a folder's chat template, a line each."""
    if not ChatTemplate.is_in(folder):
        return
    template, tokens = ChatTemplate(folder), added_tokens(folder)
    try:
        with _in_time():
            token = template.turn_end(tokens)
    except InvalidField as error:
        yield f"chats will be refused: {error}"
        return
    ends = text_ends(folder)
    if token and tokens[token] not in next(iter(ends.values()), (tokens[token],)):
        line = f"the chat template ends turns with {token} ({tokens[token]})"
        yield f"{line}, but {ends_line(ends)}: answers go on behind it"


def _answers(role: str, folder: Path) -> Callable[[Any], str | list[int]]:
    """What answers the questions of a role."""
    if role == "encode":
        os.nice(_NICENESS)
        codec = TextCodec(folder)
        return lambda question: codec.encode(*question)
    template = ChatTemplate(folder)

    def render(question: list[dict[str, str]]) -> str:
        with _in_time():
            return template.render([ChatMessage(**message) for message in question])

    return render


def main(role: str, folder: str) -> None:
    """Do what the role is for, without more memory than one question may take."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES if most < 0 else min(most, _MOST_BYTES), most))
    signal.signal(signal.SIGPROF, _too_slow)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on a terminal it goes to the whole group
    if role == "check":
        print(*_check(Path(folder)), sep="\n")
        return
    answer, reply = _answers(role, Path(folder)), list[object]()
    print(flush=True)
    for question in sys.stdin:
        try:
            reply = [answer(json.loads(question))]
        except InvalidField as error:
            reply = [None, error.field, str(error).removeprefix(f"{error.field}: ")]
        except BaseException as error:  # as the panic of a tokenizer is
            reply = [None, "prompt", f"the tokenizer fails: {error}"]
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

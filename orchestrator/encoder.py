"""Encodes prompts: chats and long texts in processes of their own, since a tokenizer holds the interpreter's lock while
it works, and a chat template is a program that came with a model.

`python -m orchestrator.encoder FOLDER MOST_IDS NICENESS` is such a process. It reads questions from standard input and
answers on standard output, each behind its length in four bytes: a text or, as JSON, a conversation; then ids as 32-bit
numbers, or why there are none. Before the first question it says, a line each, what is wrong with the folder's chat
template. It ends with its input.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import structlog

from coppice.config.model_folder import ends_line, text_ends
from coppice.errors import InvalidField, Unavailable
from coppice.limits import MAX_CHAT_MESSAGES, Limits, check_count
from coppice.messages.generation import ChatMessage
from coppice.rpc.access import client_salt
from coppice.rpc.admission import Admission

from .tokenizer import TextCodec, no_room

log = structlog.get_logger()

SHORT_CHARS = 4096  # a text of this length is encoded in a few milliseconds
TEMPLATE_S = 2.0  # for a chat template to render a conversation
_START_S, _ANSWER_S, _ANSWER_S_A_MIB = 60.0, 5.0, 10.0
_MOST_BYTES = 4 << 30  # of such a process
_NICENESS = 5  # running sessions come first
_LENGTH = struct.Struct("<I")
_TEXT, _BARE, _CHAT, _IDS, _TOO_LONG, _INVALID = b"t", b"b", b"c", b"i", b"l", b"x"


class Encoder:
    """A target's tokenizer for prompts of any length. For one event loop."""

    def __init__(self, codec: TextCodec, most_ids: int, limits: Limits) -> None:
        """most_ids: of a prompt that the target has room for. limits: how many may wait for the processes, how long."""
        self._codec, self._most_ids = codec, most_ids
        # No short chat waits behind a long prompt.
        self._short, self._long = (_Process(codec.folder, most_ids, niceness, limits) for niceness in (0, _NICENESS))

    async def start(self) -> None:
        """Start the process for short chats, if there will be any; it loads in the background."""
        if self._codec.has_chat_template:
            await self._short.start()

    async def encode(self, prompt: str | Sequence[ChatMessage], bare: bool = False) -> list[int]:
        """Ids of a text or of a conversation; the clients that `client_salt` tells apart take turns at long ones.

        bare: without the special tokens around a prompt. Raises InvalidField, before any work when it is hopelessly
        long, Overloaded and Unavailable.
        """
        parts, chat = [prompt], False
        if not isinstance(prompt, str):
            check_count("chat.messages", len(prompt), 1, MAX_CHAT_MESSAGES)
            parts, chat = [message.content for message in prompt], self._codec.has_chat_template
        chars = sum(map(len, parts))
        if chars > self._most_ids * self._codec.longest:
            raise InvalidField("prompt", f"{chars} characters are more than {self._most_ids} tokens hold")
        short = chars <= SHORT_CHARS
        if short and not chat:
            return self._codec.encode(prompt, bare)
        try:
            answer = await (self._short if short else self._long).ask(_question(prompt, bare))
        except TimeoutError:
            if chat:
                raise InvalidField("chat.messages", "this target's chat template does not end") from None
            raise Unavailable("the tokenizer's process does not answer") from None
        kind, rest = answer[:1], answer[1:]
        if kind == _IDS:
            return array.array("I", rest).tolist()
        if kind == _TOO_LONG:
            raise no_room(int(rest), self._most_ids)
        field, _, reason = rest.decode().partition(": ")
        raise InvalidField(field, reason)

    async def stop(self) -> None:
        """End the processes."""
        await self._short.stop()
        await self._long.stop()


class _Process:
    """A process that answers one question after another; who asks waits for a turn."""

    def __init__(self, folder: Path, most_ids: int, niceness: int, limits: Limits) -> None:
        self._arguments = str(folder), str(most_ids), str(niceness)
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
            )
        return self._process

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def ask(self, question: bytes) -> bytes:
        """The answer. Who leaves before its turn leaves the line; a question that was asked is answered in any case.

        Raises Overloaded, Unavailable, TimeoutError.
        """
        asked = asyncio.Event()
        answer = asyncio.create_task(self._ask_in_turn(question, asked))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not asked.is_set():
                answer.cancel()
            raise

    async def _ask_in_turn(self, question: bytes, asked: asyncio.Event) -> bytes:
        async with self._turns.admit(client=client_salt()):
            asked.set()
            for last in (False, True):  # it may have been killed, or hang
                try:
                    return await self._exchange(question)
                except TimeoutError:
                    await self.stop()
                    if last:
                        raise
                except (OSError, asyncio.IncompleteReadError):
                    await self.stop()
        raise Unavailable("the tokenizer's process ended")

    async def _exchange(self, question: bytes) -> bytes:
        process = await self.start()
        stdin, stdout = process.stdin, process.stdout
        assert stdin
        assert stdout
        if not self._loaded:
            async with asyncio.timeout(_START_S):
                for line in (await _read(stdout)).decode().splitlines():
                    log.warning(line)
            self._loaded = True
        async with asyncio.timeout(_ANSWER_S + _ANSWER_S_A_MIB * len(question) / 2**20):
            stdin.write(_LENGTH.pack(len(question)) + question)
            await stdin.drain()
            return await _read(stdout)


async def _read(stdout: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
    return await stdout.readexactly(length)


def _question(prompt: str | Sequence[ChatMessage], bare: bool) -> bytes:
    if isinstance(prompt, str):
        return (_BARE if bare else _TEXT) + prompt.encode()
    return _CHAT + json.dumps([asdict(message) for message in prompt]).encode()


def _answered(codec: TextCodec, question: bytes, most_ids: int) -> bytes:
    kind, rest = question[:1], question[1:].decode()
    try:
        text = rest
        if kind == _CHAT:
            messages = [ChatMessage(**message) for message in json.loads(rest)]
            with _in_time():
                text = codec.render(messages)
        ids = codec.tokenizer.encode(text, add_special_tokens=kind == _TEXT).ids
    except InvalidField as error:
        return _INVALID + str(error).encode()
    except BaseException as error:  # as the panic of a tokenizer is
        return _INVALID + f"prompt: the tokenizer fails: {error}".encode()
    if len(ids) >= most_ids:
        return _TOO_LONG + str(len(ids)).encode()
    return _IDS + array.array("I", ids).tobytes()


def _template_faults(codec: TextCodec) -> Iterator[str]:
    """What is wrong with the chat template of a folder, a line each."""
    if not codec.has_chat_template:
        return
    try:
        with _in_time():
            end = codec.turn_end()
    except InvalidField as error:
        yield f"chats will be refused: {error}"
        return
    ends = text_ends(codec.folder)
    if end is not None and end not in next(iter(ends.values()), (end,)):
        token = codec.tokenizer.id_to_token(end)
        yield f"the chat template ends turns with {token} ({end}), but {ends_line(ends)}: answers go on behind it"


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


def main(folder: str, most_ids: str, niceness: str) -> None:
    """Answer until the input ends."""
    os.nice(int(niceness))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES if most < 0 else min(most, _MOST_BYTES), most))
    signal.signal(signal.SIGPROF, _too_slow)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on a terminal it goes to the whole group
    codec = TextCodec(Path(folder))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    answer = "\n".join(_template_faults(codec)).encode()
    while True:
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()
        if not (length := questions.read(_LENGTH.size)):
            return
        answer = _answered(codec, questions.read(*_LENGTH.unpack(length)), int(most_ids))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Encodes prompts, long ones in a process of their own: the tokenizer holds the interpreter's lock while it works.

`python -m orchestrator.encoder FOLDER` is that process. It reads questions from standard input and answers on standard
output, each behind its length in four bytes: a text or, as JSON, a conversation; then ids as 32-bit numbers, or why
there are none. It ends with its input.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from coppice.errors import InvalidField, Unavailable
from coppice.messages.generation import ChatMessage

from .tokenizer import TextCodec, no_room

SHORT_CHARS = 4096  # a text of this length is encoded in a few milliseconds
_NICENESS = 5  # running sessions come first
_LENGTH = struct.Struct("<I")
_TEXT, _BARE, _CHAT, _IDS, _TOO_LONG, _INVALID = b"t", b"b", b"c", b"i", b"l", b"x"


class Encoder:
    """A target's tokenizer for prompts of any length. For one event loop."""

    def __init__(self, codec: TextCodec, most_ids: int) -> None:
        """most_ids: of a prompt that the target has room for."""
        self._codec, self._most_ids = codec, most_ids
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # one prompt after another: they share the services' cores

    async def encode(self, prompt: str | Sequence[ChatMessage], bare: bool = False) -> list[int]:
        """Ids of a text or of a conversation. Raises InvalidField, before any work when it is hopelessly long.

        bare: without the special tokens around a prompt.
        """
        parts = [prompt] if isinstance(prompt, str) else ["".join(message.fields.values()) for message in prompt]
        chars = sum(map(len, parts))
        if chars > self._most_ids * self._codec.longest:
            raise InvalidField("prompt", f"{chars} characters are more than {self._most_ids} tokens hold")
        if chars <= SHORT_CHARS:
            return self._codec.encode(prompt, bare)
        answer = asyncio.create_task(self._elsewhere(_question(prompt, bare)))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(answer)  # a question that was asked is answered, whoever still waits

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _elsewhere(self, question: bytes) -> list[int]:
        async with self._turn:
            for _ in range(2):  # it may have been killed
                try:
                    return self._answer(await self._ask(question))
                except (OSError, asyncio.IncompleteReadError):
                    await self.stop()
                    self._process = None
        raise Unavailable("the tokenizer's process ended")

    async def _ask(self, question: bytes) -> bytes:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", __name__, str(self._codec.folder), str(self._most_ids)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(_LENGTH.pack(len(question)) + question)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return await stdout.readexactly(length)

    def _answer(self, answer: bytes) -> list[int]:
        kind, rest = answer[:1], answer[1:]
        if kind == _IDS:
            return array.array("I", rest).tolist()
        if kind == _TOO_LONG:
            raise no_room(int(rest), self._most_ids)
        field, _, why = rest.decode().partition(": ")
        raise InvalidField(field, why)


def _question(prompt: str | Sequence[ChatMessage], bare: bool) -> bytes:
    if isinstance(prompt, str):
        return (_BARE if bare else _TEXT) + prompt.encode()
    return _CHAT + json.dumps([asdict(message) for message in prompt]).encode()


def _answered(codec: TextCodec, question: bytes, most_ids: int) -> bytes:
    kind, rest = question[:1], question[1:].decode()
    try:
        prompt = [ChatMessage(**message) for message in json.loads(rest)] if kind == _CHAT else rest
        ids = codec.encode(prompt, bare=kind == _BARE)
    except InvalidField as error:
        return _INVALID + str(error).encode()
    if len(ids) >= most_ids:
        return _TOO_LONG + str(len(ids)).encode()
    return _IDS + array.array("I", ids).tobytes()


def main(folder: str, most_ids: str) -> None:
    """Answer until the input ends."""
    os.nice(_NICENESS)
    codec = TextCodec(Path(folder))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while length := questions.read(_LENGTH.size):
        answer = _answered(codec, questions.read(*_LENGTH.unpack(length)), int(most_ids))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

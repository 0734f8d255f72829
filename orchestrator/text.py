"""Text to ids and back: prompts are encoded here, and answers' ids are turned into text.

A chat template is a program that comes with a model, and a tokenizer holds the interpreter's lock while it works. So
chats and long texts are encoded in processes of their own: `python -m orchestrator.text ROLE FOLDER` writes a line when
it has loaded, and answers each line of its input, both in JSON, until the input ends: as `render` chats, as `encode`
texts, as `compile` whether grammars can be decoded with. As `check` it prints what is wrong with the folder's chat
template, a line each.
"""

import asyncio
import codecs
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from coppice.config.model import added_tokens, ends_line, text_ends
from coppice.config.token_bytes import NEIGHBOUR, TokenBytes
from coppice.errors import CoppiceError, InvalidField, Unavailable
from coppice.limits import MAX_CHAT_MESSAGES, Limits, check_count
from coppice.rpc.admission import Admission
from coppice.wire.common import Grammar
from coppice.wire.generation import ChatMessage

from .tokens import client_salt

# --- ids to text ---


class TextStream:
    """Turns one answer's ids into text, whole characters only, and watches for stop strings.

    It depends on these ids alone: as an answer stands behind a prompt, its first token keeps its leading space.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        stops: Sequence[str] = (),
        least: int = 0,
        include_stop: bool = False,
        special: bool = False,
    ) -> None:
        """No stop string ends the first `least` tokens. include_stop: it is in the text; special: such tokens are."""
        self.tokens, self._stops, self._least = tokens, stops, least
        self._include_stop, self._special = include_stop, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds three bytes at most
        self._before, self._pieces = [NEIGHBOUR], list[str]()  # where ids are not context-free: decoded, and not yet
        self._held = ""  # text that may turn out to begin a stop string

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now that `token` came, and whether a stop string was met (and cut off)."""
        self._least -= 1
        if self.tokens.context_free:
            return self._search(self._utf8.decode(self.tokens.of(token, self._special)))
        self._pieces += filter(None, [self.tokens.piece(token, self._special)])
        text = self._behind()
        if text.endswith("\ufffd") and len(self._pieces) < 4:  # a character has four bytes at most
            return "", False
        if self._pieces:
            self._before, self._pieces = [NEIGHBOUR, *(self._pieces if len(self._pieces) == 1 else ())], []
        return self._search(text)

    def flush(self) -> tuple[str, bool]:
        """What is left when the answer ends elsewhere than at a stop string, and whether one was met in it."""
        text, stopped = self._search(self._utf8.decode(b"", True) + self._behind())
        return text + self._held, stopped

    def _behind(self) -> str:
        """What the pieces that are not decoded yet add to those before them."""
        return self.tokens.join(self._before + self._pieces)[len(self.tokens.join(self._before)) :]

    def _search(self, text: str) -> tuple[str, bool]:
        if self._least >= 0 or not self._stops:
            return text, False
        text, self._held = self._held + text, ""
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            return text[: end if self._include_stop else at], True
        keep = overlap(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`, none of which is in it as a whole.

    Over an answer it takes a time in proportion to its text: beyond what was held before only new characters are tried.
    """
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    ends = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), 0)


# --- prompts to ids ---

SHORT_CHARS = 4096  # a text of this length is encoded in a few milliseconds
ANSWER_S = 5.0  # for an exchange with a process, and _ANSWER_S_A_MIB more for each MiB of the question
TEMPLATE_S = 1.0  # of computing, for a chat template to render a conversation
GRAMMAR_S = 0.2  # of computing, to compile a grammar
_MOST_COMPILED = 1024  # grammars that are remembered
_START_S, _ANSWER_S_A_MIB = 60.0, 10.0
_MOST_BYTES = 4 << 30  # of a process
_NICENESS = 5  # running sessions come first
_LONGEST_LINE = 1 << 28  # bytes of an answer
_CHAT_BYTES = 16 << 20  # of a rendered chat
_TEMPLATE_ARGUMENTS = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
"""of `apply_chat_template`, that a request may set; its others are no template's"""
_ASSISTANT = "Hello."  # what the assistant says in the chat that tells how a template ends a turn


class ChatTemplate:
    """The chat template of a folder, rendered by transformers."""

    def __init__(self, folder: Path) -> None:
        """Does not fail: what is wrong with the folder's files is raised by `render`. Takes half a second, no torch."""
        from transformers import PreTrainedTokenizerFast

        signature = inspect.signature(PreTrainedTokenizerFast.apply_chat_template)
        self._reserved = signature.parameters.keys() - _TEMPLATE_ARGUMENTS
        self._error: Exception | None = None
        try:  # its templates and special tokens, without its vocabulary
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
                folder, tokenizer_object=Tokenizer(BPE()), local_files_only=True
            )
        except Exception as error:
            self._error = error

    @staticmethod
    def source(folder: Path) -> str:
        """The text of every template of a folder, one behind the other, usable or not; those in its config are JSON."""
        config = folder / "tokenizer_config.json"
        files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja")), config]
        texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()}
        if '"chat_template"' not in texts.get(config, ""):
            texts.pop(config, None)
        with suppress(KeyError, ValueError, TypeError):
            texts[config] = json.dumps(json.loads(texts[config])["chat_template"], ensure_ascii=False)
        return "\n".join(texts.values())

    def render(self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any] = {}) -> str:
        """The text that `apply_chat_template` makes of a conversation. Raises InvalidField.

        arguments: what it is given beside the messages; where they say nothing of it, the text goes up to where the
        assistant answers. A template may take any time and memory.
        """
        if reserved := sorted(self._reserved & arguments.keys()):
            raise InvalidField("template_arguments", f"{reserved[0]} is no argument of a template")
        filled = [message.fields for message in messages]
        try:
            if self._error:
                raise self._error
            arguments = {"add_generation_prompt": True, **arguments}
            text: str = self._tokenizer.apply_chat_template(filled, tokenize=False, **arguments)
            if len(text.encode()) > _CHAT_BYTES:
                raise ValueError(f"a text of {len(text)} characters")
        except Exception as error:  # templates come with models and can raise anything
            reason = str(error).partition("\n")[0]
            if type(error).__name__ != "TemplateError":  # which is what a template's raise_exception raises
                reason = f"this target's chat template cannot be used: {type(error).__name__}: {reason}"
            raise InvalidField("chat.messages", reason) from None
        return text


class TextCodec:
    """A target's tokenizer.json and, if it has one, its chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidField when tokenizer.json is unusable."""
        self.folder = folder
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise InvalidField("orchestrator.target", f"{folder / 'tokenizer.json'}: {error}") from None
        self.tokenizer.no_padding()  # of batches; a prompt is itself
        self.tokenizer.no_truncation()
        self.chat_template = ChatTemplate.source(folder)
        self.has_chat_template = bool(self.chat_template)

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """Ids of a text, `bare` without the special tokens around a prompt. Holds the interpreter's lock."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not bare).ids
        return ids


class Encoder:
    """A target's tokenizer and chat template for prompts of any length. For one event loop."""

    def __init__(self, codec: TextCodec, most_ids: int, limits: Limits, answer_s: float = ANSWER_S) -> None:
        """most_ids: of a prompt that the target has room for. limits: how many may wait for a process, and how long."""
        self._codec, self._most_ids = codec, most_ids
        self._most_chars = most_ids * max(map(len, codec.tokenizer.get_vocab()), default=1)
        self._render, self._encode, self._compile = (
            _Process((role, str(codec.folder)), limits, answer_s, tries)
            for role, tries in (("render", 2), ("encode", 2), ("compile", 1))
        )
        self._compiled = set[Grammar]()

    async def start(self) -> None:
        """Start the process for chats, if there will be any; it loads in the background."""
        if self._codec.has_chat_template:
            await self._render.start()

    async def encode(
        self, prompt: str | Sequence[ChatMessage], bare: bool = False, template_arguments: str = ""
    ) -> list[int]:
        """Ids of a text or of a conversation; the clients that `client_salt` tells apart take turns at the processes.

        bare: without the special tokens around a prompt. template_arguments: a JSON object, of a conversation. Raises
        InvalidField, before any work when it is hopelessly long, Overloaded and Unavailable.
        """
        question: list[Any] = [prompt, bare]
        chars, process = len(prompt), self._encode
        late: CoppiceError = Unavailable("the tokenizer's process does not answer")
        if not isinstance(prompt, str):
            check_count("chat.messages", len(prompt), 1, MAX_CHAT_MESSAGES)
            question, process = [[asdict(message) for message in prompt], template_arguments], self._render
            chars = len(template_arguments) + sum(len(text) for fields in question[0] for text in fields.values())
            late = InvalidField("chat.messages", "this target's chat template does not end")
        if chars > self._most_chars:
            raise InvalidField("prompt", f"{chars} characters are more than {self._most_ids} tokens hold")
        if isinstance(prompt, str) and chars <= SHORT_CHARS:
            return self._codec.encode(prompt, bare)
        if not (isinstance(prompt, str) or self._codec.has_chat_template):
            raise InvalidField("chat", "this target has no chat template")
        try:
            ids: list[int] = await process.ask(question)
        except TimeoutError:
            raise late from None
        if len(ids) >= self._most_ids:
            raise InvalidField("prompt", f"{len(ids)} tokens leave no room in a context of {self._most_ids}")
        return ids

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidField unless a grammar compiles in GRAMMAR_S, Overloaded."""
        if grammar in self._compiled:
            return
        try:
            await self._compile.ask([grammar.kind, grammar.text])
        except (TimeoutError, Unavailable):
            raise InvalidField("grammar", f"takes more than {GRAMMAR_S:g} s to compile") from None
        if len(self._compiled) == _MOST_COMPILED:
            self._compiled.clear()
        self._compiled.add(grammar)

    async def stop(self) -> None:
        for process in (self._render, self._encode, self._compile):
            await process.stop()


class _Process:
    """A process that answers one question after another; who asks waits for a turn."""

    def __init__(self, arguments: Sequence[str], limits: Limits, answer_s: float, tries: int) -> None:
        """tries: processes that a question may break."""
        self._arguments, self._answer_s, self._tries = arguments, answer_s, tries
        self._turns = Admission("turns of the tokenizer's process", 1, limits.queued, limits.queue_s)
        self._exchanging = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False

    async def start(self) -> asyncio.subprocess.Process:
        """The process, started if there is none."""
        if self._process is None or self._process.returncode is not None:
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
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def ask(self, question: object) -> Any:
        """The answer. Who leaves before the process is asked leaves the line; a question is answered in any case.

        Raises InvalidField, Overloaded, Unavailable, and TimeoutError when no process answers in time.
        """
        async with self._turns.admit(client=client_salt()):
            await self._exchanging.acquire()  # the client of the question before may have left
            answering = asyncio.create_task(self._answer(json.dumps(question).encode() + b"\n"))
            answering.add_done_callback(lambda _: self._exchanging.release())
            answering.add_done_callback(lambda done: done.cancelled() or done.exception())
            answer, *refused = json.loads(await asyncio.shield(answering))
        if refused:
            raise InvalidField(*refused)
        return answer

    async def _answer(self, question: bytes) -> bytes:
        for left in reversed(range(self._tries)):
            try:
                return await self._exchange(question)
            except (OSError, EOFError) as error:  # it was killed, or hangs
                await self.stop()
                if not left and isinstance(error, TimeoutError):
                    raise
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
def _in_time(seconds: float = TEMPLATE_S) -> Iterator[None]:
    """Have the block interrupted by SIGPROF when it has computed for so long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it computes for more than {TEMPLATE_S:g} s")


def _check(folder: Path) -> Iterator[str]:
    """What is wrong with a folder's chat template, a line each."""
    if not ChatTemplate.source(folder):
        return
    template, tokens = ChatTemplate(folder), added_tokens(folder)
    question = ChatMessage("user", "Hi")
    try:
        with _in_time():
            template.render([question])
    except InvalidField as error:
        yield f"chats will be refused: {error}"
        return
    try:
        with _in_time():
            text = template.render([question, ChatMessage("assistant", _ASSISTANT)], {"add_generation_prompt": False})
    except InvalidField:
        return
    _, answered, rest = text.rpartition(_ASSISTANT)
    token = max((token for token in tokens if answered and rest.strip().startswith(token)), key=len, default="")
    ends = text_ends(folder)
    if token and tokens[token] not in next(iter(ends.values()), (tokens[token],)):
        line = f"the chat template ends turns with {token} ({tokens[token]})"
        yield f"{line}, but {ends_line(ends)}: answers go on behind it"


def _answering(role: str, folder: Path) -> Callable[..., object]:
    """What answers a question, whose parts are its arguments; a compiler is killed when it takes too long."""
    codec = TextCodec(folder)
    if role == "compile":
        from coppice.speculation.grammar import compile_grammar, make_vocabulary

        # The target's special tokens, an end and all bytes: its own ids take no longer, as nothing is made for each.
        special = {number: name for name, number in TokenBytes(codec.tokenizer).special.items()}
        end = max(special, default=-1) + 1
        names = [special.get(at, "").encode() for at in range(end)]
        tokens = [*names, b"<end>", *(bytes([byte]) for byte in range(256))]
        vocabulary = make_vocabulary(tokens, [*special, end], [end], lambda text: [end + 1 + b for b in text.encode()])
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a handler would wait for the library

        @_in_time(GRAMMAR_S)
        def compile_in_time(kind: str, text: str) -> None:
            compile_grammar(vocabulary, kind, text)

        return compile_in_time
    if role == "encode":
        return codec.encode
    template = ChatTemplate(folder)

    def render(messages: list[Any], arguments: str) -> list[int]:
        try:
            given = dict(json.loads(arguments or "{}"))
        except (ValueError, TypeError, RecursionError):
            raise InvalidField("template_arguments", "is no JSON object") from None
        with _in_time():
            prompt = template.render([ChatMessage(**message) for message in messages], given)
        return codec.encode(prompt, bare=True)

    return render


def main(role: str, path: str) -> None:
    """Do what the role is for, without more memory than one question may take."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES if most < 0 else min(most, _MOST_BYTES), most))
    signal.signal(signal.SIGPROF, _too_slow)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on a terminal it goes to the whole group
    folder = Path(path)
    if role == "check":
        print(*_check(folder), sep="\n")
        return
    os.nice(_NICENESS)
    answer, reply = _answering(role, folder), list[object]()
    print(flush=True)
    for question in sys.stdin:
        try:
            reply = [answer(*json.loads(question))]
        except InvalidField as error:
            reply = [None, error.field, str(error).removeprefix(f"{error.field}: ")]
        except BaseException as error:  # as the panic of a tokenizer is
            reply = [None, "prompt", f"the tokenizer fails: {error}"]
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

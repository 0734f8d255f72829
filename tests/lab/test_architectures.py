"""The sweep over classes: what it finds, and that it survives them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from coppice.engine import loading
from coppice.engine.attention import Layer, Sdpa
from coppice.testing import tiny_models
from coppice.testing.tiny_models import model_types
from lab import architectures as sweep
from lab.architectures import EXACT, FAILED, NOT_MADE, REFUSED, WRONG, Finding, architectures, examine, try_one


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
    finding = try_one(kind, variant)
    assert (finding.verdict, finding.name) == (verdict, model_types()[kind])
    assert bool(finding.reason) == (verdict == REFUSED)


def spoiled(kind: str, variant: str) -> Finding:
    """Examine, in a process of its own, an engine that attends with the wrong sign."""

    def wrong(attention: Sdpa, layer: Layer, query: Tensor, *inputs: Tensor) -> Tensor:
        return attend(attention, layer, -query, *inputs)

    attend, Sdpa.attend = Sdpa.attend, wrong  # type: ignore[method-assign]
    loading.self_check = lambda _: None  # type: ignore[assignment,return-value]
    return examine(kind, variant)


def ended(*_: object) -> None:
    """End the process that should answer."""
    os._exit(9)


def too_large(kind: str, variant: str) -> Finding:
    """Examine under a bound that no model keeps."""
    tiny_models.MOST_PARAMETERS = 10
    return examine(kind, variant)


@pytest.mark.parametrize(
    ("examined", "found"),
    [
        (spoiled, (WRONG, "a token is not the argmax of transformers' forward")),
        (ended, (FAILED, "the process crashed")),
        (too_large, (NOT_MADE, "")),
    ],
)
def test_wrong_text_a_crash_and_a_class_that_cannot_be_made_are_findings(
    examined: Callable[..., None], found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "examine", examined)
    finding = try_one("llama", "")
    assert (finding.name, finding.verdict) == ("LlamaForCausalLM", found[0])
    assert found[1] in finding.reason


def test_the_table_has_a_row_for_each_class_and_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sweep, "try_one", lambda kind, variant: Finding("Llama", *((REFUSED, "no, more") if variant else (EXACT,)))
    )
    table, console = tmp_path / "models.csv", Console(file=io.StringIO())
    assert architectures(console, table, ["llama"])
    assert table.read_text().splitlines() == [
        "class,verdict,models,why",
        "Llama,exact,llama,",
        'Llama,refused,llama one key head,"no, more"',
    ]

"""The sweep over classes: what it finds."""

from __future__ import annotations

import pytest
from torch import Tensor

from coppice.engine import loading
from coppice.engine.attention import Layer, Sdpa
from coppice.testing.tiny_models import model_types
from lab import architectures as sweep
from lab.architectures import EXACT, REFUSED, WRONG, Finding, examine, try_one


@pytest.mark.parametrize(
    ("kind", "variant", "verdict"),
    [
        ("llama", "one key head", EXACT),
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


def test_wrong_text_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "examine", spoiled)
    finding = try_one("llama", "")
    assert (finding.verdict, "is not the argmax of transformers' forward" in finding.reason) == (WRONG, True)

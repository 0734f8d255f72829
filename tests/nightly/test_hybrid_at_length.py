"""Every class of targets that keep states as tests/pipeline/test_hybrid.py has two of them, which takes ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.test_hybrid import KINDS, check_kind
from tests.services.test_states import CONVOLUTIONS, DELTA, MAMBA

pytestmark = pytest.mark.timeout(0)


@pytest.mark.parametrize("kind", sorted({*CONVOLUTIONS, *DELTA, *MAMBA} - {*KINDS}))
def test_no_class_says_anything_else(kind: str, tmp_path: Path) -> None:
    check_kind(kind, tmp_path)

"""Every class of targets that keep states as tests/pipeline/test_hybrid.py has one, which takes ten minutes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.pipeline.test_hybrid import check_kind
from tests.services.test_states import CONVOLUTIONS, DELTA, MAMBA

PATHS = (("plain", None), ("route", 8), *product(("single:lookup", "merge", "auto"), (0, 8, 31)))
pytestmark = pytest.mark.timeout(0)


@pytest.mark.parametrize("kind", [*CONVOLUTIONS, *DELTA, *MAMBA])
def test_no_class_says_anything_else(kind: str, tmp_path: Path) -> None:
    check_kind(kind, tmp_path, PATHS, prompts=8)

"""The fuzzing of tests/faults/test_fuzz.py with 100,000 messages to each method, which takes hours."""

from __future__ import annotations

import pytest

from tests.faults.test_fuzz import pushes, right, stack, test_a_method_survives_whatever_is_sent_to_it

__all__ = ["pushes", "right", "stack", "test_a_method_survives_whatever_is_sent_to_it"]
pytestmark = pytest.mark.timeout(7200, func_only=True)


@pytest.fixture
def messages() -> int:
    return 100_000

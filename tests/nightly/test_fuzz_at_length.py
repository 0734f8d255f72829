"""The fuzzing of tests/faults/test_fuzz.py with 100,000 messages to each method, which takes hours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coppice.stack.launch import Stack
from tests.faults.talks import Says
from tests.faults.test_fuzz import CASES, Answers, pushes, right, stack, survive
from tests.pushes import Push

__all__ = ["pushes", "right", "stack"]  # the fixtures

MESSAGES = 100_000


@pytest.mark.timeout(7200, func_only=True)
@pytest.mark.parametrize(("service", "method", "says", "expected"), CASES)
async def test_a_method_survives_whatever_is_sent_to_it_for_long(
    stack: Stack,
    pushes: list[Push],
    right: Answers,
    service: str,
    method: str,
    says: Callable[[Stack, list[Push]], Says],
    expected: set[str],
) -> None:
    await survive(stack, service, method, says(stack, pushes), expected, right, MESSAGES)

"""Every head of the demo that was trained, as tests/pipeline/test_http.py has one of them."""

from __future__ import annotations

import pytest

from coppice.client.client import Client
from coppice.stack.spec import HeadSpec
from tests.pipeline.test_http import check_heads
from tests.stacks import serving

SHIPPED = ("dspark-code", "specblock-code", "eagle3-code")


@pytest.mark.timeout(0)
def test_texts_of_the_shipped_heads_are_generates_and_drafts_are_of_use() -> None:
    with serving(None, None, *map(HeadSpec.parse, SHIPPED)) as stack, Client(stack.address) as client:
        check_heads(stack, client, (*(f"single:{head}" for head in SHIPPED), "route", "merge"), 99)

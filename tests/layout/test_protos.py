"""The wire contract: its descriptor set holds what the protos declare. .ci/run compiles them again and compares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coppice.v1 import adapter_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos" / "coppice" / "v1").glob("*.proto"))


@pytest.mark.parametrize("module", [adapter_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2])
def test_every_rpc_and_every_message_of_a_stub_is_in_its_proto(module: object) -> None:
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    text = (ROOT / "protos" / descriptor.name).read_text(encoding="utf-8")
    assert set(re.findall(r"^message (\w+)", text, re.M)) == set(descriptor.message_types_by_name)
    methods = {method.name for service in descriptor.services_by_name.values() for method in service.methods}
    assert set(re.findall(r"^  rpc (\w+)", text, re.M)) == methods


def test_no_proto_declares_an_enum_inside_a_message() -> None:
    assert not [proto.name for proto in PROTOS if re.search(r"^\s+enum\b", proto.read_text(encoding="utf-8"), re.M)]

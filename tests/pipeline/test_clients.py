"""Clients that are not the SDK: one that has the descriptor set alone, and the documented one for Node."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from coppice.client.client import Client
from coppice.stack.launch import Stack
from tests.fake_service import echo_server
from tests.node import node_modules

ROOT = Path(__file__).parents[2]
GENERATE = "coppice.v1.GenerationService.Generate"
PROMPT = tuple(range(7, 40))


def test_the_descriptor_set_is_all_that_a_caller_needs(stack: Stack, client: Client) -> None:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((ROOT / "coppice" / "v1" / "coppice.binpb").read_bytes()).file:
        pool.Add(file)
    method = pool.FindMethodByName(GENERATE)
    request, response = (message_factory.GetMessageClass(one) for one in (method.input_type, method.output_type))
    with grpc.insecure_channel(stack.address) as channel:
        call = channel.unary_stream(
            "/coppice.v1.GenerationService/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        events = list(call(request(ids={"ids": PROMPT}, max_new_tokens=16, ignore_eos=True)))
    ids = tuple(token for event in events for token in event.chunk.ids)
    assert ids == client.generate(PROMPT, max_new_tokens=16, ignore_eos=True).ids


def test_the_example_for_node_is_answered(pytestconfig: pytest.Config) -> None:
    installed = node_modules(pytestconfig, "grpc", "@grpc/grpc-js@1", "@grpc/proto-loader@0.8")
    (example,) = re.findall(r"```js\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"), re.DOTALL)
    with echo_server() as (address, echo):
        told = {**os.environ, "NODE_PATH": str(installed), "COPPICE_ADDRESS": address}
        run = subprocess.run(["node", "-e", example], cwd=ROOT, env=told, capture_output=True, text=True, timeout=30)
    (request,) = echo.requests
    assert run.returncode == 0, run.stderr
    assert (run.stdout, request.text) == ("Once upon a time", "Once upon a time")
    assert (request.max_new_tokens, request.sampling.temperature) == (64, 0.8)
    assert re.fullmatch(r"seed [1-9]\d*\nFINISH_REASON_EOS, 16 tokens\n", run.stderr)

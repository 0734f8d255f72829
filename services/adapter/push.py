"""The adapter's connection to a drafter, over which new weights are pushed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc

from coppice.errors import InvalidField, from_rpc_error
from coppice.messages.steps import HeadDescription
from coppice.messages.weights import WeightsHeader, WeightsPart, WeightsSynced
from coppice.rpc.channels import Dialer
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.wire.drafter import read_head, read_synced, weights_to_wire

DESCRIBE_S = 5.0


class DrafterLink:
    """One drafter that weights are pushed to; an async context manager that closes its channel."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        """Connects with the first call."""
        self.address = address
        self._channel = dialer.open(address)
        self._stub = DrafterServiceStub(self._channel)

    async def describe(self, deadline_s: float = DESCRIBE_S) -> HeadDescription:
        """Ask what it serves, the version and hash in use among others. Raises CoppiceError."""
        try:
            return read_head(await self._stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=deadline_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def push(self, header: WeightsHeader, parts: Sequence[WeightsPart], deadline_s: float = 60) -> WeightsSynced:
        """Send an update; returns when the next draft reads it.

        What was pushed may be in use also when this raises DeadlineExceeded or Unavailable: the same push again is
        acknowledged then. Raises the CoppiceError it was refused with, InvalidField on an answer about other weights.
        """
        try:
            synced = read_synced(await self._stub.SyncWeights(_messages(header, parts), timeout=deadline_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if (synced.version, synced.weights_hash) != (header.version, header.weights_hash):
            raise InvalidField("weights_hash", f"{self.address} answers with version {synced.version} of other weights")
        return synced

    async def close(self) -> None:
        """End the channel."""
        await self._channel.close()

    async def __aenter__(self) -> DrafterLink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _messages(
    header: WeightsHeader, parts: Sequence[WeightsPart]
) -> AsyncIterator[drafter_pb2.SyncWeightsRequest]:
    yield weights_to_wire(header)
    for part in parts:
        yield weights_to_wire(part)

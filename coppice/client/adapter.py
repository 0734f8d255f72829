"""The client with which operators' tools call an adapter."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
from google.protobuf.message import Message

from coppice.errors import from_rpc_error
from coppice.rpc.channels import Dialer, Stub
from coppice.v1 import adapter_pb2 as pb

TIMEOUT_S = 30.0
ROLLBACK_S = 120.0
STANDING_BY = "standing by"
"""what a head does while another adapter is the active one, or redis is away"""


class AdapterClient(AbstractContextManager["AdapterClient"]):
    """A context manager that closes its channel. Every call raises the CoppiceError that it is answered with."""

    def __init__(self, address: str | None = None, *, dialer: Dialer | None = None) -> None:
        """Connects with the first call, by default to COPPICE_ADAPTER_ADDRESS, with the environment's certificates."""
        dialer = dialer or Dialer(tls=Dialer.from_environment().tls)
        address = address or os.environ.get("COPPICE_ADAPTER_ADDRESS") or "127.0.0.1:50061"
        self._channel = dialer.open_blocking(address)
        self._stub = Stub(self._channel, pb)

    def status(self, head: str = "", history: int = 0) -> list[pb.HeadStatus]:
        """Return the status of one head or of all, with that many of the latest queries."""
        answer: pb.GetStatusResponse = self._call(self._stub.GetStatus, pb.GetStatusRequest(head=head, history=history))
        return list(answer.heads)

    def pause(self, head: str = "") -> None:
        """Stop training."""
        self._call(self._stub.Pause, pb.PauseRequest(head=head))

    def resume(self, head: str = "") -> None:
        """Train again."""
        self._call(self._stub.Resume, pb.ResumeRequest(head=head))

    def rollback(self, head: str = "", version: int | None = None) -> int:
        """Put back a version, 0: the head as it was deployed, None: the last good one; returns the one it made."""
        request = pb.RollbackRequest(head=head, version=version)
        return int(self._call(self._stub.Rollback, request, ROLLBACK_S).version)

    def _call(self, method: Callable[..., Any], request: Message, timeout_s: float = TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def __exit__(self, *error: object) -> None:
        self._channel.close()


def plain(message: Message) -> dict[str, Any]:
    """A message as values of JSON: bytes in hex, numbers as numbers, None for an optional field that is not set."""

    def convert(field: Any, value: Any) -> Any:
        return plain(value) if field.message_type else value.hex() if isinstance(value, bytes) else value

    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            fields[field.name] = [convert(field, element) for element in value]
        else:
            unset = field.has_presence and not message.HasField(field.name)
            fields[field.name] = None if unset else convert(field, value)
    return fields

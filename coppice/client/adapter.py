"""The client with which operators' tools call an adapter."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc

from coppice.errors import from_rpc_error
from coppice.rpc.channels import Dialer
from coppice.v1.adapter_pb2_grpc import AdapterServiceStub
from coppice.wire import adapter
from coppice.wire.adapter import HeadStatus

TIMEOUT_S = 30.0
ROLLBACK_S = 120.0


def default_address() -> str:
    """Return COPPICE_ADAPTER_ADDRESS, else the address that `coppice up --adapt` takes."""
    return os.environ.get("COPPICE_ADAPTER_ADDRESS") or "127.0.0.1:50061"


class AdapterClient(AbstractContextManager["AdapterClient"]):
    """A context manager that closes its channel. Every call raises the CoppiceError that it is answered with."""

    def __init__(self, address: str | None = None, *, dialer: Dialer | None = None) -> None:
        """Connects with the first call; `dialer` None: with the certificates that the environment names."""
        dialer = dialer or Dialer(tls=Dialer.from_environment().tls)
        self._channel = dialer.open_blocking(address or default_address())
        self._stub = AdapterServiceStub(self._channel)

    def status(self, head: str = "", history: int = 0) -> list[HeadStatus]:
        """Return the status of one head or of all, with that many of the latest queries."""
        return adapter.read_status(self._call(self._stub.GetStatus, adapter.status_request(head=head, history=history)))

    def pause(self, head: str = "") -> None:
        """Stop training."""
        self._call(self._stub.Pause, adapter.pause_request(head=head))

    def resume(self, head: str = "") -> None:
        """Train again."""
        self._call(self._stub.Resume, adapter.resume_request(head=head))

    def rollback(self, head: str = "", version: int | None = None) -> int:
        """Put back a version, 0: the head as it was deployed, None: the last good one; returns the one it made."""
        answer = self._call(self._stub.Rollback, adapter.rollback_request(head=head, version=version), ROLLBACK_S)
        return adapter.read_rollback(answer)

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def __exit__(self, *error: object) -> None:
        self.close()

"""Client channels between Coppice processes, all with the same options."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio
from pydantic import ValidationError

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.rpc.certificates import is_loopback
from coppice.rpc.tls import AioGuardedChannel, GuardedChannel, Metadata

HEAD = "coppice-head-bin"
"""metadata of a call to a drafter: the pool it is for, as one address may serve several"""
_CLIENT_TLS = ("ca", "cert", "key", "server_name", "tokens_in_clear")


def channel_options(message_bytes: int) -> list[tuple[str, int]]:
    """Options of every client channel: message bounds, keepalive, no retries of their own."""
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 500),  # calls fail meanwhile: less than the SDK's tries take
        # Two channels to one address must not share a connection: a stuck stream would stall the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]


@dataclass(frozen=True, slots=True)
class Dialer:
    """How a process reaches others: with which bounds, certificates and bearer token, and of drafters which head."""

    limits: Limits = field(default_factory=Limits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    token: str = field(default="", repr=False)
    head: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        """A client's: COPPICE_TLS__CA and its like name the files, COPPICE_TOKEN is the token. Raises InvalidField."""
        variables = {name: f"COPPICE_TLS__{name.upper()}" for name in _CLIENT_TLS}
        given: dict[str, Any] = {name: os.environ[key] for name, key in variables.items() if os.environ.get(key)}
        try:
            tls = TlsSettings(**given)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidField(variables[str(first["loc"][0])], first["msg"]) from None
        return cls(tls=tls, token=os.environ.get("COPPICE_TOKEN", ""))

    def open(self, address: str) -> AioGuardedChannel:
        """A channel to one address; it connects in the event loop of its first call, and may be made outside of one.

        Raises InvalidField for unusable certificates or a token.
        """
        return AioGuardedChannel(grpc.aio, address, self._options, self.tls, self._metadata(address))

    def open_blocking(self, address: str) -> grpc.Channel:
        """The same for callers without an event loop."""
        if not self.tls.on and not self.token and not self.head:
            return grpc.insecure_channel(address, options=self._options)
        return GuardedChannel(grpc, address, self._options, self.tls, self._metadata(address))

    @property
    def _options(self) -> list[tuple[str, int]]:
        return channel_options(self.limits.message_bytes)

    def _metadata(self, address: str) -> Metadata:
        head: Metadata = ((HEAD, self.head.encode()),) if self.head else ()
        if not self.token:
            return head
        if not self.token.isascii() or not self.token.isprintable():
            raise InvalidField("token", "is not printable ASCII")
        if not (self.tls.on or self.tls.tokens_in_clear or is_loopback(address.rpartition(":")[0])):
            raise InvalidField("token", f"would go to {address} in clear; COPPICE_TLS__CA encrypts it")
        return (("authorization", f"Bearer {self.token}"), *head)

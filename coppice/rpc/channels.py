"""Client channels between Coppice processes, all with the same options."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import grpc.aio

from coppice.limits import Limits


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
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Two channels to one address must not share a connection: a stuck stream would stall the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]


@dataclass(frozen=True, slots=True)
class Dialer:
    """How a process reaches others: with which bounds."""

    limits: Limits = field(default_factory=Limits)

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to one address; connects lazily."""
        return grpc.aio.insecure_channel(address, options=channel_options(self.limits.message_bytes))

    def open_blocking(self, address: str) -> grpc.Channel:
        """The same for callers without an event loop."""
        return grpc.insecure_channel(address, options=channel_options(self.limits.message_bytes))

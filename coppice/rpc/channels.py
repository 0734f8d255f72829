"""Client channels between Coppice processes, all with the same options; they follow a rotation of certificates."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio
from google.protobuf import message_factory
from pydantic import ValidationError

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField
from coppice.limits import MESSAGE_BYTES
from coppice.rpc import tracing
from coppice.rpc.access import SERVED_BY, Certificates, is_loopback
from coppice.rpc.link import LINK, LINKED, Link

Metadata = tuple[tuple[str, str | bytes], ...]
HEAD = "coppice-head-bin"
"""metadata of a call to a drafter: the pool it is for, as one address may serve several"""
_CLIENT_TLS = ("ca", "cert", "key", "server_name", "tokens_in_clear")

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),  # calls fail meanwhile: less than the SDK's tries take
    # Two channels to one address must not share a connection: a stuck stream would stall the other.
    ("grpc.use_local_subchannel_pool", 1),
]
"""of every client channel: message bounds, keepalive, no retries of their own"""


class GuardedChannel:
    """Stands for a channel to one address, also from several threads: hands the trace on, sends metadata with each
    call, checks that the server is the service's. After a change of certificates the next call takes a new connection.
    """

    def __init__(self, library: ModuleType, address: str, tls: TlsSettings, metadata: Metadata) -> None:
        """`library` opens the channels: grpc, or grpc.aio. Raises InvalidField."""
        self._metadata = metadata
        self._library, self._address, self._tls = library, address, tls
        self._certificates = Certificates.read(tls) if tls.on else None
        self._current: dict[str, Any] = {}  # by the name the server must have

    def _callable(self, kind: str, *method: Any, **codecs: Any) -> Callable[..., Any]:
        return partial(self._call, kind, method, codecs)

    unary_unary = partialmethod(_callable, "unary_unary")
    """As of a gRPC channel; so are the next three"""
    unary_stream = partialmethod(_callable, "unary_stream")
    stream_unary = partialmethod(_callable, "stream_unary")
    stream_stream = partialmethod(_callable, "stream_stream")

    def _call(self, kind: str, method: Any, codecs: Any, *request: Any, metadata: Any = None, **options: Any) -> Any:
        service = method[0].strip("/").partition("/")[0]
        make = getattr(self._channel(service), kind)
        sent = tracing.metadata() if metadata is None else metadata
        return make(*method, **codecs)(*request, metadata=(*sent, *self._metadata), **options)

    def _channel(self, service: str) -> Any:
        """The channel for calls of a service."""
        if self._certificates is None:
            if not self._current:
                self._current[""] = self._library.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            return self._current[""]
        before, self._certificates = self._certificates, self._certificates.renewed(self._tls)
        if self._certificates is not before:
            self._current.clear()  # a channel goes when its last call ends
        name = self._tls.server_name or SERVED_BY.get(service, "")
        if name not in self._current:
            ca, cert, key = self._certificates
            credentials = grpc.ssl_channel_credentials(ca, key or None, cert or None)
            options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
            self._current[name] = self._library.secure_channel(self._address, credentials, options=options)
        return self._current[name]

    def close(self) -> Any:
        """End the calls of the channels in use."""
        return [channel.close() for channel in self._current.values()]


class AioGuardedChannel(GuardedChannel, AbstractAsyncContextManager["AioGuardedChannel"]):
    """For callers on an event loop; an async context manager. Sessions share a link."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._links: dict[Any, Link] = {}  # by the channel that carries it

    def _call(self, kind: str, method: Any, codecs: Any, *request: Any, metadata: Any = None, **options: Any) -> Any:
        if method[0] not in LINKED:
            return super()._call(kind, method, codecs, *request, metadata=metadata, **options)
        service, name = method[0].strip("/").split("/")
        channel = self._channel(service)
        link = self._links.get(channel)
        if link is None or link.is_over:
            stream = channel.stream_stream(f"/{service}/{LINK}")(metadata=self._metadata)
            self._links = {each: other for each, other in self._links.items() if not other.is_over}
            link = self._links[channel] = Link(stream, self._address)
        trace = dict(tracing.metadata() if metadata is None else metadata)
        serialize, deserialize = (codecs.get(each) or bytes for each in ("request_serializer", "response_deserializer"))
        call = link.session(name, trace, serialize, deserialize)
        for message in request:
            call.send(message)
        return call

    async def close(self) -> None:
        """End the calls of the channels in use."""
        await asyncio.gather(*super().close())

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Stub:
    """The methods of a service as functions that call it over a channel, by their names in the proto."""

    def __init__(self, channel: Any, file: ModuleType) -> None:
        """file: the messages of the proto that declares the service, such as verifier_pb2."""
        (service,) = file.DESCRIPTOR.services_by_name.values()
        for method in service.methods:
            sides = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
            request, answer = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
            codecs = {"request_serializer": request.SerializeToString, "response_deserializer": answer.FromString}
            make, path = getattr(channel, "_".join(sides)), f"/{service.full_name}/{method.name}"
            setattr(self, method.name, make(path, **codecs))

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Dialer:
    """How a process reaches others: with which certificates and bearer token, and of drafters which head."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    token: str = field(default="", repr=False)
    head: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        """A client's: COPPICE_TLS__CA and its like name the files, COPPICE_TOKEN is the token. Raises InvalidField."""
        variables = {name: f"COPPICE_TLS__{name.upper()}" for name in _CLIENT_TLS}
        values: dict[str, Any] = {name: os.environ[key] for name, key in variables.items() if os.environ.get(key)}
        try:
            tls = TlsSettings(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidField(variables[str(first["loc"][0])], first["msg"]) from None
        return cls(tls=tls, token=os.environ.get("COPPICE_TOKEN", ""))

    def open(self, address: str) -> AioGuardedChannel:
        """A channel to one address, which connects in the event loop of its first call. Raises InvalidField."""
        return AioGuardedChannel(grpc.aio, address, self.tls, self._metadata(address))

    def open_blocking(self, address: str) -> GuardedChannel:
        """The same for callers without an event loop."""
        return GuardedChannel(grpc, address, self.tls, self._metadata(address))

    def _metadata(self, address: str) -> Metadata:
        head: Metadata = ((HEAD, self.head.encode()),) if self.head else ()
        if not self.token:
            return head
        if not self.token.isascii() or not self.token.isprintable():
            raise InvalidField("token", "is not printable ASCII")
        if not (self.tls.on or self.tls.tokens_in_clear or is_loopback(address.rpartition(":")[0])):
            raise InvalidField("token", f"would go to {address} in clear; COPPICE_TLS__CA encrypts it")
        return (("authorization", f"Bearer {self.token}"), *head)

"""gRPC credentials that follow their files: a rotation of certificates needs no restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial, partialmethod
from types import ModuleType
from typing import Any

import grpc
import grpc.aio

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField
from coppice.rpc.access import ACCESS
from coppice.rpc.certificates import Certificates

Options = list[tuple[str, Any]]
Metadata = tuple[tuple[str, str | bytes], ...]


def server_credentials(tls: TlsSettings, require: bool) -> grpc.ServerCredentials:
    """What a port is opened with; `require`: callers need a certificate. Every new connection gets the files' content.

    Raises InvalidField naming the setting whose file is missing or unusable.
    """
    used = Certificates.read(tls)
    if not used.cert:
        raise InvalidField("tls.cert", "is missing: a server shows a certificate")

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, used.renewed(tls)
        return None if used is before else _configuration(used)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, require_client_authentication=require)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.cert)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.ca)


def _channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key or None, certificates.cert or None)


class _Guarded:
    """Stands for a channel to one address: sends metadata with each call, checks that the server is the service's.

    After a change of certificates the next call takes a new connection. Those under way keep theirs.
    """

    def __init__(
        self, library: ModuleType, address: str, options: Options, tls: TlsSettings, metadata: Metadata
    ) -> None:
        """`library` opens the channels: grpc, or grpc.aio. Raises InvalidField."""
        self._metadata = metadata
        self._library, self._address, self._options, self._tls = library, address, options, tls
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
        return make(*method, **codecs)(*request, metadata=(*(metadata or ()), *self._metadata), **options)

    def _channel(self, service: str) -> Any:
        """The channel for calls of a service."""
        name = ""
        if self._certificates is not None:
            before, self._certificates = self._certificates, self._certificates.renewed(self._tls)
            if self._certificates is not before:
                self._retire(list(self._current.values()))
                self._current.clear()
            name = self._tls.server_name or (ACCESS[service].server if service in ACCESS else "")
        if name not in self._current:
            options = [*self._options, *([("grpc.ssl_target_name_override", name)] if name else [])]
            if self._certificates is None:
                channel = self._library.insecure_channel(self._address, options=options)
            else:
                credentials = _channel_credentials(self._certificates)
                channel = self._library.secure_channel(self._address, credentials, options=options)
            self._current[name] = channel
        return self._current[name]

    def _retire(self, channels: list[Any]) -> None:
        """No call will begin on these."""


class GuardedChannel(_Guarded):
    """For callers without an event loop; may be used from several threads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._retired: list[Any] = []

    def _retire(self, channels: list[Any]) -> None:
        self._retired += channels

    def close(self) -> None:
        """End every call."""
        for channel in (*self._retired, *self._current.values()):
            channel.close()


class AioGuardedChannel(_Guarded, AbstractAsyncContextManager["AioGuardedChannel"]):
    """For callers on an event loop; an async context manager. A retired channel goes when its last call ends."""

    async def close(self) -> None:
        """End the calls of the channels in use."""
        await asyncio.gather(*(channel.close() for channel in self._current.values()))

    async def __aexit__(self, *error: object) -> None:
        await self.close()

"""Who may call what: the names in certificates that tell services apart, and the PEM files that hold these."""

import contextlib
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import MethodDescriptor

from coppice.config.sections import SERVICES, TlsSettings
from coppice.errors import InvalidField, PermissionDenied, Unauthenticated

log = structlog.get_logger()


ACCESS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "coppice.v1.VerifierService": {
        "Link": frozenset({"orchestrator", "drafter"}),
        "Verify": frozenset({"orchestrator"}),
        "FetchFeatures": frozenset({"drafter"}),
        "DescribeTarget": frozenset({"orchestrator"}),
    },
    "coppice.v1.DrafterService": {
        "Link": frozenset({"orchestrator"}),
        "Draft": frozenset({"orchestrator"}),
        "DescribeHead": frozenset({"orchestrator", "adapter"}),
        "SyncWeights": frozenset({"adapter"}),
    },
    "coppice.v1.AdapterService": {
        "GetStatus": frozenset({"operator", "orchestrator"}),
        **dict.fromkeys(("Pause", "Resume", "Rollback"), frozenset({"operator"})),
    },
    "coppice.v1.GenerationService": {"Generate": frozenset(), "DescribeModel": frozenset()},
}
"""By service and method, whose certificate may call it; empty: it needs none. What is not here may not be served."""
SERVED_BY = {service: role for role, service in SERVICES.items() if role != "orchestrator"}
"""Whose certificate serves a service; that of any other must name the host that was dialed"""


Place = AbstractAsyncContextManager[None, bool | None]
"""What a call holds inside the block"""
Clients = Callable[[Iterable[tuple[str, str | bytes]], bool], Place]
"""The place of a client of generation, by a call's metadata, and whether the call counts towards the client's limit;
raises Unauthenticated, Overloaded"""


class Access:
    """Lets a call of one server in, or refuses it."""

    def __init__(self, tls: TlsSettings, clients: Clients | None = None) -> None:
        """Without TLS everybody may call everything but generation, and that too if `clients` is None."""
        self._tls, self._clients = tls, clients

    def admit(self, method: MethodDescriptor, context: grpc.aio.ServicerContext) -> Place:
        """Hold the call's place inside the block. Raises Unauthenticated, PermissionDenied, Overloaded."""
        callers = ACCESS[method.containing_service.full_name][method.name]
        if not callers:
            return self.client(context.invocation_metadata() or (), counted=method.server_streaming)
        if self._tls.on:
            names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
            if not names:
                raise Unauthenticated("a certificate is needed")
            if callers.isdisjoint(names):
                log.warning("refused", method=method.full_name, caller=names)
                raise PermissionDenied(f"{method.full_name} is for {' and '.join(sorted(callers))}")
        return contextlib.nullcontext()

    def client(self, metadata: Iterable[tuple[str, str | bytes]], counted: bool) -> Place:
        """Hold the place of a client of generation inside the block, as Clients."""
        return self._clients(metadata, counted) if self._clients else contextlib.nullcontext()


class Certificates(NamedTuple):
    """What the files of TlsSettings hold. `cert` and `key` are empty for a client that shows none."""

    ca: bytes
    cert: bytes
    key: bytes

    @classmethod
    def read(cls, tls: TlsSettings) -> Self:
        """Read the files. Raises InvalidField naming the setting whose file is missing or unusable."""
        if not tls.ca:
            raise InvalidField("tls.ca", "is missing: nobody's certificate could be checked")
        if bool(tls.cert) != bool(tls.key):
            raise InvalidField("tls.key" if tls.cert else "tls.cert", "is missing: certificate and key go together")
        certificates = cls._contents(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # gRPC would only log what is wrong, and refuse everybody
        try:
            context.load_verify_locations(tls.ca)
        except OSError:
            raise InvalidField("tls.ca", f"{tls.ca} holds no PEM certificate") from None
        try:
            if tls.cert:
                context.load_cert_chain(tls.cert, tls.key, password="")
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise InvalidField("tls.cert", f"{tls.cert} and {tls.key} are no PEM pair: {reason}") from None
        return certificates

    @classmethod
    def of_server(cls, tls: TlsSettings) -> Self:
        """Read the files of a server, which shows a certificate. Raises InvalidField as `read` does."""
        certificates = cls.read(tls)
        if not certificates.cert:
            raise InvalidField("tls.cert", "is missing: a server shows a certificate")
        return certificates

    def renewed(self, tls: TlsSettings) -> Self:
        """What the files hold now: this very object while nothing changed, or while they are unusable."""
        try:
            return self if self == self._contents(tls) else self.read(tls)
        except InvalidField as error:  # half of a rotation; the next connection looks again
            log.warning("certificates stay as they were", why=str(error))
            return self

    @classmethod
    def _contents(cls, tls: TlsSettings) -> Self:
        contents = []
        for name in cls._fields:
            file = getattr(tls, name)
            try:
                contents.append(Path(file).read_bytes() if file else b"")
            except OSError as error:
                raise InvalidField(f"tls.{name}", f"{file} cannot be read: {error.strerror}") from None
        return cls(*contents)


def server_credentials(tls: TlsSettings, service: str) -> grpc.ServerCredentials:
    """Open a port of a service with these; every new connection gets the files' content. Raises InvalidField."""
    used = Certificates.of_server(tls)

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(used.key, used.cert)], root_certificates=used.ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, used.renewed(tls)
        return None if used is before else configuration()

    require = tls.require or any(ACCESS[service].values())
    return grpc.dynamic_ssl_server_credentials(configuration(), changed, require_client_authentication=require)


def is_loopback(host: str) -> bool:
    """Whether a host as it is written in an address never leaves the machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

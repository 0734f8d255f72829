"""The certificates that a process shows and those that it trusts: PEM files, read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self

import grpc
import structlog

from coppice.config.sections import TlsSettings
from coppice.errors import InvalidField

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Certificates:
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
        certificates = cls(*(_read(f"tls.{name}", getattr(tls, name)) for name in ("ca", "cert", "key")))
        certificates._check(tls)
        return certificates

    def renewed(self, tls: TlsSettings) -> Certificates:
        """What the files hold now: this very object while nothing changed, or while they are unusable."""
        try:
            now = tuple(_read(f"tls.{name}", getattr(tls, name)) for name in ("ca", "cert", "key"))
            return self if now == (self.ca, self.cert, self.key) else Certificates.read(tls)
        except InvalidField as error:  # half of a rotation; the next connection looks again
            log.warning("certificates stay as they were", why=str(error))
            return self

    def _check(self, tls: TlsSettings) -> None:
        """gRPC would only log what is wrong, and refuse every connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(tls.ca)
        except OSError:
            raise InvalidField("tls.ca", f"{tls.ca} holds no PEM certificate") from None
        if not self.cert:
            return
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise InvalidField("tls.cert", f"{tls.cert} and {tls.key} are no PEM pair: {reason}") from None


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


def is_loopback(host: str) -> bool:
    """Whether a host as it is written in an address never leaves the machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(setting: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes() if file else b""
    except OSError as error:
        raise InvalidField(setting, f"{file} cannot be read: {error.strerror}") from None

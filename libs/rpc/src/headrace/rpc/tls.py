"""TLS for gRPC and HTTP: credentials that follow their files, and the words for what goes wrong in a handshake.

A server asks for the files' content at each handshake, so a new certificate is shown to the next connection. A gRPC
channel keeps the credentials it was made with (grpc #41779): `RotatingChannel` makes a new one when files change.
"""

from __future__ import annotations

import ssl
from typing import Any

import grpc
import structlog

from headrace.base.errors import Unauthenticated
from headrace.base.tls import SYSTEM, TlsFiles, TlsPem, TlsSettings, tls_files

__all__ = [
    "PeerNames",
    "TlsSettings",
    "channel_credentials",
    "channel_name_options",
    "explained",
    "http_server_context",
    "server_credentials",
]

log = structlog.get_logger(__name__)


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """Credentials that are looked up again at each handshake; StartError when the files are no good now."""
    watch = _Watch(tls_files(settings))
    return grpc.dynamic_ssl_server_credentials(
        watch.configuration(), watch.configuration, require_client_authentication=bool(settings.client_ca_file)
    )


def channel_credentials(settings: TlsSettings, pem: TlsPem) -> grpc.ChannelCredentials:
    """What a client shows and trusts."""
    shown = {"private_key": pem.key, "certificate_chain": pem.cert} if settings.cert_file else {}
    return grpc.ssl_channel_credentials(root_certificates=pem.ca or None, **shown)


def channel_name_options(settings: TlsSettings) -> list[tuple[str, str]]:
    """The channel option that says which name the server's certificate must carry, when it is not the address's."""
    return [("grpc.ssl_target_name_override", settings.server_name)] if settings.server_name else []


class _Watch:
    """Called by gRPC from a thread of its own, at each handshake."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._pem: TlsPem | None = None
        self._configuration: Any = None
        self._fault = ""

    def configuration(self) -> Any:
        """The newest good one; an error here would fail the handshake, so there is none."""
        pem = self._files.current()
        if self._files.fault and self._files.fault != self._fault:
            log.error("tls_files_refused", why=self._files.fault)
        self._fault = self._files.fault
        if pem is not self._pem:
            if self._pem is not None:
                log.info("tls_certificate_reloaded", file=self._files.settings.cert_file)
            self._pem = pem
            self._configuration = grpc.ssl_server_certificate_configuration(
                [(pem.key, pem.cert)], root_certificates=pem.client_ca or None
            )
        return self._configuration


class PeerNames:
    """Refuses callers whose certificate is of the right authority but for somebody else.

    Where one authority signs for a whole company, its signature alone does not make a caller part of the fleet.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted.encode()

    def refusal(self, context: Any) -> Unauthenticated | None:
        """Why this caller is refused; None when it is welcome."""
        if self._wanted in context.auth_context().get("x509_subject_alternative_name", ()):
            return None
        return Unauthenticated(
            f"this server takes calls from certificates with the name {self._wanted.decode()} only",
            reason="NOT_OF_THE_FLEET",
        )


def http_server_context(settings: TlsSettings) -> ssl.SSLContext:
    """For an asyncio server that speaks HTTP/1.1: each handshake uses the newest good files."""
    files = tls_files(settings)
    first = _http_context(settings)
    newest = (files.current(), first)

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake once the client's hello is there, with or without a server name in it."""
        nonlocal newest
        pem = files.current()
        if pem is not newest[0]:
            try:
                newest = (pem, _http_context(settings))
            except OSError as error:  # changed again since it was checked: the next handshake tries again
                log.error("tls_files_refused", why=str(error))
        connection.context = newest[1]

    first.sni_callback = choose
    return first


def _http_context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(settings.cert_file, settings.key_file)
    if settings.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(settings.client_ca_file)
    return context


def explained(message: str, settings: TlsSettings) -> str:
    """gRPC's words for a failed connection, with what is likely behind them."""
    trusted = "the machine's authorities" if settings.ca_file == SYSTEM else settings.ca_file
    if "WRONG_VERSION_NUMBER" in message:
        return f"{message} (the server speaks no TLS, and this side does)"
    if "CERTIFICATE_VERIFY_FAILED" in message or "BAD_SIGNATURE" in message:
        return f"{message} (its certificate is not signed by {trusted}, or has expired)"
    if "Hostname Verification" in message:
        return f"{message} (its certificate does not carry the name {settings.server_name or 'that was called'})"
    if "Socket closed" in message and "failed to connect" in message:
        if settings.calls:
            return f"{message} (it may not accept this side's certificate: {settings.cert_file or 'none is shown'})"
        return f"{message} (it may speak TLS, and this side does not)"
    return message

"""TLS as settings and files: what to prove, whom to trust, and the newest good content of those files.

Made for three uses: calls between services (`HEADRACE_TLS_*`, certificates on both sides), the gateway's edge
(`HEADRACE_GATEWAY_EDGE_TLS_*`, where API keys say who calls), and etcd's members (`HEADRACE_ETCD_TLS_*`).
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.base.errors import StartError

INTERNAL_NAME = "headrace.internal"
"""The DNS name that every certificate of a fleet's own services carries, whatever host it runs on."""

INTERNAL_PREFIX = "HEADRACE_TLS_"
EDGE_PREFIX = "HEADRACE_GATEWAY_EDGE_TLS_"
ETCD_PREFIX = "HEADRACE_ETCD_TLS_"

SYSTEM = "system"
"""As `ca_file`: trust the authorities that the machine trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """PEM files by path; "" for none. Without any of them there is no TLS.

    `cert_file`, `key_file`: what this side shows. `client_ca_file`: as a server, demand a certificate of these
    authorities from every caller. `ca_file`: as a client, whom to trust. `server_name`: as a client, the name that the
    server's certificate must carry (default: the address's host). `peer_name`: as a server, the DNS name that a
    caller's certificate must carry.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    ca_file: str = ""
    server_name: str = ""
    peer_name: str = ""

    @property
    def serves(self) -> bool:
        """Whether a server with these settings speaks TLS."""
        return bool(self.cert_file)

    @property
    def calls(self) -> bool:
        """Whether a client with these settings speaks TLS."""
        return bool(self.ca_file)

    @property
    def files(self) -> tuple[str, ...]:
        """All files named."""
        named = (self.cert_file, self.key_file, self.client_ca_file, self.ca_file)
        return tuple(file for file in named if file and file != SYSTEM)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> TlsSettings:
        """Those for calls between services: all of HEADRACE_TLS_{CERT,KEY,CA}_FILE, or none; StartError otherwise.

        Callers are asked for certificates always: of HEADRACE_TLS_CLIENT_CA_FILE, else of HEADRACE_TLS_CA_FILE.
        """
        given = _given(os.environ if environ is None else environ, INTERNAL_PREFIX)
        if not given.files:
            return cls()
        missing = [name for name in ("cert_file", "key_file", "ca_file") if not getattr(given, name)]
        if missing:
            names = ", ".join(INTERNAL_PREFIX + name.upper() for name in missing)
            raise StartError(f"TLS between services needs {names} too: each service proves itself to each other one")
        return replace(
            given,
            client_ca_file=given.client_ca_file or given.ca_file,
            server_name=given.server_name or INTERNAL_NAME,
            peer_name=given.server_name or INTERNAL_NAME,
        )

    @classmethod
    def edge_from_environ(cls, environ: Mapping[str, str] | None = None) -> TlsSettings:
        """Those of the gateway's edge: CERT_FILE and KEY_FILE for the gateway, CA_FILE for who calls it.

        With CLIENT_CA_FILE the gateway demands certificates, besides API keys. Without CA_FILE, who calls a gateway
        that has a certificate trusts whom the machine trusts.
        """
        given = _given(os.environ if environ is None else environ, EDGE_PREFIX)
        if bool(given.cert_file) != bool(given.key_file):
            raise StartError(f"{EDGE_PREFIX}CERT_FILE and {EDGE_PREFIX}KEY_FILE belong together: set both or none")
        return replace(given, ca_file=given.ca_file or (SYSTEM if given.cert_file else ""))

    @classmethod
    def etcd_from_environ(cls, environ: Mapping[str, str] | None = None) -> TlsSettings:
        """Those for etcd's members with https endpoints: whom to trust (else whom the machine trusts), and, where etcd
        demands certificates of its clients, CERT_FILE and KEY_FILE. StartError for one without the other."""
        given = _given(os.environ if environ is None else environ, ETCD_PREFIX)
        if bool(given.cert_file) != bool(given.key_file):
            raise StartError(f"{ETCD_PREFIX}CERT_FILE and {ETCD_PREFIX}KEY_FILE belong together: set both or none")
        return replace(given, ca_file=given.ca_file or SYSTEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPem:
    """The files' content; empty where there is none (or, for `ca`, where the machine's authorities count)."""

    cert: bytes
    key: bytes
    client_ca: bytes
    ca: bytes


class TlsFiles:
    """The newest good content of the files; it is read again when they change.

    A change is taken over once the new files make sense together: between the replacing of a certificate and that
    of its key the former pair stays. Safe to use from several threads; a look costs a stat per file (3 µs each).
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.settings = settings
        self.fault = ""
        """Why the newest files are not in use; "" when they are."""
        self._lock = threading.Lock()
        self._stamp = _stamp(settings)
        self._pem = _read(settings)

    def current(self) -> TlsPem:
        """The content in force; the same object as long as nothing changed."""
        with self._lock:
            try:
                stamp = _stamp(self.settings)
                if stamp != self._stamp:
                    pem = _read(self.settings)
                    # Changed while it was read: not to be trusted, the next look reads it again.
                    if stamp == _stamp(self.settings):
                        self._pem, self._stamp = pem, stamp
                self.fault = ""
            except StartError as error:
                self.fault = str(error)
            return self._pem


_FILES: dict[TlsSettings, TlsFiles] = {}


def tls_files(settings: TlsSettings) -> TlsFiles:
    """The files of these settings, shared by all connections of the process; StartError names what is wrong."""
    found = _FILES.get(settings)
    if found is None:
        found = _FILES.setdefault(settings, TlsFiles(settings))
    return found


def _given(environ: Mapping[str, str], prefix: str) -> TlsSettings:
    names = ("cert_file", "key_file", "client_ca_file", "ca_file", "server_name")
    return TlsSettings(**{name: environ.get(prefix + name.upper(), "") for name in names})


def _stamp(settings: TlsSettings) -> tuple[tuple[int, int, int], ...]:
    try:
        found = [os.stat(file) for file in settings.files]
    except OSError as error:
        raise StartError(f"cannot read the TLS file {error.filename}: {error.strerror}") from error
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def _read(settings: TlsSettings) -> TlsPem:
    """The content, checked: certificate and key belong together, authorities are certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.cert_file:
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            raise StartError(
                f"{settings.cert_file} and {settings.key_file} are no certificate with its key, in PEM: {_text(error)}"
            ) from error
    for file in (settings.client_ca_file, settings.ca_file):
        if file and file != SYSTEM:
            try:
                context.load_verify_locations(file)
            except OSError as error:
                raise StartError(f"{file} holds no certificate of an authority, in PEM: {_text(error)}") from error
    return TlsPem(
        cert=_content(settings.cert_file),
        key=_content(settings.key_file),
        client_ca=_content(settings.client_ca_file),
        ca=_content(settings.ca_file),
    )


def _no_password() -> str:
    """OpenSSL would ask the terminal for the password of an encrypted key."""
    raise ValueError("the key is encrypted; store it without a password, readable by its owner alone")


def _content(file: str) -> bytes:
    if not file or file == SYSTEM:
        return b""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise StartError(f"cannot read the TLS file {file}: {error.strerror}") from error


def _text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)

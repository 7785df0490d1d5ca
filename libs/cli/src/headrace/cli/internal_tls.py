"""Where the certificates of a fleet lie, and the settings that use them. Making them is `headrace.cli.certs`."""

from __future__ import annotations

from pathlib import Path

from headrace.base.tls import INTERNAL_PREFIX, TlsSettings

AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"


def internal_environ(folder: Path) -> dict[str, str]:
    """What turns TLS between services on, for each process, with the files in `folder`."""
    folder = folder.absolute()
    return {
        INTERNAL_PREFIX + "CERT_FILE": str(folder / CERTIFICATE),
        INTERNAL_PREFIX + "KEY_FILE": str(folder / KEY),
        INTERNAL_PREFIX + "CA_FILE": str(folder / AUTHORITY),
    }


def internal_settings(folder: Path) -> TlsSettings:
    """The same, for one connection."""
    return TlsSettings.from_environ(internal_environ(folder))

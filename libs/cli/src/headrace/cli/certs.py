"""`headrace certs`: a private authority, and the one certificate that the services of a fleet show each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.base.errors import StartError
from headrace.base.tls import INTERNAL_NAME, TlsSettings
from headrace.cli.home import write_private
from headrace.cli.internal_tls import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    internal_environ,
    internal_settings,
)

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
# Machines whose clocks are a little behind must accept it too.
_BACKDATED = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its private key, in PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Signs certificates; whoever holds its key can join the fleet."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str = "Headrace fleet") -> Authority:
        """A fresh one, valid for ten years."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key, AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(cert=builder.sign(key, hashes.SHA256()), key=key)

    @classmethod
    def parse(cls, pair: Pair) -> Authority:
        """From PEM; ValueError when it is none of ours."""
        key = serialization.load_pem_private_key(pair.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is not on an elliptic curve")
        cert = x509.load_pem_x509_certificate(pair.cert)
        if cert.public_key() != key.public_key():
            raise ValueError("certificate and key do not belong together")
        return cls(cert=cert, key=key)

    @property
    def pem(self) -> Pair:
        """To be kept; the key where only its owner can read it."""
        return _pem(self.cert, self.key)

    def issue(self, name: str, hosts: Sequence[str] = (), *, days: int = CERTIFICATE_DAYS) -> Pair:
        """A certificate for servers and clients called `name`, valid for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        builder = _builder(name, str(issuer), key, days)
        names = [_general_name(host) for host in hosts or (name,)]
        # By its key, not by its name, is the right authority found where several are called the same.
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(signer, critical=False)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        return _pem(builder.sign(self.key, hashes.SHA256()), key)


def write_internal(folder: Path) -> TlsSettings:
    """Make `folder` hold an authority and a certificate for calls between services; the settings that use them.

    The authority that is there already is kept, so that a running fleet takes a new certificate over; then each
    service must have the new one before the old one expires.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartError(f"cannot make the folder {folder}: {error.strerror}") from error
    authority = _kept_or_new(folder)
    pair = authority.issue(INTERNAL_NAME, (INTERNAL_NAME, "localhost", "127.0.0.1"))
    write_private(folder / KEY, pair.key.decode())
    write_private(folder / CERTIFICATE, pair.cert.decode())
    return internal_settings(folder)


def say_certs(folder: Path) -> None:
    """`write_internal`, and print how to use it."""
    write_internal(folder)
    print(f"wrote {AUTHORITY}, {AUTHORITY_KEY}, {CERTIFICATE}, {KEY} to {folder}\n")
    print("In the environment of every service, and of headrace commands that ask them:")
    for name, value in internal_environ(folder).items():
        print(f"export {name}={value}")
    print(
        f"\nServices need {CERTIFICATE}, {KEY} and {AUTHORITY}. Keep {AUTHORITY_KEY} away from them: it makes members."
        f"\nThe certificate is good for {CERTIFICATE_DAYS} days; run this again for a new one, which running services"
        "\ntake over by themselves."
    )


def _kept_or_new(folder: Path) -> Authority:
    cert_file, key_file = folder / AUTHORITY, folder / AUTHORITY_KEY
    try:
        if cert_file.exists() or key_file.exists():
            return Authority.parse(Pair(cert=cert_file.read_bytes(), key=key_file.read_bytes()))
    except OSError as error:
        raise StartError(f"cannot read the authority in {folder}: {error.filename}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StartError(f"{cert_file} and {key_file} are no authority made by this command: {error}") from error
    authority = Authority.new()
    write_private(key_file, authority.pem.key.decode())
    write_private(cert_file, authority.pem.cert.decode())
    return authority


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        subject_name=_name(name),
        issuer_name=_name(issuer),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _BACKDATED,
        not_valid_after=now + timedelta(days=days),
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        cert=cert.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )

"""TLS for both listeners, and certificates of clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.serve.operations.api_keys import read_secret
from exportkit.serve.serve_options import ListenOptions


@dataclass(frozen=True)
class Tls:
    """The certificate, its key, and who signs the certificates of clients, all checked.

    Attributes:
        context: All of it, for HTTP.
        certificate, private_key, client_authorities: The same in PEM form, for gRPC. No authorities: clients need no
            certificate.
    """

    context: ssl.SSLContext
    certificate: bytes
    private_key: bytes
    client_authorities: bytes | None


def read_tls(listen: ListenOptions) -> Tls | None:
    """Reads what the options name. Returns None if they ask for no TLS.

    Raises:
        UsageError: An option is missing, a file cannot be used, or the key does not belong to the certificate.
    """
    if listen.certificate is None and listen.private_key is None:
        if listen.client_authorities is not None:
            raise UsageError("--client-ca needs TLS", hint="Give --tls-certificate and --tls-key too.")
        return None
    if listen.certificate is None or listen.private_key is None:
        raise UsageError("TLS needs a certificate and its key", hint="Give both --tls-certificate and --tls-key.")
    private_key = read_secret(listen.private_key, "the TLS key")
    certificate = _read(listen.certificate, "the TLS certificate")
    authorities = None
    if listen.client_authorities is not None:
        authorities = _read(listen.client_authorities, "the certificate of --client-ca")
    context = _context(listen, listen.certificate, listen.private_key, authorities)
    return Tls(context, certificate, private_key, authorities)


def _context(listen: ListenOptions, certificate: Path, private_key: Path, authorities: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, certificate, private_key)
    if authorities is not None:
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(f"{listen.client_authorities} has no certificate in PEM form") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, private_key: Path) -> None:
    def no_password() -> str:
        raise UsageError(
            f"the TLS key {private_key} is encrypted", hint=f"Decrypt it: openssl pkey -in {private_key} -out key.pem"
        )

    try:
        context.load_cert_chain(certificate, private_key, password=no_password)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise UsageError(f"the TLS key {private_key} does not belong to {certificate}") from error
        raise UsageError(
            f"{certificate} and {private_key} are not a certificate and its key: {error.reason or error}",
            hint="Both must be in PEM form.",
        ) from error


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{kind} {path} cannot be read: {error.strerror}") from error

"""Whether a package is signed by somebody who is trusted here, found out before anything of it is executed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exportkit.errors import SignatureMissingError, UsageError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.core import KeySource
from exportkit.package.keys import PublicKey, decode_signers

KeySources = KeySource | Sequence[KeySource]


@dataclass(frozen=True)
class SignatureInfo:
    """A signature file beside a package, as it describes itself: nothing of it is checked.

    Attributes:
        path: Of the file.
        key_ids: Of the keys that it says signed.
        problem: Why it cannot be read, if it cannot.
    """

    path: Path
    key_ids: tuple[str, ...]
    problem: str | None


# Made at import: exportkit.package.manifest says why.
_FILES = msgspec.json.Decoder(tuple[SignatureInfo, ...], dec_hook=lambda kind, value: kind(value))


def demand(public_key: KeySources | None = None, signature: str | os.PathLike[str] | None = None) -> core.Demand:
    """What a caller asks of a package's signature; what this machine's policies ask for is asked for in any case.

    Args:
        public_key: Any of these keys must have signed: paths of PEM files, or PEM text. None asks for no signature.
        signature: The signature file; by default the package's name with `.sig`, or `.sigstore.json` for a bundle,
            beside the path that was given or beside the file that it links to.

    Raises:
        UsageError: The list of keys is empty.
    """
    return core.Demand(() if public_key is None else key_sources(public_key), signature)


def check_trust(
    reader: PackageReader, public_key: KeySources | None = None, signature: str | os.PathLike[str] | None = None
) -> tuple[PublicKey, ...]:
    """Checks that an open package is signed as its caller and this machine's policies ask for.

    The signature covers the manifest, and through it every record: with `reader.verify()` the whole file is what was
    signed. A bundle of OpenSSF model signing, made with an elliptic curve key, covers the file, which is read for it.

    Returns:
        A key whose signature holds, for the caller and then for each policy; nothing where nobody asks.

    Raises:
        SignatureMissingError: None of the keys has signed.
        SignatureError: A signature is broken, or of another package.
        UsageError: A key cannot be used, or `signature` is given where nobody asks for one.
        PolicyError: A policy cannot be honoured.
        HostError: libcrypto is missing here.
    """
    asked = demand(public_key, signature)
    return decode_signers(core.text("ek_package_check_trust", reader.handle, byref(asked)))


def demanded_by(public_key: KeySources | None = None, signature: str | os.PathLike[str] | None = None) -> str | None:
    """Who asks for a signature, in words: the caller, or a policy of this machine. None where nobody does.

    Raises:
        UsageError: A key cannot be used, or `signature` is given where nobody asks for one.
        PolicyError: A policy cannot be honoured.
    """
    asked = demand(public_key, signature)
    return core.text("ek_demanded", byref(asked)).decode() or None


def refuse_foreign(
    path: Path, public_key: KeySources | None = None, signature: str | os.PathLike[str] | None = None
) -> None:
    """Refuses a `.pt2` that is no package, which cannot be signed, where anybody asks for signatures.

    Raises:
        SignatureMissingError: The caller does, or a policy.
        ExportkitError: As `demanded_by` does.
    """
    if by := demanded_by(public_key, signature):
        raise SignatureMissingError(
            f"{path} was written by torch and has no signature, which {by} asks for",
            hint="Where nobody asks for one, `exportkit export --format program` makes a package of it, to be signed.",
        )


def signature_info(reader: PackageReader) -> tuple[SignatureInfo, ...]:
    """What the signature files beside a package say, for people to see. No signature is checked."""
    return _FILES.decode(core.text("ek_package_signature_files", reader.handle))


def key_sources(public_key: KeySources) -> list[KeySource]:
    """One key or several, as a list.

    Raises:
        UsageError: It is empty.
    """
    sources = [public_key] if isinstance(public_key, (str, os.PathLike)) else list(public_key)
    if not sources:
        raise UsageError("an empty list of public keys was given: no signature could satisfy it")
    return sources

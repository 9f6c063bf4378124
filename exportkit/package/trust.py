"""Checks that a trusted key signed a package, before any of its code runs."""

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
from exportkit.package.core import KeySource, SignatureSource

KeySources = KeySource | Sequence[KeySource]


@dataclass(frozen=True)
class SignatureInfo:
    """The unchecked content of a signature file beside a package.

    Attributes:
        path: The signature file.
        key_ids: The ids of the keys that the file names.
        problem: The reason if the file cannot be read, else None.
    """

    path: Path
    key_ids: tuple[str, ...]
    problem: str | None


# Made at import: exportkit.package.manifest says why.
_FILES = msgspec.json.Decoder(tuple[SignatureInfo, ...], dec_hook=lambda kind, value: kind(value))


def demand(public_key: KeySources | None = None, signature: SignatureSource | None = None) -> core.Demand:
    """Makes the caller's requirement on signatures. This machine's policies add their own requirements.

    Args:
        public_key: Paths of PEM files, or PEM text. One of these keys must have signed. None requires no signature.
        signature: The signature file, or its content as bytes. Default: the package's name with `.sig`, or
            `.sigstore.json` for a bundle, beside the given path or the file it links to.

    Raises:
        UsageError: The list of keys is empty.
    """
    return core.Demand(() if public_key is None else key_sources(public_key), signature)


@dataclass(frozen=True)
class Trust:
    """Whom a caller trusts. This machine's policies add their own requirements.

    Attributes:
        keys: Paths of PEM files, or PEM text. One of these keys must have signed. Empty: no signature is required.
        signature: The signature file. Default: it is beside the signed file, see `demand`.
    """

    keys: Sequence[KeySource] = ()
    signature: Path | None = None

    def demand(self) -> core.Demand:
        """Makes the requirement that a reader checks."""
        return demand(self.keys or None, self.signature)

    def demanded_by(self) -> str | None:
        """Says what requires a signature: the caller or a policy of this machine. Returns None if nothing does.

        Raises:
            UsageError: A key cannot be used, or `signature` is given but no signature is required.
            PolicyError: A policy cannot be read or trusted.
        """
        return core.text("ek_demanded", byref(self.demand())).decode() or None

    def refuse_foreign(self, path: Path) -> None:
        """Refuses a `.pt2` that exportkit did not write if a signature is required, because it cannot be signed.

        Raises:
            SignatureMissingError: A signature is required.
            ExportkitError: The same errors as for `demanded_by`.
        """
        if by := self.demanded_by():
            raise SignatureMissingError(
                f"{path} was written by torch and has no signature, which {by} requires",
                hint="On a machine that requires none, run `exportkit export --trust --format program` on it, and "
                "sign the result.",
            )


def signature_info(reader: PackageReader) -> tuple[SignatureInfo, ...]:
    """Reads the signature files beside a package, for display. Does not check the signatures."""
    return _FILES.decode(core.text("ek_package_signature_files", reader.handle))


def key_sources(public_key: KeySources) -> list[KeySource]:
    """Returns one key or several as a list.

    Raises:
        UsageError: The list is empty.
    """
    sources = [public_key] if isinstance(public_key, (str, os.PathLike)) else list(public_key)
    if not sources:
        raise UsageError("the list of public keys is empty, so no signature could satisfy it")
    return sources

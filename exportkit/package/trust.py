"""Whether a package is signed by somebody who is trusted here, found out before anything of it is executed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import ExportkitError, SignatureMissingError, UsageError
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.keys import PublicKey, read_public_key
from exportkit.package.policy import Demand, policy_demands

KeySource = str | os.PathLike[str]  # the path of a PEM file, or PEM text
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


def check_trust(
    reader: PackageReader, public_key: KeySources | None = None, signature: str | os.PathLike[str] | None = None
) -> tuple[PublicKey, ...]:
    """Checks that an open package is signed as its caller and this machine's policies ask for.

    The signature covers the manifest, and through it every record: with `reader.verify()` the whole file is what was
    signed. A bundle of OpenSSF model signing, made with an elliptic curve key, covers the file, which is read for it.

    Args:
        reader: Of the package, of which nothing was executed yet.
        public_key: Any of these keys must have signed: paths of PEM files, or PEM text. None asks for no signature of
            its own; what a policy asks for stands.
        signature: The signature file; by default the package's name with `.sig`, or `.sigstore.json` for a bundle,
            beside the path that was given or beside the file that it links to.

    Returns:
        A key whose signature holds, for the caller and then for each policy; nothing where nobody asks.

    Raises:
        SignatureMissingError: None of the keys has signed.
        SignatureError: A signature is broken, or of another package.
        UsageError: A key cannot be used, or `signature` is given where nobody asks for one.
        PolicyError: A policy cannot be read.
        HostError: The `cryptography` package is not installed.
    """
    given = None if signature is None else Path(signature)
    return tuple(_signer(reader, demand, given) for demand in _demands(public_key, given))


def refuse_foreign(path: Path, public_key: KeySources | None = None, signature: Path | None = None) -> None:
    """Refuses a `.pt2` that is no package, which cannot be signed, where anybody asks for signatures.

    Args:
        path: The file.
        public_key: As `check_trust` takes it.
        signature: Likewise.

    Raises:
        SignatureMissingError: The caller does, or a policy.
        UsageError: A key cannot be used, or `signature` is given where nobody asks for one.
        PolicyError: A policy cannot be read.
    """
    if demands := _demands(public_key, signature):
        raise SignatureMissingError(
            f"{path} was written by torch and has no signature, which {demands[0].by} asks for",
            hint="Where nobody asks for one, `exportkit export --format program` makes a package of it, to be signed.",
        )


def signature_info(reader: PackageReader) -> tuple[SignatureInfo, ...]:
    """What the signature files beside a package say, for people to see. No signature is checked."""
    found = []
    for suffix in (own.SUFFIX, openssf.SUFFIX):
        file = _beside(reader.path, suffix)
        try:
            if (data := own.read_signature_file(file)) is not None:
                found.append(SignatureInfo(file, _key_ids(data, suffix, file.name), None))
        except ExportkitError as error:
            found.append(SignatureInfo(file, (), error.message))
    return tuple(found)


def _demands(public_key: KeySources | None, signature: Path | None) -> tuple[Demand, ...]:
    """What the caller asks for, and what this machine's policies do."""
    demands = policy_demands()
    if public_key is not None:
        return (Demand(tuple(map(read_public_key, key_sources(public_key))), "the caller"), *demands)
    if signature is not None and not demands:
        raise UsageError("a signature file was given, and no public key to check it with", hint="Give the key as well.")
    return demands


def key_sources(public_key: KeySources) -> list[KeySource]:
    """One key or several, as a list.

    Raises:
        UsageError: It is empty.
    """
    sources = [public_key] if isinstance(public_key, (str, os.PathLike)) else list(public_key)
    if not sources:
        raise UsageError("an empty list of public keys was given: no signature could satisfy it")
    return sources


def _signer(reader: PackageReader, demand: Demand, given: Path | None) -> PublicKey:
    """The key that satisfies a demand. The kind of a key says which form of signature it checks."""
    reasons = []
    for suffix, keys in _by_form(demand.keys, given).items():
        file = given or _beside(reader.path, suffix)
        data = own.read_signature_file(file)
        if data is None:
            reasons.append(f"there is no {file}")
            continue
        if suffix == own.SUFFIX:
            signatures = own.decode_signatures(data, file.name)
            signer = own.signer(signatures, reader.manifest_sha256, keys, file.name)
        else:
            signer = openssf.signer(data, lambda: reader.sha256, keys, file.name)
        if signer is not None:
            return signer
        reasons.append(f"{file} has signatures by {_some(_key_ids(data, suffix, file.name))}")
    wanted = _some([f"{key.id} ({key.source})" for key in demand.keys])
    raise SignatureMissingError(
        f"{reader.path.name} is not signed as {demand.by} asks for: {'; '.join(reasons)}; wanted: {wanted}",
        hint="`exportkit sign` signs a package; a signature file of another name or place must be given.",
    )


def _by_form(keys: Sequence[PublicKey], given: Path | None) -> dict[str, tuple[PublicKey, ...]]:
    """Suffix -> the keys that check a file of that form. Where a given one could be either, its own name decides."""
    forms = {
        own.SUFFIX: tuple(key for key in keys if key.is_ed25519),
        openssf.SUFFIX: tuple(key for key in keys if not key.is_ed25519),
    }
    if given is not None and all(forms.values()):
        del forms[own.SUFFIX if given.name.endswith(openssf.SUFFIX) else openssf.SUFFIX]
    return {suffix: keys for suffix, keys in forms.items() if keys}


def _beside(path: Path, suffix: str) -> Path:
    """The signature file beside the name that was given; if there is none, beside the file that it links to."""
    file = path.with_name(path.name + suffix)
    return file if os.path.lexists(file) else Path(os.path.realpath(path) + suffix)


def _key_ids(data: bytes, suffix: str, name: str) -> tuple[str, ...]:
    if suffix == own.SUFFIX:
        return tuple(signature.key_id for signature in own.decode_signatures(data, name).signatures)
    return (openssf.key_id(data, name),)


def _some(items: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"key{'s' if len(items) > 1 else ''} {', '.join(items[:shown])}{more}"

"""Signatures in the form of OpenSSF model signing, made with an elliptic curve key: its tools read ours, and we theirs.

A Sigstore bundle (https://docs.sigstore.dev/about/bundle/) with a DSSE envelope around an in-toto statement, of the
predicate type https://model_signing/signature/v1.0. Of what that form can say, a package needs one thing, the digest of
one file, and everything else is refused: docs/adr/0011-signatures.md says why it is not left to that library.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from exportkit.errors import SignatureError
from exportkit.package import strict_json
from exportkit.package.keys import PrivateKey, PublicKey
from exportkit.package.manifest import Sha256

SUFFIX = ".sigstore.json"

_BundleType = Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
_BUNDLE: _BundleType = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PayloadType = Literal["application/vnd.in-toto+json"]
_PAYLOAD: _PayloadType = "application/vnd.in-toto+json"
_StatementType = Literal["https://in-toto.io/Statement/v1"]
_STATEMENT: _StatementType = "https://in-toto.io/Statement/v1"
_PredicateType = Literal["https://model_signing/signature/v1.0"]
_PREDICATE: _PredicateType = "https://model_signing/signature/v1.0"
_WholeFile = Literal["."]
_WHOLE_FILE: _WholeFile = "."  # what model signing calls the one file of a model that is a file
Part = TypeVar("Part")

MAX_DEPTH = 16  # of brackets; model signing nests 5


class _Key(Struct):
    hint: Sha256


class _Material(Struct, rename="camel"):
    public_key: _Key


class _EnvelopeSignature(Struct):
    sig: str


class _Envelope(Struct, rename="camel"):
    payload: str
    payload_type: _PayloadType
    signatures: Annotated[list[_EnvelopeSignature], Meta(min_length=1, max_length=1)]


class _Bundle(Struct, rename="camel"):
    """Other keys are allowed: what they say is not signed, and not needed."""

    media_type: _BundleType
    verification_material: _Material
    dsse_envelope: _Envelope


class _Resource(Struct):
    name: _WholeFile
    algorithm: Literal["sha256"]
    digest: Sha256


class _Serialization(Struct):
    method: Literal["files"]


class _Predicate(Struct):
    resources: Annotated[list[_Resource], Meta(min_length=1, max_length=1)]
    serialization: _Serialization


class _Statement(Struct, rename={"type_": "_type", "predicate_type": "predicateType"}):
    type_: _StatementType
    predicate_type: _PredicateType
    predicate: _Predicate


def sign(name: str, file_sha256: str, key: PrivateKey) -> bytes:
    """The bundle for a file.

    Args:
        name: Of the file; nobody compares it.
        file_sha256: Of its content.
        key: On an elliptic curve.
    """
    root = hashlib.sha256(bytes.fromhex(file_sha256)).hexdigest()  # over the digests of all files, here of one
    payload = json.dumps(
        {
            "_type": _STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": root}}],
            "predicateType": _PREDICATE,
            "predicate": {
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [],
                },
                "resources": [{"name": _WHOLE_FILE, "algorithm": "sha256", "digest": file_sha256}],
            },
        }
    ).encode()
    signature = key.sign(_pre_authentication(payload))
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.public.id}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle, indent=1).encode() + b"\n"


def key_id(data: bytes, name: str) -> str:
    """The id of the key that a bundle says it was made with.

    Raises:
        SignatureError: It is no bundle as model signing makes it with a key.
    """
    return _decode(data, _Bundle, name).verification_material.public_key.hint


def signer(data: bytes, file_sha256: Callable[[], str], keys: tuple[PublicKey, ...], name: str) -> PublicKey | None:
    """The key that made a bundle over this file; None where it is none of these.

    Args:
        data: The bundle.
        file_sha256: Of the package, asked for once the signature holds, since all of the file is read for it.
        keys: On elliptic curves.
        name: Of the bundle's file, for messages.

    Raises:
        SignatureError: It is no such bundle, its signature does not hold, or it is of another file.
    """
    bundle = _decode(data, _Bundle, name)
    hint = bundle.verification_material.public_key.hint
    key = next((key for key in keys if key.id == hint), None)
    if key is None:
        return None
    envelope = bundle.dsse_envelope
    payload = _base64(envelope.payload, name)
    if not key.verifies(_base64(envelope.signatures[0].sig, name), _pre_authentication(payload)):
        raise SignatureError(
            f"{name}: the signature by key {key.id} ({key.source}) does not hold",
            hint="The bundle was changed after it was written. Get it again.",
        )
    signed = _decode(payload, _Statement, name).predicate.resources[0].digest
    if signed != (package := file_sha256()):
        raise SignatureError(
            f"{name} is the signature of another file: of one with sha256 {signed}, and the package has {package}",
            hint="The package was changed or exchanged after it was signed, or the signature is of another build.",
        )
    return key


def _pre_authentication(payload: bytes) -> bytes:
    """What is signed: DSSE's PAE, https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


# Made at import: exportkit.package.manifest says why.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in (_Bundle, _Statement)}


def _decode(data: bytes, kind: type[Part], name: str) -> Part:
    try:
        strict_json.parse(data, max_depth=MAX_DEPTH)
        part: Part = _DECODERS[kind].decode(data)
        return part
    except ValueError as error:  # msgspec's errors are such, too
        raise SignatureError(
            f"{name} is no bundle that model signing makes of one file with an elliptic curve key: {error}"
        ) from error


def _base64(text: str, name: str) -> bytes:
    with suppress(ValueError):  # of binascii, or of a letter that is not ASCII
        content = base64.b64decode(text, validate=True)
        if base64.b64encode(content).decode() == text:  # else its last letter has more than the last byte
            return content
    raise SignatureError(f"{name} holds what is no base64")

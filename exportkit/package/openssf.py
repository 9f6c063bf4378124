"""Makes signatures of OpenSSF model signing with an elliptic curve key. OpenSSF's tools can check them.

A signature is a Sigstore bundle (https://docs.sigstore.dev/about/bundle/) with a DSSE envelope around an in-toto
statement of the predicate type https://model_signing/signature/v1.0. docs/adr/0011-signatures.md says why exportkit
does not use that library.
"""

from __future__ import annotations

import base64
import hashlib
import json

from exportkit.package.keys import SigningKey

SUFFIX = ".sigstore.json"

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_WHOLE_FILE = "."  # model signing's name for a model that is a single file


def sign(name: str, file_sha256: str, key: SigningKey) -> bytes:
    """Returns the bundle for a file.

    Args:
        name: The file's name. It is not compared when the signature is checked.
        file_sha256: The digest of the file.
        key: An elliptic curve key.
    """
    root = hashlib.sha256(bytes.fromhex(file_sha256)).hexdigest()  # the digest of all files' digests; here of one file
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
    signature = key.sign(pre_authentication(payload))
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


def pre_authentication(payload: bytes) -> bytes:
    """Returns the bytes to sign: DSSE's PAE, https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)

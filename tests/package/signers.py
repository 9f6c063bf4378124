"""Keys and signed packages for the tests of signatures. The keys are made anew each time and sign nothing else."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from exportkit.package.archive import write_package
from exportkit.package.keys import PrivateKey, PublicKey, read_private_key, read_public_key
from tests.package import samples


class Signer(NamedTuple):
    """The files of a key pair."""

    private: Path
    public: Path

    @property
    def key(self) -> PrivateKey:
        return read_private_key(self.private, no_password)

    @property
    def public_key(self) -> PublicKey:
        return read_public_key(self.public)


def no_password() -> NoReturn:
    raise AssertionError("the key is not encrypted")


def signer(folder: Path, name: str = "release", *, curve: ec.EllipticCurve | None = None, password: str = "") -> Signer:
    """A new Ed25519 key, or one on a curve."""
    key = ec.generate_private_key(curve) if curve else ed25519.Ed25519PrivateKey.generate()
    return written(folder, name, key, password)


def written(folder: Path, name: str, key: object, password: str = "") -> Signer:
    """A key's PEM files."""
    files = Signer(folder / f"{name}-private.pem", folder / f"{name}.pem")
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    files.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))  # type: ignore[attr-defined]
    public = key.public_key()  # type: ignore[attr-defined]
    files.public.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return files


@pytest.fixture
def release(tmp_path: Path) -> Signer:
    """A new key, in a folder of its own."""
    (tmp_path / "keys").mkdir()
    return signer(tmp_path / "keys")


def package(folder: Path, name: str = "model.pt2", **changes: object) -> Path:
    """The sample package."""
    path = folder / name
    write_package(path, samples.manifest(**changes), samples.RECORDS)
    return path


Change = Callable[[dict[str, Any]], object]


def set_at(*path: Any) -> Change:
    """Sets what the path but its last element leads to, to the last."""

    def change(document: dict[str, Any]) -> None:
        *steps, last, value = path
        functools.reduce(operator.getitem, steps, document)[last] = value

    return change


def edit(file: Path, change: Change) -> None:
    """Changes a JSON document."""
    document = json.loads(file.read_bytes())
    change(document)
    file.write_text(json.dumps(document))


def write_policy(file: Path, *keys: object, **changes: object) -> Path:
    """A policy that demands a signature by one of the keys, in a file that only we may write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": 1, "require_signature": True, "public_keys": [str(key) for key in keys], **changes}
    file.write_text(json.dumps(document))
    file.chmod(0o644)
    return file

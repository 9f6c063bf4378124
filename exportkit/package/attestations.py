"""In-toto statements about operator libraries, which a package carries: https://github.com/in-toto/attestation.

Nothing follows from a statement: who trusts it decides that. `exportkit ops check --candidate` writes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from exportkit.errors import UsageError
from exportkit.package.manifest import Manifest

if TYPE_CHECKING:
    from exportkit.package.archive import PackageReader

STATEMENT = "https://in-toto.io/Statement/v1"
FOLDER = "exportkit/attestations"

_LARGEST = 1 << 20
_HINT = "`exportkit ops check --candidate FILE.json` writes one."


class _Subject(msgspec.Struct):
    digest: dict[str, str]
    name: str = ""


class Statement(msgspec.Struct, rename={"type": "_type", "predicate_type": "predicateType"}):
    """A statement: `subject` are files, by their digests, and `predicate` says something about them."""

    type: str
    subject: list[_Subject]
    predicate_type: str
    predicate: dict[str, Any] = {}


def add_attestations(manifest: Manifest, statements: Sequence[Path], records: dict[str, Any]) -> Manifest:
    """Adds statements to the libraries that they are about.

    Args:
        manifest: The manifest, with its libraries.
        statements: Files, each a statement.
        records: The package's records, which are changed.

    Raises:
        UsageError: A file is no statement, or is about no library of the package.
    """
    for path in statements:
        content = _read(path)
        digests = {each.digest.get("sha256") for each in _decoded(path, content).subject}
        record = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}.json"
        libraries = tuple(
            msgspec.structs.replace(each, attestations=tuple(dict.fromkeys((*(each.attestations or ()), record))))
            if each.sha256 in digests
            else each
            for each in manifest.libraries
        )
        if libraries == manifest.libraries and record not in records:
            has = ", ".join(f"{Path(each.record).name} ({each.sha256})" for each in manifest.libraries) or "none"
            raise UsageError(
                f"{path} is about no library of the package: it names {', '.join(sorted(map(str, digests)))}",
                hint=f"The package's libraries are: {has}. Check the file that --op-library names.",
            )
        manifest, records[record] = msgspec.structs.replace(manifest, libraries=libraries), content
    return manifest


def _read(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST:
        raise UsageError(f"{path} has more than {_LARGEST} bytes, which is too much for a statement")
    return path.read_bytes()


def _decoded(path: Path, content: bytes) -> Statement:
    try:
        found = msgspec.json.decode(content, type=Statement)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no in-toto statement: {error}", hint=_HINT) from error
    if found.type != STATEMENT:
        raise UsageError(f"{path} is no in-toto statement: its _type is {found.type!r}, not {STATEMENT!r}", hint=_HINT)
    return found


def attestation_rows(reader: PackageReader) -> Iterator[tuple[str, str]]:
    """Yields the library and what each statement says, as far as it is one of ours."""
    sizes = {record.name: record.size for record in reader.manifest.records}
    for library in reader.manifest.libraries:
        for record in library.attestations or ():
            name = Path(library.record).name
            try:
                content = reader.read(record) if sizes[record] <= _LARGEST else b""
                found = msgspec.json.decode(content, type=Statement)
            except (msgspec.DecodeError, RecursionError):
                yield name, f"{record}, which is no in-toto statement"
                continue
            yield name, f"{found.predicate_type}: {_said(found.predicate)}"


def _said(predicate: Mapping[str, Any]) -> str:
    ok = predicate.get("ok")
    words = ["passed" if ok is True else "failed" if ok is False else ""]
    words += [
        f"{key} {predicate[key]}" for key in ("date", "exportkit", "torch") if isinstance(predicate.get(key), str)
    ]
    return ", ".join(filter(None, words))

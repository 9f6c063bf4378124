"""Writing and reading packages. FORMAT.md numbers the rules that the reader holds a package to.

Opening a package reads its headers and its manifest only. That a record's content has another digest or CRC-32 shows
when it is read.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import msgspec
from typing_extensions import Self

from exportkit.errors import (
    ArchiveLayoutError,
    DigestMismatchError,
    DuplicateRecordError,
    ExportkitError,
    ManifestTooLargeError,
    MissingRecordError,
    NoManifestError,
    NotAnArchiveError,
    StockRecordError,
    UnlistedRecordError,
    UnsafeRecordNameError,
    UsageError,
)
from exportkit.package.atomic import written_whole
from exportkit.package.consistency import check_consistency
from exportkit.package.container import Entry, Header, check_layout, directory, local_header, pread, read_directory
from exportkit.package.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    Record,
    decode_manifest,
    encode_manifest,
)

# torch takes the folder of the first record for the archive's root. It is the same in every package: torch's own writer
# uses the file's name, so that the same package under another name would have other bytes.
ROOT = "package"

# What torch's writer adds to every archive and its readers look for. `.data/version` is that of the zip layout, not of
# the package; torch reads 1 to 10.
STOCK_RECORDS: Mapping[str, bytes] = {
    ".data/version": b"6\n",
    "archive_format": b"pt2",
    "archive_version": b"0",
    "byteorder": b"little",
}
# torch derives this from the other records, and only logs it.
_DROPPED_RECORDS = frozenset({".data/serialization_id"})

MAX_NAME_LENGTH = 512
_BLOCK = 1 << 20
_DAMAGED = "The package was changed or damaged after it was written. Get it again."
_PART = re.compile(r"[A-Za-z0-9_.+=@-]+")


class StoredRecord(NamedTuple):
    """A record of a package that is open, to be copied without holding it in memory."""

    reader: PackageReader
    name: str


Content = bytes | memoryview | Path | StoredRecord


def write_package(path: Path, manifest: Manifest, records: Mapping[str, Content]) -> Manifest:
    """Writes a package, whole or not at all, the same bytes for the same manifest and records.

    Args:
        path: The `.pt2` to write; replaced if it is there.
        manifest: What it says of itself. Its `records` and `format_version` are ignored and filled in.
        records: Name in the archive (no root) to content, to the file that holds it, or to another package's record.
            Those that torch adds to every archive may be among them, and are written as this format has them.

    Returns:
        The manifest as written.

    Raises:
        PackageError: The manifest and records would break a rule of the format; the class says which.
        OSError: A file cannot be read, or the package not written.
    """
    path = Path(path)
    contents: dict[str, Content] = {**records, **STOCK_RECORDS}
    for name in _DROPPED_RECORDS & contents.keys():
        del contents[name]
    if MANIFEST_NAME in contents:
        raise DuplicateRecordError(f"{MANIFEST_NAME} is written from the manifest; it cannot be a record as well")
    _check_names([f"{ROOT}/{name}" for name in contents])
    measured = {name: _measure(content) for name, content in sorted(contents.items())}
    listed = tuple(Record(name=name, size=size, sha256=sha) for name, (size, sha, _) in measured.items())
    manifest = msgspec.structs.replace(manifest, format_version=FORMAT_VERSION, records=listed)
    check_consistency(manifest)
    encoded = encode_manifest(manifest)
    _check_manifest_size(len(encoded))
    decode_manifest(encoded)  # what no reader would take is not written
    # The manifest comes first, so that a reader of the first few kilobytes has it.
    sources: dict[str, Content] = {MANIFEST_NAME: encoded, **{name: contents[name] for name in measured}}
    measured = {MANIFEST_NAME: _measure(encoded)} | measured
    entries: list[Entry] = []
    with written_whole(path) as file:
        for name, source in sources.items():
            size, _, crc32 = measured[name]
            entry = Entry(f"{ROOT}/{name}", size, crc32, entries[-1].end if entries else 0)
            file.write(local_header(entry))
            _copy(source, file, entry)
            entries.append(entry)
        file.write(directory(entries))
    return manifest


class PackageReader:
    """An open package whose structure holds; what `read` and `extract` give holds as well.

    The file is opened once: what was checked is what is read, whatever the path names by then. Usable from several
    threads, and as a context manager.
    """

    def __init__(self, path: Path, *, file: int | None = None) -> None:
        """Opens a package and checks everything but the records' contents.

        Args:
            path: The `.pt2`.
            file: It, open for reading, where it is: then that is read, and closed in the end, whatever the path names.

        Raises:
            UsageError: There is no such file, or it may not be read.
            PackageError: It breaks a rule of the format; the class says which.
        """
        self.path = Path(path)
        self._fd = _open(self.path) if file is None else file
        try:
            status = os.fstat(self._fd)
            self._size, self._modified = status.st_size, status.st_mtime_ns
            headers = read_directory(self._fd, self._size)
            _check_has_manifest(headers)
            _check_names([header.name for header in headers])
            entries = check_layout(self._fd, self._size, headers)
            self._entries = {entry.name.removeprefix(f"{ROOT}/"): entry for entry in entries}
            _check_order(list(self._entries))
            self._manifest_bytes = self._read_manifest(self._entries[MANIFEST_NAME])
            self.manifest = decode_manifest(self._manifest_bytes)
            check_consistency(self.manifest)
            self._records = {record.name: record for record in self.manifest.records}
            self._check_records()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The records, without the manifest, sorted."""
        return tuple(self._records)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self._size

    @cached_property
    def manifest_sha256(self) -> str:
        """Hex digest of the manifest, which has every other record's: it identifies the content of the package."""
        return hashlib.sha256(self._manifest_bytes).hexdigest()

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the whole file, read when first asked for."""
        digest = hashlib.sha256()
        for offset in range(0, self._size, _BLOCK):
            digest.update(pread(self._fd, offset, min(_BLOCK, self._size - offset)))
        return digest.hexdigest()

    def fileno(self) -> int:
        """The open file: `/proc/self/fd/<n>` is the file that was checked, whatever the path names by now."""
        return self._fd

    def record(self, name: str) -> Record:
        """What the manifest says of a record.

        Raises:
            MissingRecordError: There is no such record.
        """
        self._entry(name)
        return self._records[name]

    def data_offset(self, name: str) -> int:
        """Where in the file a record's content starts."""
        return self._entry(name).data_offset

    def read(self, name: str) -> bytes:
        """A record's content, with its digest checked each time.

        Raises:
            MissingRecordError: There is no such record.
            DigestMismatchError: Its content is not what the manifest says.
        """
        return b"".join(self.blocks(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        """A record's content in blocks of at most 1 MiB; the error for a wrong digest comes after the last.

        Raises:
            MissingRecordError: There is no such record.
            DigestMismatchError: Its content is not what the manifest says.
        """
        entry, record = self._entry(name), self._records[name]
        digest, crc32 = hashlib.sha256(), 0
        for block in self._unverified(entry):
            digest.update(block)
            crc32 = zlib.crc32(block, crc32)
            yield block
        if digest.hexdigest() != record.sha256:
            raise DigestMismatchError(
                f"record {name} has sha256 {digest.hexdigest()}; the manifest says {record.sha256}",
                hint=_DAMAGED,
            )
        if crc32 != entry.crc32:  # torch's reader looks at this one, and only at this one
            raise DigestMismatchError(
                f"record {name} has CRC-32 {crc32:08x}; the archive's directory says {entry.crc32:08x}",
                hint=_DAMAGED,
            )

    def verify(self) -> None:
        """Checks every record's digest, a block at a time.

        Raises:
            DigestMismatchError: A record's content is not what the manifest says.
        """
        for name in self._records:
            for _ in self.blocks(name):
                pass

    def extract(self, name: str, destination: Path, *, mode: int = 0o666) -> None:
        """Writes a record to a file, which appears only if its digest holds. A power failure may still take it back.

        Raises:
            MissingRecordError: There is no such record.
            DigestMismatchError: Its content is not what the manifest says.
            OSError: The file cannot be written.
        """
        self._entry(name)
        with written_whole(Path(destination), mode=mode, durable=False) as file:
            for block in self.blocks(name):
                file.write(block)

    def check_unchanged(self) -> None:
        """Finds out whether somebody wrote into the open file since, as `cp` over it does; a rename does not.

        Raises:
            DigestMismatchError: Its size or modification time has changed.
        """
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self._size, self._modified):
            raise self.changed()

    def changed(self) -> DigestMismatchError:
        """The error for a file that somebody wrote into."""
        return DigestMismatchError(
            f"{self.path.name} was written to while it was open",
            hint="Put a new package in place by renaming it, so that nobody reads half of each.",
        )

    def close(self) -> None:
        """Closes the file; the manifest stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _entry(self, name: str) -> Entry:
        if name not in self._records:
            raise MissingRecordError(f"{self.path.name} has no record {name!r}")
        return self._entries[name]

    def _unverified(self, entry: Entry) -> Iterator[bytes]:
        for at in range(0, entry.size, _BLOCK):
            yield pread(self._fd, entry.data_offset + at, min(_BLOCK, entry.size - at))

    def _read_manifest(self, entry: Entry) -> bytes:
        _check_manifest_size(entry.size)
        data = b"".join(self._unverified(entry))
        if (crc32 := zlib.crc32(data)) != entry.crc32:
            raise DigestMismatchError(
                f"{MANIFEST_NAME} has CRC-32 {crc32:08x}; the archive's directory says {entry.crc32:08x}", hint=_DAMAGED
            )
        return data

    def _check_records(self) -> None:
        listed, present = self._records.keys(), self._entries.keys() - {MANIFEST_NAME}
        if missing := sorted(listed - present):
            raise MissingRecordError(f"the manifest lists records that the archive does not hold: {_some(missing)}")
        if unlisted := sorted(present - listed):
            raise UnlistedRecordError(f"the archive holds records that the manifest does not list: {_some(unlisted)}")
        for name, record in self._records.items():
            if record.size != self._entries[name].size:
                raise DigestMismatchError(
                    f"record {name} has {self._entries[name].size} bytes; the manifest says {record.size}"
                )
        for name, content in STOCK_RECORDS.items():
            if self._records.get(name) != Record(name=name, size=len(content), sha256=_sha256(content)):
                raise StockRecordError(f"record {name} must be there and read {content!r}: torch looks for it first")


# --- rules on names and sizes -----------------------------------------------------------------------------------------


def _check_has_manifest(headers: Sequence[Header]) -> None:
    if not any(header.name.endswith(f"/{MANIFEST_NAME}") for header in headers):
        stock = any(header.name.endswith("/archive_format") for header in headers)
        raise NoManifestError(
            f"the archive has no {MANIFEST_NAME}: "
            + ("a .pt2 that torch wrote, not exportkit" if stock else "a zip archive, but no package"),
            hint="`exportkit export` makes a package of a model; MODEL may be an ExportedProgram .pt2."
            if stock
            else None,
        )


def _check_names(names: Sequence[str]) -> None:
    """Every name is safe to extract under a folder, and each is there once."""
    seen: set[str] = set()
    for name in names:
        parts = name.split("/")
        if len(name) > MAX_NAME_LENGTH or not all(_PART.fullmatch(part) and part.strip(".") for part in parts):
            raise UnsafeRecordNameError(
                f"record name {name[:MAX_NAME_LENGTH]!r} is not allowed: names are relative, of parts joined by `/`, "
                "each of letters, digits and _.+=@- and more than dots"
            )
        if name in seen:
            raise DuplicateRecordError(f"two records have the name {name}")
        seen.add(name)
    # With NUL for the slash, what is in a folder comes right after the record of the folder's name.
    for folder, name in itertools.pairwise(sorted(name.replace("/", "\0") for name in names)):
        if name.startswith(f"{folder}\0"):
            folder, name = folder.replace("\0", "/"), name.replace("\0", "/")
            raise UnsafeRecordNameError(f"{folder} is a record, and a folder of the record {name}")
    if outside := next((name for name in names if not name.startswith(f"{ROOT}/")), None):
        raise ArchiveLayoutError(f"record {outside} is not under {ROOT}/, the root folder of every package")


def _check_order(names: Sequence[str]) -> None:
    expected = [MANIFEST_NAME, *sorted(name for name in names if name != MANIFEST_NAME)]
    if out_of_place := next((name for name, there in zip(names, expected) if name != there), None):
        raise ArchiveLayoutError(
            f"record {out_of_place} is out of place: the manifest comes first, and then the records sorted by name"
        )


def _check_manifest_size(size: int) -> None:
    if size > MAX_MANIFEST_BYTES:
        raise ManifestTooLargeError(f"the manifest has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")


def _some(names: Sequence[str], shown: int = 5) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


# --- bytes ------------------------------------------------------------------------------------------------------------


def _open(path: Path) -> int:
    try:
        # Non-blocking, or a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAnArchiveError(f"{path} is not a file; a package is one .pt2 file")
    return fd


def _content_blocks(content: Content) -> Iterator[bytes | memoryview]:
    if isinstance(content, (bytes, memoryview)):
        yield content
    elif isinstance(content, StoredRecord):
        yield from content.reader.blocks(content.name)
    else:
        with open(content, "rb") as file:
            while block := file.read(_BLOCK):
                yield block


def _measure(content: Content) -> tuple[int, str, int]:
    """(size, sha256, CRC-32)."""
    size, digest, crc32 = 0, hashlib.sha256(), 0
    for block in _content_blocks(content):
        size += len(block)
        digest.update(block)
        crc32 = zlib.crc32(block, crc32)
    return size, digest.hexdigest(), crc32


def _copy(content: Content, file: BinaryIO, entry: Entry) -> None:
    size, crc32 = 0, 0
    for block in _content_blocks(content):
        size += len(block)
        crc32 = zlib.crc32(block, crc32)
        file.write(block)
    if (size, crc32) != (entry.size, entry.crc32):
        raise ExportkitError(f"{content!s} changed while it was being packed", hint="Pack again once it is complete.")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

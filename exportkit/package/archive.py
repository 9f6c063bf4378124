"""Reads and writes packages. csrc/package checks the rules that FORMAT.md numbers, in both directions.

Opening a package reads only its headers and its manifest. A wrong digest or CRC-32 is found when the record is read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from ctypes import byref, c_char_p, c_int, c_uint64
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

import msgspec

from exportkit.errors import MissingRecordError, UsageError
from exportkit.package import core
from exportkit.package.keys import decode_signers
from exportkit.package.manifest import FORMAT_VERSION, Manifest, Record, decode_checked, encode_manifest
from exportkit.package.package_source import STREAM_LIMIT, PackageSource, open_package

# torch takes the folder of the first record as the archive's root. torch's own writer names it after the file, so the
# same package under another name would have other bytes. Here it is the same in every package.
ROOT = "package"

# Records that torch's readers need. The writer adds them to every package.
STOCK_RECORDS = frozenset({".data/version", "archive_format", "archive_version", "byteorder"})

_RECORDS = msgspec.json.Decoder(tuple[Record, ...])  # made at import: exportkit.package.manifest says why


class StoredRecord(NamedTuple):
    """A record of an open package. It is copied without holding it in memory."""

    reader: PackageReader
    name: str


Content = bytes | memoryview | Path | StoredRecord


def write_package(path: Path, manifest: Manifest, records: Mapping[str, Content]) -> Manifest:
    """Writes a package atomically. The same manifest and records give the same bytes.

    Args:
        path: The `.pt2` to write. An existing file is replaced.
        manifest: The package's manifest. `records` and `format_version` are filled in.
        records: Maps names in the archive, without the root, to their content, to a file with the content, or to a
            record of another package. torch's stock records may be among them; they get this format's content.

    Returns:
        The manifest as written.

    Raises:
        PackageError: The manifest and records break a rule of the format. The class says which.
        ExportkitError: A record changed while it was packed.
        OSError: A file cannot be read, or the package cannot be written.
    """
    library = core.library()
    writer = library.ek_writer_new()
    kept: list[object] = []  # the writer holds only addresses, so these objects must stay alive
    try:
        for name, content in records.items():
            kept.append(_add(writer, core.encoded(name), content))
        listed = _RECORDS.decode(core.text("ek_writer_records", writer))
        manifest = msgspec.structs.replace(manifest, format_version=FORMAT_VERSION, records=listed)
        encoded = encode_manifest(manifest)
        core.call("ek_writer_finish", writer, core.encoded(path), encoded, len(encoded))
    finally:
        library.ek_writer_close(writer)
    return manifest


def _add(writer: int, name: bytes, content: Content) -> object:
    """Adds a record to the writer. The returned object must live as long as the writer."""
    if isinstance(content, StoredRecord):
        package = content.reader.handle
        core.call("ek_writer_add_record", writer, name, package, core.encoded(content.name))
        return package
    if isinstance(content, Path):
        core.call("ek_writer_add_file", writer, name, core.encoded(content))
        return None
    data: object = content
    if isinstance(content, memoryview):
        # ctypes cannot take the address of a read-only view.
        data = bytes(content) if content.readonly else (ctypes.c_char * content.nbytes).from_buffer(content)
    core.call("ek_writer_add_bytes", writer, name, data, memoryview(content).nbytes)
    return data


class _Package(int):
    """An `ek_package`. It closes when its last reference is gone, so a call in another thread can finish."""

    close: Callable[[int], None]

    def __new__(cls, handle: int) -> Self:
        made = super().__new__(cls, handle)
        made.close = core.library().ek_package_close  # the module may be gone when the interpreter ends
        return made

    def __del__(self) -> None:
        self.close(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open package cannot be pickled or copied: it would be closed twice")


class PackageReader:
    """An open package with a checked structure. `read` and `extract` check each record's digest.

    The file is opened only once, so later changes of the path have no effect. Several threads may use the reader. It is
    a context manager.

    Attributes:
        name: The file's name, or what was given instead of a path, for messages.
        manifest: The manifest. It stays available after closing.
        manifest_sha256: The hex digest of the manifest. It identifies the content, because the manifest has the digest
            of every other record.
        size: The file's size in bytes.
        signers: The keys whose signatures satisfied `demand` and then each policy.
    """

    def __init__(
        self, source: PackageSource, *, demand: core.Demand | None = None, stream_limit: int = STREAM_LIMIT
    ) -> None:
        """Opens a package and checks everything except the contents of its records.

        Args:
            source: The path of the `.pt2`; or its content, as bytes, as a file object that is read to its end, or as
                an open descriptor. `package_source` has what is copied.
            demand: The caller's required signatures, from `trust.demand`. They, and those that policies require, are
                checked before the manifest is read. None checks no signatures.
            stream_limit: How many bytes of a stream are taken.

        Raises:
            UsageError: The file does not exist or cannot be read, or the source is none that is listed.
            PackageError: The package breaks a rule of the format or lacks a required signature. The class says which.
            PolicyError: A policy cannot be read or trusted.
        """
        self._path = Path(source) if isinstance(source, (str, os.PathLike)) else None
        library = core.library()
        package = _Package(open_package(source, demand, stream_limit))
        self._package: _Package | None = package
        self.name: str = os.fsdecode(library.ek_package_name(package))
        self.manifest = decode_checked(library.ek_package_manifest(package).bytes())
        self.manifest_sha256: str = library.ek_package_manifest_sha256(package).decode()
        self.size: int = library.ek_package_size(package)
        self.signers = decode_signers(library.ek_package_signers(package).bytes())
        self._records = {record.name: record for record in self.manifest.records}

    @property
    def has_path(self) -> bool:
        """Whether it was opened by a path."""
        return self._path is not None

    @property
    def path(self) -> Path:
        """The path as given.

        Raises:
            UsageError: The package was not opened by a path.
        """
        if self._path is None:
            raise UsageError(f"the package was read from {self.name}, which has no path")
        return self._path

    @property
    def handle(self) -> int:
        """The `ek_package` for the library's functions. A reference to it keeps the file open.

        Raises:
            UsageError: The package was closed.
        """
        package = self._package
        if package is None:
            raise UsageError(f"{self.name} was closed", hint="Open it again to read from it.")
        return package

    @property
    def names(self) -> tuple[str, ...]:
        """The sorted names of the records, without the manifest."""
        return tuple(self._records)

    @property
    def sha256(self) -> str:
        """The hex digest of the whole file, which is read on first use."""
        digest = c_char_p()
        core.call("ek_package_sha256", self.handle, byref(digest))
        assert digest.value is not None
        return digest.value.decode()

    def fileno(self) -> int:
        """Returns the file descriptor, or a negative number after closing.

        `/proc/self/fd/<n>` is the checked file, even if the path names another file by now.
        """
        package = self._package
        return -1 if package is None else int(core.library().ek_package_fd(package))

    def record(self, name: str) -> Record:
        """Returns the manifest's entry for a record.

        Raises:
            MissingRecordError: The record does not exist.
        """
        if name not in self._records:
            raise MissingRecordError(f"{self.name} has no record {name!r}")
        return self._records[name]

    def data_offset(self, name: str) -> int:
        """Returns the offset of a record's content in the file.

        Raises:
            MissingRecordError: The record does not exist.
        """
        offset = c_uint64()
        core.call("ek_package_data_offset", self.handle, core.encoded(name), byref(offset))
        return offset.value

    def read(self, name: str) -> bytes:
        """Returns a record's content. Each call checks the digest.

        Raises:
            MissingRecordError: The record does not exist.
            DigestMismatchError: The content differs from the manifest's digest.
        """
        size = self.record(name).size
        content = ctypes.create_string_buffer(size)
        core.call("ek_package_read", self.handle, core.encoded(name), content, size)
        return content.raw

    def extract(self, name: str, destination: Path, *, mode: int = 0o666) -> None:
        """Writes a record to a file, which appears only if the digest matches. A power failure may still undo it.

        Raises:
            MissingRecordError: The record does not exist.
            DigestMismatchError: The content differs from the manifest's digest.
            OSError: The file cannot be written.
        """
        core.call("ek_package_extract", self.handle, core.encoded(name), core.encoded(destination), mode)

    def verify(self) -> None:
        """Checks every record's digest.

        Raises:
            DigestMismatchError: A record's content differs from the manifest's digest.
        """
        core.call("ek_package_verify", self.handle)

    def verify_once(self, *, always: bool) -> bool:
        """Checks every digest, unless the cache has a valid record of an earlier check.

        exportkit.runtime.cache has the rules.

        Args:
            always: Whether to ignore the cache's record.

        Returns:
            Whether the package was read.

        Raises:
            DigestMismatchError: A record's content differs from the manifest's digest.
        """
        read = c_int()
        core.call("ek_package_verify_once", self.handle, int(always), byref(read))
        return bool(read.value)

    def read_case(self, index: int) -> bytes:
        """Returns the content of a case's file, whose tensors are those of the case: FORMAT.md, rule 14.

        Args:
            index: The case's index in the manifest.

        Raises:
            CaseError: It is not a safetensors file, or its tensors do not fit the calls.
            DigestMismatchError: The content differs from the manifest's digest.
        """
        content = self.read(self.manifest.cases[index].record)
        core.call("ek_package_check_case", self.handle, index, content, len(content))
        return content

    def check_unchanged(self) -> None:
        """Checks that the open file was not written to, as `cp` over it does. A rename does not count.

        Raises:
            DigestMismatchError: The file was written to.
        """
        core.call("ek_package_check_unchanged", self.handle)

    def close(self) -> None:
        """Closes the file after the running calls of other threads."""
        self._package = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""Writing and reading packages. FORMAT.md numbers the rules that both hold a package to, in csrc/package.

Opening a package reads its headers and its manifest only. That a record's content has another digest or CRC-32 shows
when it is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_char_p, c_int, c_uint64
from pathlib import Path
from typing import NamedTuple

import msgspec
from typing_extensions import Self

from exportkit.errors import MissingRecordError, UsageError
from exportkit.package import core
from exportkit.package.keys import decode_signers
from exportkit.package.manifest import FORMAT_VERSION, Manifest, Record, decode_checked, encode_manifest

# torch takes the folder of the first record for the archive's root. It is the same in every package: torch's own writer
# uses the file's name, so that the same package under another name would have other bytes.
ROOT = "package"

# What torch's readers look for; a package has them without being given them.
STOCK_RECORDS = frozenset({".data/version", "archive_format", "archive_version", "byteorder"})

_RECORDS = msgspec.json.Decoder(tuple[Record, ...])  # made at import: exportkit.package.manifest says why


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
        ExportkitError: A record changed while it was packed.
        OSError: A file cannot be read, or the package not written.
    """
    library = core.library()
    writer = library.ek_writer_new()
    kept: list[object] = []  # what the writer has only the addresses of
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
    """Gives the writer a record; what comes back must live as long as it."""
    if isinstance(content, StoredRecord):
        package = content.reader.handle
        core.call("ek_writer_add_record", writer, name, package, core.encoded(content.name))
        return package
    if isinstance(content, Path):
        core.call("ek_writer_add_file", writer, name, core.encoded(content))
        return None
    data: object = content
    if isinstance(content, memoryview):
        # A view that may not be written to gives ctypes no address.
        data = bytes(content) if content.readonly else (ctypes.c_char * content.nbytes).from_buffer(content)
    core.call("ek_writer_add_bytes", writer, name, data, memoryview(content).nbytes)
    return data


class _Package(int):
    """An `ek_package`. It is closed once nobody has it, so that a call in another thread is never left without it."""

    close: Callable[[int], None]

    def __new__(cls, handle: int) -> Self:
        made = super().__new__(cls, handle)
        made.close = core.library().ek_package_close  # the module may be gone when the interpreter ends
        return made

    def __del__(self) -> None:
        self.close(self)


class PackageReader:
    """An open package whose structure holds; what `read` and `extract` give holds as well.

    The file is opened once: what was checked is what is read, whatever the path names by then. Usable from several
    threads, and as a context manager.

    Attributes:
        path: As it was given.
        manifest: What the package says of itself. It stays when the package is closed.
        manifest_sha256: Hex digest of the manifest, which has every other record's: it identifies the content.
        size: Of the file, in bytes.
        signers: Keys whose signatures hold, for the demand that it was opened with and then for each policy.
    """

    def __init__(self, path: Path, *, demand: core.Demand | None = None) -> None:
        """Opens a package and checks everything but the records' contents.

        Args:
            path: The `.pt2`.
            demand: Whose signature is asked for, beside what policies ask for: `trust.demand` makes it. Signatures are
                checked before the manifest is read. None checks no signature.

        Raises:
            UsageError: There is no such file, or it may not be read.
            PackageError: It breaks a rule of the format, or is not signed as was asked for; the class says which.
            PolicyError: A policy cannot be honoured.
        """
        self.path = Path(path)
        library = core.library()
        asked = None if demand is None else byref(demand)
        package = _Package(core.handle("ek_package_open", core.encoded(self.path), asked))
        self._package: _Package | None = package
        self.manifest = decode_checked(library.ek_package_manifest(package).bytes())
        self.manifest_sha256: str = library.ek_package_manifest_sha256(package).decode()
        self.size: int = library.ek_package_size(package)
        self.signers = decode_signers(library.ek_package_signers(package).bytes())
        self._records = {record.name: record for record in self.manifest.records}

    @property
    def handle(self) -> int:
        """The library's `ek_package`, to be given to its functions. Whoever has it keeps the file open.

        Raises:
            UsageError: The package was closed.
        """
        package = self._package
        if package is None:
            raise UsageError(f"{self.path.name} was closed", hint="Open it again to read from it.")
        return package

    @property
    def names(self) -> tuple[str, ...]:
        """The records, without the manifest, sorted."""
        return tuple(self._records)

    @property
    def sha256(self) -> str:
        """Hex digest of the whole file, read when first asked for."""
        digest = c_char_p()
        core.call("ek_package_sha256", self.handle, byref(digest))
        assert digest.value is not None
        return digest.value.decode()

    def fileno(self) -> int:
        """The open file: `/proc/self/fd/<n>` is the file that was checked, whatever the path names by now.

        It is negative once the package was closed.
        """
        package = self._package
        return -1 if package is None else int(core.library().ek_package_fd(package))

    def record(self, name: str) -> Record:
        """What the manifest says of a record.

        Raises:
            MissingRecordError: There is no such record.
        """
        if name not in self._records:
            raise MissingRecordError(f"{self.path.name} has no record {name!r}")
        return self._records[name]

    def data_offset(self, name: str) -> int:
        """Where in the file a record's content starts.

        Raises:
            MissingRecordError: There is no such record.
        """
        offset = c_uint64()
        core.call("ek_package_data_offset", self.handle, core.encoded(name), byref(offset))
        return offset.value

    def read(self, name: str) -> bytes:
        """A record's content, with its digest checked each time.

        Raises:
            MissingRecordError: There is no such record.
            DigestMismatchError: Its content is not what the manifest says.
        """
        size = self.record(name).size
        content = ctypes.create_string_buffer(size)
        core.call("ek_package_read", self.handle, core.encoded(name), content, size)
        return content.raw

    def extract(self, name: str, destination: Path, *, mode: int = 0o666) -> None:
        """Writes a record to a file, which appears only if its digest holds. A power failure may still take it back.

        Raises:
            MissingRecordError: There is no such record.
            DigestMismatchError: Its content is not what the manifest says.
            OSError: The file cannot be written.
        """
        core.call("ek_package_extract", self.handle, core.encoded(name), core.encoded(destination), mode)

    def verify(self) -> None:
        """Checks every record's digest.

        Raises:
            DigestMismatchError: A record's content is not what the manifest says.
        """
        core.call("ek_package_verify", self.handle)

    def verify_once(self, *, always: bool) -> bool:
        """`verify`, unless it is on record that every digest of this very file held; exportkit.runtime.cache says when.

        Args:
            always: Whether to read the package whatever is on record.

        Returns:
            Whether it was read.

        Raises:
            DigestMismatchError: A record's content is not what the manifest says.
        """
        read = c_int()
        core.call("ek_package_verify_once", self.handle, int(always), byref(read))
        return bool(read.value)

    def check_unchanged(self) -> None:
        """Finds out whether somebody wrote into the open file since, as `cp` over it does; a rename does not.

        Raises:
            DigestMismatchError: Somebody did.
        """
        core.call("ek_package_check_unchanged", self.handle)

    def close(self) -> None:
        """Closes the file, once calls that other threads are in the middle of have ended."""
        self._package = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""The bytes of a package: a zip archive with exactly one layout for given records.

A package is stored, not compressed, in ZIP64 form throughout, each record's data on a 64-byte boundary (as torch's own
writer puts it, so that data can be mapped), no dates, no comments, no attributes, nothing before, between or after. So
the archive is a function of its records' names, contents and order. The writer computes that function and the reader
compares with it: what two zip readers could understand in two ways, and what could hide beside the records, is not that
layout, and is refused. https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT has the field names.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from exportkit.errors import ArchiveLayoutError, NotAnArchiveError

ALIGNMENT = 64
# A reader allocates several times this before it has checked anything. The manifest says more of each record than the
# directory does, and has no more than this either, so no package is refused for it.
MAX_DIRECTORY_BYTES = 16 << 20

_VERSION = 45  # "needed to extract": ZIP64
_DATE = 0x21  # 1980-01-01, the first date zip can express
_MAX32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE = 0x04034B50, 0x02014B50
_END64_SIGNATURE, _LOCATOR_SIGNATURE, _END_SIGNATURE = 0x06064B50, 0x07064B50, 0x06054B50
_ENCRYPTED_FLAG = 0x0041  # bit 0: encrypted; bit 6: strongly


class Entry(NamedTuple):
    """A record's place: `offset` is that of its local header, which its data follow."""

    name: str
    size: int
    crc32: int
    offset: int

    @property
    def data_offset(self) -> int:
        """Where the record's first byte is."""
        return self.offset + len(local_header(self))

    @property
    def end(self) -> int:
        """The offset after the record's last byte, where the next one starts."""
        return self.data_offset + self.size


def local_header(entry: Entry) -> bytes:
    """What precedes a record's data, padded so that they start on an aligned offset."""
    name = entry.name.encode()
    sizes = struct.pack("<HHQQ", 1, 16, entry.size, entry.size)
    start = entry.offset + _LOCAL.size + len(name) + len(sizes) + 4
    padding = struct.pack("<2sH", b"FB", -start % ALIGNMENT) + b"Z" * (-start % ALIGNMENT)  # torch's own padding field
    extra = sizes + padding
    fixed = (_LOCAL_SIGNATURE, _VERSION, 0, 0, 0, _DATE, entry.crc32, _MAX32, _MAX32, len(name), len(extra))
    return _LOCAL.pack(*fixed) + name + extra


def directory(entries: Sequence[Entry]) -> bytes:
    """Everything after the last record: the central directory and its end."""
    start = entries[-1].end if entries else 0
    central = b"".join(_central_header(entry) for entry in entries)
    count, end = len(entries), start + len(central)
    return b"".join(
        [
            central,
            _END64.pack(
                _END64_SIGNATURE, _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(central), start
            ),
            _LOCATOR.pack(_LOCATOR_SIGNATURE, 0, end, 1),
            _END.pack(_END_SIGNATURE, 0, 0, 0xFFFF, 0xFFFF, _MAX32, _MAX32, 0),
        ]
    )


def _central_header(entry: Entry) -> bytes:
    name = entry.name.encode()
    extra = struct.pack("<HHQQQ", 1, 24, entry.size, entry.size, entry.offset)
    # The version a package was "made by" has host system 0 (none), so that no reader looks for a file mode or a link
    # in the attributes.
    fixed = (_CENTRAL_SIGNATURE, _VERSION, _VERSION, 0, 0, 0, _DATE, entry.crc32, _MAX32, _MAX32)
    return _CENTRAL.pack(*fixed, len(name), len(extra), 0, 0, 0, 0, _MAX32) + name + extra


# --- reading ----------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """An entry of the central directory as some writer made it; `name` is not yet to be trusted, nor anything else."""

    name: str
    flags: int
    method: int
    crc32: int
    stored_size: int
    size: int
    attributes: int
    offset: int


def read_directory(fd: int, file_size: int) -> list[Header]:
    """The central directory of any zip archive, so that a wrong one can be told from none.

    Raises:
        NotAnArchiveError: The file is no zip archive, or it is cut short.
        ArchiveLayoutError: The directory is larger than any package's.
    """
    tail = pread(fd, max(0, file_size - 98), min(98, file_size))  # END64, LOCATOR and END, without a comment
    if len(tail) < _END.size or tail[-_END.size : -_END.size + 4] != b"PK\x05\x06":
        raise NotAnArchiveError(
            f"the file ({file_size} bytes) does not end as a zip archive does: it was cut short, something was "
            "appended to it, or it never was one"
        )
    _, _, _, _, count, length, start, _ = _END.unpack(tail[-_END.size :])
    if len(tail) == 98 and tail[56:60] == b"PK\x06\x07" and tail[:4] == b"PK\x06\x06":
        _, _, _, _, _, _, _, count, length, start = _END64.unpack(tail[:56])
    if length > MAX_DIRECTORY_BYTES:
        raise ArchiveLayoutError(
            f"the central directory has {length} bytes; a package's has at most {MAX_DIRECTORY_BYTES}"
        )
    if start + length > file_size:
        raise NotAnArchiveError(
            f"the central directory should lie at {start}..{start + length}, but the file has {file_size} bytes"
        )
    block = pread(fd, start, length)
    headers: list[Header] = []
    at = 0
    for _ in range(count):
        try:
            header, at = _parse_central(block, at)
        except (struct.error, UnicodeDecodeError) as error:
            raise NotAnArchiveError(f"entry {len(headers)} of the central directory is damaged: {error}") from error
        headers.append(header)
    return headers


def _parse_central(block: bytes, at: int) -> tuple[Header, int]:
    """The entry at `at`, and where the next one starts. Whatever is odd shows when the layout is compared."""
    fields = _CENTRAL.unpack_from(block, at)
    signature, _, _, flags, method, _, _, crc32, stored, size, name_length, extra_length, comment_length = fields[:13]
    attributes, offset = fields[15:]
    if signature != _CENTRAL_SIGNATURE:
        raise struct.error(f"signature {signature:#010x}")
    name_end = at + _CENTRAL.size + name_length
    extra_end = name_end + extra_length
    if extra_end + comment_length > len(block):
        raise struct.error("it reaches beyond the directory")
    if _MAX32 in (size, stored, offset):
        size, stored, offset = _zip64_fields(block[name_end:extra_end], size, stored, offset)
    name = block[at + _CENTRAL.size : name_end].decode()
    return Header(name, flags, method, crc32, stored, size, attributes, offset), extra_end + comment_length


def _zip64_fields(extra: bytes, *fields: int) -> list[int]:
    """The fields with those that did not fit in 32 bits replaced by the ZIP64 field's, which has them in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            return [wide.pop(0) if field == _MAX32 and wide else field for field in fields]
        at += 4 + length
    return list(fields)


def check_layout(fd: int, file_size: int, headers: Iterable[Header]) -> list[Entry]:
    """Compares the archive with the one layout it can have.

    Only headers are read, no record's data.

    Raises:
        ArchiveLayoutError: They differ; the message says where first, and how, if that has a name.
    """
    entries = []
    offset = 0
    for header in headers:
        _refuse_named_oddities(header)
        if header.offset != offset:
            raise ArchiveLayoutError(
                f"record {header.name} starts at byte {header.offset}, not {offset} where the record before it ends: "
                "records overlap, or bytes are hidden between them"
            )
        entry = Entry(header.name, header.size, header.crc32, header.offset)
        if entry.end > file_size:
            raise ArchiveLayoutError(f"record {header.name} ends at byte {entry.end} of a file of {file_size}")
        expected = local_header(entry)
        if pread(fd, offset, len(expected)) != expected:
            raise ArchiveLayoutError(
                f"the local header of record {header.name} disagrees with the central directory",
                hint="Two zip readers could see two different records; pack it again with `exportkit package`.",
            )
        entries.append(entry)
        offset = entry.end
    expected = directory(entries)
    if file_size - offset != len(expected) or pread(fd, offset, len(expected)) != expected:
        raise ArchiveLayoutError(
            f"what follows the last record (from byte {offset} of {file_size}) is not the central directory that a "
            "package of these records has: a comment, extra fields, dates or hidden bytes",
            hint="Other zip tools write such archives; pack it again with `exportkit package`.",
        )
    return entries


def _refuse_named_oddities(header: Header) -> None:
    if header.flags & _ENCRYPTED_FLAG:
        raise ArchiveLayoutError(f"record {header.name} is encrypted; a package's records are stored as they are")
    if header.method != 0 or header.stored_size != header.size:
        raise ArchiveLayoutError(
            f"record {header.name} is compressed (method {header.method}, {header.stored_size} bytes for "
            f"{header.size}); a package's records are stored as they are"
        )
    if header.attributes != 0:
        raise ArchiveLayoutError(
            f"record {header.name} has file attributes ({header.attributes:#x}), as a link or a device would; "
            "a package has plain records only"
        )


def pread(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset` (fewer at the end of the file), without moving the file's position."""
    blocks = []
    while size > 0 and (block := os.pread(fd, size, offset)):
        blocks.append(block)
        offset += len(block)
        size -= len(block)
    return b"".join(blocks)

"""Rules 1 to 6 of FORMAT.md: archives that break one each, the class, and what the message names."""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from exportkit.errors import (
    ArchiveLayoutError,
    DuplicateRecordError,
    ManifestTooLargeError,
    NoManifestError,
    NotAnArchiveError,
    UnsafeRecordNameError,
)
from exportkit.package.archive import ROOT, PackageReader
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial.forge import (
    MAX_MANIFEST_BYTES,
    MAX_NAME_LENGTH,
    Entry,
    Refused,
    archive,
    directory,
    full,
    local_header,
    package,
    records,
    with_manifest,
)
from tests.package import samples


def test_what_the_forge_makes_is_accepted_when_nothing_is_changed(file: Path) -> None:
    file.write_bytes(package())
    with PackageReader(file) as reader:
        reader.verify()
        assert reader.read(samples.CASE) == samples.RECORDS[samples.CASE]


# --- rule 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 21, 22, 97, 98, 500, 0.5, -1, -22])
def test_rule_1_a_truncated_package_is_no_archive(refused: Refused, kept: float) -> None:
    data = package()
    kept = int(len(data) * kept) if isinstance(kept, float) else kept
    refused(data[:kept], NotAnArchiveError, "bytes")


@pytest.mark.parametrize("appended", [b"\0", b"PK\x05\x06" + bytes(17), b"<html>" * 100])
def test_rule_1_bytes_appended_to_a_package(refused: Refused, appended: bytes) -> None:
    refused(package() + appended, NotAnArchiveError, "appended")


def test_rule_1_other_files_are_no_archive(refused: Refused) -> None:
    refused(b"\x7fELF" + bytes(1000), NotAnArchiveError, "does not end like a zip archive")
    refused(b"", NotAnArchiveError, "(0 bytes)")


def test_rule_1_a_directory_beyond_the_file(refused: Refused) -> None:
    data = bytearray(package())
    struct.pack_into("<Q", data, len(data) - 98 + 48, len(data))  # where the ZIP64 end says the directory starts
    refused(bytes(data), NotAnArchiveError, "should lie at")


def test_rule_1_more_entries_than_the_directory_has(refused: Refused) -> None:
    data = bytearray(package())
    struct.pack_into("<Q", data, len(data) - 98 + 32, 2**40)
    refused(bytes(data), NotAnArchiveError, "central directory is damaged")


def test_rule_1_a_folder_or_a_pipe_is_no_archive_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt2")
    for path in (tmp_path, tmp_path / "pipe.pt2"):
        with pytest.raises(NotAnArchiveError, match="is not a file"):
            PackageReader(path)


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def test_rule_2_an_archive_without_manifest(refused: Refused) -> None:
    error = refused(archive(full(records())), NoManifestError, MANIFEST_NAME)
    assert "ExportedProgram" in (error.hint or "")


def test_rule_2_a_stock_zip_without_manifest(refused: Refused) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("readme.txt", "hello")
    refused(buffer.getvalue(), NoManifestError, "not a package")


def test_rule_2_what_torch_writes_is_told_from_a_broken_package(tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    with PT2ArchiveWriter(str(tmp_path / "stock.pt2")) as writer:
        writer.write_bytes("data/x", b"hello")
    with pytest.raises(NoManifestError, match=r"a \.pt2 that torch wrote"):
        PackageReader(tmp_path / "stock.pt2")


def test_rule_2_an_empty_archive(refused: Refused) -> None:
    refused(archive([]), NoManifestError, MANIFEST_NAME)


# --- rule 3 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../evil.so",
        f"{ROOT}/../../evil.so",
        f"{ROOT}/data/../../../evil.so",
        "/etc/passwd",
        f"{ROOT}//double",
        f"{ROOT}/folder/",
        f"{ROOT}/./here",
        f"{ROOT}/...",
        f"{ROOT}/back\\slash",
        f"{ROOT}/C:evil",
        f"{ROOT}/nul\0.so",
        f"{ROOT}/new\nline",
        f"{ROOT}/$(reboot)",
        f"{ROOT}/spa ce",
        f"{ROOT}/\N{LATIN SMALL LETTER E WITH ACUTE}",
        f"{ROOT}/\N{RIGHT-TO-LEFT OVERRIDE}os.so",
        "",
        f"{ROOT}/" + "x" * MAX_NAME_LENGTH,
    ],
)
def test_rule_3_names_that_are_not_plain_and_relative(refused: Refused, name: str) -> None:
    data = archive([*full(with_manifest(records())), (name, b"evil")])
    refused(data, UnsafeRecordNameError, ascii(name[:60])[:-1].split("\\")[0])


def test_rule_3_a_record_that_is_the_folder_of_another(refused: Refused) -> None:
    contents = records() | {"exportkit/cases": b""}
    refused(package(contents=contents), UnsafeRecordNameError, "exportkit/cases")


# --- rule 4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [samples.CODE, samples.LIBRARY, MANIFEST_NAME])
def test_rule_4_a_second_record_of_the_same_name(refused: Refused, name: str) -> None:
    data = archive([*full(with_manifest(records())), (f"{ROOT}/{name}", b"the other one")])
    refused(data, DuplicateRecordError, name)


# --- rule 5 -----------------------------------------------------------------------------------------------------------


def zipped(compression: int = zipfile.ZIP_STORED, **attributes: Any) -> bytes:
    """The sample as another zip tool writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in full(with_manifest(records())):
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            for key, value in attributes.items():
                setattr(info, key, value)
            file.writestr(info, content)
    return buffer.getvalue()


def test_rule_5_compressed_records(refused: Refused) -> None:
    refused(zipped(zipfile.ZIP_DEFLATED), ArchiveLayoutError, "compressed")


def test_rule_5_encrypted_records(refused: Refused) -> None:
    data = bytearray(package())
    first = data.index(b"PK\x01\x02")
    struct.pack_into("<H", data, first + 8, 1)
    refused(bytes(data), ArchiveLayoutError, f"{MANIFEST_NAME} is encrypted")


def test_rule_5_a_link(refused: Refused) -> None:
    refused(zipped(create_system=3, external_attr=0o120777 << 16), ArchiveLayoutError, "link")


def test_rule_5_an_archive_that_another_zip_tool_wrote(refused: Refused) -> None:
    data = bytearray(zipped())
    for header in re.finditer(rb"PK\x01\x02", data):
        struct.pack_into("<I", data, header.start() + 38, 0)  # attributes, which zipfile insists on
    error = refused(bytes(data), ArchiveLayoutError, MANIFEST_NAME)
    assert "exportkit package" in (error.hint or "")


def test_rule_5_records_outside_of_the_root(refused: Refused) -> None:
    refused(archive([*full(with_manifest(records())), ("elsewhere/x", b"")]), ArchiveLayoutError, "elsewhere/x")
    moved = [(f"another/{name}", content) for name, content in with_manifest(records()).items()]
    refused(archive(moved), ArchiveLayoutError, "another/")


def test_rule_1_a_package_after_a_script(refused: Refused) -> None:
    refused(b"#!/bin/sh\n" + package(), NotAnArchiveError, "central directory is damaged")


def test_rule_5_bytes_before_the_first_record_and_offsets_that_know_of_them(refused: Refused) -> None:
    contents = full(with_manifest(records()))
    refused(archive(contents, before=b"#!/bin/sh\n"), ArchiveLayoutError, "starts at byte 10")


def test_rule_5_a_local_header_that_names_another_record(refused: Refused) -> None:
    data = package()
    name = f"{ROOT}/{samples.CASE}".encode()
    refused(data.replace(name, name.replace(b"0", b"1"), 1), ArchiveLayoutError, samples.CASE)


def test_rule_5_bytes_hidden_in_the_padding(refused: Refused) -> None:
    data = package()
    assert b"ZZZZ" in data
    refused(data.replace(b"ZZZZ", b"evil", 1), ArchiveLayoutError, MANIFEST_NAME)


def test_rule_5_records_that_overlap(refused: Refused) -> None:
    data = bytearray(package())
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", data)]
    last = entries[-1]
    name_length, extra_length = struct.unpack_from("<HH", data, last + 28)
    offset_at = last + 46 + name_length + extra_length - 8
    struct.pack_into("<Q", data, offset_at, 0)
    refused(bytes(data), ArchiveLayoutError, "overlap")


def test_rule_5_a_record_larger_than_the_file(refused: Refused) -> None:
    entry = Entry(f"{ROOT}/{MANIFEST_NAME}", 2**62, 0, 0)
    data = local_header(entry) + directory([entry])
    # The directory would start at 2^62; say where it is.
    data = data[:-98] + data[-98:].replace(struct.pack("<Q", entry.end), struct.pack("<Q", len(local_header(entry))))
    refused(data, ArchiveLayoutError, str(entry.size))


def test_rule_5_a_comment_in_the_directory(refused: Refused) -> None:
    data = bytearray(package())
    last = data.rindex(b"PK\x01\x02")
    struct.pack_into("<H", data, last + 32, 4)  # comment length
    end = data.index(b"PK\x06\x06", last)
    data[end:end] = b"evil"
    size_at = data.index(b"PK\x06\x06", last) + 40
    struct.pack_into("<Q", data, size_at, struct.unpack_from("<Q", data, size_at)[0] + 4)
    refused(bytes(data), ArchiveLayoutError, "comment")


def test_rule_5_records_in_another_order(refused: Refused) -> None:
    contents = full(with_manifest(records()))
    refused(archive([*contents[1:], contents[0]]), ArchiveLayoutError, "out of place")
    refused(archive([contents[0], *reversed(contents[1:])]), ArchiveLayoutError, "out of place")


def test_rule_5_a_directory_too_large_to_read(file: Path, refused: Refused) -> None:
    data = bytearray(package())
    struct.pack_into("<Q", data, len(data) - 98 + 40, 1 << 40)
    refused(bytes(data), ArchiveLayoutError, str(1 << 40))


# --- rule 6 -----------------------------------------------------------------------------------------------------------


def test_rule_6_an_oversized_manifest_is_not_parsed(refused: Refused) -> None:
    refused(package(b"[" * (MAX_MANIFEST_BYTES + 1)), ManifestTooLargeError, str(MAX_MANIFEST_BYTES + 1))

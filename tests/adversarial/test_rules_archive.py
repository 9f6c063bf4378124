"""Rules 1 to 6 and 10 to 13 of FORMAT.md: archives that break one each, the class, and what the message names."""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from exportkit import errors
from exportkit.errors import (
    ArchiveLayoutError,
    DigestMismatchError,
    DuplicateRecordError,
    ManifestTooLargeError,
    MissingRecordError,
    NoManifestError,
    NotAnArchiveError,
    PackageError,
    StockRecordError,
    UnlistedRecordError,
    UnsafeRecordNameError,
)
from exportkit.package.archive import ROOT, STOCK_RECORDS, PackageReader
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial.forge import (
    MAX_MANIFEST_BYTES,
    MAX_NAME_LENGTH,
    Entry,
    Refused,
    archive,
    directory,
    document,
    full,
    local_header,
    package,
    records,
)
from tests.package import samples

WHOLE = package()
END = len(WHOLE) - 98  # of the directory, in ZIP64
FULL = full({MANIFEST_NAME: msgspec.json.encode(document()), **records()})


def patched(at: int, form: str, value: int) -> bytes:
    """The sample with a number written over what was there."""
    data = bytearray(WHOLE)
    struct.pack_into(form, data, at, value)
    return bytes(data)


# --- rule 1 -----------------------------------------------------------------------------------------------------------

RULE_1: dict[str, tuple[bytes, str]] = {
    **{f"cut at {kept}": (WHOLE[:kept], "bytes") for kept in (0, 1, 21, 22, 97, 98, 500, len(WHOLE) // 2, -1, -22)},
    "a byte appended": (WHOLE + b"\0", "appended"),
    "an end appended": (WHOLE + b"PK\x05\x06" + bytes(17), "appended"),
    "a page appended": (WHOLE + b"<html>" * 100, "appended"),
    "another file": (b"\x7fELF" + bytes(1000), "does not end like a zip archive"),
    "nothing": (b"", "(0 bytes)"),
    "a directory beyond the file": (patched(END + 48, "<Q", len(WHOLE)), "should lie at"),
    "more entries than the directory has": (patched(END + 32, "<Q", 2**40), "central directory is damaged"),
    "after a script": (b"#!/bin/sh\n" + WHOLE, "central directory is damaged"),
}


@pytest.mark.parametrize(("data", "named"), RULE_1.values(), ids=RULE_1)
def test_rule_1_what_is_no_archive(refused: Refused, data: bytes, named: str) -> None:
    refused(data, NotAnArchiveError, named)


def test_rule_1_a_folder_or_a_pipe_is_no_archive_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt2")
    for path in (tmp_path, tmp_path / "pipe.pt2"):
        with pytest.raises(NotAnArchiveError, match="is not a file"):
            PackageReader(path)


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def test_rule_2_an_archive_without_manifest(refused: Refused) -> None:
    error = refused(archive(full(records())), NoManifestError, MANIFEST_NAME)
    assert "ExportedProgram" in (error.hint or "")
    refused(archive([]), NoManifestError, MANIFEST_NAME)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("readme.txt", "hello")
    refused(buffer.getvalue(), NoManifestError, "not a package")


def test_rule_2_what_torch_writes_is_told_from_a_broken_package(refused: Refused, tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    torch.save({"weight": torch.zeros(2)}, tmp_path / "net.pth")
    with PT2ArchiveWriter(str(tmp_path / "stock.pt2")) as writer:
        writer.write_bytes("data/x", b"hello")
    refused((tmp_path / "stock.pt2").read_bytes(), NoManifestError, "a .pt2 that torch wrote")
    error = refused((tmp_path / "net.pth").read_bytes(), NoManifestError, "a checkpoint, as torch.save")
    assert "--weights WEIGHTS.safetensors" in str(error.hint)


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
    data = archive([*FULL, (name, b"evil")])
    refused(data, UnsafeRecordNameError, ascii(name[:60])[:-1].split("\\")[0])


def test_rule_3_a_record_that_is_the_folder_of_another(refused: Refused) -> None:
    refused(package(contents=records({"exportkit/cases": b""})), UnsafeRecordNameError, "exportkit/cases")


# --- rule 4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [samples.CODE, samples.LIBRARY, MANIFEST_NAME])
def test_rule_4_a_second_record_of_the_same_name(refused: Refused, name: str) -> None:
    data = archive([*FULL, (f"{ROOT}/{name}", b"the other one")])
    refused(data, DuplicateRecordError, name)


# --- rule 5 -----------------------------------------------------------------------------------------------------------


def zipped(compression: int = zipfile.ZIP_STORED, **attributes: Any) -> bytes:
    """The sample as another zip tool writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in FULL:
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            for key, value in attributes.items():
                setattr(info, key, value)
            file.writestr(info, content)
    return buffer.getvalue()


def test_rule_5_an_archive_that_another_zip_tool_wrote(refused: Refused) -> None:
    data = bytearray(zipped())
    for header in re.finditer(rb"PK\x01\x02", data):
        struct.pack_into("<I", data, header.start() + 38, 0)  # attributes, which zipfile insists on
    error = refused(bytes(data), ArchiveLayoutError, MANIFEST_NAME)
    assert "exportkit package" in (error.hint or "")


def with_another_name() -> bytes:
    name = f"{ROOT}/{samples.CASE}".encode()
    return WHOLE.replace(name, name.replace(b"0", b"1"), 1)


def overlapping() -> bytes:
    last = WHOLE.rindex(b"PK\x01\x02")
    name_length, extra_length = struct.unpack_from("<HH", WHOLE, last + 28)
    return patched(last + 46 + name_length + extra_length - 8, "<Q", 0)


def larger_than_the_file() -> bytes:
    entry = Entry(f"{ROOT}/{MANIFEST_NAME}", 2**62, 0, 0)
    data = local_header(entry) + directory([entry])
    # The directory would start at 2^62; say where it is.
    return data[:-98] + data[-98:].replace(struct.pack("<Q", entry.end), struct.pack("<Q", len(local_header(entry))))


def with_a_comment() -> bytes:
    last = WHOLE.rindex(b"PK\x01\x02")
    data = bytearray(patched(last + 32, "<H", 4))  # comment length
    end = data.index(b"PK\x06\x06", last)
    data[end:end] = b"evil"
    size_at = data.index(b"PK\x06\x06", last) + 40
    struct.pack_into("<Q", data, size_at, struct.unpack_from("<Q", data, size_at)[0] + 4)
    return bytes(data)


ENCRYPTED = patched(WHOLE.index(b"PK\x01\x02") + 8, "<H", 1)
MOVED = [(name.replace(ROOT, "another", 1), content) for name, content in FULL]
RULE_5: dict[str, tuple[bytes, str]] = {
    "compressed": (zipped(zipfile.ZIP_DEFLATED), "compressed"),
    "encrypted": (ENCRYPTED, f"{MANIFEST_NAME} is encrypted"),
    "a link": (zipped(create_system=3, external_attr=0o120777 << 16), "link"),
    "outside of the root": (archive([*FULL, ("elsewhere/x", b"")]), "elsewhere/x"),
    "all outside of it": (archive(MOVED), "another/"),
    "bytes before, and offsets that know of them": (archive(FULL, before=b"#!/bin/sh\n"), "starts at byte 10"),
    "a local header that names another record": (with_another_name(), samples.CASE),
    "bytes hidden in the padding": (WHOLE.replace(b"ZZZZ", b"evil", 1), MANIFEST_NAME),
    "records that overlap": (overlapping(), "overlap"),
    "a record larger than the file": (larger_than_the_file(), str(2**62)),
    "a comment in the directory": (with_a_comment(), "comment"),
    "the manifest last": (archive([*FULL[1:], FULL[0]]), "out of place"),
    "in another order": (archive([FULL[0], *reversed(FULL[1:])]), "out of place"),
    "a directory too large to read": (patched(END + 40, "<Q", 1 << 40), str(1 << 40)),
}


@pytest.mark.parametrize(("data", "named"), RULE_5.values(), ids=RULE_5)
def test_rule_5_another_layout(refused: Refused, data: bytes, named: str) -> None:
    assert data != WHOLE
    refused(data, ArchiveLayoutError, named)


# --- rule 6 -----------------------------------------------------------------------------------------------------------


def test_rule_6_an_oversized_manifest_is_not_parsed(refused: Refused) -> None:
    refused(package(b"[" * (MAX_MANIFEST_BYTES + 1)), ManifestTooLargeError, str(MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize("name", [samples.CASE, samples.LIBRARY, samples.CODE])
def test_rule_10_a_record_that_is_listed_and_not_there(refused: Refused, name: str) -> None:
    contents = records()
    del contents[name]
    refused(package(document(), contents), MissingRecordError, name)


def test_rule_11_a_record_that_is_there_and_not_listed(refused: Refused) -> None:
    contents = records({"exportkit/ops/linux-x86_64/libevil.so": b"evil"})
    refused(package(document(), contents), UnlistedRecordError, "libevil.so")


@pytest.mark.parametrize("name", sorted(STOCK_RECORDS))
def test_rule_12_torch_records_that_are_missing_or_say_something_else(refused: Refused, name: str) -> None:
    refused(package(contents=records() | {name: b"9"}), StockRecordError, name)
    contents = records()
    del contents[name]
    refused(package(contents=contents), StockRecordError, name)


FLIPPED = sorted(samples.RECORDS.keys() - {"data/aotinductor/cpu_v3/model.wrapper.cpp"})


@pytest.mark.parametrize("name", [*FLIPPED, MANIFEST_NAME])
def test_rule_13_a_flipped_bit_or_content_that_was_replaced(refused: Refused, name: str) -> None:
    content = records().get(name, b'"name":"toy"')
    data = bytearray(package())
    data[data.index(content) + 9] ^= 1
    refused(bytes(data), DigestMismatchError, name)
    if name != MANIFEST_NAME:  # with a CRC-32 that fits
        swapped = records() | {name: content[:-1] + bytes([content[-1] ^ 1])}
        refused(package(document(), swapped), DigestMismatchError, name)
        refused(package(document(), records() | {name: b"longer" * 100}), DigestMismatchError, "600 bytes")


def test_rule_13_a_crc_that_torch_would_trip_over(refused: Refused) -> None:
    crc32 = zlib.crc32(samples.RECORDS[samples.CASE])
    right, wrong = struct.pack("<I", crc32), struct.pack("<I", crc32 ^ 1)
    assert package().count(right) == 2
    refused(package().replace(right, wrong), DigestMismatchError, f"{samples.CASE} has a CRC-32 that differs")


def test_rule_13_holds_for_every_read_and_extract_and_leaves_no_file(file: Path, tmp_path: Path) -> None:
    swapped = records() | {samples.LIBRARY: records()[samples.LIBRARY][:-1] + b"!"}
    file.write_bytes(package(document(), swapped))
    with PackageReader(file) as reader:
        for _ in range(2):
            with pytest.raises(DigestMismatchError, match=r"libtoy_cpu\.so"):
                reader.read(samples.LIBRARY)
        with pytest.raises(DigestMismatchError, match=r"libtoy_cpu\.so"):
            reader.extract(samples.LIBRARY, tmp_path / "libtoy_cpu.so")
        reader.read(samples.CASE)  # the others hold
    assert [file.name for file in tmp_path.iterdir()] == [file.name]


# --- the list itself --------------------------------------------------------------------------------------------------


def test_every_rule_of_the_document_has_a_class_and_a_test() -> None:
    text = Path(errors.__file__).parent.joinpath("package/FORMAT.md").read_text()
    rules = dict(re.findall(r"^(\d+)\. `(\w+)`:", text, re.MULTILINE))
    assert list(rules) == [str(number) for number in range(1, 17)]
    assert all(issubclass(getattr(errors, name), PackageError) for name in rules.values())
    assert len(set(rules.values())) == len(rules)
    here = "".join(file.read_text() for file in Path(__file__).parent.glob("test_rules_*.py"))
    tested = {number: name for number, name in rules.items() if f"def test_rule_{number}_" in here}
    elsewhere = {"14": "CaseError", "15": "MissingLibraryError", "16": "SchemaChangedError"}
    assert tested | elsewhere == rules
    others = [file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py") if "rules" not in file.name]
    for name in elsewhere.values():
        assert any(f"raises({name}" in other for other in others), f"no test has {name} raised"

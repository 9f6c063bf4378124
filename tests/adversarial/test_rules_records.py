"""Rules 10 to 13 of FORMAT.md: records that break one each, the class, and what the message names."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest

from exportkit import errors
from exportkit.errors import (
    DigestMismatchError,
    MissingRecordError,
    PackageError,
    StockRecordError,
    UnlistedRecordError,
)
from exportkit.package.archive import STOCK_RECORDS, PackageReader
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial.forge import Refused, document, package, records
from tests.package import samples


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

from __future__ import annotations

import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from exportkit.errors import (
    DigestMismatchError,
    DuplicateRecordError,
    ExportkitError,
    MissingRecordError,
    UnsafeRecordNameError,
    UsageError,
)
from exportkit.package.archive import ROOT, STOCK_RECORDS, PackageReader, StoredRecord, write_package
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial import forge
from tests.adversarial.forge import Entry, directory, local_header
from tests.package import samples, signers
from tests.subprocesses import run_interpreter


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return signers.package(tmp_path, "toy.pt2")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    manifest = write_package(tmp_path / "toy.pt2", samples.manifest(), samples.RECORDS)
    assert msgspec.structs.replace(manifest, records=()) == samples.manifest()
    with PackageReader(tmp_path / "toy.pt2") as reader:
        assert reader.manifest == manifest
        assert tuple(map(reader.record, reader.names)) == manifest.records
        assert set(reader.names) == samples.RECORDS.keys() | STOCK_RECORDS
        assert {name: reader.read(name) for name in samples.RECORDS} == samples.RECORDS
        reader.verify()


def test_same_inputs_give_the_same_bytes_whatever_the_name_the_order_and_the_clock(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records may be files and records of other packages, and torch's are written as the format has them."""
    monkeypatch.setattr("time.time", lambda: 2e9)
    (tmp_path / "code.so").write_bytes(samples.RECORDS[samples.CODE])
    with PackageReader(package) as reader:
        elsewhere = {samples.CODE: tmp_path / "code.so", samples.CASE: StoredRecord(reader, samples.CASE)}
        of_torch = {"byteorder": b"big", ".data/serialization_id": b"4711", ".data/version": b"3\n"}
        for records in (dict(reversed(samples.RECORDS.items())), {**samples.RECORDS, **elsewhere, **of_torch}):
            write_package(tmp_path / "another.pt2", samples.manifest(), records)
            assert package.read_bytes() == (tmp_path / "another.pt2").read_bytes()


def test_the_bytes_are_those_that_the_document_describes(package: Path) -> None:
    with PackageReader(package) as reader:
        written = dict(zip(reader.names, map(reader.read, reader.names)))
        start = package.read_bytes().index(b"{")
        manifest = package.read_bytes()[start : package.read_bytes().index(b"\n}\n") + 3]
    assert package.read_bytes() == forge.package(manifest, written)


def test_sizes_beyond_32_bits_have_their_place_in_the_headers(tmp_path: Path) -> None:
    contents, file = forge.records({"data/v": b""}), tmp_path / "sparse.pt2"
    whole = forge.document(contents=contents)
    next(record for record in whole["records"] if record["name"] == "data/v")["size"] = 5 << 30
    entries: list[Entry] = []
    with open(file, "wb") as out:
        for name, content in forge.full({MANIFEST_NAME: msgspec.json.encode(whole), **contents}):
            size = 5 << 30 if name.endswith("data/v") else len(content)
            entries.append(Entry(name, size, zlib.crc32(content), out.tell()))
            out.write(local_header(entries[-1]) + content)
            out.seek(entries[-1].end)
        out.write(directory(entries))
    found = zipfile.ZipFile(file).infolist()
    assert [(info.file_size, info.header_offset) for info in found] == [(entry.size, entry.offset) for entry in entries]
    with PackageReader(file) as reader:
        assert reader.record("data/v").size == 5 << 30
        (weight,) = (entry for entry in entries if entry.name.endswith(samples.WEIGHT))
        assert reader.data_offset(samples.WEIGHT) == weight.data_offset > 5 << 30
        assert reader.read(samples.WEIGHT) == samples.RECORDS[samples.WEIGHT]


WRITE_AND_CHANGE = """
import os, pathlib, sys, threading
from exportkit.errors import ExportkitError
from exportkit.package.archive import write_package
from tests.package import samples

code, out = map(pathlib.Path, sys.argv[1:])
def change():  # it is read twice: once for its digest, once for the package
    while not list(out.parent.glob(".toy.pt2.*.tmp")): pass
    with open(code, "r+b") as file: file.seek(-5, os.SEEK_END), file.write(b"later")
threading.Thread(target=change).start()
try: write_package(out, samples.manifest(), {**samples.RECORDS, "data/z": code})
except ExportkitError as error: print(type(error).__name__, error)
"""


def test_a_file_that_changes_while_it_is_packed_is_noticed_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(bytes(64 << 20))
    said = run_interpreter(WRITE_AND_CHANGE, tmp_path / "code", tmp_path / "toy.pt2", cwd=tmp_path)
    assert said.startswith("ExportkitError"), said
    assert "changed while it was being packed" in said
    assert os.listdir(tmp_path) == ["code"]


def test_who_may_read_a_package_is_the_umasks_to_say(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_package(tmp_path / "toy.pt2", samples.manifest(), samples.RECORDS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "toy.pt2").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("name", "error"),
    [("../up", UnsafeRecordNameError), (MANIFEST_NAME, DuplicateRecordError), ("", UnsafeRecordNameError)],
)
def test_names_that_no_reader_would_take_are_not_written(
    tmp_path: Path, name: str, error: type[ExportkitError]
) -> None:
    with pytest.raises(error):
        write_package(tmp_path / "toy.pt2", samples.manifest(), {**samples.RECORDS, name: b""})


def test_a_damaged_record_does_not_travel_from_one_package_to_another(package: Path, tmp_path: Path) -> None:
    damaged = package.read_bytes().replace(samples.RECORDS[samples.CODE], b"\x7fELF other    code")
    assert damaged != package.read_bytes()
    package.write_bytes(damaged)
    with PackageReader(package) as reader:
        records = {**samples.RECORDS, samples.CODE: StoredRecord(reader, samples.CODE)}
        with pytest.raises(DigestMismatchError, match=r"model\.wrapper\.so"):
            write_package(tmp_path / "another.pt2", samples.manifest(), records)


def test_of_a_large_package_that_threads_read_the_first_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "large.pt2"
    records = {**samples.RECORDS, "data/large": bytes(65 << 20)}
    write_package(path, samples.manifest(), records)
    with PackageReader(path) as reader:
        reader.verify()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for name in (samples.CODE, samples.CASE):
            at = content.find(samples.RECORDS[name])
            content[at] ^= 1
    with PackageReader(path) as reader, pytest.raises(DigestMismatchError, match=r"model\.wrapper\.so"):
        reader.verify()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_record_is_extracted_whole_with_the_permissions_asked_for(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        reader.extract(samples.LIBRARY, tmp_path / "lib.so", mode=0o600)
    assert (tmp_path / "lib.so").read_bytes() == samples.RECORDS[samples.LIBRARY]
    assert stat.S_IMODE((tmp_path / "lib.so").stat().st_mode) == 0o600


def test_a_record_that_is_not_there_leaves_no_file(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        for name in ("nothing", MANIFEST_NAME, f"{ROOT}/{samples.CODE}"):
            with pytest.raises(MissingRecordError, match=f"toy.pt2 has no record '{name}'"):
                reader.read(name)
            with pytest.raises(MissingRecordError):
                reader.extract(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    write_package(tmp_path / "toy.pt2", samples.manifest(), {**samples.RECORDS, "data/w": os.urandom(3 << 20)})
    with PackageReader(tmp_path / "toy.pt2") as reader, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(reader.verify) for _ in range(12)]:
            done.result()


def test_a_path_that_is_not_there_or_that_no_file_can_have_is_a_usage_error(package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot open .*missing\.pt2: No such file"):
        PackageReader(tmp_path / "missing.pt2")
    for name in (f"{package}\0x", "\ud800.pt2"):
        with pytest.raises(UsageError, match="is not a valid file name"):
            PackageReader(Path(name))
        with pytest.raises(UsageError, match="is not a valid file name"):
            write_package(Path(name), samples.manifest(), samples.RECORDS)


def test_a_reader_that_was_closed_says_so(package: Path, tmp_path: Path) -> None:
    reader = PackageReader(package)
    fd = reader.fileno()
    reader.close()
    reader.close()
    assert reader.fileno() < 0
    assert reader.manifest.name == "toy"
    for use in (
        reader.verify,
        reader.check_unchanged,
        lambda: reader.sha256,
        lambda: reader.read(samples.CODE),
        lambda: reader.extract(samples.CODE, tmp_path / "x"),
        lambda: reader.data_offset(samples.CODE),
    ):
        with pytest.raises(UsageError, match=r"toy\.pt2 was closed"):
            use()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_closing_in_the_middle_of_another_threads_calls_is_safe(tmp_path: Path) -> None:
    write_package(tmp_path / "toy.pt2", samples.manifest(), {**samples.RECORDS, "data/z": os.urandom(8 << 20)})

    def work(reader: PackageReader, started: threading.Event) -> None:
        while True:
            started.set()
            reader.verify()

    with ThreadPoolExecutor(1) as pool:
        for _ in range(10):
            reader, started = PackageReader(tmp_path / "toy.pt2"), threading.Event()
            ended = pool.submit(work, reader, started)
            started.wait()
            reader.close()
            with pytest.raises(UsageError, match="was closed"):
                ended.result()


LEFT_OPEN = """
import pathlib, sys
from exportkit.package.archive import PackageReader
readers = [PackageReader(pathlib.Path(sys.argv[1])) for _ in range(3)]
for name in [name for name in sys.modules if name == "os" or name.startswith("exportkit")]:
    module = vars(sys.modules[name])
    module.update(dict.fromkeys(module))  # as the interpreter may leave them
"""


def test_readers_that_are_open_when_the_interpreter_ends_say_nothing(package: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(package)], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


# --- other readers ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip")
def test_info_zips_reader_finds_nothing_wrong(package: Path) -> None:
    subprocess.run(["unzip", "-t", str(package)], check=True, capture_output=True)


def test_a_file_that_is_written_to_while_open_is_noticed_but_not_its_replacement(package: Path, tmp_path: Path) -> None:
    content = package.read_bytes()
    with PackageReader(package) as reader:
        (tmp_path / "new.pt2").write_bytes(b"another")
        os.replace(tmp_path / "new.pt2", package)
        reader.check_unchanged()
    package.write_bytes(content)
    os.utime(package, ns=(0, 0))
    with PackageReader(package) as reader:
        package.write_bytes(content)  # the same bytes, in time; but who knows what was read meanwhile
        with pytest.raises(DigestMismatchError, match=r"toy\.pt2 was written to while it was open"):
            reader.check_unchanged()
        os.utime(package, ns=(0, 0))
        reader.check_unchanged()
        package.write_bytes(content.replace(samples.RECORDS[samples.CODE], samples.RECORDS[samples.CODE][::-1]))
        os.utime(package, ns=(0, 0))  # as its owner may: then its content is looked at
        with pytest.raises(DigestMismatchError, match=r"model\.wrapper\.so has"):
            reader.check_unchanged()

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest

from exportkit.errors import (
    DigestMismatchError,
    DuplicateRecordError,
    ExportkitError,
    ManifestConsistencyError,
    ManifestSyntaxError,
    MissingRecordError,
    UnsafeRecordNameError,
    UsageError,
)
from exportkit.package import archive
from exportkit.package.archive import ROOT, STOCK_RECORDS, PackageReader, StoredRecord, write_package
from exportkit.package.container import ALIGNMENT, Entry, directory, local_header, read_directory
from exportkit.package.manifest import MANIFEST_NAME
from tests.package import samples


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "toy.pt2"
    write_package(path, samples.manifest(), samples.RECORDS)
    return path


# --- writing ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(package: Path) -> None:
    with PackageReader(package) as reader:
        assert msgspec.structs.replace(reader.manifest, records=()) == samples.manifest()
        assert set(reader.names) == samples.RECORDS.keys() | STOCK_RECORDS.keys()
        assert {name: reader.read(name) for name in samples.RECORDS} == samples.RECORDS
        reader.verify()


def test_the_manifest_that_is_returned_is_the_one_in_the_file(tmp_path: Path) -> None:
    manifest = write_package(tmp_path / "toy.pt2", samples.manifest(), samples.RECORDS)
    with PackageReader(tmp_path / "toy.pt2") as reader:
        assert reader.manifest == manifest
        for record in manifest.records:
            assert reader.record(record.name) == record


def test_same_inputs_give_the_same_bytes_whatever_the_name_the_order_and_the_clock(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9)
    backwards = dict(reversed(samples.RECORDS.items()))
    write_package(tmp_path / "another.pt2", samples.manifest(), backwards)
    assert package.read_bytes() == (tmp_path / "another.pt2").read_bytes()


def test_records_may_be_files_and_records_of_other_packages(package: Path, tmp_path: Path) -> None:
    (tmp_path / "code.so").write_bytes(samples.RECORDS[samples.CODE])
    with PackageReader(package) as reader:
        records = {**samples.RECORDS, samples.CODE: tmp_path / "code.so"}
        records[samples.CASE] = StoredRecord(reader, samples.CASE)
        write_package(tmp_path / "another.pt2", samples.manifest(), records)
    assert package.read_bytes() == (tmp_path / "another.pt2").read_bytes()


def test_records_that_torch_adds_are_written_as_the_format_has_them(package: Path, tmp_path: Path) -> None:
    records = {**samples.RECORDS, "byteorder": b"big", ".data/serialization_id": b"4711", ".data/version": b"3\n"}
    write_package(tmp_path / "another.pt2", samples.manifest(), records)
    assert package.read_bytes() == (tmp_path / "another.pt2").read_bytes()


def test_data_are_aligned_as_torch_aligns_them(package: Path) -> None:
    with PackageReader(package) as reader:
        content = package.read_bytes()
        for name in reader.names:
            offset = reader.data_offset(name)
            assert offset % ALIGNMENT == 0
            assert content[offset : offset + reader.record(name).size] == reader.read(name)


def test_sizes_beyond_32_bits_have_their_place_in_the_headers(tmp_path: Path) -> None:
    large = Entry(f"{ROOT}/{MANIFEST_NAME}", 5 << 30, 1, 0)
    entries = [large, Entry(f"{ROOT}/x", 7, 2, large.end)]
    assert entries[1].data_offset % ALIGNMENT == 0
    file = tmp_path / "sparse.zip"
    with open(file, "wb") as out:
        for entry in entries:
            out.seek(entry.offset)
            out.write(local_header(entry))
        out.seek(entries[-1].end)
        out.write(directory(entries))
    found = zipfile.ZipFile(file).infolist()
    assert [(info.file_size, info.header_offset) for info in found] == [(entry.size, entry.offset) for entry in entries]
    fd = os.open(file, os.O_RDONLY)
    assert [header.size for header in read_directory(fd, file.stat().st_size)] == [5 << 30, 7]
    os.close(fd)


def test_a_failure_leaves_the_old_package_and_no_temporary_file(package: Path, tmp_path: Path) -> None:
    before = package.read_bytes()
    with pytest.raises(FileNotFoundError):
        write_package(package, samples.manifest(), {**samples.RECORDS, samples.CASE: tmp_path / "not there"})
    with pytest.raises(ManifestConsistencyError):
        write_package(package, samples.manifest(targets=()), samples.RECORDS)
    assert package.read_bytes() == before
    assert os.listdir(tmp_path) == [package.name]


def test_an_interrupt_while_writing_leaves_no_temporary_file(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(entries: object) -> bytes:
        assert len(os.listdir(tmp_path)) == 2
        raise KeyboardInterrupt

    before = package.read_bytes()
    monkeypatch.setattr(archive, "directory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_package(package, samples.manifest(), samples.RECORDS)
    assert package.read_bytes() == before
    assert os.listdir(tmp_path) == [package.name]


def test_a_file_that_changes_while_it_is_packed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code.so"
    code.write_bytes(b"first")
    measure = archive._measure

    def measure_and_change(content: archive.Content) -> tuple[int, str, int]:
        measured = measure(content)
        if content == code:
            code.write_bytes(b"later")
        return measured

    monkeypatch.setattr(archive, "_measure", measure_and_change)
    with pytest.raises(ExportkitError, match="changed while it was being packed"):
        write_package(tmp_path / "toy.pt2", samples.manifest(), {**samples.RECORDS, samples.CODE: code})
    assert os.listdir(tmp_path) == ["code.so"]


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


def test_values_that_no_reader_would_take_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ManifestSyntaxError, match="name"):
        write_package(tmp_path / "toy.pt2", samples.manifest(name="no/name"), samples.RECORDS)


def test_a_damaged_record_does_not_travel_from_one_package_to_another(package: Path, tmp_path: Path) -> None:
    damaged = package.read_bytes().replace(samples.RECORDS[samples.CODE], b"\x7fELF other    code")
    assert damaged != package.read_bytes()
    package.write_bytes(damaged)
    with PackageReader(package) as reader:
        records = {**samples.RECORDS, samples.CODE: StoredRecord(reader, samples.CODE)}
        with pytest.raises(DigestMismatchError, match=r"model\.wrapper\.so"):
            write_package(tmp_path / "another.pt2", samples.manifest(), records)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_what_was_checked_is_read_even_when_the_path_names_another_file(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        (tmp_path / "evil").write_bytes(b"evil")
        os.replace(tmp_path / "evil", package)
        assert reader.read(samples.CODE) == samples.RECORDS[samples.CODE]
        with open(f"/proc/self/fd/{reader.fileno()}", "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == reader.sha256


def test_digests_of_the_whole(package: Path) -> None:
    with PackageReader(package) as reader:
        content = package.read_bytes()
        assert reader.sha256 == hashlib.sha256(content).hexdigest()
        assert reader.size == len(content)
        manifest = zipfile.ZipFile(io.BytesIO(content)).read(f"{ROOT}/{MANIFEST_NAME}")
        assert reader.manifest_sha256 == hashlib.sha256(manifest).hexdigest()


def test_a_record_is_extracted_whole_with_the_permissions_asked_for(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        reader.extract(samples.LIBRARY, tmp_path / "lib.so", mode=0o600)
    assert (tmp_path / "lib.so").read_bytes() == samples.RECORDS[samples.LIBRARY]
    assert stat.S_IMODE((tmp_path / "lib.so").stat().st_mode) == 0o600


def test_a_record_that_is_not_there(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        for name in ("nothing", MANIFEST_NAME, f"{ROOT}/{samples.CODE}"):
            with pytest.raises(MissingRecordError, match=f"toy.pt2 has no record '{name}'"):
                reader.read(name)
            with pytest.raises(MissingRecordError):
                reader.extract(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    records = {**samples.RECORDS, "data/weights/w": os.urandom(3 << 20)}
    write_package(tmp_path / "toy.pt2", samples.manifest(), records)
    failures = []
    with PackageReader(tmp_path / "toy.pt2") as reader:

        def work() -> None:
            try:
                for _ in range(3):
                    reader.verify()
            except ExportkitError as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot open .*missing\.pt2: No such file"):
        PackageReader(tmp_path / "missing.pt2")


def test_no_descriptor_stays_open(package: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        PackageReader(package).close()
        with pytest.raises(ExportkitError):
            PackageReader(tmp_path)
        (tmp_path / "bad").write_bytes(package.read_bytes()[:-1])
        with pytest.raises(ExportkitError):
            PackageReader(tmp_path / "bad")
    assert len(os.listdir("/proc/self/fd")) == before


# --- other readers ----------------------------------------------------------------------------------------------------


def test_torchs_reader_sees_the_same_records(package: Path) -> None:
    from torch.export.pt2_archive._package import PT2ArchiveReader, is_pt2_package

    assert is_pt2_package(str(package))
    with PT2ArchiveReader(str(package)) as reader:
        assert reader.archive_version() == 0
        assert set(reader.get_file_names()) == samples.RECORDS.keys() | STOCK_RECORDS.keys() | {MANIFEST_NAME}
        for name, content in samples.RECORDS.items():
            assert reader.read_bytes(name) == content


def test_pythons_and_info_zips_readers_find_nothing_wrong(package: Path) -> None:
    with zipfile.ZipFile(package) as file:
        assert file.testzip() is None
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    if unzip := shutil.which("unzip"):
        subprocess.run([unzip, "-t", str(package)], check=True, capture_output=True)


def test_a_file_that_is_written_to_while_open_is_noticed_and_one_that_is_replaced_is_not(tmp_path: Path) -> None:
    path = tmp_path / "toy.pt2"
    write_package(path, samples.manifest(), samples.RECORDS)
    content = path.read_bytes()
    with PackageReader(path) as reader:
        (tmp_path / "new.pt2").write_bytes(b"another")
        os.replace(tmp_path / "new.pt2", path)
        reader.check_unchanged()
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with PackageReader(path) as reader:
        path.write_bytes(content)  # the same bytes, in time; but who knows what was read meanwhile
        with pytest.raises(DigestMismatchError, match=r"toy\.pt2 was written to while it was open"):
            reader.check_unchanged()

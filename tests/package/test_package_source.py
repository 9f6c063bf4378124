"""Packages from memory, streams and descriptors: the same rules as for a path, whoever changes them meanwhile."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportkit.errors import DigestMismatchError, NotAnArchiveError, UsageError
from exportkit.package.archive import PackageReader, write_package
from exportkit.runtime.weights import mapped_weights
from tests.package import samples, signers
from tests.package.sources import SOURCES, Giving, Reads, ReadsInto, pieces
from tests.subprocesses import run_python


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signers.package(tmp_path_factory.mktemp("source"))


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def source(request: pytest.FixtureRequest, package: Path) -> Giving:
    made: Giving = request.param(package)
    return made


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_source_gives_the_package_of_the_path(source: Giving, package: Path) -> None:
    with PackageReader(package) as expected, source as value, PackageReader(value) as reader:
        assert (reader.manifest_sha256, reader.sha256) == (expected.manifest_sha256, expected.sha256)
        reader.verify()
        assert [reader.read(name) for name in reader.names] == [expected.read(name) for name in expected.names]
        weights, wanted = mapped_weights(reader), mapped_weights(expected)
        assert {name: tensor.tolist() for name, tensor in weights.items()} == {
            name: tensor.tolist() for name, tensor in wanted.items()
        }
        with pytest.raises(UsageError, match=re.escape(reader.name)):
            _ = reader.path


def test_what_was_given_is_still_the_callers(package: Path) -> None:
    before = open_files()
    with package.open("rb") as file, PackageReader(file):
        assert file.tell() == 0
    with PackageReader(descriptor := os.open(package, os.O_RDONLY)) as reader:
        assert reader.name == f"descriptor {descriptor}"
        os.close(descriptor)  # the reader has its own
        reader.verify()
    assert open_files() == before
    # With a writer that stays: what is read ends where the stream does, and the next one begins there.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(package.read_bytes())
        theirs.shutdown(socket.SHUT_WR)
        with PackageReader(ours.fileno()) as reader:
            reader.verify()
        assert ours.fileno() > 0
    assert open_files() == before


# --- content that changes ---------------------------------------------------------------------------------------------


def test_bytes_that_change_afterwards_change_nothing(package: Path) -> None:
    content = bytearray(package.read_bytes())
    with PackageReader(content) as reader:
        content[:] = bytes(len(content))
        del content[:]  # nothing holds it
        reader.verify()
        reader.check_unchanged()


def test_bytes_that_change_meanwhile_are_whole_or_refused(package: Path) -> None:
    with PackageReader(package) as reader:
        sound, records = reader.manifest_sha256, [reader.read(name) for name in reader.names]
        at = reader.data_offset(samples.CASE)
    content, stop = bytearray(package.read_bytes()), threading.Event()

    def change() -> None:
        while not stop.is_set():
            content[at] ^= 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            try:
                with PackageReader(content) as reader:
                    reader.verify()
                    assert reader.manifest_sha256 == sound
                    assert [reader.read(name) for name in reader.names] == records
            except DigestMismatchError:  # what was copied is damaged, and stays as it is
                continue
    finally:
        stop.set()
        thread.join()


def test_nobody_writes_to_the_copy(package: Path) -> None:
    with PackageReader(package.read_bytes()) as reader:
        for write in (os.write, lambda file, data: os.pwrite(file, data, 0)):
            with pytest.raises(PermissionError):
                write(reader.fileno(), b"x")
        with pytest.raises(PermissionError):
            os.truncate(reader.fileno(), 0)
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{reader.fileno()}", "r+b") as file:
            file.write(b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(reader.fileno(), 0)


class Keeps(ReadsInto):
    """Keeps the buffers that it was given, and writes to them whenever it is asked again."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.kept: list[memoryview] = []

    def readinto(self, buffer: memoryview) -> Any:
        for kept in self.kept:
            kept[:] = bytes(len(kept))
        self.kept.append(buffer)
        return super().readinto(buffer)


def test_a_file_object_that_keeps_its_buffer_reaches_nothing(package: Path) -> None:
    file = Keeps(*pieces(package.read_bytes(), 1000))
    with PackageReader(file) as reader:
        for kept in file.kept:
            kept[:] = bytes(len(kept))
        reader.verify()


@pytest.mark.parametrize("change", ["write", "truncate", "extend"])
def test_a_file_that_changes_under_its_descriptor_is_noticed(change: str, tmp_path: Path) -> None:
    path = signers.package(tmp_path)
    with path.open("r+b", buffering=0) as file, PackageReader(file.fileno()) as reader:
        if change == "truncate":
            file.truncate(reader.size - 1)
        else:
            file.seek(reader.size if change == "extend" else reader.data_offset(samples.CASE))
            file.write(b"\1")
        with pytest.raises(DigestMismatchError, match="was written to while it was open"):
            reader.check_unchanged()
        if change == "write":
            with pytest.raises(DigestMismatchError):
                reader.verify()


# A file that is mapped and then cut short: its pages are gone, and who touches them dies.
CUT = """
import mmap, os, sys
from exportkit.errors import UsageError
from exportkit.package.archive import PackageReader
with open(sys.argv[1], "r+b") as file:
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(0)
    try: PackageReader(content)
    except UsageError as error: print(error)
"""


def test_memory_that_is_gone_is_an_error_and_not_the_end(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt2").write_bytes(package.read_bytes())
    done = run_python(CUT, tmp_path / "cut.pt2", cwd=tmp_path)
    assert "cannot be read at byte 0: there is no memory at its address" in done


# --- what is refused --------------------------------------------------------------------------------------------------


def endless(package: Path) -> Reads:
    file = Reads()
    file.read = lambda size: package.read_bytes()[:size]  # type: ignore[method-assign]  # it lies
    return file


def test_a_stream_that_does_not_end_is_refused_at_its_limit(package: Path) -> None:
    with pytest.raises(UsageError, match=r"a Reads gave more than 1000000 bytes, the limit") as refused:
        PackageReader(endless(package), stream_limit=1_000_000)
    assert "set stream_limit higher" in str(refused.value.hint)
    out, into = os.pipe()
    with open(into, "wb", buffering=0) as writer, open(out, "rb") as reader:
        threading.Thread(target=writer.write, args=(bytes(60_000),)).start()
        with pytest.raises(UsageError, match=f"descriptor {out} gave more than 50000 bytes"):
            PackageReader(reader.fileno(), stream_limit=50_000)
    # Bytes have an end, and so has a file: neither is a stream.
    size = package.stat().st_size
    for source in (package.read_bytes(), package.open("rb")):
        PackageReader(source, stream_limit=1).close()
    PackageReader(io.BytesIO(package.read_bytes()), stream_limit=size).close()
    with pytest.raises(UsageError):
        PackageReader(io.BytesIO(package.read_bytes()), stream_limit=size - 1)


def opened(flags: int) -> Callable[[Path], int]:
    return lambda path: os.open(path, flags)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, "cannot be read from a NoneType"),
    "true": (lambda path: True, "a number of an open file, got True"),
    "negative": (lambda path: -1, "a number of an open file, got -1"),
    "huge": (lambda path: 1 << 40, "a number of an open file, got 1099511627776"),
    "closed": (lambda path: 1 << 20, "descriptor 1048576 is not open: Bad file descriptor"),
    "O_PATH": (opened(os.O_PATH), r"only names a file \(O_PATH\)"),
    "O_WRONLY": (opened(os.O_WRONLY), "is open for writing only"),
    "folder": (lambda path: os.open(path.parent, os.O_RDONLY), "is open on a folder; a package is one .pt2 file"),
    "device": (lambda path: os.open("/dev/zero", os.O_RDONLY), "is open on a device"),
    "device's file": (lambda path: io.FileIO("/dev/zero"), "is open on a device"),
    "event": (lambda path: os.eventfd(1), "is open on no file"),
    "end of a pipe": (lambda path: os.pipe()[1], "is open for writing only"),
    "text": (lambda path: path.open(encoding="latin-1"), "TextIOWrapper has text"),
    "text of a read": (lambda path: Reads("text"), "read of the Reads gave a str, not bytes"),
    "numbers": (lambda path: Reads(3), "read of the Reads gave 3, not bytes"),
    "nothing yet": (lambda path: Reads(b"PK", None), "has nothing to read now and does not wait: read gave None"),
    "none into": (lambda path: ReadsInto(None), "readinto gave None"),
    "too many": (lambda path: ReadsInto(1 << 40), "readinto of the ReadsInto gave 1099511627776"),
    "too few": (lambda path: ReadsInto(-1), "readinto of the ReadsInto gave -1"),
    "not a number": (lambda path: ReadsInto(1.5), "gave a float"),
    "true into": (lambda path: ReadsInto(True), "gave True"),
    "strided": (lambda path: memoryview(path.read_bytes())[::2], r"not contiguous: shape \(\d+,\), strides \(2,\)"),
    "strided piece": (lambda path: Reads(memoryview(path.read_bytes())[::2]), "gave a memoryview, not bytes"),
    "a path": (lambda path: os.fsencode(path), r"names a file"),
    "no package": (lambda path: b"no package", r"^10 bytes in memory: the file \(.* does not end like a zip archive"),
    "no package in a file": (lambda path: io.BytesIO(b""), r"^a BytesIO: the file \(.* does not end like a zip"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_package_is_refused_with_what_was_given(
    make: Callable[[Path], Any], message: str, package: Path
) -> None:
    value = make(package)
    with pytest.raises((UsageError, NotAnArchiveError), match=message):
        PackageReader(value)
    if isinstance(value, int) and 2 < value < 1 << 20:
        os.close(value)


def test_a_closed_file_object_and_a_released_view_are_refused(package: Path) -> None:
    for closed in (package.open("rb"), io.BytesIO(package.read_bytes()), package.open("rb", buffering=0)):
        closed.close()
        with pytest.raises(UsageError, match="is closed"):
            PackageReader(closed)
    view = memoryview(package.read_bytes())
    view.release()
    with pytest.raises(UsageError, match="released"):
        PackageReader(view)


def test_what_a_file_object_raises_is_raised(package: Path) -> None:
    class Lost(Reads):
        def read(self, size: int) -> bytes:
            raise ConnectionResetError("the line went dead")

    with pytest.raises(ConnectionResetError, match="the line went dead"):
        PackageReader(Lost())


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(UsageError, match="stream_limit must be a positive number of bytes"):
        PackageReader(io.BytesIO(), stream_limit=limit)


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY = """
import fcntl, os, sys
import numpy
from exportkit.package.archive import PackageReader
from exportkit.runtime.weights import mapped_weights
path = sys.argv[1]
size = os.path.getsize(path)
def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024
def given(kind):
    descriptor = os.open(path, os.O_RDONLY)
    if kind == "stream":
        return type("Stream", (), {"read": staticmethod(lambda size: os.read(descriptor, size))})()
    if "memfd" in kind:
        memory = os.memfd_create("given", os.MFD_ALLOW_SEALING)
        os.sendfile(memory, descriptor, 0, size)
        if kind == "memfd":  # what could still change is copied
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        return memory
    return descriptor
for kind in sys.argv[2:]:
    source, before = given(kind), anonymous()
    with PackageReader(source) as reader:
        reader.verify()
        (tensor,) = mapped_weights(reader).values()
        assert tensor.sum().item() == tensor.numel() and tensor.data_ptr() % 64 == 0
        maps = [line.split() for line in open("/proc/self/maps") if path in line or "/memfd:" in line]
        mapped = [word for line in maps for word in (line[1], os.path.basename(line[5]))]
        print(kind, *mapped, anonymous() - before < size // 4)
        del tensor
"""


def test_weights_are_mapped_from_the_one_copy_or_none(tmp_path: Path) -> None:
    content = b"\1" * (32 << 20)
    record = f"data/weights/{hashlib.sha256(content).hexdigest()}"
    weight = samples.weight(dtype="uint8", shape=(len(content),), strides=(1,), record=record)
    records = {name: part for name, part in samples.RECORDS.items() if name != samples.WEIGHT}
    target = samples.target(constants={"forward": {}})
    manifest = samples.manifest(targets=(target,), weights=(weight,))
    write_package(tmp_path / "large.pt2", manifest, {**records, record: content})
    kinds = ("stream", "descriptor", "memfd", "unsealed-memfd")
    done = run_python(MEMORY, tmp_path / "large.pt2", *kinds, cwd=tmp_path)
    assert done.splitlines() == [
        "stream r--p memfd:exportkit-package True",
        "descriptor r--s large.pt2 True",
        "memfd r--p memfd:given True",
        "unsealed-memfd False",
    ]

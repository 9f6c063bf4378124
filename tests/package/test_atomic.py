"""Files that appear whole, and what killed writers leave behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from exportkit.errors import UsageError
from exportkit.package.atomic import check_writable, temporary_folder, write_whole


def test_what_a_killed_writer_left_goes_and_what_somebody_writes_now_stays(tmp_path):
    left, at_work = (tmp_path / f".file.{digit * 16}.tmp" for digit in "01")
    left.write_bytes(b"half")
    at_work.write_bytes(b"half")
    with open(at_work, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(tmp_path / "file", b"whole")
        assert set(tmp_path.iterdir()) == {tmp_path / "file", at_work}
    write_whole(tmp_path / "file", b"again")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert (tmp_path / "file").read_bytes() == b"again"


def test_a_disk_without_room_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    check_writable(tmp_path / "file", 3 << 20)
    with pytest.raises(UsageError, match=r"it will have 4\.2 MB or more, and 3\.1 MB are free"):
        check_writable(tmp_path / "file", 4 << 20)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match="directory"):
            write_whole(path, b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_what_only_looks_left_over_is_left_alone(tmp_path):
    for name in ("file.tmp", ".file.0123.tmp", ".file.0123456789abcdeg.tmp", ".file.0123456789abcdef.tmp2"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".other.0123456789abcdef.tmp").write_text("of another file")
    (tmp_path / ".folder.0123456789abcdef.tmp").mkdir()
    link = tmp_path / ".file.0123456789abcdef.tmp"
    link.symlink_to(tmp_path / "file.tmp")
    before = set(tmp_path.iterdir())
    write_whole(tmp_path / "file", b"x")
    with temporary_folder(tmp_path, "another"):
        pass
    assert set(tmp_path.iterdir()) == before | {tmp_path / "file"}
    assert link.is_symlink()
    assert (tmp_path / "file.tmp").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_left_is_left_alone(tmp_path):
    theirs = tmp_path / ".file.0123456789abcdef.tmp"
    theirs.write_text("theirs")
    os.chown(theirs, 12345, -1)
    write_whole(tmp_path / "file", b"x")
    assert theirs.exists()


def test_many_writers_of_one_file_do_not_remove_each_others_work(tmp_path):
    path = tmp_path / "file"

    def write(number: int) -> None:
        write_whole(path, b"%03d" % number * 1000)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, range(200)))
    content = path.read_bytes()
    assert content == content[:3] * 1000
    assert list(tmp_path.iterdir()) == [path]


def test_a_fork_does_not_take_its_parents_folder_along(tmp_path):
    with temporary_folder(tmp_path, "work") as folder:
        child = os.fork()
        if child == 0:
            try:
                raise KeyboardInterrupt  # leaves the block, as an exit of the child would
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert folder.exists()

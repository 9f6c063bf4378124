"""Files that appear whole, and what killed writers leave behind."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from exportkit.package.archive import PackageReader, write_package
from exportkit.package.atomic import remove_leftovers, temporaries, temporary_folder, written_whole
from tests.fresh import killed_in_the_middle
from tests.package.samples import RECORDS, manifest

WRITE = """
from exportkit.package.atomic import written_whole
with written_whole(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    pause()
"""
FOLDER = """
from exportkit.package.atomic import temporary_folder
with temporary_folder(Path(sys.argv[1]), "work") as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("half")
    pause()
"""
PACKAGE = """
import exportkit.package.archive as archive
from tests.package.samples import RECORDS, manifest
archive._copy = lambda *args: pause()
archive.write_package(Path(sys.argv[1]), manifest(), RECORDS)
"""


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_removes_what_it_left(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    killed_in_the_middle(WRITE, path)
    assert path.read_bytes() == b"old"
    (left,) = temporaries(tmp_path)
    assert left.read_bytes() == b"half"
    with written_whole(path) as file:
        assert not left.exists()
        file.write(b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"new"


def test_a_killed_process_leaves_its_folder_to_the_next_one_of_the_same_prefix(tmp_path):
    killed_in_the_middle(FOLDER, tmp_path)
    (left,) = tmp_path.iterdir()
    assert (left / "sub" / "file").exists()
    with temporary_folder(tmp_path, "other"):
        assert left.exists()
    with temporary_folder(tmp_path, "work") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_package_whose_writer_was_killed_is_not_there(tmp_path):
    path = tmp_path / "package.pt2"
    killed_in_the_middle(PACKAGE, path)
    assert [entry.suffix for entry in tmp_path.iterdir()] == [".tmp"]
    write_package(path, manifest(), RECORDS)
    assert list(tmp_path.iterdir()) == [path]
    with PackageReader(path) as reader:
        reader.verify()


def test_what_somebody_writes_now_is_not_taken_for_left_over(tmp_path):
    with written_whole(tmp_path / "file") as file, temporary_folder(tmp_path, "work") as folder:
        assert len(temporaries(tmp_path)) == 2
        assert remove_leftovers(tmp_path) == []
        file.write(b"whole")
        (folder / "file").write_text("there")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_names_that_only_look_alike_are_left_alone(tmp_path):
    for name in ("file.tmp", ".file.0123.tmp", ".file.0123456789abcdeg.tmp", ".file.0123456789abcdef.tmp2"):
        (tmp_path / name).write_text("mine")
    other = tmp_path / ".other.0123456789abcdef.tmp"
    other.write_text("of another file")
    before = set(tmp_path.iterdir())
    with written_whole(tmp_path / "file") as file:
        file.write(b"x")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "file"}
    assert remove_leftovers(tmp_path) == [other]


def test_a_link_that_looks_left_over_is_neither_followed_nor_removed(tmp_path):
    target = tmp_path / "target"
    target.write_text("elsewhere")
    link = tmp_path / ".file.0123456789abcdef.tmp"
    link.symlink_to(target)
    assert remove_leftovers(tmp_path) == []
    assert target.read_text() == "elsewhere"
    assert link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_left_is_left_alone(tmp_path):
    theirs = tmp_path / ".file.0123456789abcdef.tmp"
    theirs.write_text("theirs")
    os.chown(theirs, 12345, -1)
    assert remove_leftovers(tmp_path) == []
    assert theirs.exists()


def test_many_writers_of_one_file_do_not_remove_each_others_work(tmp_path):
    path = tmp_path / "file"

    def write(number: int) -> None:
        with written_whole(path) as file:
            file.write(b"%03d" % number * 1000)

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

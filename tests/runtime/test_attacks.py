"""What other users of a machine can do to a load, and what a package can do to a terminal: nothing."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exportkit.errors import CacheError, DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand
from exportkit.runtime.cache import cache_directory, unpack_target
from exportkit.runtime.cache.prune import cache_items, prune
from exportkit.runtime.weights import mapped_weights
from tests.adversarial import forge
from tests.package import samples
from tests.package.signers import write_policy
from tests.runtime import exportkit_run, tiny
from tests.runtime.test_mapped_weights import package_of
from tests.subprocesses import run_python

STRANGER = 12345
CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4
SECRET = bytes(range(24))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

HOLD_LOCK = """
import fcntl, os, sys, time
os.setuid(int(sys.argv[1]))
fd = os.open(sys.argv[2], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def code_package(tmp_path: Path) -> Path:
    """Whose code is not run."""
    return tiny.write_code(tmp_path / "package.pt2")


@pytest.fixture
def weights_package(tmp_path: Path) -> Path:
    """Of one weight, `a`."""
    return package_of(tmp_path / "weights.pt2", {"a": (samples.weight(), SECRET)})


def overwrite(package: Path, content: bytes) -> None:
    """Puts this in the place of the weight of a package, and its modification time back."""
    before = package.stat()
    place = package.read_bytes().index(SECRET)
    with open(package, "r+b") as file:
        file.seek(place)
        file.write(content)
    os.utime(package, ns=(before.st_atime_ns, before.st_mtime_ns))


def bytes_of(tensors: dict) -> bytes:
    return bytes(tensors["a"].reshape(-1).view(torch.uint8).tolist())


def make_old(package: Path) -> None:
    """Waits until a verification of it can be put on record."""
    time.sleep(max(0.0, package.stat().st_ctime + 2.1 - time.time()))


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a user with files of his own, one of them with the name of an entry."""
    home = tmp_path / "home"
    for name in ("notes.txt", "thesis/chapter.tex", f"{'0' * 64}/photo.jpg", "1-2.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
        os.utime(home / name, (0, 0))
    return home


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["libraries", "targets", "packages"])
def test_prune_follows_no_link_in_the_cache(home, kind):
    before = files(home)
    cache_directory().mkdir(mode=0o700)
    (cache_directory() / kind).symlink_to(home)
    for look in (cache_items, lambda: prune(everything=True), lambda: prune(max_bytes=0)):
        with pytest.raises(CacheError, match="link"):
            look()
    assert files(home) == before


@as_root
@pytest.mark.parametrize("whose", ["the cache", "a folder of it", "the folder above it"])
def test_prune_leaves_a_cache_that_another_user_owns(home, monkeypatch, tmp_path, whose):
    cache = tmp_path / "above" / "cache"
    monkeypatch.setenv("EXPORTKIT_CACHE", str(cache))
    shutil.copytree(home, cache / "targets")
    theirs = {"the cache": cache, "a folder of it": cache / "targets", "the folder above it": cache.parent}[whose]
    os.chown(theirs, STRANGER, -1)
    before = files(cache)
    with pytest.raises(CacheError, match="another user"):
        prune(everything=True)
    assert files(cache) == before


def test_prune_takes_only_what_loads_leave_in_a_cache(home):
    cache_directory().mkdir(mode=0o700)
    for kind in ("libraries", "targets", "packages"):
        shutil.copytree(home, cache_directory() / kind)
        (cache_directory() / kind / "link").symlink_to(home)
    kept = files(cache_directory())
    prune(everything=True)
    gone = {path.relative_to(cache_directory()).as_posix() for path in kept - files(cache_directory())}
    assert gone == {"packages/1-2.json", *(f"{kind}/{'0' * 64}/photo.jpg" for kind in ("libraries", "targets"))}
    assert len(files(home)) == 4


@pytest.mark.parametrize(
    ("owner", "group", "mode"),
    [
        (-1, -1, 0o777),
        pytest.param(0, STRANGER, 0o2775, marks=as_root),
        pytest.param(STRANGER, STRANGER, 0o755, marks=as_root),
        pytest.param(STRANGER, STRANGER, 0o1777, marks=as_root),
    ],
)
def test_a_cache_below_a_folder_that_others_may_write_to_is_not_used(
    code_package, monkeypatch, tmp_path, owner, group, mode
):
    """They could rename it, and put another one in its place, between the check and the dynamic linker."""
    shared = tmp_path / "team"
    (shared / "mine").mkdir(parents=True)
    (shared / "mine").chmod(0o700)
    os.chown(shared, owner, group)
    shared.chmod(mode)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(shared / "mine" / "cache"))
    with PackageReader(code_package) as reader:
        with pytest.warns(RuntimeWarning, match="cannot use its cache .*it is in .*team, which"):
            entry = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
        assert not entry.folder.is_relative_to(shared)
        entry.close()


@as_root
def test_a_strangers_lock_on_a_cache_that_all_may_read_is_not_waited_for(code_package):
    with PackageReader(code_package) as reader:
        entry = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
        entry.close()
        for folder in (entry.folder, *entry.folder.parents):
            if folder == Path(tempfile.gettempdir()):
                break
            folder.chmod(folder.stat().st_mode | 0o055)
        command = [sys.executable, "-c", HOLD_LOCK, str(STRANGER), str(entry.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
            try:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == "locked\n"
                start = time.monotonic()
                unpack_target(reader, reader.manifest.targets[0], "forward", always=False).close()
                assert time.monotonic() - start < 40, "a minute is what our own writers are given"
            finally:
                stranger.kill()


@as_root
def test_a_cache_is_used_in_a_user_namespace_without_root(code_package, monkeypatch):
    """As sandboxes and clusters make them: the machine's own folders seem to be nobody's there."""
    with tempfile.TemporaryDirectory() as folder, PackageReader(code_package) as reader:
        os.chown(folder, STRANGER, STRANGER)
        monkeypatch.setenv("EXPORTKIT_CACHE", f"{folder}/cache")
        child = os.fork()
        if child == 0:
            status = 2
            try:
                os.setuid(STRANGER)
                libc = ctypes.CDLL(None)
                libc.prctl(PR_SET_DUMPABLE, 1)  # or /proc/self stays root's
                if libc.unshare(CLONE_NEWUSER):
                    status = 1
                    return
                Path("/proc/self/uid_map").write_text(f"{STRANGER} {STRANGER} 1")
                assert os.stat("/").st_uid not in (0, STRANGER)
                entry = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
                status = 0 if entry.folder.is_relative_to(folder) else 3
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 1:
            # A kernel or container may forbid it (user.max_user_namespaces, seccomp): then no load runs in one.
            pytest.skip("this machine makes no user namespaces")
        assert status == 0


@as_root
@pytest.mark.parametrize("below", ["", "cache"])
def test_a_cache_behind_another_users_link_is_neither_used_nor_pruned(code_package, home, tmp_path, monkeypatch, below):
    """It would be a folder of the user's own, which they chose."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "shared" / "link"
    link.symlink_to(home)
    (home / "packages").mkdir()
    (home / "packages" / "1-2.json").write_text("mine")
    monkeypatch.setenv("EXPORTKIT_CACHE", str(link / below))
    before = files(home)
    os.lchown(link, STRANGER, -1)
    with pytest.raises(CacheError, match=r"behind the link .*shared/link of another user"):
        prune(everything=True)
    with PackageReader(code_package) as reader:
        with pytest.warns(RuntimeWarning, match="cannot use its cache .*link of another user"):
            unpack_target(reader, reader.manifest.targets[0], "forward", always=False).close()
        assert files(home) == before
        os.lchown(link, os.geteuid(), -1)
        unpack_target(reader, reader.manifest.targets[0], "forward", always=False).close()  # our own links are followed
    assert files(home) != before


# --- weights ----------------------------------------------------------------------------------------------------------


@as_root
def test_weights_of_a_file_that_another_user_owns_stay_what_was_verified(weights_package):
    os.chown(weights_package, STRANGER, -1)
    with PackageReader(weights_package) as reader:
        mapped = mapped_weights(reader)
        overwrite(weights_package, SECRET[::-1])
        assert bytes_of(mapped) == SECRET
        with pytest.raises(DigestMismatchError):
            reader.check_unchanged()  # its modification time is what it was; its change time is not
        with pytest.raises(DigestMismatchError):
            mapped_weights(reader)


def test_weights_that_somebody_has_mapped_for_writing_stay_what_was_verified(weights_package):
    """Such a mapping outlives chmod and chown, and stores through it change no time of the file's."""
    with open(weights_package, "r+b") as file:
        older = mmap.mmap(file.fileno(), 0)
    place = weights_package.read_bytes().index(SECRET)
    with PackageReader(weights_package) as reader:
        mapped = mapped_weights(reader)
        older[place : place + len(SECRET)] = SECRET[::-1]
        assert bytes_of(mapped) == SECRET
        older.close()


@as_root
@pytest.mark.parametrize("demanded", [False, True])
@pytest.mark.parametrize("kept", ["a mapping", "a descriptor"])
@pytest.mark.parametrize("owner", [0, STRANGER])
def test_weights_that_a_former_owner_may_still_write_to_stay_what_was_verified(
    weights_package, release, demanded, kept, owner
):
    """chown and mv keep the inode. The kernel tells only the present owner whether somebody has it open."""
    sign_package(weights_package, release.key)
    place = weights_package.read_bytes().index(SECRET)
    with open(weights_package, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        if kept == "a descriptor":
            mapping.close()
        os.chown(weights_package, owner, owner)
        with PackageReader(weights_package, demand=demand(release.public if demanded else None)) as reader:
            child = Child(lambda: mapped_weights(reader), lambda mapped: bytes_of(mapped) == SECRET)
            if kept == "a mapping":
                mapping[place : place + len(SECRET)] = SECRET[::-1]
            else:
                os.pwrite(file.fileno(), SECRET[::-1], place)
            assert child.holds()


class Child:
    """A process of another user: does the first thing at once, and the second when it is asked."""

    def __init__(self, start, end):
        (started, tell), (go, self.go) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 2
            try:
                os.setgid(STRANGER)
                os.setuid(STRANGER)
                result = start()
                os.write(tell, b"x")
                os.read(go, 1)
                status = int(not end(result))
            finally:
                os._exit(status)
        os.close(tell)
        os.read(started, 1)

    def holds(self):
        os.write(self.go, b"x")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0


# Whether a process that asks for this signature takes the package, and whether it is hashed for that.
ASK = """
import sys
from pathlib import Path
from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.package.trust import demand
with PackageReader(Path(sys.argv[1]), demand=demand(sys.argv[2] or None)) as reader:
    try:
        print([reader.verify_once(always=False) for _ in range(2)])
    except DigestMismatchError:
        print("changed")
"""


def test_where_a_signature_is_demanded_no_record_of_another_process_is_believed(weights_package, release, tmp_path):
    """A stick or an image that is exchanged for another one brings the times along that are on record."""
    sign_package(weights_package, release.key)
    make_old(weights_package)

    def ask(key: object) -> str:
        return run_python(ASK, weights_package, key, cwd=tmp_path).strip()

    assert ask("") == "[True, False]"
    assert ask("") == "[False, False]"
    assert ask(release.public) == "[True, False]", "once a process"
    overwrite(weights_package, SECRET[::-1])
    (record,) = (cache_directory() / "packages").iterdir()
    status, document = weights_package.stat(), json.loads(record.read_bytes())
    document["state"] |= {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    record.write_text(json.dumps(document))
    assert ask("") == "[False, False]", "as the exchanged medium would have it"
    assert ask(release.public) == "changed"


def test_a_policy_demands_as_a_caller_does(weights_package, release, tmp_path, monkeypatch):
    sign_package(weights_package, release.key)
    make_old(weights_package)
    release.public.chmod(0o600)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", release.public)))
    for _ in range(2):
        assert run_python(ASK, weights_package, "", cwd=tmp_path) == "[True, False]\n"


# --- terminals --------------------------------------------------------------------------------------------------------

HOSTILE = "\x1b[31mRED\x1b]0;title\x07\x9b2J\u202eRTL\r\nok  forged \xff"


@pytest.fixture
def hostile(tiny_package: Path, tmp_path: Path) -> Callable[..., Path]:
    """A package of these changes to a manifest that runs, its digests right."""
    with PackageReader(tiny_package) as reader:
        records = {name: reader.read(name) for name in reader.names}
        manifest = reader.manifest

    def make(change: Callable[[dict], object]) -> Path:
        document = forge.document(manifest, records)
        change(document)
        path = tmp_path / "hostile.pt2"
        path.write_bytes(forge.package(document, records))
        return path

    return make


def printed(package: Path, *arguments: str) -> list[str]:
    """The lines of exportkit-run's output and errors."""
    answer = exportkit_run.run(package, *arguments, json_output=False)
    return (answer.document["text"] + answer.said).split("\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update({HOSTILE: 1}),
        lambda document: document.update(version=HOSTILE),
        lambda document: document["records"].append({"name": HOSTILE, "size": 1, "sha256": "0" * 64}),
        lambda document: document["methods"][0]["call"]["outputs"][0].update(name=HOSTILE),
        lambda document: document["targets"][0].update(needs_torch=HOSTILE),
    ],
)
def test_exportkit_run_prints_nothing_a_terminal_obeys_and_no_forged_line(hostile, change):
    lines = printed(hostile(change))
    assert all(character.isprintable() for line in lines for character in line)
    assert not [line for line in lines if line.startswith("ok")]


def test_exportkit_runs_json_is_ascii(hostile):
    package = hostile(lambda document: document.update(version=HOSTILE))
    answer = exportkit_run.run(package)
    assert answer.document["package"]["version"] == HOSTILE
    assert json.dumps(answer.document).isascii()


def test_sizes_beyond_64_bits_are_no_fault_of_exportkit_run(hostile):
    def enlarge(document: dict) -> None:
        call = document["methods"][0]["call"]
        call["dimensions"].append({"name": "huge", "min": 3, "max": 3})
        shape = call["inputs"][0]["shape"]
        shape[0] = {"dimension": "huge", "scale": 2**62, "offset": -(2**63)}
        shape[1] = 0
        for case in document["cases"]:
            case["calls"][0]["sizes"]["huge"] = 3

    said = "\n".join(printed(hostile(enlarge)))
    assert "takes image: float32[4611686018427387904*huge-9223372036854775808, 0, " in said
    assert f"the manifest says float32[{2**62}, 0, " in said

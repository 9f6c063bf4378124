"""The cache of compiled targets: what it answers, and what it does not believe."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from exportkit.export.compiling import compiled_cache
from exportkit.export.compiling.aot_inductor import compile_methods
from exportkit.export.compiling.compile_plan import CompilePlan
from exportkit.export.compiling.compiled_cache import Code, find_code, keep_code
from exportkit.export.compiling.program_weights import ProgramWeights
from exportkit.export.cpu_isas import default_cpu_isa
from exportkit.export.export_options import TraceOptions
from exportkit.export.programs.resolve import resolve
from exportkit.export.tracing.trace import trace
from exportkit.runtime.cache.prune import cache_items, prune

CPU = torch.device("cpu")
KEY = "ab" * 32


class Model(torch.nn.Module):
    def __init__(self, value: float = 1.0, other: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.folded = torch.nn.Parameter(torch.full((3,), other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.folded + torch.tensor([1.0, 2.0, 3.0])


Program = tuple[torch.export.ExportedProgram, ProgramWeights]


def program(value: float = 1.0, other: float = 1.0) -> Program:
    traced = torch.export.export(Model(value, other), (torch.zeros(3),))
    return traced, ProgramWeights([traced])


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled" / KEY


@pytest.fixture(scope="module")
def made() -> Program:
    return program()


def code(folder: Path, made: Program, text: str = "code") -> Code:
    """Returns code that reads one of the weights and the program's own constant."""
    folder.mkdir(exist_ok=True)
    files = {"model.so": text.encode(), "model.wrapper.cpp": b"confidential", "model.json": b"{}"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (constant,) = made[0].constants.values()
    constants = {"weight": made[0].state_dict["weight"], "_tensor_constant0": constant}
    return Code([folder / name for name in files], constants)


def keep(folder: Path, made: Program, text: str = "code") -> str:
    return keep_code(KEY, code(folder, made, text), *made)


def find(folder: Path, made: Program, key: str = KEY) -> Code | None:
    folder.mkdir(exist_ok=True)
    return find_code(key, folder, *made, CPU)


def test_kept_code_is_found_without_its_source(tmp_path: Path, made: Program, entry: Path) -> None:
    assert keep(tmp_path / "made", made) == ""
    found = find(tmp_path / "found", made)
    assert found is not None
    contents = {path.name: path.read_bytes() for path in found.files}
    assert contents == {"model.so": b"code", "model.wrapper.cpp": b"", "model.json": b"{}"}
    assert found.constants["weight"].data_ptr() == made[0].state_dict["weight"].data_ptr()
    assert found.constants["_tensor_constant0"].tolist() == [1.0, 2.0, 3.0]
    assert not [path for path in entry.iterdir() if path.stat().st_mode & 0o077]
    assert find(tmp_path / "other", made, key="cd" * 32) is None


def test_other_weights_share_code_unless_the_compiler_computed_with_them(tmp_path: Path, made: Program) -> None:
    keep(tmp_path / "made", made)
    other = program(value=2.0)
    found = find(tmp_path / "found", other)
    assert found is not None
    assert found.constants["weight"].tolist() == [2.0] * 3
    assert find(tmp_path / "found", program(other=2.0)) is None


def test_a_constant_that_is_nobodys_binds_the_code_to_all_weights(tmp_path: Path, made: Program) -> None:
    computed = code(tmp_path / "made", made)
    computed = Code(computed.files, {**computed.constants, "product": torch.rand(5)})
    keep_code(KEY, computed, *made)
    assert find(tmp_path / "found", made) is not None
    assert find(tmp_path / "found", program(value=2.0)) is None


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to(path.with_name("away"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda entry: (entry / "model.so").write_bytes(b"evil"),
    "cut": lambda entry: os.truncate(entry / "model.so", 2),
    "gone": lambda entry: (entry / "model.so").unlink(),
    "open to others": lambda entry: (entry / "model.so").chmod(0o666),
    "record open to others": lambda entry: (entry / "~record.json").chmod(0o620),
    "a link": lambda entry: replace_by_link(entry / "model.so"),
    "record a link": lambda entry: replace_by_link(entry / "~record.json"),
    "a folder": lambda entry: ((entry / "model.so").unlink(), (entry / "model.so").mkdir()),
    "a pipe": lambda entry: ((entry / "model.so").unlink(), os.mkfifo(entry / "model.so")),
    "no record": lambda entry: (entry / "~record.json").unlink(),
    "half a record": lambda entry: os.truncate(entry / "~record.json", 20),
    "another constant": lambda entry: (entry / "constant-0").write_bytes(b"\1" * 12),
    "open folder": lambda entry: entry.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_not_used_and_is_replaced(
    damage: Callable[[Path], object], tmp_path: Path, made: Program, entry: Path
) -> None:
    keep(tmp_path / "made", made)
    damage(entry)
    assert find(tmp_path / "found", made) is None
    if entry.stat().st_mode & 0o022:
        assert "other users" in keep(tmp_path / "made", made)  # nothing is kept where others can write
        return
    if (entry / "model.so").is_dir():
        (entry / "model.so").rmdir()
    assert keep(tmp_path / "made", made, "again") == ""
    assert find(tmp_path / "found", made) is not None
    assert (tmp_path / "found" / "model.so").read_text() == "again"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("format", 2),
        ("key", "cd" * 32),
        ("files", ["../../outside"]),
        ("files", ["/etc/passwd"]),
        ("digests", {"../model.so": "00" * 32}),
        ("more", 1),
    ],
)
def test_a_record_that_says_something_else_is_not_believed(
    part: str, value: object, tmp_path: Path, made: Program, entry: Path
) -> None:
    keep(tmp_path / "made", made)
    record = json.loads((entry / "~record.json").read_text())
    (entry / "~record.json").write_text(json.dumps({**record, part: value}))
    assert find(tmp_path / "found", made) is None


def test_an_entry_of_another_user_is_not_used(tmp_path: Path, made: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "made", made)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find(tmp_path / "found", made) is None


def test_a_full_disk_only_means_that_nothing_is_kept(
    tmp_path: Path, made: Program, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == "model.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(compiled_cache, "write_whole", full)
    assert "No space left" in keep(tmp_path / "made", made)
    assert [*entry.iterdir()] == []  # what was written takes no room
    monkeypatch.undo()
    assert find(tmp_path / "found", made) is None


def test_a_cache_that_cannot_be_made_means_that_nothing_is_kept(
    tmp_path: Path, made: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORTKIT_CACHE", "/proc/nowhere")
    assert keep(tmp_path / "made", made) != ""
    assert find(tmp_path / "found", made) is None


def killed_writer(folder: Path, made: Program) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    compiled_cache.limit_compiled = die
    write, count = compiled_cache.write_whole, []

    def second_kills(path: Path, content: bytes) -> None:
        count.append(path)
        write(path, content) if len(count) < 3 else die(path, content)

    compiled_cache.write_whole = second_kills
    keep(folder, made)


def writer(folder: Path, made: Program, text: str) -> None:
    for _ in range(20):
        assert keep(folder, made, text) == ""


@pytest.mark.process
def test_a_killed_writer_leaves_nothing_that_is_used(tmp_path: Path, made: Program) -> None:
    child = multiprocessing.get_context("fork").Process(target=killed_writer, args=(tmp_path / "child", made))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert find(tmp_path / "found", made) is None
    assert keep(tmp_path / "made", made) == ""
    assert find(tmp_path / "found", made) is not None


@pytest.mark.process
def test_two_writers_and_a_reader_see_whole_entries(tmp_path: Path, made: Program) -> None:
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=writer, args=(tmp_path / name, made, name * 1000)) for name in ("one", "two")]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        if found := find(tmp_path / "found", made):
            assert found.files[0].read_text() in ("one" * 1000, "two" * 1000)
    assert [child.exitcode for child in children] == [0, 0]
    assert find(tmp_path / "found", made) is not None


def test_the_oldest_entries_go_when_the_cache_is_full(
    tmp_path: Path, made: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "compiled"
    monkeypatch.setattr(compiled_cache, "MOST_BYTES", 25_000)
    for number in range(4):
        key = f"{number:064x}"
        keep_code(key, code(tmp_path / "made", made, "x" * 10_000), *made)
        os.utime(cache / key, (1000 + number, 1000 + number))
    assert {path.name[-1] for path in cache.iterdir()} == {"2", "3"}
    assert find(tmp_path / "found", made, key=f"{2:064x}") is not None  # now it was used last
    keep_code(KEY, code(tmp_path / "made", made, "x" * 10_000), *made)
    assert {path.name for path in cache.iterdir()} == {KEY, f"{2:064x}"}
    monkeypatch.setattr(compiled_cache, "MOST_OF_ONE", 5_000)
    assert keep_code("cd" * 32, code(tmp_path / "made", made, "x" * 10_000), *made) == "it is too large"


def test_the_command_shows_and_removes_entries(
    tmp_path: Path, made: Program, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "made", made)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [(item.kind, item.path, item.in_use) for item in cache_items()] == [("compiled", entry, False)]
    assert [item.kind for item in prune(everything=True).removed] == ["compiled"]
    assert find(tmp_path / "found", made) is None


@pytest.mark.process
def test_an_export_that_repeats_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.rand(3))\n\n    def forward(self, x):\n        return x * self.w\n"
    )
    device, isa = torch.device("cpu"), default_cpu_isa()
    said: list[str] = []

    def compiled(folder: str, *, seed: int = 0, cache: bool = True) -> Any:
        model = resolve(f"{tmp_path}/model.py:Net", inputs=["x=float32[2,3]"], seed=seed)
        traced = trace(model, TraceOptions(cases=1), device, said.append)
        weights = ProgramWeights([method.program for method in traced.methods])
        plan = CompilePlan(device, [isa], cache=cache)
        return compile_methods(traced, tmp_path / folder, plan, isa, weights=weights, progress=said.append)

    first = compiled("first")

    def refused(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError("compiled")

    monkeypatch.setattr(torch._inductor, "aot_compile", refused)
    for seed in (0, 1):
        again = compiled(f"again{seed}", seed=seed)
        assert again.target == first.target
        assert {
            name: content if isinstance(content, bytes) else content.read_bytes()
            for name, content in again.records.items()
        } == {
            name: content if isinstance(content, bytes) else content.read_bytes()
            for name, content in first.records.items()
        }
    assert said.count("taking the code from the cache") == 2
    with pytest.raises(Exception, match="compiled"):
        compiled("without", cache=False)

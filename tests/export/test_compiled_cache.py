"""The cache of compiled targets: what it answers, and what it does not believe."""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from exportkit.export.compile import compiled_cache
from exportkit.export.compile.aot_inductor import compile_methods
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.compile.compiled_cache import Code, find_code, keep_code
from exportkit.export.compile.program_weights import ProgramWeights
from exportkit.export.cpu_isas import default_cpu_isa
from exportkit.runtime.cache.prune import cache_items, prune
from tests.export.function_models import CPU, spec_of, traced

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


def keep(folder: Path, made: Program, text: str = "code", key: str = KEY) -> str:
    return keep_code(key, code(folder, made, text), made[1])


def find(folder: Path, made: Program, key: str = KEY) -> Code | None:
    folder.mkdir(exist_ok=True)
    return find_code(key, folder, made[0], CPU)


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


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to(path.with_name("away"))


def change_code(path: Path) -> None:
    content = path.read_bytes()
    assert content.count(b"code") == 1
    path.write_bytes(content.replace(b"code", b"evil"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": change_code,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "open to others": lambda path: path.chmod(0o620),
    "a link": replace_by_link,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "open folder": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_not_used_and_is_replaced(
    damage: Callable[[Path], object], tmp_path: Path, made: Program, entry: Path
) -> None:
    keep(tmp_path / "made", made)
    archive = entry / "code.zip"
    damage(archive)
    assert find(tmp_path / "found", made) is None
    if entry.stat().st_mode & 0o022:
        assert "other users" in keep(tmp_path / "made", made)  # nothing is kept where others can write
        return
    if archive.is_dir():
        archive.rmdir()
    assert keep(tmp_path / "made", made, "again") == ""
    assert find(tmp_path / "found", made) is not None
    assert (tmp_path / "found" / "model.so").read_text() == "again"


def test_an_entry_of_another_user_is_not_used(tmp_path: Path, made: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "made", made)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find(tmp_path / "found", made) is None


def test_nothing_is_kept_where_nothing_can_be_written(
    tmp_path: Path, made: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(compiled_cache, "write_whole", full)
        assert "No space left" in keep(tmp_path / "made", made)
    assert find(tmp_path / "found", made) is None
    monkeypatch.setenv("EXPORTKIT_CACHE", "/proc/nowhere")
    assert keep(tmp_path / "made", made) != ""
    assert find(tmp_path / "found", made) is None


def writer(folder: Path, made: Program, text: str) -> None:
    for _ in range(20):
        assert keep(folder, made, text) == ""


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
        keep(tmp_path / "made", made, "x" * 10_000, key)
        os.utime(cache / key, (1000 + number, 1000 + number))
    assert {path.name[-1] for path in cache.iterdir()} == {"2", "3"}
    assert find(tmp_path / "found", made, key=f"{2:064x}") is not None  # now it was used last
    keep(tmp_path / "made", made, "x" * 10_000)
    assert {path.name for path in cache.iterdir()} == {KEY, f"{2:064x}"}
    monkeypatch.setattr(compiled_cache, "MOST_OF_ONE", 5_000)
    assert keep(tmp_path / "made", made, "x" * 10_000, "cd" * 32) == "it is too large"


def test_the_command_shows_and_removes_entries(
    tmp_path: Path, made: Program, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "made", made)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [(item.kind, item.path, item.in_use) for item in cache_items()] == [("compiled", entry, False)]
    assert [item.kind for item in prune(everything=True).removed] == ["compiled"]
    assert find(tmp_path / "found", made) is None


@pytest.mark.slow
def test_an_export_that_repeats_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa, said = default_cpu_isa(), list[str]()

    def compiled(folder: str, *, value: float = 1.0, cache: bool = True) -> Any:
        found = traced(spec_of(Model(value), torch.rand(3)), cases=1)
        weights = ProgramWeights([method.program for method in found.methods])
        plan = CompilePlan(device=CPU, cpu_isas=[isa], cache=cache)
        return compile_methods(found, tmp_path / folder, plan, isa, weights=weights, progress=said.append)

    first = compiled("first")

    def refused(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError("compiled")

    monkeypatch.setattr(torch._inductor, "aot_compile", refused)
    again = compiled("again")
    assert again.target == first.target
    contents = [
        {name: record if isinstance(record, bytes) else record.read_bytes() for name, record in each.records.items()}
        for each in (first, again)
    ]
    assert contents[0] == contents[1]
    assert said.count("taking the code from the cache") == 1
    with pytest.raises(Exception, match="compiled"):
        compiled("without", cache=False)
    with pytest.raises(Exception, match="compiled"):  # the compiler may compute with any weight
        compiled("others", value=2.0)

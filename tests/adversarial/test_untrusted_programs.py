"""A program is code: what exportkit did not write is read with `--trust` only, and looking at a program runs nothing.

Each program here leaves a mark when torch reads or calls it. The controls show that it does.
"""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.cli import main
from exportkit.export.models.resolve import resolve
from exportkit.package.archive import write_package
from tests.package import samples

Attack = Callable[[Path, str], None]


class Net(torch.nn.Module):
    """Its program has a guard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2)


@functools.cache
def saved() -> bytes:
    file, rows = io.BytesIO(), torch.export.Dim("rows", min=2, max=8)
    torch.export.save(torch.export.export(Net(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: 2 * rows}}), file)
    return file.getvalue()


def write_edited(path: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """Writes the program with one of its records edited."""
    with zipfile.ZipFile(io.BytesIO(saved())) as archive:
        records = {each: archive.read(each) for each in archive.namelist()}
    assert any(each.endswith(name) for each in records)
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in records.items():
            archive.writestr(each, edit(content) if each.endswith(name) else content)


# --- the attacks ------------------------------------------------------------------------------------------------------


class Bomb:
    """Pickled, it runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, (self.command,)


def pickle_of_the_example_inputs(path: Path, command: str) -> None:
    pickled = io.BytesIO()
    torch.save(((Bomb(command),), {}), pickled)
    write_edited(path, "data/sample_inputs/model.pt", lambda _: pickled.getvalue())


def text_of_a_size(path: Path, command: str) -> None:
    """torch evaluates it with sympy."""

    def edit(content: bytes) -> bytes:
        program = json.loads(content)
        sizes = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = f"__import__('os').system('{command}')"
        return json.dumps(program).encode()

    write_edited(path, "models/model.json", edit)


def key_of_an_input(path: Path, command: str) -> None:
    """torch writes it into the source of a function. The file is as torch.export.save writes it."""
    key = f" + str(__import__('os').system('{command}')) + "

    class Keyed(torch.nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return x[key] + 1

    torch.export.save(torch.export.export(Keyed(), ({key: torch.ones(2)},)), path)


attacks = pytest.mark.parametrize(
    "attack", [pickle_of_the_example_inputs, text_of_a_size, key_of_an_input], ids=lambda attack: attack.__name__
)


def packaged(program: Path, path: Path) -> Path:
    """A package that has the file as its program."""
    records = {samples.CASE: samples.RECORDS[samples.CASE], samples.PROGRAM: program.read_bytes()}
    write_package(path, samples.program_manifest(str(torch.__version__)), records)
    return path


# --- files of torch.export.save ---------------------------------------------------------------------------------------


@pytest.mark.process
@attacks
def test_nothing_of_an_untrusted_program_runs(
    attack: Attack, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil, out = tmp_path / "evil.pt2", tmp_path / "out.pt2"
    attack(evil, f"touch {mark}")
    for command in (
        ["export", evil, "--format", "program", "-o", out],
        ["export", evil, "-o", out],
        ["export", evil, "--draft"],
        ["export", evil, "--repair", "-o", out],
    ):
        assert main([str(each) for each in command]) != 0
        said = "".join(capfd.readouterr())
        assert "evil.pt2 was not written by exportkit" in said
        assert "runs what the author of such a file wrote" in said
        assert "If you trust its author, give --trust." in said
    for command in (
        ["verify", evil],
        ["package", evil, "-o", out],
        ["package", evil, "--model-version", "2", "-o", out],
    ):
        assert main([str(each) for each in command]) == 3
        assert "a .pt2 that torch wrote, not exportkit" in "".join(capfd.readouterr())
    assert not mark.exists()
    assert not out.exists()
    main(["export", str(evil), "--format", "program", "--trust", "-o", str(out)])
    assert mark.exists(), f"the attack is none: {capfd.readouterr()}"


def test_with_trust_a_program_is_what_torch_reads(mark: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "program.pt2", tmp_path / "out.pt2"
    path.write_bytes(saved())
    x = torch.randn(6, 3)
    expected = torch.export.load(path).module()(x)
    assert torch.equal(resolve(str(path), trusted=True).spec.model(x), expected)
    assert main(["export", str(path), "--format", "program", "--trust", "-o", str(out)]) == 0
    assert main(["verify", str(out)]) == 0  # what exportkit wrote is a package
    assert main(["export", str(out), "--format", "program", "-o", str(tmp_path / "again.pt2")]) == 0
    assert main(["verify", str(out), "--model", str(path)]) == 2


def test_one_function_reads_programs() -> None:
    root = Path(exportkit.__file__).parent
    readers = [path for path in root.rglob("*.py") if "export.load(" in path.read_text()]
    assert [path.relative_to(root).as_posix() for path in readers] == ["program_reader.py"]


# --- programs in packages ---------------------------------------------------------------------------------------------


@pytest.mark.process
@attacks
def test_looking_at_a_program_runs_nothing(attack: Attack, mark: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.pt2"
    attack(evil, f"touch {mark}")
    package = packaged(evil, tmp_path / "package.pt2")
    page = tmp_path / "page.html"
    assert main(["inspect", str(package)]) == 0
    assert main(["inspect", str(package), "--report", str(page)]) == 0
    assert not mark.exists()

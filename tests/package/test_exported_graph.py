"""The graph of a program is read as torch wrote it, and nothing else is taken for one."""

from __future__ import annotations

import io
import operator
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from exportkit.arr_coc import register
from exportkit.package import exported_graph
from exportkit.package.archive import PackageReader
from exportkit.package.exported_graph import ProgramGraphError, called_operators
from tests.artifacts import artifact
from tests.package.written import document, node, package, program


def operators_in(folder: Path, content: bytes) -> list[str]:
    """What the graph of a package with this program calls."""
    with PackageReader(package(folder / "package.pt2", content)) as reader:
        return called_operators(reader, "forward")


def test_the_nodes_are_those_that_torch_reads(tmp_path: Path) -> None:
    register()
    with PackageReader(artifact("patches-program")) as reader:
        reader.extract("exportkit/program.pt2", tmp_path / "program.pt2")
        read = called_operators(reader, "forward")
    loaded = torch.export.load(tmp_path / "program.pt2")
    calls = [each for each in loaded.graph.nodes if each.op == "call_function" and each.target is not operator.getitem]
    assert [each for each in read if each != "_operator.getitem"] == [_target(each.target) for each in calls]


def _target(target: object) -> str:
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    return f"{'torch' if name.startswith('sym_') else '_operator'}.{name}"


def appended(content: bytes, name: str, data: bytes) -> bytes:
    """The archive with one more file."""
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(name, data)
    return file.getvalue()


class Armed:
    """Ends the test with an error if it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


def test_nothing_is_unpickled(tmp_path: Path):
    content = appended(
        program(document([node("y", "x")])), "archive/data/sample_inputs/model.pt", pickle.dumps(Armed())
    )
    assert operators_in(tmp_path, content) == ["torch.ops.aten.relu.default"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "is not a file of torch.export.save"),
        (program(document([]), "archive/models/deeper/model.json"), "it has 0 programs"),
        (appended(program(document([])), "archive/models/other.json", b"{}"), "it has 2 programs"),
        (program(b"{"), "has no graph in the form that torch writes"),
        (program(b"[" * 100_000), "has no graph in the form that torch writes"),
        (program(b'"\xff"'), "has no graph in the form that torch writes"),
        (program(document([], schema_version={"major": 9, "minor": 0})), "has a program of schema 9.0"),
        (program(document([]))[:-40], "is not a file of torch.export.save"),
    ],
)
def test_what_is_no_program_is_refused(content: bytes, message: str, tmp_path: Path):
    with pytest.raises(ProgramGraphError, match=message):
        operators_in(tmp_path, content)


def test_a_graph_that_unpacks_to_too_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exported_graph, "MAX_BYTES", 1 << 20)
    content = program(b" " * (4 << 20), compression=zipfile.ZIP_DEFLATED)
    assert len(content) < 10_000
    with pytest.raises(ProgramGraphError, match="more than 1 MiB"):
        operators_in(tmp_path, content)


def test_an_archive_with_a_large_directory_is_not_read(tmp_path: Path):
    file = io.BytesIO(program(document([node("y", "x")])))
    assert operators_in(tmp_path, file.getvalue())
    with zipfile.ZipFile(file, "a") as archive:
        for number in range(300):
            archive.writestr(f"archive/{number:060000}", b"")
    with pytest.raises(ProgramGraphError, match="its directory has more than"):
        operators_in(tmp_path, file.getvalue())

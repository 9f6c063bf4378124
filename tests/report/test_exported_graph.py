"""The graph of a program is read as torch wrote it, and nothing else is taken for one."""

from __future__ import annotations

import io
import operator
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

from exportkit.arr_coc import register
from exportkit.errors import NotAnArchiveError
from exportkit.package import exported_graph
from exportkit.package.archive import PackageReader
from exportkit.package.exported_graph import ProgramGraphError, graph_in, graph_of, tensors_in
from exportkit.package.manifest import Manifest
from exportkit.report.graph_data import graph_data, operator_name
from exportkit.report.untrusted import LeftOut
from tests.artifacts import artifact
from tests.report.written import document, node, package, program


@pytest.fixture(scope="module")
def patches() -> Path:
    return artifact("patches-program")


def test_the_nodes_are_those_that_torch_reads_with_their_shapes(patches: Path, tmp_path: Path):
    register()
    with PackageReader(patches) as reader:
        reader.extract("exportkit/program.pt2", tmp_path / "program.pt2")
        read = graph_of(reader)
        manifest = reader.manifest
    assert read is not None
    data = graph_data(read, manifest, LeftOut())
    loaded = torch.export.load(tmp_path / "program.pt2")
    values = {n.name: n.meta["val"] for n in loaded.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    calls = [n for n in loaded.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    shown = [each for each in data["nodes"] if "target" in each]
    assert [each["name"] for each in shown] == [each.name for each in calls]
    assert [each["target"] for each in shown] == [_target(each.target) for each in calls]
    symbols = _symbols(loaded, manifest)
    compared = 0
    for each in data["nodes"]:
        for name, text in each["out"]:
            if name in values:
                dtype, _, sizes = text.partition("[")
                assert dtype == str(values[name].dtype).removeprefix("torch.")
                numbers = [int(size) for size in sympy.sympify(f"[{sizes}", locals=symbols)]
                assert numbers == [
                    int(size.node.hint) if hasattr(size, "node") else size for size in values[name].shape
                ]
                compared += 1
    assert compared > len(calls) / 2
    users = {(source.name, user.name) for source in calls for user in source.users if user in calls}
    names = [each.get("name") for each in data["nodes"]]
    edges = {(names[a], names[b]) for a, b in data["edges"]}
    assert users <= edges


def _target(target: object) -> str:
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    return f"{'torch' if name.startswith('sym_') else '_operator'}.{name}"


def _symbols(loaded: torch.export.ExportedProgram, manifest: Manifest) -> dict[str, Any]:
    """The example's number for each dimension, from the sizes of the example inputs."""
    args, kwargs = loaded.example_inputs
    tensors = torch.utils._pytree.tree_leaves((args, kwargs))
    found: dict[str, Any] = {"min": sympy.Min, "max": sympy.Max}
    for described, tensor in zip(manifest.call.inputs, tensors):
        for size, number in zip(described.shape, tensor.shape):
            if not isinstance(size, int):
                found[size.dimension] = sympy.Integer((number - size.offset) // size.scale)
    return found


def test_an_artifact_and_the_program_inside_of_it_have_one_digest(patches: Path, tmp_path: Path):
    with PackageReader(patches) as reader:
        reader.extract("exportkit/program.pt2", tmp_path / "program.pt2")
    of_artifact, of_torch = graph_in(patches), graph_in(tmp_path / "program.pt2")
    assert of_artifact.sha256 == of_torch.sha256
    assert (of_artifact.manifest is None, of_torch.manifest is None) == (False, True)


class Armed:
    """Ends the test with an error if it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


def test_nothing_is_unpickled(tmp_path: Path):
    path = tmp_path / "program.pt2"
    path.write_bytes(program(document([node("y", "x")])))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/sample_inputs/model.pt", pickle.dumps(Armed()))
    assert [each.name for each in graph_in(path).graph.nodes] == ["y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "is not a file of torch.export.save"),
        (program(document([]), "archive/models/deeper/model.json"), "it has 0 programs"),
        (program(b"{"), "has no graph in the form that torch writes"),
        (program(b"[" * 100_000), "has no graph in the form that torch writes"),
        (program(b'"\xff"'), "has no graph in the form that torch writes"),
        (program(document([], schema_version={"major": 9, "minor": 0})), "has a program of schema 9.0"),
        (program(document([]))[:-40], "is not a file of torch.export.save"),
    ],
)
def test_what_is_no_program_is_refused(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "program.pt2"
    path.write_bytes(content)
    with pytest.raises((ProgramGraphError, NotAnArchiveError)):
        graph_in(path)
    with (
        PackageReader(package(tmp_path / "package.pt2", content)) as reader,
        pytest.raises(ProgramGraphError, match=message),
    ):
        graph_of(reader)


def test_two_programs_in_a_file_are_refused(tmp_path: Path):
    path = tmp_path / "program.pt2"
    path.write_bytes(program(document([])))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/models/other.json", "{}")
    with pytest.raises(ProgramGraphError, match="it has 2 programs"):
        graph_in(path)


def test_a_graph_that_unpacks_to_too_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exported_graph, "MAX_BYTES", 1 << 20)
    path = tmp_path / "program.pt2"
    path.write_bytes(program(b" " * (4 << 20), compression=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 10_000
    with pytest.raises(ProgramGraphError, match="more than 1 MiB"):
        graph_in(path)


def test_an_archive_with_a_large_directory_is_not_read(tmp_path: Path):
    file = io.BytesIO(program(document([node("y", "x")])))
    assert graph_in(package(tmp_path / "small.pt2", file.getvalue())).graph.nodes
    with zipfile.ZipFile(file, "a") as archive:
        for number in range(300):
            archive.writestr(f"archive/{number:060000}", b"")
    with pytest.raises(ProgramGraphError, match="its directory has more than"):
        graph_in(package(tmp_path / "large.pt2", file.getvalue()))


@pytest.mark.parametrize(
    "broken",
    [
        document([node("y", {})]),
        document([node("y", {"as_device": 3})]),
        document([node("y", "x")], ["y"]) | {"graph_module": document([])["graph_module"] | {"signature": {}}},
        document([{**node("y", "x"), "outputs": [{}]}]),
    ],
)
def test_a_graph_of_another_form_is_an_error_of_ours(broken: dict, tmp_path: Path):
    path = tmp_path / "program.pt2"
    path.write_bytes(program(broken))
    with PackageReader(package(tmp_path / "package.pt2")) as reader:
        manifest = reader.manifest
    try:
        graph_data(graph_in(path), manifest, LeftOut())
    except ProgramGraphError:
        return
    assert broken["graph_module"]["graph"]["nodes"][0]["outputs"] == [{}]  # a node without a result is none of ours


def test_values_in_every_kind_of_argument_are_found():
    assert list(tensors_in({"as_tensor": {"name": "a"}})) == ["a"]
    assert list(tensors_in({"as_tensors": [{"name": "a"}, {"name": "b"}]})) == ["a", "b"]
    assert list(tensors_in({"as_optional_tensors": [{"as_tensor": {"name": "a"}}, {"as_none": True}]})) == ["a"]
    assert list(tensors_in({"as_nested_tensors": [[{"name": "a"}], [{"name": "b"}]]})) == ["a", "b"]
    assert list(tensors_in({"as_sym_ints": [{"as_int": 1}, {"as_name": "s"}]})) == ["s"]
    assert list(tensors_in({"as_int": 3})) == list(tensors_in({"as_graph": {"name": "g", "graph": {}}})) == []


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("torch.ops.aten.add.Tensor", "aten::add.Tensor"),
        ("torch.ops.toy.twice.default", "toy::twice"),
        ("torch.ops.higher_order.cond", "higher_order::cond"),
        ("_operator.mul", None),
    ],
)
def test_targets_have_their_operators_names(target: str, name: str | None):
    assert operator_name(target) == name


def test_who_reads_a_value_later_reads_what_an_operator_has_written_to_it(tmp_path: Path):
    writes = {**node("w", target="torch.ops.aten.add_.Tensor"), "outputs": []}
    writes["inputs"] = [{"name": "self", "arg": {"as_tensor": {"name": "t"}}, "kind": 1}]
    path = tmp_path / "program.pt2"
    path.write_bytes(program(document([node("t", "x"), node("before", "t"), writes, node("y", "t")], ["y"])))
    with PackageReader(package(tmp_path / "package.pt2")) as reader:
        data = graph_data(graph_in(path), reader.manifest, LeftOut())
    names = [each.get("name") or each["kind"] for each in data["nodes"]]
    edges = {(names[a], names[b]) for a, b in data["edges"]}
    assert {("t", "w"), ("t", "y"), ("w", "y")} <= edges
    assert ("w", "before") not in edges
    assert ["t", "float32[4]"] in data["nodes"][names.index("w")]["out"]

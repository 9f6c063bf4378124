"""`exportkit diff`: what differs between two packages, and whether that changes an answer or a load."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from exportkit.diff.comparing import compare_artifacts
from exportkit.diff.difference import Comparison
from exportkit.errors import PackageError
from exportkit.export.record.host_copies import elements
from exportkit.libraries import LIBRARY_DIR
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.signing import sign_package
from tests.built import operator_library
from tests.commands import run
from tests.diff.nets import Branching, Longer, Net, Renamed
from tests.package import samples
from tests.package.signers import signer, write_policy
from tests.verify.verify_artifacts import right, write_artifact

X = torch.linspace(-1, 1, 6).reshape(2, 3)
CASE = {"0.input.0": torch.ones(2, 3), "0.output.0": torch.ones(2, 5)}


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """Compares the sample package with one that has other records and manifest keys."""

    def compare(records: Mapping[str, bytes] | None = None, **changes: Any) -> Comparison:
        known = {**samples.RECORDS, samples.CASE: save(CASE)}
        write_package(tmp_path / "a.pt2", samples.manifest(), known)
        changed = {name: content for name, content in {**known, **(records or {})}.items() if content is not None}
        if (call := changes.pop("call", None)) is not None:
            changes["methods"] = (m.PackagedMethod(name="forward", call=call, state=()),)
        write_package(tmp_path / "b.pt2", samples.manifest(**changes), changed)
        return compare_artifacts(tmp_path / "a.pt2", tmp_path / "b.pt2")

    return compare


def found(comparison: Comparison) -> set[tuple[str, str, str | None]]:
    """What differs, but for sizes."""
    return {(each.part, each.what, each.effect) for each in comparison.differences if each.part != "sizes"}


# --- manifests and records --------------------------------------------------------------------------------------------


def test_a_package_is_the_same_as_itself(compared: Any) -> None:
    comparison = compared()
    assert comparison.same
    assert comparison.differences == comparison.notes == ()


CALL = samples.manifest().call
KEYWORD = msgspec.structs.replace(CALL.parameters[0], kind="keyword")
LIBRARY = samples.manifest().libraries[0]
OPERATOR = m.Operator(name="toy::twice", schema="toy::twice(Tensor x, int n=1) -> Tensor")
CHANGES: list[tuple[dict[str, Any], set[tuple[str, str, str | None]]]] = [
    ({"name": "other"}, {("package", "name", None)}),
    ({"version": "2"}, {("package", "version", None)}),
    (
        {"call": msgspec.structs.replace(CALL, dimensions=(m.Dimension(name="batch", min=1, max=65),))},
        {("call", "dimension batch", "answer")},
    ),
    (
        {"call": msgspec.structs.replace(CALL, inputs=(msgspec.structs.replace(CALL.inputs[0], dtype="float16"),))},
        {("call", "input image", "answer")},
    ),
    (
        {
            "call": msgspec.structs.replace(
                CALL,
                outputs=(msgspec.structs.replace(CALL.outputs[0], tolerance=m.OutputTolerance(rtol=1e-3, atol=1e-6)),),
            )
        },
        {("call", "output scores: tolerance", None)},
    ),
    (
        {"call": msgspec.structs.replace(CALL, parameters=(KEYWORD,))},
        {("call", "parameter image: kind", "answer")},
    ),
    ({"targets": (samples.target(cpu_isa="x86-64-v4"),)}, {("targets", "cpu_v3: cpu_isa", "load")}),
    ({"targets": (samples.target(built_with_torch="2.14.0"),)}, {("targets", "cpu_v3: built_with_torch", None)}),
    (
        {"targets": (samples.target(constants={"forward": {}}),)},
        {("targets", "cpu_v3: constant head.weight", "answer")},
    ),
    (
        {"libraries": (msgspec.structs.replace(LIBRARY, torch_bound="2.13", needs=()),)},
        {
            ("libraries", "linux-x86_64/libtoy_cpu.so: torch_bound", "load"),
            ("libraries", "linux-x86_64/libtoy_cpu.so: needs", "load"),
        },
    ),
    (
        {"operators": (OPERATOR,), "libraries": (msgspec.structs.replace(LIBRARY, defines=(OPERATOR,)),)},
        {
            ("operators", "toy::twice", "load"),
            ("libraries", "linux-x86_64/libtoy_cpu.so: defines toy::twice", "load"),
        },
    ),
    ({"weights": (samples.weight(aliases=()),)}, {("weights", "tied.weight", "answer")}),
    (
        {"provenance": m.Provenance(exportkit="9", torch="2.13.0", commit=None, dirty=None, tf32=False)},
        {("provenance", "exportkit", None)},
    ),
    (
        {"source": m.Source(model="toy:spec", model_kwargs={"depth": 2}, dtype=None, seed=0, state_sha256="0" * 64)},
        {("source", "model_kwargs", None)},
    ),
    (
        {"cases": (m.Case(record=samples.CASE, calls=(m.CaseCall(method="forward", sizes={"batch": 3}),)),)},
        {("cases", "case 0: calls", None)},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_what_differs_is_named_and_what_it_changes(
    compared: Any, changes: dict[str, Any], expected: set[tuple[str, str, str | None]]
) -> None:
    comparison = compared(**changes)
    assert found(comparison) == expected
    assert comparison.same == all(effect is None for _, _, effect in expected)


def test_another_build_of_the_code_or_of_a_library_may_change_answers(compared: Any) -> None:
    comparison = compared({samples.CODE: b"\x7fELF another build"})
    assert found(comparison) == {("targets", "cpu_v3: file model.wrapper.so", "answer")}
    other = b"\x7fELF operator library 2"
    library = msgspec.structs.replace(LIBRARY, sha256=hashlib.sha256(other).hexdigest())
    comparison = compared({samples.LIBRARY: other}, libraries=(library,))
    assert found(comparison) == {("libraries", "linux-x86_64/libtoy_cpu.so: sha256", "answer")}


def test_the_symbols_that_libraries_need_are_compared(tmp_path: Path) -> None:
    ours = operator_library("cpu")
    bare = LIBRARY_DIR / "libexportkit_package.so"  # a shared library that needs nothing of torch
    for name, path in (("a", ours), ("b", bare)):
        library = msgspec.structs.replace(LIBRARY, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        records = {**samples.RECORDS, samples.LIBRARY: path}
        write_package(tmp_path / f"{name}.pt2", samples.manifest(libraries=(library,)), records)
    comparison = compare_artifacts(tmp_path / "a.pt2", tmp_path / "b.pt2")
    (symbols,) = (each for each in comparison.differences if each.what.endswith("symbols of torch"))
    assert symbols.b == "0"
    assert int(symbols.a or 0) > 3
    assert "only A needs aoti_torch" in str(symbols.note)
    assert symbols.effect == "load"


def test_weights_are_compared_by_name_and_by_value(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)

    def package(name: str, tensor: torch.Tensor) -> Path:
        content = bytes(elements(tensor))
        record = f"data/weights/{hashlib.sha256(content).hexdigest()}"
        weight = samples.weight(record=record, strides=tuple(tensor.stride()))
        records = {each: data for each, data in samples.RECORDS.items() if each != samples.WEIGHT} | {record: content}
        write_package(tmp_path / name, samples.manifest(weights=(weight,)), records)
        return tmp_path / name

    plain = package("plain.pt2", values)
    # The same values in another order of memory are other bytes, but the same weight.
    turned = package("turned.pt2", values.t().contiguous().t())
    assert found(compare_artifacts(plain, turned)) == set()
    changed = values.clone()
    changed[1, 0] -= 0.25
    for other in (changed, changed.t().contiguous().t()):
        comparison = compare_artifacts(plain, package("changed.pt2", other))
        # Both names of a tied weight.
        assert [(each.what, each.max_abs) for each in comparison.differences if each.part == "weights"] == [
            ("head.weight", 0.25),
            ("tied.weight", 0.25),
        ]
        assert not comparison.same


def test_cases_are_compared_tensor_by_tensor_and_do_not_count(compared: Any) -> None:
    other = {**CASE, "0.output.0": torch.full((2, 5), 1.5)}
    comparison = compared({samples.CASE: save(other)})
    assert [(each.what, each.max_abs) for each in comparison.differences if each.part == "cases"] == [
        ("case 0: output scores", 0.5)
    ]
    assert comparison.same
    comparison = compared({samples.CASE: b"no tensors"})
    (unread,) = (each for each in comparison.differences if each.part == "cases")
    assert str(unread.note).startswith("it is not a safetensors file")
    assert found(compared({samples.CASE: None}, cases=())) == {("cases", "case 0", None)}


def test_signatures_are_shown_and_do_not_count(compared: Any, tmp_path: Path) -> None:
    compared()
    sign_package(tmp_path / "b.pt2", signer(tmp_path).key)
    comparison = compare_artifacts(tmp_path / "a.pt2", tmp_path / "b.pt2")
    assert found(comparison) == {("signatures", "keys", None)}
    assert comparison.same


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts with a program, by name."""
    folder = tmp_path_factory.mktemp("nets")
    models = {
        "net": Net(),
        "renamed": Renamed(),
        "biased": Net(bias=0.75),
        "factor": Net(factor=3.0),
        "longer": Longer(),
        "branching": Branching(),
        "other-branch": Branching(factor=3.0),
    }
    return {name: write_artifact(folder / f"{name}.pt2", model, [(X, right(X))]) for name, model in models.items()}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("net", "renamed", set()),
        ("branching", "branching", set()),
        ("net", "biased", {("weights", "bias", "answer")}),
        ("net", "factor", {("graph", "first difference, node 2", "answer")}),
        (
            "net",
            "longer",
            {
                ("graph", "nodes of aten.exp.default", "answer"),
                ("graph", "first difference, node 2", "answer"),
                ("graph", "inputs and outputs", "answer"),
            },
        ),
        ("branching", "other-branch", {("graph", "first difference, node 3", "answer")}),
    ],
)
def test_graphs_are_compared_by_what_they_compute(
    nets: dict[str, Path], a: str, b: str, expected: set[tuple[str, str, str]]
) -> None:
    comparison = compare_artifacts(nets[a], nets[b])
    assert found(comparison) == expected | ({("graph", "sha256", None)} if a != b else set())
    assert comparison.same == (not expected)


def test_the_first_difference_names_nodes_and_lines(nets: dict[str, Path]) -> None:
    differences = compare_artifacts(nets["net"], nets["longer"]).differences
    (first,) = (each for each in differences if each.what.startswith("first"))
    assert str(first.a).startswith("aten.mul.Tensor (mul, nets.py:")
    assert str(first.b).startswith("aten.exp.default (exp, nets.py:")


def _archive(entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


CONFIG = b'{"config": {}}'
OTHERS = {"p/data/weights/model_weights_config.json": CONFIG, "p/data/constants/model_constants_config.json": CONFIG}


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"PK\x03\x04 not an archive",
        _archive({}),
        _archive({"p/models/model.json": b"[" * 100_000, **OTHERS}),
        _archive({"p/models/model.json": b"{}", **OTHERS}),
        _archive({"p/models/model.json": b'{"graph_module": 1}', **OTHERS}),
        _archive({"p/models/model.json": b"{}" + b" " * 10**6, **OTHERS}, zipfile.ZIP_DEFLATED),
        _archive({"p/models/model.json": b"\xff\xfe", **OTHERS}),
        _archive(
            {
                "p/models/model.json": b"{}",
                **OTHERS,
                "p/data/weights/model_weights_config.json": b'{"config": {"w": {"path_name": "../x"}}}',
            }
        ),
    ],
)
def test_a_program_that_cannot_be_read_is_compared_by_its_digest(
    nets: dict[str, Path], tmp_path: Path, program: bytes
) -> None:
    with PackageReader(nets["net"]) as reader:
        manifest = reader.manifest
        assert manifest.program is not None
        records = {manifest.program.records["forward"]: program, manifest.cases[0].record: save({"0.input.0": X})}
        write_package(tmp_path / "bad.pt2", reader.manifest, records)
    comparison = compare_artifacts(nets["net"], tmp_path / "bad.pt2")
    assert ("graph", "sha256", "answer") in found(comparison)
    assert any(note.startswith("B: the graph cannot be read") for note in comparison.notes)


@pytest.fixture(scope="module")
def program(nets: dict[str, Path]) -> bytes:
    """The record of a program, uncompressed: its JSON can be changed in place."""
    with PackageReader(nets["branching"]) as reader:
        assert reader.manifest.program is not None
        return reader.read(reader.manifest.program.records["forward"])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("unpickled",)


def _hostile(entries: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    torch.save(Hostile(), buffer)
    (name,) = (each for each in entries if each.endswith("data/sample_inputs/model.pt"))
    entries[name] = buffer.getvalue()


def _more(entries: dict[str, bytes]) -> None:
    entries[f"{next(iter(entries)).partition('/')[0]}/data/sample_inputs/other.pt"] = b"cprint\n."


def _pickled_weight(entries: dict[str, bytes]) -> None:
    (name,) = (each for each in entries if each.endswith("model_weights_config.json"))
    entries[name] = entries[name].replace(b'"use_pickle": false', b'"use_pickle": true')


@pytest.mark.parametrize("change", [_hostile, _more, _pickled_weight])
def test_what_a_program_unpickles_counts(
    nets: dict[str, Path], program: bytes, tmp_path: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with PackageReader(nets["branching"]) as reader:
        manifest, case = reader.manifest, reader.manifest.cases[0].record
        assert manifest.program is not None
        records = {manifest.program.records["forward"]: _archive(entries), case: reader.read(case)}
        write_package(tmp_path / "changed.pt2", manifest, records)
    code, out, _ = run(capsys, "diff", nets["branching"], tmp_path / "changed.pt2", "--json")
    assert code == 1
    assert {each["effect"] for each in json.loads(out)["differences"] if each["part"] == "graph"} == {"load", None}
    assert "unpickled" not in out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 1),
    old=st.sampled_from([b'"', b"[", b"{", b"1", b"3", b"as_int", b"name"]),
    new=st.binary(max_size=6),
)
def test_no_program_crashes_the_comparison(
    nets: dict[str, Path], program: bytes, tmp_path: Path, place: float, old: bytes, new: bytes
) -> None:
    at = program.find(old, int(place * len(program)))
    fill = new.ljust(len(old), b"9")[: len(old)]
    changed = program[:at] + fill + program[at + len(old) :] if at >= 0 else program
    with PackageReader(nets["branching"]) as reader:
        manifest = reader.manifest
        assert manifest.program is not None
        records = {manifest.program.records["forward"]: changed, manifest.cases[0].record: save({"0.input.0": X})}
        write_package(tmp_path / "bad.pt2", manifest, records)
    # It says what differs, or that a file was changed: any other error fails the test.
    with contextlib.suppress(PackageError):
        compare_artifacts(nets["branching"], tmp_path / "bad.pt2")


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_neither_imports_torch_nor_runs_anything(nets: dict[str, Path]) -> None:
    code = f"import sys; from exportkit.cli import main; main(['diff', {str(nets['net'])!r}, {str(nets['biased'])!r}])"
    code += "; print([name for name in ('torch', 'exportkit.runtime.loader') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_exit_code_is_that_of_diff(
    nets: dict[str, Path], compared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "diff", nets["net"], nets["renamed"])
    assert (code, out.splitlines()[-1].partition(" ")[0]) == (0, "same")
    code, out, _ = run(capsys, "diff", nets["net"], nets["biased"], "--json")
    document = json.loads(out)
    assert code == 1
    assert not document["same"]
    assert [each["max_abs"] for each in document["differences"] if each["part"] == "weights"] == [0.25]
    code, out, _ = run(capsys, "diff", nets["net"], nets["biased"])
    assert "DIFFERENT" in out
    assert "greatest absolute difference 0.25" in out
    (tmp_path / "bad.pt2").write_bytes(b"not a package")
    assert run(capsys, "diff", nets["net"], tmp_path / "bad.pt2")[0] == 3
    assert run(capsys, "diff", nets["net"], tmp_path / "none.pt2")[0] == 2


@pytest.mark.process
def test_run_compares_the_answers_to_all_recorded_cases(
    nets: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "diff", nets["net"], nets["renamed"], "--run", "--json")
    answers = json.loads(out)["answers"]
    # Both have the same case, which is run once.
    assert [check["same"] for check in answers["checks"]] == [True]
    assert code == 0
    code, out, _ = run(capsys, "diff", nets["net"], nets["biased"], "--run", "--json")
    (check,) = json.loads(out)["answers"]["checks"]
    assert (code, check["same"], check["b"]["kind"], check["a"]["kind"]) == (1, False, "mismatch", "mismatch")
    assert "elements differ" in check["message"]


def test_a_policy_holds_for_what_is_run_and_not_for_what_is_read(
    nets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", key.public)))
    assert run(capsys, "diff", nets["net"], nets["renamed"])[0] == 0
    code, _, err = run(capsys, "diff", nets["net"], nets["renamed"], "--run")
    assert code == 3
    assert "signature" in err

"""`exportkit diff`: what differs between two artifacts, and whether that changes an answer or a load."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from exportkit.export.record.host_copies import elements
from exportkit.inspect.comparing import Comparison, compare_artifacts
from exportkit.onnx.files import sidecar_path
from exportkit.package import manifest as m
from exportkit.package.archive import write_package
from tests.commands import run
from tests.onnx.small_models import write_small
from tests.package import samples, stateful_samples
from tests.package.signers import signer, write_policy
from tests.verify.verify_artifacts import right, write_artifact


class Net(torch.nn.Module):
    def __init__(self, *, bias: float = 0.5) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((3,), bias))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x + self.bias) * 2, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


X = torch.linspace(-1, 1, 6).reshape(2, 3)
Found = set[tuple[str, str, str | None]]


def found(comparison: Comparison) -> Found:
    return {(each.part, each.what, each.effect) for each in comparison.differences}


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """Compares a sample package with one that has other records and manifest keys."""

    def compare(records: Mapping[str, bytes | None] | None = None, of: Any = samples, **changes: Any) -> Comparison:
        write_package(tmp_path / "a.pt2", of.manifest(), of.RECORDS)
        changed = {name: data for name, data in {**of.RECORDS, **(records or {})}.items() if data is not None}
        if (call := changes.pop("call", None)) is not None:
            changes["methods"] = (m.PackagedMethod(name="forward", call=call, state=()),)
        write_package(tmp_path / "b.pt2", of.manifest(**changes), changed)
        return compare_artifacts(tmp_path / "a.pt2", tmp_path / "b.pt2")

    return compare


@pytest.mark.parametrize("of", [samples, stateful_samples])
def test_a_package_is_the_same_as_itself(compared: Any, of: Any) -> None:
    comparison = compared(of=of)
    assert comparison.same
    assert comparison.differences == ()


CALL = samples.manifest().call
LIBRARY = samples.manifest().libraries[0]
PLACE = "linux-x86_64/libtoy_cpu.so"
OPERATOR = m.Operator(name="toy::twice", schema="toy::twice(Tensor x, int n=1) -> Tensor")
LOOSE = m.OutputTolerance(rtol=1e-3, atol=1e-6)
replaced = msgspec.structs.replace
CHANGES: list[tuple[dict[str, Any], Found]] = [
    ({"name": "other"}, {("package", "name", None)}),
    ({"version": "2"}, {("package", "version", None)}),
    (
        {"call": replaced(CALL, dimensions=(m.Dimension(name="batch", min=1, max=65),))},
        {("methods", "forward.call.dimensions.batch.max", "answer")},
    ),
    (
        {"call": replaced(CALL, inputs=(replaced(CALL.inputs[0], dtype="float16"),))},
        {("methods", "forward.call.inputs.image.type", "answer")},
    ),
    (
        {"call": replaced(CALL, outputs=(replaced(CALL.outputs[0], tolerance=LOOSE),))},
        {("methods", "forward.call.outputs.scores.tolerance.rtol", None)},
    ),
    (
        {"call": replaced(CALL, parameters=(replaced(CALL.parameters[0], kind="keyword"),))},
        {("methods", "forward.call.parameters.image.kind", "answer")},
    ),
    ({"targets": (samples.target(cpu_isa="x86-64-v4"),)}, {("targets", "cpu_v3.cpu_isa", "load")}),
    ({"targets": (samples.target(built_with_torch="2.14.0"),)}, {("targets", "cpu_v3.built_with_torch", None)}),
    (
        {"targets": (samples.target(constants={"forward": {}}),)},
        {("targets", "cpu_v3.constants.forward.head.weight", "answer")},
    ),
    (
        {"libraries": (replaced(LIBRARY, torch_bound="2.13", needs=()),)},
        {("libraries", f"{PLACE}.torch_bound", "load"), ("libraries", f"{PLACE}.needs", "load")},
    ),
    (
        {"operators": (OPERATOR,), "libraries": (replaced(LIBRARY, defines=(OPERATOR,)),)},
        {("operators", "toy::twice.schema", "load"), ("libraries", f"{PLACE}.defines.toy::twice.schema", "load")},
    ),
    ({"weights": (samples.weight(aliases=()),)}, {("weights", "tied.weight", "answer")}),
    (
        {"provenance": m.Provenance(exportkit="9", torch="2.13.0", commit=None, dirty=None, tf32=False)},
        {("provenance", "exportkit", None)},
    ),
    (
        {"cases": (m.Case(record=samples.CASE, calls=(m.CaseCall(method="forward", sizes={"batch": 3}),)),)},
        {("cases", "case 0", None)},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_what_differs_is_named_and_what_it_changes(compared: Any, changes: dict[str, Any], expected: Found) -> None:
    comparison = compared(**changes)
    assert found(comparison) == expected
    assert comparison.same == all(effect is None for _, _, effect in expected)


def test_another_build_of_the_code_or_of_a_library_may_change_answers(compared: Any) -> None:
    other = b"\x7fELF another build"
    assert found(compared({samples.CODE: other})) == {("code", "cpu_v3/model.wrapper.so", "answer")}
    library = replaced(LIBRARY, sha256=hashlib.sha256(other).hexdigest())
    comparison = compared({samples.LIBRARY: other}, libraries=(library,))
    assert found(comparison) == {("libraries", f"{PLACE}.sha256", "answer")}


def test_recorded_cases_are_shown_and_do_not_count(compared: Any) -> None:
    for comparison in (compared({samples.CASE: save({"other": X})}), compared({samples.CASE: None}, cases=())):
        assert found(comparison) == {("cases", "case 0", None)}
        assert comparison.same


def test_weights_are_compared_by_name_and_by_value(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)

    def package(name: str, tensor: torch.Tensor) -> Path:
        content = bytes(elements(tensor))
        record = f"data/weights/{hashlib.sha256(content).hexdigest()}"
        weight = samples.weight(record=record, strides=tuple(tensor.stride()))
        records = {each: data for each, data in samples.RECORDS.items() if each != samples.WEIGHT} | {record: content}
        write_package(tmp_path / name, samples.manifest(weights=(weight,)), records)
        return tmp_path / name

    changed = values.clone()
    changed[1, 0] -= 0.25
    comparison = compare_artifacts(package("a.pt2", values), package("b.pt2", changed))
    # Both names of a tied weight.
    assert [(each.what, each.max_abs) for each in comparison.differences] == [
        ("head.weight", 0.25),
        ("tied.weight", 0.25),
    ]
    assert not comparison.same


def test_what_sessions_begin_with_is_compared(compared: Any) -> None:
    row = np.arange(4, dtype=np.float32)
    row[2] += 0.25
    record = f"exportkit/state/{hashlib.sha256(row.tobytes()).hexdigest()}"
    cache, step = stateful_samples.state()

    def differences(records: dict[str, bytes], initial: str | None) -> list[tuple[str, str, float | None]]:
        state = (replaced(cache, initial=initial), step)
        comparison = compared({stateful_samples.INITIAL: None, **records}, stateful_samples, state=state)
        return [(each.part, each.what, each.max_abs) for each in comparison.differences]

    assert differences({record: row.tobytes()}, record) == [("state", "cache.keys", 0.25)]
    assert differences({}, None) == [("state", "cache.keys", 3.0)]


def test_what_methods_do_with_state_is_compared(compared: Any) -> None:
    plain, decode = stateful_samples.manifest().methods
    uses = (decode.state[0], replaced(decode.state[1], written=False))
    comparison = compared(of=stateful_samples, methods=(plain, replaced(decode, state=uses)))
    assert found(comparison) == {("methods", "decode.state.1.written", "answer")}


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts with a program, by name."""
    folder = tmp_path_factory.mktemp("nets")
    models = {"net": Net(), "biased": Net(bias=0.75)}
    return {name: write_artifact(folder / f"{name}.pt2", model, [(X, right(X))]) for name, model in models.items()}


def test_programs_are_compared_by_their_bytes(nets: dict[str, Path]) -> None:
    assert found(compare_artifacts(nets["net"], nets["biased"])) == {("program", "forward", "answer")}


def test_onnx_models_are_compared_by_their_digests(tmp_path: Path) -> None:
    models = [tmp_path / name / "model.onnx" for name in ("a", "b")]
    for model, threshold in zip(models, (0, 2**40)):
        model.parent.mkdir()
        write_small(model, data_threshold=threshold)
    assert compare_artifacts(models[0], sidecar_path(models[0])).same
    assert ("onnx", "0.sha256", "answer") in found(compare_artifacts(*models))


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_neither_imports_torch_nor_runs_anything(nets: dict[str, Path]) -> None:
    code = f"import sys; from exportkit.cli import main; main(['diff', {str(nets['net'])!r}, {str(nets['biased'])!r}])"
    code += "; print([name for name in ('torch', 'exportkit.runtime.loader') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_exit_code_is_that_of_diff(
    nets: dict[str, Path], compared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "diff", nets["net"], nets["net"])
    assert (code, out.splitlines()[-1].partition(" ")[0]) == (0, "same")
    zeros = bytes(len(samples.RECORDS[samples.WEIGHT]))
    record = f"data/weights/{hashlib.sha256(zeros).hexdigest()}"
    compared({samples.WEIGHT: None, record: zeros}, weights=(samples.weight(record=record),))
    code, out, _ = run(capsys, "diff", tmp_path / "a.pt2", tmp_path / "b.pt2")
    assert code == 1
    assert "head.weight  greatest absolute difference" in out
    assert "DIFFERENT (differences that change an answer or a load: 2" in out
    code, out, _ = run(capsys, "diff", tmp_path / "a.pt2", tmp_path / "b.pt2", "--json")
    assert (code, json.loads(out)["same"]) == (1, False)
    (tmp_path / "bad.pt2").write_bytes(b"not a package")
    assert run(capsys, "diff", nets["net"], tmp_path / "bad.pt2")[0] == 3
    assert run(capsys, "diff", nets["net"], tmp_path / "none.pt2")[0] == 2


def test_a_policy_does_not_hold_for_what_is_read(
    nets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", key.public)))
    assert run(capsys, "diff", nets["net"], nets["net"])[0] == 0

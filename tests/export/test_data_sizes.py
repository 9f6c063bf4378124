"""Sizes that depend on data, and sizes of 0: a package answers for 0, 1, 2 and all, or is refused at export."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from safetensors.torch import load as load_tensors

from exportkit import load
from exportkit.errors import ExportError, RefusedValueError
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.trace import trace
from exportkit.export.trace.traced import Traced
from exportkit.libraries import load_library
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.spec import ExportSpec
from exportkit.verify.options import VerifyOptions
from tests.artifacts import ROOT, artifact
from tests.fixtures import stable_library

SOURCE = ROOT / "tests" / "export" / "kept_rows.cpp"


@pytest.fixture(scope="module")
def models() -> ModuleType:
    load_library(stable_library.build(SOURCE))
    return importlib.import_module("tests.export.kept_models")


def traced(spec, said: list[str] | None = None) -> Traced:
    model = EagerModel(spec, name="kept", model_kwargs={}, seed=0)
    return trace(model, TraceOptions(), torch.device("cpu"), (said if said is not None else []).append)


@pytest.mark.parametrize(("name", "least"), [pytest.param("keep-of-two", 2, marks=pytest.mark.slow), ("keep-any", 0)])
def test_a_package_answers_for_none_one_two_and_all_rows(name, least, models, tmp_path):
    eager = ReferenceModel(op_libraries=[stable_library.build(SOURCE)])
    options = PackOptions(VerifyOptions(against="cases", device="cpu", eager=eager), verify=True)
    _, report = build_package([artifact(name)], tmp_path / "kept.pt2", options)
    assert report is not None
    assert report.exit_code == 0
    with load(tmp_path / "kept.pt2") as model:
        for count in (0, 1, 2, 3, 33, 100):
            for kept in {0, 1, 2, count} if count >= least else ():
                if kept > count:
                    continue
                rows = torch.randn(count, 4)
                rows[:, 0] = torch.arange(count).clamp(max=max(kept - 1, 0))
                answer = model(rows, torch.full((count,), 1.0 if kept else -1.0))
                torch.testing.assert_close(answer, models.uses(rows[:kept], rows), equal_nan=True, rtol=1e-4, atol=1e-4)


class Extremes(torch.nn.Module):
    """The greatest and the least of the rows that it chooses."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = rows[rows[:, 0] > 0]
        return chosen.max(), -chosen.min(), chosen.softmax(0).sum(0)


def test_what_has_no_result_for_no_rows_is_refused_as_eager_refuses_it(tmp_path):
    rows = torch.rand(5, 4)
    spec = ExportSpec(Extremes(), (rows,), dynamic_shapes={"rows": {0: "n[1:9]"}})
    export_aoti(EagerModel(spec), tmp_path / "extremes.pt2")
    with load(tmp_path / "extremes.pt2") as model:
        torch.testing.assert_close(model(rows), spec.model(rows))
        with pytest.raises(RuntimeError, match="numel\\(\\) == 0"):
            spec.model(-rows)
        with pytest.raises(RefusedValueError, match=r"(max|min)\(\) of no elements"):
            model(-rows)


def test_cases_have_none_one_two_and_all_rows(models):
    found = [
        (case.calls[0].sizes["n"], len(load_tensors(case.tensors)["0.output.0"]))
        for case in traced(models.spec(models.Rows(), 0)).cases
        if case.edge_case
    ]
    largest = max(rows for rows, _ in found)
    assert {(largest, kept) for kept in (0, 1, 2, largest)} <= {*found}


def test_a_least_size_that_the_kernel_does_not_keep_to_is_refused_at_export(models):
    with pytest.raises(
        ExportError, match=r"refuses, at n=\d+, what eager answers: it was traced for u0 >= 2"
    ) as caught:
        traced(models.spec(models.KeepTwo(), 2))
    assert "u0 is what kept_rows.keep_two.default finds at kept_models.py:" in caught.value.message
    assert "new_dynamic_size(min=0)" in str(caught.value.hint)


@pytest.mark.parametrize("wide", [False, True], ids=["in float32", "in the float64 of the reference"])
def test_values_that_end_the_process_are_left_out(wide, models):
    said: list[str] = []
    cases = traced(models.spec(models.Fragile(wide), 2), said).cases
    assert any("that end eager's process" in line for line in said)
    assert any(case.edge_case for case in cases)
    assert not any("NaN in rows" in case.edge_case for case in cases)

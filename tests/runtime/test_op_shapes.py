"""Operators with every kind of argument and result, from the model to a package that answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportkit import load
from exportkit.errors import NoTargetError
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from tests.artifacts import PASSES_DTYPES, ROOT, artifact, runs_op_shapes
from tests.fixtures import stable_library


def _options(verify: bool) -> PackOptions:
    library = stable_library.build(ROOT / "tests" / "export" / "op_shapes.cpp")
    eager = ReferenceModel(op_libraries=[library])
    return PackOptions(VerifyOptions(against="cases", device="cpu", eager=eager), verify=verify)


@pytest.mark.skipif(PASSES_DTYPES, reason="torch 2.12 and newer pass the dtype")
def test_a_torch_that_passes_other_dtypes_to_operators_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "shapes.pt2"
    build_package([artifact("op-shapes")], package, _options(verify=False))
    with pytest.raises(NoTargetError, match=r"it needs torch 2\.12 or newer, this is 2\.11"):
        load(package)


@runs_op_shapes
def test_operators_of_every_shape_are_packaged_and_compute_what_they_are_named_after(tmp_path: Path) -> None:
    package = tmp_path / "shapes.pt2"
    manifest, report = build_package([artifact("op-shapes")], package, _options(verify=True))
    assert report is not None
    assert report.exit_code == 0
    assert {operator.name.removeprefix("op_shapes::") for operator in manifest.operators} == {
        "add_out", "twice_", "scaled", "scaled.Tensor", "sum_of", "halves", "filled", "negated", "positive"
    }  # fmt: skip
    x = torch.randn(7, 3)
    expected = {
        "total": 2 * x + 1,
        "doubled": 2 * x,
        "number": 3 * x,
        "tensor": 5 * x,
        "sum": 6.5 * x,
        "filled": torch.ones(7, 3, dtype=torch.int64),
        "like": torch.zeros(7, 3),
        "minus": -x,
        "positive": x.relu().sum(),
        "added": torch.cat([2 * x[:1].bfloat16(), x[1:].bfloat16()]),
    }
    with load(package) as model:
        torch.testing.assert_close(model(x), expected)

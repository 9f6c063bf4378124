"""ONNX Runtime is timed beside a package, and only if it answers the same."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import onnx
import onnx_ir
import pytest

from exportkit.bench.tables import table
from exportkit.errors import SignatureMissingError, UsageError, WrongResultError
from exportkit.onnx.files import MethodModel, sidecar_path, write_onnx
from exportkit.package.archive import PackageReader
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from tests.bench import test_packages
from tests.onnx.small_models import OPSET, write_small
from tests.package.signers import signer

bench = functools.partial(test_packages.bench, against=[])


def flat(factor: float = 2) -> onnx.ModelProto:
    """tests.runtime.tiny.Flat: tensors in, tensors out."""
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {OPSET}]>
        tiny (float[batch, 3, height, 8] image, float[batch, 5] features, float[5] offset)
            => (float[batch, 3] mean, float[batch, 3, height, 8] doubled, float[batch, 5] rest) {{
            space = Constant <value_ints = [2, 3]> ()
            last = Constant <value_ints = [1]> ()
            three = Constant <value_float = 3.0> ()
            factor = Constant <value_float = {float(factor)}> ()
            pooled = ReduceMean <keepdims = 0> (image, space)
            summed = ReduceSum (features, last)
            sum = Add (pooled, summed)
            mean = Mul (sum, three)
            doubled = Mul (image, factor)
            rest = Add (features, offset)
        }}
    """)


def beside(package: Path, out: Path, factor: float = 2) -> Path:
    """An ONNX model with the package's call and cases."""
    with PackageReader(package) as reader:
        manifest = msgspec.structs.replace(reader.manifest, targets=())
        cases = {case.record: reader.read(case.record) for case in manifest.cases}
    write_onnx(out, [MethodModel(onnx_ir.serde.deserialize_model(flat(factor)))], manifest, cases, opset=OPSET)
    return out


def test_it_is_timed_on_the_inputs_of_the_package(tiny_package: Path, tmp_path: Path) -> None:
    rows = bench(tiny_package, onnx=beside(tiny_package, tmp_path / "tiny.onnx"))
    assert len(rows) == 2
    for row in rows:
        assert [measurement.name for measurement in row.measurements] == ["exportkit", "onnxruntime"]
        assert all(measurement.call.median > 0 for measurement in row.measurements)
        assert row.get("onnxruntime").load_ms > 0
        assert f"opset {OPSET}" in row.get("onnxruntime").what
    assert "ONNX Runtime ms" in table(rows)


def test_another_answer_is_refused_and_not_timed(tiny_package: Path, tmp_path: Path) -> None:
    wrong = beside(tiny_package, tmp_path / "tiny.onnx", factor=2.001)
    with pytest.raises(WrongResultError, match=r"onnxruntime differ from eager's(?s:.*)regions\.doubled"):
        bench(tiny_package, onnx=wrong)


def test_another_call_is_refused(tiny_package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="different inputs or outputs"):
        bench(tiny_package, onnx=write_small(tmp_path / "small.onnx"))


def test_both_must_be_signed_where_a_key_is_given(tiny_package: Path, tmp_path: Path) -> None:
    package, release = tmp_path / "tiny.pt2", signer(tmp_path)
    package.write_bytes(tiny_package.read_bytes())
    model = beside(package, tmp_path / "tiny.onnx")
    sign_package(package, release.key)
    with pytest.raises(SignatureMissingError, match=r"tiny\.onnx\.exportkit"):
        bench(package, onnx=model, trust=Trust([release.public]))
    sign_package(sidecar_path(model), release.key)
    assert bench(package, onnx=model, trust=Trust([release.public]))

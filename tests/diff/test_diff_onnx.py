"""`exportkit diff` of two ONNX models."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import onnx
import pytest
from onnx import numpy_helper

from exportkit.diff.comparing import compare_artifacts
from exportkit.onnx.files import sidecar_path
from exportkit.package.archive import PackageReader, write_package
from tests.diff.test_diff import found
from tests.onnx.small_models import write_small


def test_onnx_models_are_compared_by_their_graphs_and_initializers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_small(tmp_path / name / "model.onnx", data_threshold=0 if name == "a" else 2**40)
    one, other = tmp_path / "a" / "model.onnx", tmp_path / "b" / "model.onnx"
    # The same tensors, in a file beside the model and inside the model.
    assert found(compare_artifacts(one, other)) == {("graph", "sha256", None)}
    proto = onnx.load(other)
    tensor = proto.graph.initializer[0]
    changed = numpy_helper.to_array(tensor) + 1
    tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    content = proto.SerializeToString()
    other.write_bytes(content)
    with PackageReader(sidecar_path(other)) as reader:
        described = msgspec.structs.replace(
            reader.manifest.onnx[0], size=len(content), sha256=hashlib.sha256(content).hexdigest()
        )
        manifest = msgspec.structs.replace(reader.manifest, onnx=(described,))
        records = {case.record: reader.read(case.record) for case in manifest.cases}
    write_package(sidecar_path(other), manifest, records)
    comparison = compare_artifacts(one, sidecar_path(other))
    (weight,) = (each for each in comparison.differences if each.effect)
    assert (weight.part, weight.what, weight.max_abs) == ("weights", tensor.name, pytest.approx(1.0, abs=1e-6))

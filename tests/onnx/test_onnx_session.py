"""ONNX Runtime gets every dtype and shape, and only what was checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file, save_file

from exportkit.bench.contenders import OnnxSteps
from exportkit.errors import HostError, ModelLoadError, OnnxFileError, UsageError
from exportkit.onnx import onnx_session as module
from exportkit.onnx.files import MethodModel, write_onnx
from exportkit.onnx.interface import Interface
from exportkit.onnx.onnx_session import ONNX_TYPES, Bits, OnnxSession, bits_type
from exportkit.onnx.tensor_files import read_tensors, write_tensors
from exportkit.package.manifest import MappingNode
from exportkit.package.trust import demand
from tests.onnx.small_models import OPSET, manifest, model_proto, write_small
from tests.runtime import tiny

SHAPES = [(), (3,), (2, 0, 3), (0,), (2, 3)]


def test_the_numbers_of_dtypes_are_those_of_onnx() -> None:
    for dtype, number in ONNX_TYPES.items():
        name = dtype.upper().replace("FLOAT8_", "FLOAT8").replace("FLOAT64", "DOUBLE").replace("FLOAT32", "FLOAT")
        assert getattr(TensorProto, name) == number


def drawn(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern is as likely, NaNs included; a bool is 0 or 1."""
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    return torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8).view(kind).reshape(shape)


def as_bits(tensor: torch.Tensor) -> Bits:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Bits(dtype, tensor.view(getattr(torch, bits_type(dtype))).numpy())


@pytest.mark.parametrize("dtype", ONNX_TYPES)
def test_files_hold_the_bits_of_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    tensors = [drawn(dtype, shape) for shape in SHAPES]
    save_file({f"0.input.{i}": tensor for i, tensor in enumerate(tensors)}, tmp_path / "in")
    read = read_tensors(tmp_path / "in", [f"0.input.{i}" for i in range(len(tensors))])
    write_tensors(tmp_path / "out", {name.replace("input", "output"): each for name, each in read.items()})
    loaded = load_file(tmp_path / "out")
    assert len(loaded) == len(tensors)
    for i, tensor in enumerate(tensors):
        got = loaded[f"0.output.{i}"]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert np.array_equal(as_bits(got).array, as_bits(tensor).array)


def opened(path: Path, proto: onnx.ModelProto, *, outputs: int = 1, threads: int | None = None) -> OnnxSession:
    """Loads a model with one input, and this many outputs, into ONNX Runtime."""
    call = manifest().call
    assert isinstance(call.result, MappingNode)
    result = msgspec.structs.replace(call.result, keys=("y",), items=call.result.items[:1])
    call = call if outputs == 2 else msgspec.structs.replace(call, outputs=call.outputs[:1], result=result)
    described = msgspec.structs.replace(manifest(), methods=tiny.forward(call), cases=())
    written = write_onnx(path, [MethodModel(onnx_ir.serde.deserialize_model(proto))], described, {}, opset=OPSET)
    return OnnxSession(path, written.onnx[0], Interface.of(written.methods[0], ()), threads=threads)


def of_node(kind: str, dtype: int = TensorProto.FLOAT, *, inputs: str = "x", domain: str = "") -> onnx.ModelProto:
    """A model from x to y of one node."""
    values = [helper.make_tensor_value_info(name, dtype, None) for name in "xy"]
    graph = helper.make_graph([helper.make_node(kind, inputs, "y", domain=domain)], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("toy", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("dtype", ONNX_TYPES)
def test_onnx_runtime_gets_and_gives_the_bits_of_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    identity = opened(tmp_path / "m.onnx", of_node("Identity", ONNX_TYPES[dtype]), threads=1)
    for shape in SHAPES:
        given = as_bits(drawn(dtype, shape))
        (got,) = identity.run([given])
        assert got.dtype == dtype
        assert got.array.shape == shape
        assert np.array_equal(got.array, given.array)


def test_an_output_lives_as_long_as_it_is_used(tmp_path: Path) -> None:
    twice = opened(tmp_path / "m.onnx", of_node("Add", inputs="xx"))
    kept = [twice.run([as_bits(torch.full((1000,), float(i)))])[0].array for i in range(50)]
    for i, array in enumerate(kept):
        assert np.array_equal(array.view(np.float32), np.full(1000, 2.0 * i, np.float32))


def test_a_dtype_that_onnx_runtime_does_not_have_is_refused(tmp_path: Path) -> None:
    identity = opened(tmp_path / "m.onnx", of_node("Identity"))
    with pytest.raises(RuntimeError, match="no dtype complex64"):
        identity.run([Bits("complex64", np.zeros(2, np.uint64))])


def test_a_model_with_another_number_of_outputs_is_not_that_of_its_sidecar(tmp_path: Path) -> None:
    with pytest.raises(OnnxFileError, match="has 1 outputs; its sidecar describes 2"):
        opened(tmp_path / "m.onnx", of_node("Identity"), outputs=2)


@pytest.mark.parametrize(
    ("proto", "says"),
    [
        (of_node("Erf", TensorProto.BFLOAT16), "NOT_IMPLEMENTED"),
        (of_node("thrice", domain="toy"), "not a registered function/op"),
    ],
)
def test_a_model_that_onnx_runtime_cannot_run_is_a_matter_of_the_host(
    tmp_path: Path, proto: onnx.ModelProto, says: str
) -> None:
    with pytest.raises(ModelLoadError, match=says):
        opened(tmp_path / "m.onnx", proto)


def test_weights_that_are_written_to_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small(tmp_path / "m.onnx", data_threshold=0)
    (data,) = tmp_path.glob("*.data")
    right = module.import_onnxruntime()

    class Writing:
        def __getattr__(self, name: str) -> object:
            if name == "InferenceSession":
                content = data.read_bytes()
                data.write_bytes(content)  # another time of change
            return getattr(right, name)

    monkeypatch.setattr(module, "import_onnxruntime", Writing)
    with pytest.raises(OnnxFileError, match="changed while they were loaded"):
        OnnxSteps(path, torch.device("cpu"), demand(), ["forward"])


def test_a_missing_onnx_runtime_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(HostError, match=r"pip install 'exportkit\[onnx\]'"):
        module.import_onnxruntime()


# --- beside a package -------------------------------------------------------------------------------------------------


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path / "m.onnx", proto=model_proto())
    with pytest.raises(UsageError, match="CPUExecutionProvider"):
        OnnxSteps(path, torch.device("cuda"), demand(), ["forward"])
    other = tmp_path / "other.pt2"
    other.write_bytes(b"")
    with pytest.raises(UsageError, match="not an ONNX model"):
        OnnxSteps(other, torch.device("cpu"), demand(), ["forward"])

"""A package as a model of Triton: the repository is what the backend's code asks for, and stock torch runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from google.protobuf import text_format
from safetensors.torch import load
from tritonclient.grpc import model_config_pb2

from exportkit.cli import main
from exportkit.deployment.triton_repository import write_triton_model
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.signing import sign_package
from exportkit.package.structure import names
from tests.artifacts import ROOT, artifact
from tests.package import samples, stateful_samples
from tests.package.signers import signer
from tests.runtime import tiny

# What the backend does, in Python: src/pt2/model_state.cc and call_spec.cc make the names from torch's call
# specification, and refuse what is not a dict, a list, a tuple or a tensor.
_BACKEND = """
import json, sys
import torch
from torch._C._aoti import AOTIModelPackageLoader

def names(spec):
    if spec["type"] is None:
        return [""]
    assert spec["type"] in ("builtins.dict", "builtins.list", "builtins.tuple"), spec["type"]
    parts = spec["children_spec"]
    keys = json.loads(spec["context"]) if spec["type"] == "builtins.dict" else range(len(parts))
    return [f"[{key}]{rest}" for key, part in zip(keys, parts) for rest in names(part)]

torch.set_num_threads(1)
loader = AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
given, returned = (json.loads(spec)[1] for spec in loader.get_call_spec())
args, kwargs = given["children_spec"]
inputs = ["ARGS" + name for name in names(args)] if args["children_spec"] else []
inputs += [f"INPUT__{len(inputs) + i}" for i in range(len(names(kwargs)))]
outputs = ["RESULT" + name for name in names(returned)]
tensors = torch.load(sys.argv[2])
torch.save(loader.run(tensors), sys.argv[3])
print(json.dumps([inputs, outputs]))
"""


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with an operator library, whose weights are inside of the code."""
    path = tmp_path_factory.mktemp("patches") / "patches.pt2"
    assert main(["package", str(artifact("patches-embedded")), "-o", str(path), "--no-verify"]) == 0
    return path


def config_of(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("name", ["patches", "triton-cpu"])
def test_the_printed_command_loads_what_the_configuration_names(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
):
    package = request.getfixturevalue("patches") if name == "patches" else artifact(name)
    capsys.readouterr()
    assert main(["triton", str(package), "-o", str(tmp_path / "models"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    model = Path(said["folder"], "1", "model.pt2")
    with PackageReader(model) as reader:
        reader.verify()
        tensors = load(reader.read(reader.manifest.cases[0].record))
    inputs = [tensors[f"0.input.{i}"] for i in range(len(said["inputs"]))]
    torch.save(inputs, tmp_path / "inputs")
    # Triton's place of torch is this one's, and a program that loads the model stands for Triton.
    command = said["command"].replace("/opt/tritonserver/backends/pytorch", str(Path(torch.__file__).parent / "lib"))
    command = re.sub(r"tritonserver .*", '"$@"', command)
    program = [sys.executable, "-c", _BACKEND, model, tmp_path / "inputs", tmp_path / "outputs"]
    done = subprocess.run(["bash", "-c", command, "bash", *map(str, program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = config_of(Path(said["folder"]))
    named = [[tensor.name for tensor in tensors] for tensors in (config.input, config.output)]
    assert json.loads(done.stdout) == named
    assert named == [list(said["inputs"].values()), list(said["outputs"].values())]
    for i, answer in enumerate(torch.load(tmp_path / "outputs")):
        expected = tensors[f"0.output.{i}"]
        torch.testing.assert_close(answer, expected, rtol=2e-5, atol=2e-5)
        fits(config.output[i], answer)
    for i, given in enumerate(inputs):
        fits(config.input[i], given)


def fits(tensor: Any, value: torch.Tensor) -> None:
    assert len(tensor.dims) == value.ndim
    assert all(size in (-1, real) for size, real in zip(tensor.dims, value.shape))
    assert model_config_pb2.DataType.Name(tensor.data_type) == {
        torch.float32: "TYPE_FP32", torch.int64: "TYPE_INT64", torch.int8: "TYPE_INT8", torch.bool: "TYPE_BOOL",
        torch.float64: "TYPE_FP64", torch.int32: "TYPE_INT32",
    }[value.dtype]  # fmt: skip


def test_the_written_target_is_a_package_that_verifies(
    patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = write_triton_model(patches, tmp_path / "models")
    monkeypatch.chdir(ROOT)  # where the model's source is found
    assert main(["verify", str(model.folder / "1" / "model.pt2")]) == 0, capsys.readouterr()
    with PackageReader(patches) as reader:
        for library, file in zip(reader.manifest.libraries, model.libraries, strict=True):
            assert file.read_bytes() == reader.read(library.record)
    assert sorted(path.name for path in model.folder.iterdir()) == ["1", "README.md", "config.pbtxt", "operators"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [model.folder.name]  # nothing is left over


# --- the call ---------------------------------------------------------------------------------------------------------


def tensor(index: int) -> m.TensorNode:
    return m.TensorNode(index=index)


def package(path: Path, *, call: m.Call | None = None, targets: tuple[m.Target, ...] = (), **changes: Any) -> Path:
    """A package of samples.py without weights outside of the code."""
    targets = targets or (samples.target(constants={"forward": {}}),)
    whole = samples.manifest(weights=(), targets=targets, cases=(), **changes)
    left_out = (samples.WEIGHT, samples.CASE)
    records = {name: data for name, data in samples.RECORDS.items() if name not in left_out}
    for each in targets:
        records |= {name.replace("/cpu_v3/", f"/{each.name}/"): d for name, d in records.items() if "/cpu_v3/" in name}
    if not any(each.name == "cpu_v3" for each in targets):
        records = {name: data for name, data in records.items() if "/cpu_v3/" not in name}
    if call is not None:
        whole = msgspec.structs.replace(whole, methods=tiny.forward(call))
    write_package(path, whole, records)
    return path


DIMENSIONS = (m.Dimension(name="batch", min=1, max=64), m.Dimension(name="rows", min=3, max=3))


def call_of(parameters: tuple[m.Parameter, ...], result: m.Node, inputs: Any, outputs: Any) -> m.Call:
    """A call whose inputs and outputs are (dtype, shape)."""
    tolerance = m.OutputTolerance(rtol=0, atol=0)
    given = [name for parameter in parameters for name in names(parameter.value, parameter.name)]
    used = {size.dimension for _, shape in inputs for size in shape if isinstance(size, m.Size)}
    return m.Call(
        parameters=parameters,
        inputs=tuple(
            m.TensorInput(name=n, dtype=d, shape=s, written=None) for n, (d, s) in zip(given, inputs, strict=True)
        ),
        result=result,
        outputs=tuple(
            m.TensorOutput(name=n, dtype=d, shape=s, tolerance=tolerance)
            for n, (d, s) in zip(names(result), outputs, strict=True)
        ),
        dimensions=tuple(d for d in DIMENSIONS if d.name in used),
    )


BATCH, ROWS = m.Size(dimension="batch"), m.Size(dimension="rows", scale=4, offset=1)


def test_names_follow_the_structure_of_the_call(tmp_path: Path):
    pair = m.SequenceNode(kind="tuple", items=(tensor(1), m.MappingNode(keys=("mask",), items=(tensor(2),))))
    parameters = (
        m.Parameter(name="image", kind="positional", value=tensor(0)),
        m.Parameter(name="pair", kind="positional", value=pair),
        m.Parameter(name="offset", kind="keyword", value=tensor(3)),
    )
    best = m.NamedTupleNode(class_name="Best", fields=("values", "indices"), items=(tensor(0), tensor(1)))
    result = m.MappingNode(keys=("best", "all"), items=(best, tensor(2)))
    inputs = [
        ("float32", (BATCH, 3, ROWS)),
        ("float16", (BATCH,)),
        ("bool", (0, 5)),
        ("uint8", (ROWS,)),
    ]
    outputs = [
        ("float64", (BATCH, None)),
        ("int64", (BATCH,)),
        ("int8", (1,)),
    ]
    path = package(tmp_path / "p.pt2", call=call_of(parameters, result, inputs, outputs))
    model = write_triton_model(path, tmp_path / "models")
    config = config_of(model.folder)
    assert [(t.name, model_config_pb2.DataType.Name(t.data_type), list(t.dims)) for t in config.input] == [
        ("ARGS[0]", "TYPE_FP32", [-1, 3, 13]),
        ("ARGS[1][0]", "TYPE_FP16", [-1]),
        ("ARGS[1][1][mask]", "TYPE_BOOL", [-1, 5]),
        ("INPUT__3", "TYPE_UINT8", [13]),
    ]
    assert [(t.name, model_config_pb2.DataType.Name(t.data_type), list(t.dims)) for t in config.output] == [
        ("RESULT[best][0]", "TYPE_FP64", [-1, -1]),
        ("RESULT[best][1]", "TYPE_INT64", [-1]),
        ("RESULT[all]", "TYPE_INT8", [1]),
    ]
    assert (config.name, config.backend, config.platform, config.max_batch_size) == ("toy", "pytorch", "torch_aoti", 0)
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_CPU]


ONE = (m.Parameter(name="x", kind="positional", value=tensor(0)),)
ON = m.ConstantNode(value=True)
X = Y = ("float32", (BATCH,))


def test_a_result_with_constants_is_a_tuple_of_its_tensors(tmp_path: Path):
    result = m.SequenceNode(kind="list", items=(m.ConstantNode(value="a\nb"), tensor(0)))
    model = write_triton_model(package(tmp_path / "p.pt2", call=call_of(ONE, result, [X], [Y])), tmp_path / "models")
    assert model.outputs == {"1": "RESULT[0]"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (call_of(ONE, tensor(0), [("bfloat16", (BATCH,))], [Y]), "'x' is bfloat16"),
        (call_of(ONE, tensor(0), [X], [("complex64", (BATCH,))]), "'0' is complex64"),
        (call_of(ONE, tensor(0), [X], [("float32", ())]), "'0' is a scalar"),
        (call_of(ONE, tensor(0), [("float32", ())], [("float32", (1,))]), "'x' is a scalar"),
        (
            call_of(
                (*ONE, m.Parameter(name="mode", kind="keyword", value=m.ConstantNode(value=1))), tensor(0), [X], [Y]
            ),
            "'mode' has a value that was fixed",
        ),
        (
            call_of((m.Parameter(name="x", kind="keyword", value=tensor(0)),), tensor(0), [X], [Y]),
            "every input is given by keyword",
        ),
        (
            call_of(
                (*ONE, m.Parameter(name="k", kind="keyword", value=m.MappingNode(keys=("a",), items=(tensor(1),)))),
                tensor(0),
                [X, ("float32", (BATCH,))],
                [Y],
            ),
            "the keyword 'k' has several tensors",
        ),
        *[
            (call_of(ONE, m.MappingNode(keys=(key,), items=(tensor(0),)), [X], [Y]), re.escape(f"the key {key!r}"))
            for key in ("a b", 'a"', "a]", "a\nmax_batch_size: 8", "é", "a\\", "")
        ],
    ],
)
def test_what_the_backend_does_not_take_is_refused(
    call: m.Call, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = package(tmp_path / "p.pt2", call=call)
    assert main(["triton", str(path), "-o", str(tmp_path / "models")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "models").exists()


# --- the package ------------------------------------------------------------------------------------------------------


def test_weights_beside_the_code_are_refused_with_the_option_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["triton", str(artifact("weighted")), "-o", str(tmp_path / "m"), "--target", "cpu_x86_64_v3"]) == 2
    assert "`exportkit export --embed-weights`" in capsys.readouterr().err


def test_of_several_targets_one_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    targets = (
        samples.target(constants={"forward": {}}),
        samples.target(name="cuda", device="cuda", cpu_isa=None, cuda_architecture="sm_90", constants={"forward": {}}),
    )
    path = package(tmp_path / "p.pt2", targets=targets)
    assert main(["triton", str(path), "-o", str(tmp_path / "models")]) == 2
    assert "the targets cpu_v3, cuda" in capsys.readouterr().err
    assert main(["triton", str(path), "-o", str(tmp_path / "models"), "--target", "cpu"]) == 2
    assert "has no target 'cpu'" in capsys.readouterr().err
    assert main(["triton", str(path), "-o", str(tmp_path / "models"), "--target", "cuda"]) == 0
    config = config_of(tmp_path / "models" / "toy")
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_GPU]
    with PackageReader(tmp_path / "models" / "toy" / "1" / "model.pt2") as reader:
        assert [(target.name, target.device) for target in reader.manifest.targets] == [("model", "cuda")]


def test_a_package_without_libraries_or_targets_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = {name: data for name, data in samples.RECORDS.items() if name not in (samples.WEIGHT, samples.LIBRARY)}
    bare = samples.manifest(weights=(), targets=(samples.target(constants={"forward": {}}),), libraries=())
    write_package(tmp_path / "bare.pt2", bare, records)
    assert main(["triton", str(tmp_path / "bare.pt2"), "-o", str(tmp_path / "models")]) == 2
    assert "`exportkit package`" in capsys.readouterr().err
    write_package(tmp_path / "companion", samples.companion(), samples.COMPANION_RECORDS)
    assert main(["triton", str(tmp_path / "companion"), "-o", str(tmp_path / "models")]) == 2
    assert "no compiled target" in capsys.readouterr().err


def test_a_model_that_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = package(tmp_path / "p.pt2")
    assert main(["triton", str(path), "-o", str(tmp_path / "models")]) == 0
    before = (tmp_path / "models" / "toy" / "config.pbtxt").stat().st_mtime_ns
    assert main(["triton", str(path), "-o", str(tmp_path / "models")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "models" / "toy" / "config.pbtxt").stat().st_mtime_ns == before
    assert main(["triton", str(path), "-o", str(tmp_path / "no" / "models")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_nothing_of_a_changed_package_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = package(tmp_path / "p.pt2")
    with PackageReader(path) as reader:
        offset = reader.data_offset(samples.LIBRARY)
    with path.open("r+b") as file:
        file.seek(offset + 1)
        file.write(b"?")
    assert main(["triton", str(path), "-o", str(tmp_path / "models")]) == 3
    assert not (tmp_path / "models").exists()


def test_a_required_signature_is_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, other = package(tmp_path / "p.pt2"), signer(tmp_path, "other")
    arguments = ["triton", str(path), "-o", str(tmp_path / "models")]
    assert main([*arguments, "--public-key", str(other.public)]) == 3
    assert "p.pt2 is not signed as the caller requires" in capsys.readouterr().err
    sign_package(path, signer(tmp_path).key)
    assert main([*arguments, "--public-key", str(other.public)]) == 3
    assert not (tmp_path / "models").exists()
    assert main([*arguments, "--public-key", str(tmp_path / "release.pem")]) == 0


def test_triton_imports_no_torch(tmp_path: Path):
    path = package(tmp_path / "p.pt2")
    code = f"from exportkit.cli import main; import sys; main(['triton', {str(path)!r}, '-o', 'models'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


# --- methods and state ------------------------------------------------------------------------------------------------


def with_methods(path: Path, *methods: m.PackagedMethod) -> Path:
    """The sample with state, without weights outside of the code, and with further methods."""
    whole = stateful_samples.manifest(weights=(), cases=())
    names = [each.name for each in (*whole.methods, *methods)]
    target = samples.target(constants={name: {} for name in names})
    left_out = (samples.WEIGHT, samples.CASE, stateful_samples.SEQUENCE)
    records = {name: data for name, data in stateful_samples.RECORDS.items() if name not in left_out}
    records |= {f"data/aotinductor/{each.name}.cpu_v3/model.wrapper.so": each.name.encode() for each in methods}
    write_package(path, msgspec.structs.replace(whole, methods=(*whole.methods, *methods), targets=(target,)), records)
    return path


def score(**changes: Any) -> m.PackagedMethod:
    return m.PackagedMethod(name="score", call=msgspec.structs.replace(samples.manifest().call, **changes), state=())


def test_a_method_without_state_becomes_a_model_of_its_own(tmp_path: Path):
    path = with_methods(tmp_path / "p.pt2", score())
    default = write_triton_model(path, tmp_path / "models")
    other = write_triton_model(path, tmp_path / "models", method="score")
    assert (default.folder.name, other.folder.name) == ("toy", "toy.score")
    with PackageReader(other.folder / "1" / "model.pt2") as reader:
        reader.verify()
        assert reader.read("data/aotinductor/model/model.wrapper.so") == b"score"
        assert [method.name for method in reader.manifest.methods] == ["forward"]
        assert reader.manifest.state == ()
    assert config_of(other.folder).name == "toy.score"


def test_state_and_written_inputs_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (image,) = samples.manifest().call.inputs
    written = msgspec.structs.replace(image, written=m.OutputTolerance(rtol=0, atol=0))
    path = with_methods(tmp_path / "p.pt2", score(inputs=(written,)))
    for method, message in (
        ("decode", "decode of toy has state (step, cache.keys), and Triton has no sessions"),
        ("score", "score of toy writes into its input image"),
        ("encode", "toy has no method encode"),
    ):
        assert main(["triton", str(path), "-o", str(tmp_path / "models"), "--method", method]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "models").exists()

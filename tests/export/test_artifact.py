"""What export writes: the manifest, the cases, and what is in the archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors

from exportkit import ExportSpec
from exportkit.errors import ExportError, HostError, ModelNotFoundError, UsageError
from exportkit.export.artifact import export_aoti, export_program
from exportkit.export.compile.aot_inductor import called_operators, torch_that_calls
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.program_file import load_program
from exportkit.export.models.resolve import resolve
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Dimension, Manifest, Size
from exportkit.package.structure import flatten
from tests.artifacts import artifact, packaged
from tests.export.function_models import spec_of
from tests.subprocesses import run_python

MODELS = str(Path(__file__).with_name("export_models.py"))


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    pytest.importorskip("exportkit.arr_coc.ops")
    with PackageReader(artifact("patches")) as reader:
        return reader.manifest


@pytest.fixture(scope="session")
def program() -> Path:
    return artifact("patches-program")


def test_a_compiled_artifact_says_what_runs_it_and_what_it_calls(manifest: Manifest) -> None:
    (target,) = manifest.targets
    assert (target.name, target.device, target.cpu_isa) == ("cpu_x86_64_v3", "cpu", "x86-64-v3")
    assert target.built_with_torch == str(torch.__version__)
    assert target.needs_torch == "2.11"
    assert [operator.name for operator in manifest.operators] == ["arr_coc::compute_entropy"]
    assert manifest.operators[0].schema == str(torch.ops.arr_coc.compute_entropy.default._schema)
    assert manifest.libraries == ()
    assert manifest.name == "Patches"


def test_the_call_is_the_modules_own(manifest: Manifest) -> None:
    call = manifest.call
    assert [(p.name, p.kind) for p in call.parameters] == [("image", "positional"), ("query", "positional")]
    sides = (Size(dimension=name, scale=8) for name in ("rows", "columns"))
    assert call.inputs[0].shape == (Size(dimension="batch"), 3, *sides)
    assert call.dimensions[1] == Dimension(name="rows", min=2, max=32)
    shapes = {output.name: output.shape for output in call.outputs}
    assert shapes["best"] == (Size(dimension="batch"), None)
    assert [output.dtype for output in call.outputs] == ["int64", "float32", "float32"]


def test_no_source_travels() -> None:
    with PackageReader(artifact("patches")) as reader:
        sources = {name: reader.read(name) for name in reader.names if name.endswith((".cpp", ".h", ".py"))}
        assert {name.rpartition("/")[2] for name in sources} == {"model.wrapper.cpp"}
        assert set(sources.values()) == {b""}
        assert sum(name.endswith(".so") for name in reader.names) == 1


def test_constants_among_the_outputs_are_the_manifests_not_the_codes(manifest: Manifest) -> None:
    """AOTInductor returns a tensor for each of them, and outputs are told apart by their place alone."""
    assert [manifest.call.result.items[i].value for i in (1, 3)] == [8, None]


def test_cases_are_the_example_and_the_ends_of_every_range(manifest: Manifest) -> None:
    sizes = [case.calls[0].sizes for case in manifest.cases]
    names = ("batch", "rows", "columns")
    assert sizes[:3] == [dict(zip(names, each)) for each in ((2, 5, 7), (1, 2, 2), (16, 2, 2))]


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_program_travels_with_its_cases_and_is_what_it_was(program: Path, tmp_path: Path) -> None:
    resolved = resolve(str(program))
    again = export_program(resolved, tmp_path / "again.pt2")
    with PackageReader(program) as first, PackageReader(tmp_path / "again.pt2") as second:
        assert second.manifest.call == first.manifest.call
        assert second.manifest.source == first.manifest.source
        for case in again.cases:
            assert second.read(case.record) == first.read(case.record)


def test_a_program_of_torchs_own_is_described_from_its_graph(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 2), torch.rand(5, 4)
    n = torch.export.Dim("n", min=2, max=9)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: n},)), tmp_path / "stock.pt2")
    manifest = export_program(
        resolve(str(tmp_path / "stock.pt2"), trusted=True),
        tmp_path / "ours.pt2",
        TraceOptions(cases=2, edge_cases=False),
    )
    (dimension,) = manifest.call.dimensions
    assert (dimension.min, dimension.max) == (2, 9)
    assert manifest.call.inputs[0].shape == (Size(dimension=dimension.name), 4)
    assert [case.calls[0].sizes[dimension.name] for case in manifest.cases] == [5, 2]
    assert manifest.source.model is None
    assert manifest.name == "stock"


def test_a_traced_program_refuses_other_sizes_and_dtypes(program: Path, tmp_path: Path) -> None:
    resolved = resolve(str(program))
    with pytest.raises(UsageError, match="is already traced"):
        export_program(resolved, tmp_path / "x.pt2", TraceOptions(dynamic=["image:0=batch[1:4]"]))
    with pytest.raises(UsageError, match="is already traced"):
        export_program(resolved, tmp_path / "x.pt2", TraceOptions(dtype="float16"))


def test_a_compiled_artifact_is_no_program() -> None:
    with pytest.raises(ModelNotFoundError, match=r"has compiled code \(cpu_x86_64_v3\)"):
        resolve(str(artifact("patches")))


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.rand(2)}, tmp_path / "weights.pt2")
    with pytest.raises(ExportError, match="as an ExportedProgram"):
        resolve(str(tmp_path / "weights.pt2"), trusted=True)


# --- the call and the model -------------------------------------------------------------------------------------------


def test_nested_inputs_constants_and_keywords_are_recorded(tmp_path: Path) -> None:
    spec = resolve(f"{MODELS}:structured").spec
    manifest = export_program(spec, tmp_path / "structured.pt2")
    call = manifest.call
    assert [(p.name, p.kind) for p in call.parameters] == [
        ("batch", "positional"),
        ("scale", "positional"),
        ("offset", "keyword"),
    ]
    assert [tensor.name for tensor in call.inputs] == ["batch.x", "offset"]
    assert [tensor.name for tensor in call.outputs] == ["0.total", "0.kept", "1.0"]
    result = spec.model(*spec.example_inputs, **spec.example_kwargs)
    program = load_program(tmp_path / "structured.pt2").programs["forward"].module()
    torch.testing.assert_close(program(*spec.example_inputs, **spec.example_kwargs)[0][1], result[0].kept)
    assert flatten(result, lambda leaf: isinstance(leaf, torch.Tensor))[0] == call.result
    assert manifest.source.model is None


def test_the_model_is_traced_in_eval_mode_and_left_as_it_was(tmp_path: Path) -> None:
    model, x = resolve(f"{MODELS}:Dropout", inputs=["x=float32[2,4]"]).spec.model, torch.rand(2, 4)
    model.drop.train()
    model.linear.eval()
    said: list[str] = []
    spec = ExportSpec(model=model, example_inputs=(x,))
    export_program(spec, tmp_path / "d.pt2", TraceOptions(cases=1), progress=said.append)
    assert "dropout and batch normalization are exported as after model.eval()" in said
    assert model.drop.training
    assert not model.linear.training
    with PackageReader(tmp_path / "d.pt2") as reader:
        answer = load_tensors(reader.read("exportkit/cases/0.safetensors"))["0.output.0"]
    torch.testing.assert_close(answer, model.linear(x).detach())


def test_a_cast_is_recorded_and_does_not_touch_the_callers_model(tmp_path: Path) -> None:
    resolved = resolve(f"{MODELS}:Dropout", inputs=["x=float32[2,4]"])
    manifest = export_program(resolved, tmp_path / "d.pt2", TraceOptions(dtype="bfloat16"))
    plain = export_program(resolved, tmp_path / "p.pt2")
    assert manifest.call.inputs[0].dtype == manifest.call.outputs[0].dtype == manifest.source.dtype == "bfloat16"
    assert manifest.call.outputs[0].tolerance.rtol > plain.call.outputs[0].tolerance.rtol
    assert manifest.source.state_sha256 != plain.source.state_sha256
    assert resolved.spec.model.linear.weight.dtype == torch.float32


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_a_part_in_torchscript_is_cast(tmp_path: Path) -> None:
    """torch copies its parameters as results of a computation, which torch.export refuses."""
    part = torch.jit.trace(torch.nn.Linear(3, 3), torch.rand(4, 3))
    spec = ExportSpec(torch.nn.Sequential(part), (torch.rand(4, 3),))
    manifest = export_program(spec, tmp_path / "s.pt2", TraceOptions(dtype="float64"))
    assert manifest.call.outputs[0].dtype == manifest.source.dtype == "float64"
    assert all(parameter.dtype == torch.float32 for parameter in part.parameters())


def test_static_fixes_every_size(tmp_path: Path) -> None:
    manifest = export_program(
        resolve(f"{MODELS}:structured"), tmp_path / "s.pt2", TraceOptions(static=True, edge_cases=False)
    )
    assert manifest.call.dimensions == ()
    assert [case.calls[0].sizes for case in manifest.cases] == [{}]


def test_the_same_seed_records_the_same_cases(tmp_path: Path) -> None:
    spec = resolve(f"{MODELS}:structured").spec
    digests = []
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        manifest = export_program(spec, tmp_path / f"{name}.pt2", TraceOptions(seed=seed))
        digests.append([r.sha256 for r in manifest.records if "/cases/" in r.name])
    assert digests[0] == digests[1] != digests[2]


def test_inputs_that_the_spec_draws_must_fit_what_was_asked_for(tmp_path: Path) -> None:
    spec = ExportSpec(
        model=torch.nn.Linear(4, 2),
        example_inputs=(torch.rand(3, 4),),
        dynamic_shapes={"input": {0: "n[1:9]"}},
        draw_inputs=lambda sizes, generator: ((torch.rand(3, 4),), {}),
    )
    with pytest.raises(UsageError, match=r"draw_inputs returned .*\[3, 4\].* for n=1"):
        export_program(spec, tmp_path / "x.pt2")
    with pytest.raises(UsageError, match=r"draw_inputs returned a Tensor\n.*\(args, kwargs\)"):
        export_program(replace(spec, draw_inputs=lambda sizes, generator: torch.rand(3, 4)), tmp_path / "x.pt2")
    with pytest.raises(ExportError, match=r"draw_inputs at n=3 failed at test_artifact.py:\d+ .*KeyError: 'm'"):
        export_program(replace(spec, draw_inputs=lambda sizes, generator: sizes["m"]), tmp_path / "x.pt2")


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (lambda x: {"a": x, "b": 2 * x.shape[0] + 1}, ExportError, "output 1 of 2 is a number"),
        (lambda x: x.to(torch.complex128), ExportError, r"`0` is complex128, a dtype that safetensors.*\n.*complex64"),
        (lambda x: x.to("cuda:99"), ExportError, r"on an input's device \(x\.device\)"),
        (lambda x: {"a": x, "b": object()}, UsageError, r"the model's output\['b'\] is a builtins.object"),
    ],
)
def test_what_a_package_could_not_return_is_refused(tmp_path: Path, what, error, message: str) -> None:
    """A size that varies would be returned as the example's for ever."""
    spec = spec_of(lambda x: what(x), torch.rand(3, 4), shapes={"x": {0: "n[1:9]"}})
    with pytest.raises(error, match=message):
        export_program(spec, tmp_path / "x.pt2")


def test_sizes_that_do_not_vary_are_constants(tmp_path: Path) -> None:
    spec = spec_of(lambda x: (x, x.shape[1]), torch.rand(3, 4), shapes={"x": {0: "n[1:9]"}})
    assert export_program(spec, tmp_path / "x.pt2").call.result.items[1].value == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "auto"}, r"device 'auto' is not allowed here\n.*Give cpu, cuda or cuda:<index>"),
        ({"static": True, "dynamic": ["x:0=n[1:4]"]}, "exclude"),
        ({"name": "a/b"}, "is not allowed as a name"),
        ({"version": ""}, "is not allowed as a version"),
        ({"cases": -1}, "number of cases"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options, message: str) -> None:
    resolved = resolve(f"{MODELS}:Dropout", inputs=["x=float32[2,4]"])
    with pytest.raises(UsageError, match=message):
        export_program(resolved, tmp_path / "x.pt2", TraceOptions(**options))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_told_before_anything_is_done(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    spec = ExportSpec(model=torch.nn.Linear(2, 2), example_inputs=())
    with pytest.raises(UsageError, match=f"the folder {tmp_path} is not writable"):
        export_program(spec, tmp_path / "x.pt2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_says_how_the_program_gets_to_one_that_has_it(tmp_path: Path) -> None:
    resolved = resolve(f"{MODELS}:Dropout", inputs=["x=float32[2,4]"])
    with pytest.raises(HostError, match="--format program"):
        export_aoti(resolved, tmp_path / "x.pt2", TraceOptions(device="cuda"))


def test_operators_the_code_calls_are_read_from_aotinductors_own_list() -> None:
    targets = ["arr_coc::a", "arr_coc::b.out", "aten::sort", "torch.ops.lib.c.default", "torch.ops.lib.d.out"]
    nodes = {"nodes": [{"name": "buf", "node": {"target": target}} for target in targets]}
    assert called_operators(nodes) == {"arr_coc::a", "arr_coc::b.out", "lib::c", "lib::d.out"}


@pytest.mark.parametrize("kind", ["as_scalar_type", "as_layout", "as_memory_format"])
def test_code_that_passes_a_dtype_to_an_operator_needs_torch_2_12(kind: str) -> None:
    """torch 2.11 passes another: it takes torch.export's numbers of dtypes for its own."""
    given = [{"name": "x", "arg": {"as_tensor": {"name": "arg0_1"}}}, {"name": "how", "arg": {"as_string": kind}}]
    assert torch_that_calls({"nodes": [{"node": {"target": "lib::c", "inputs": given}}]}) == "2.11"
    numbered = [*given, {"name": "as", "arg": {kind: 5}}]
    assert torch_that_calls({"nodes": [{"node": {"target": "lib::c", "inputs": numbered}}]}) == "2.12"


# --- Triton's operators are inside of the code, and need no library --------------------------------------------------


def test_torchs_own_loader_takes_it_where_there_is_no_exportkit(device: torch.device, tmp_path: Path):
    code = """
import sys, torch
package, target, device = sys.argv[1:]
loader = torch._C._aoti.AOTIModelPackageLoader(package, target, False, 1, -1 if device == "cpu" else 0)
for batch in (1, 16):
    x, bias = torch.randn(2, batch, 7, 40, device=device)
    softmax, quantized, _, columns = loader.run([x, bias])
    torch.testing.assert_close(softmax, (x + bias).softmax(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(columns, x.mT.softmax(-1), rtol=1e-4, atol=1e-6)
    assert quantized.dtype is torch.int8 and quantized.abs().amax(-1).eq(127).all()
assert not [name for name in sys.modules if name.startswith("exportkit.runtime")]
print("equal")
"""
    package = tmp_path / "quantize.pt2"
    manifest = packaged(f"triton-{device.type}", package)
    assert (manifest.operators, manifest.libraries) == ((), ())
    (target,) = manifest.targets
    assert run_python(code, package, target.name, device.type, cwd=tmp_path) == "equal\n"


def test_a_program_of_them_travels_and_is_compiled_elsewhere():
    resolved = resolve(str(artifact("triton-program")))
    assert resolved.spec.model is not None

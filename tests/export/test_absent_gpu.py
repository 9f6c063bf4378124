"""Code for GPUs that are not here: compiled, described and refused. What it computes, only such a GPU tells."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportkit.errors import ExportError, HostError, NoTargetError, UsageError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.absent_gpu import AbsentGpu, _store, parse_gpus
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import never_run
from exportkit.package.consistency import is_complete
from exportkit.package.cuda_code import cuda_architectures
from exportkit.runtime.loader import load
from exportkit.spec import ExportSpec
from tests.export import gpu_compiler

CPU = torch.device("cpu")
HERE = TraceOptions(device="cuda", cases=1, edge_cases=False)


class Mixed(torch.nn.Module):
    """A product, fused and split reductions, tied weights, short tensors, and a constant that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(33, 33)
        self.tied = self.inner.weight
        self.norm = torch.nn.LayerNorm(33)
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))
        self.plain = torch.tensor([1.5, 2.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.norm(torch.relu(self.inner(x))) @ self.tied, -1)
        return y * self.scale * self.plain.sum() + x.sum()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackageReader]:
    """A package for three GPUs, of which this machine has none."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, and the test is of machines without one")
    gpu_compiler.require()
    out = tmp_path_factory.mktemp("gpus") / "mixed.pt2"
    spec = ExportSpec(Mixed().eval(), (torch.randn(8, 33),), dynamic_shapes={"x": {0: "batch[1:64]"}})
    export_aoti(spec, out, HERE, CompileOptions(gpus=("8.0+ptx", "9.0", "12.0")))
    with PackageReader(out) as reader:
        yield reader


def test_each_gpu_has_a_target_that_says_what_its_code_says(compiled: PackageReader, tmp_path: Path) -> None:
    targets = {target.name: target for target in compiled.manifest.targets}
    assert {name: (target.cuda_architecture, target.cuda_ptx) for name, target in targets.items()} == {
        "cuda_sm_80": ("sm_80", True),
        "cuda_sm_90": ("sm_90a", False),
        "cuda_sm_120": ("sm_120a", False),
    }
    for name, target in targets.items():
        library = tmp_path / f"{name}.so"
        record = next(r for r in compiled.names if r.startswith(f"data/aotinductor/{name}/") and r.endswith(".so"))
        library.write_bytes(compiled.read(record))
        assert cuda_architectures([library]) == {target.cuda_architecture}
        assert set(re.findall(rb"\.target (sm_\w+)", library.read_bytes())) == {target.cuda_architecture.encode()}
        assert target.built_with_cuda == torch.version.cuda
        assert never_run(compiled, target)


def test_the_code_disassembles(compiled: PackageReader, tmp_path: Path) -> None:
    import triton

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    record = next(r for r in compiled.names if "cuda_sm_90/" in r and r.endswith(".so"))
    library, found = compiled.read(record), 0
    for start in re.finditer(rb"\x7fELF\x02\x01\x01[\x33\x41]", library):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(library[start.start() :])
        told = subprocess.run([disassembler, cubin], capture_output=True, text=True, check=True).stdout
        assert "EXIT" in told
        assert "LDG" in told
        found += 1
    assert found >= 2


def test_its_weights_are_the_models(compiled: PackageReader) -> None:
    manifest = compiled.manifest
    assert is_complete(manifest)
    weights = {weight.name: weight for weight in manifest.weights}
    assert {"tied", "inner.bias", "norm.weight", "norm.bias", "scale"} <= set(weights)
    assert weights["tied"].aliases == ("inner.weight",)
    for target in manifest.targets:
        read = target.constants["forward"].values()
        assert {"tied", "scale"} <= set(read)
        (plain,) = (weights[name].record for name in read if not weights[name].state)
        assert plain is not None
        assert torch.frombuffer(bytearray(compiled.read(plain)), dtype=torch.float32).equal(torch.tensor([1.5, 2.5]))


def test_it_is_not_loaded_where_its_gpu_is_not(compiled: PackageReader) -> None:
    with pytest.raises(NoTargetError, match="cuda_sm_90: it needs a CUDA device, and torch sees none"):
        load(compiled.path)


def test_gpus_are_named_by_their_compute_capability() -> None:
    assert parse_gpus(["8.0", "8.6+ptx", "12.0"]) == (
        AbsentGpu((8, 0)),
        AbsentGpu((8, 6), ptx=True),
        AbsentGpu((12, 0)),
    )
    assert [gpu.architecture for gpu in parse_gpus(["10.3", "7.5"])] == ["sm_103", "sm_75"]
    for text, reason in (
        ("sm_80", "unknown GPU architecture 'sm_80'"),
        ("8.05", "unknown"),
        ("6.1", "unknown"),
        ("9.0+ptx", "there is no PTX for GPUs newer than 9.0"),
    ):
        with pytest.raises(UsageError, match=reason):
            parse_gpus([text])
    with pytest.raises(UsageError, match=r"8\.0 was given twice"):
        parse_gpus(["8.0", "8.0+ptx"])


def test_what_cannot_be_compiled_for_another_gpu_is_refused(tmp_path: Path) -> None:
    spec = ExportSpec(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    with pytest.raises(UsageError, match=r"8.0 was given for device cpu\n  Add --device cuda"):
        export_aoti(spec, tmp_path / "x.pt2", TraceOptions(), CompileOptions(gpus=("8.0",)))
    with pytest.raises(UsageError, match="cannot have the weights inside"):
        CompilePlan.of(CompileOptions(gpus=("8.0",), embed_weights=True), CPU)
    with pytest.raises(UsageError, match="for device cuda"):
        CompilePlan.of(CompileOptions(cpu_isas=("x86-64-v3", "x86-64-v4"), gpus=("8.0",)), CPU)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for CUDA")
def test_a_torch_without_triton_says_what_is_needed(tmp_path: Path) -> None:
    spec = ExportSpec(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    with pytest.raises(HostError, match=r"needs torch for CUDA, which has Triton; this is torch .*\n.* No GPU"):
        export_aoti(spec, tmp_path / "x.pt2", HERE, CompileOptions(gpus=("8.0",)))


def test_the_first_form_of_a_kernel_that_fits_is_stored() -> None:
    def form(shared: int) -> SimpleNamespace:
        return SimpleNamespace(
            kernel=SimpleNamespace(metadata=SimpleNamespace(shared=shared)), make_launcher=lambda: shared
        )

    stored: list[int] = []
    kernel = SimpleNamespace(
        compile_results=[form(200 << 10), form(64 << 10), form(0)],
        inductor_meta={"kernel_name": "triton_red_1"},
        save_gpu_kernel=lambda stream, launcher: stored.append(launcher),
    )
    _store(kernel, AbsentGpu((8, 6)))
    _store(kernel, AbsentGpu((9, 0)))
    assert stored == [64 << 10, 200 << 10]
    kernel.compile_results = [form(200 << 10)]
    with pytest.raises(ExportError, match="triton_red_1 needs 204800 bytes of shared memory, and a block of sm_86 has"):
        _store(kernel, AbsentGpu((8, 6)))

"""Products of one row on a GPU: the code computes them accurately, and calls no library."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import exportkit
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.vector_products import blocks, is_vector_product
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.package.archive import PackageReader
from exportkit.package.elf import read_elf
from exportkit.spec import ExportSpec

HALF = torch.bfloat16
LENGTHS = (1, 8, 130, 511, 512, 1000, 2048, 5003)
OUTPUTS = (1, 3, 700)
LIBRARY = {"aoti_torch_cuda_mm_out", "aoti_torch_cuda_addmm_out", "aoti_torch_proxy_executor_call_function"}


@pytest.mark.parametrize(
    ("taken", "rows", "device", "dtype", "transposed"),
    [
        (True, 1, "cuda", torch.float16, True),
        (True, 1, "cuda", torch.bfloat16, True),
        (True, 1, "cuda", torch.float32, True),
        (False, 2, "cuda", torch.float16, True),
        (False, 1, "cpu", torch.float32, True),
        (False, 1, "cuda", torch.float64, True),
        (False, 1, "cuda", torch.int64, True),
        (False, 1, "cuda", torch.complex64, True),
        (False, 1, "cuda", torch.float16, False),
    ],
)
def test_a_row_of_a_gpu_times_rows_of_weights_is_taken(taken, rows, device, dtype, transposed) -> None:
    with FakeTensorMode():  # needs no GPU
        row = torch.empty(rows, 32, device=device, dtype=dtype)
        sizes = {"size": (32, 8), "stride": (1, 32) if transposed else (8, 1), "device": device}
        assert is_vector_product(row, torch.empty_strided(**sizes, dtype=dtype)) is taken
        assert not is_vector_product(row, torch.empty_strided(**sizes, dtype=torch.int8))


class Products(torch.nn.Module):
    """Every way to write a product of one row, of many lengths, with something before and after it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        like = {"dtype": dtype}
        for length, outputs in itertools.product(LENGTHS, OUTPUTS):
            for bias in (False, True):
                layer = torch.nn.Linear(length, outputs, bias, **like)
                self.add_module(f"linear_{length}_{outputs}_{bias}", layer)
        self.matrix = torch.nn.Parameter(torch.randn(96, 1000, **like) / 32)
        self.bias = torch.nn.Parameter(torch.randn(96, **like))
        self.register_buffer("lost", torch.full((96,), torch.nan, **like))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        answers = {}
        for length, outputs in itertools.product(LENGTHS, OUTPUTS):
            for bias in (False, True):
                name = f"linear_{length}_{outputs}_{bias}"
                answers[name] = getattr(self, name)(x[:, :, :length])
        vector = x[0, 0, :1000]
        answers["mv"] = torch.mv(self.matrix, vector)
        answers["addmv"] = torch.addmv(self.bias, self.matrix, vector, beta=0.5, alpha=-2)
        answers["addmm"] = torch.addmm(self.bias, vector[None], self.matrix.t(), beta=-1, alpha=3)
        answers["without the bias"] = torch.addmm(self.lost, vector[None], self.matrix.t(), beta=0)
        gate, up = self.linear_1000_700_True(x[:, :, :1000]), self.linear_1000_700_False(x[:, :, :1000])
        answers["gated"] = torch.nn.functional.silu(gate) * up
        answers["of a computed row"] = self.linear_2048_700_True(torch.tanh(x[:, :, :2048]) * 3) + 1
        return answers


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_they_are_as_accurate_as_one_rounding_and_sums_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Products(dtype).eval().cuda()
    example = torch.randn(1, 1, max(LENGTHS), dtype=dtype, device="cuda")
    out = tmp_path / "products.pt2"
    export_aoti(ExportSpec(module, (example,)), out, TraceOptions("cuda", cases=1, edge_cases=False))
    wide = Products(torch.float64).eval().cuda()
    wide.load_state_dict(module.state_dict())
    with exportkit.load(out, "cuda") as loaded, torch.no_grad():
        for seed in range(3):
            x = torch.randn(example.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()
            answers, expected, eager = loaded(x), wide(x.double()), module(x)
            for name, answer in answers.items():
                assert answer.dtype == dtype
                ours, theirs = ((each[name].double() - expected[name]).abs().max() for each in (answers, eager))
                unit = torch.finfo(dtype).eps * max(1, expected[name].abs().max())  # terms are of the order of 1
                assert ours <= 2 * theirs + unit, name


def _exported(module: torch.nn.Module, x: torch.Tensor, folder: Path, **options: object) -> Path:
    out, trace = folder / "model.pt2", TraceOptions("cuda", cases=0, allow_nondeterministic=True)
    export_aoti(ExportSpec(module.cuda(), (x.cuda(),)), out, trace, CompileOptions(**options))
    return out


def _library(exported: Path) -> Path:
    library = exported.with_name("model.so")
    with PackageReader(exported) as reader:
        library.write_bytes(reader.read(next(name for name in reader.names if name.endswith(".so"))))
    return library


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "options", "calls"),
    [(1, {}, False), (2, {}, True), (1, {"eager_kernels": ("aten.mm", "aten.addmm")}, True)],
    ids=["one", "two", "left to eager"],
)
def test_the_code_calls_a_library_for_more_than_a_row_or_if_told_to(rows, options, calls, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 16, bias=False)).to(HALF)
    exported = _exported(layers.eval(), torch.randn(rows, 64, dtype=HALF), tmp_path, **options)
    assert bool(read_elf(_library(exported)).torch_symbols & LIBRARY) is calls


class Beside(torch.nn.Module):
    """A product, and beside it four short steps that do not need one another; two draw numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 48).to(HALF)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = x[:, :5], x[:, 5:30], x[:, 30:]
        drawn = [torch.rand_like(parts[0]), torch.rand_like(parts[1])]
        return [self.layer(x), *(torch.tanh(part) for part in parts), *drawn]


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "fewer"), [(1, True), (2, False)])
def test_short_kernels_beside_a_product_of_one_row_are_combined(rows: int, fewer: bool, tmp_path: Path) -> None:
    kernels = []
    for apart in ({}, {"inductor_config": {"combo_kernels": False}}):
        exported = _exported(Beside().eval(), torch.randn(rows, 64, dtype=HALF), tmp_path, **apart)
        kernels.append(len(set(re.findall(rb"(?<=\0)model_triton_\w+(?=\0)", _library(exported).read_bytes()))))
    assert kernels[1] == 5 + (rows == 1)
    assert (kernels[0] < kernels[1]) is fewer


@pytest.mark.parametrize("room", [132 * 2048, 46 * 1024])
@pytest.mark.parametrize("rows", [1, 700, 2048, 3072, 16384, 128256])
@pytest.mark.parametrize("length", [1, 8, 130, 512, 896, 2048, 8192, 53248])
def test_blocks_of_triton_hold_whole_short_rows_and_no_thread_reads_beyond_them(rows: int, length: int, room: int):
    chosen = blocks(rows, length, room)
    threads = 32 * chosen["num_warps"]
    assert 64 <= threads <= 512
    assert chosen["XBLOCK"] * chosen["R0_BLOCK"] == 8 * threads
    assert chosen["R0_BLOCK"] < 2 * length
    assert chosen["XBLOCK"] == 1 or chosen["R0_BLOCK"] >= length
    assert threads == 64 or rows * threads <= room

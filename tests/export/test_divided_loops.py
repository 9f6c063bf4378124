"""Which loops of the compiled code threads share, and their memory, do not depend on the machine that compiles."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from exportkit.export.aot_inductor import compile_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.resolve import resolve
from exportkit.export.toolchain import default_cpu_isa
from exportkit.export.trace import Traced, silent, trace

CPU = torch.device("cpu")

MODEL = """\
import torch

from exportkit.spec import ExportSpec


class Heads(torch.nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 1, 3).contiguous() + 1


def heads():
    return ExportSpec(
        model=Heads().eval(),
        example_inputs=(torch.rand(2, 3, 50, 32),),
        dynamic_shapes={"x": {0: "batch[1:64]", 2: "rows[2:1000]"}},
    )
"""


ATTENTION = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

from exportkit.spec import ExportSpec


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flex_attention(q, k, v)


def attention():
    inputs = tuple(torch.rand(1, 2, 64, 16) for _ in range(3))
    return ExportSpec(model=Attention().eval(), example_inputs=inputs)
"""


def _kernels(traced: Traced, folder: Path, threads: int) -> str:
    """Returns the kernels that a machine with so many threads compiles."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compile_program(
            traced,
            folder,
            device=CPU,
            cpu_isa=default_cpu_isa(),
            cuda_arch="native",
            inductor_config={},
            weights=None,
            progress=silent,
        )
    finally:
        torch.set_num_threads(before)
    (source,) = folder.glob("*.kernel.cpp")
    return source.read_text()


def test_the_rows_of_a_single_sample_are_divided_among_threads_whatever_machine_compiles(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = resolve(f"{tmp_path}/model.py:heads")
    traced = trace(model, TraceOptions(), CPU, silent)
    one, many = (
        re.findall("#pragma omp .*", _kernels(traced, tmp_path / str(threads), threads)) for threads in (1, 64)
    )
    assert one == many == ["#pragma omp parallel", "#pragma omp for collapse(2)"]


def test_attention_has_memory_for_each_thread_that_runs_it(tmp_path: Path) -> None:
    """With torch's own code, a package that was exported with 2 threads crashed with 16."""
    (tmp_path / "model.py").write_text(ATTENTION)
    traced = trace(resolve(f"{tmp_path}/model.py:attention"), TraceOptions(), CPU, silent)
    assert "int64_t num_thread = at::get_num_threads();" in _kernels(traced, tmp_path / "compiled", 2)

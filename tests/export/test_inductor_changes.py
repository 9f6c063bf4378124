"""What export changes in the code that Inductor writes: loops that threads share, their memory, and useless copies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import config, sizevars
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.index_propagation import TypedExpr
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils import _filelock
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._sympy.value_ranges import ValueRanges

from exportkit.errors import ExportError
from exportkit.export.compile.aot_inductor import compile_methods
from exportkit.export.compile.compile_plan import CompilePlan, read_inductor_config
from exportkit.export.compile.inductor_changes import MODEL_LOCK, _holds_all, changed_inductor
from exportkit.export.cpu_isas import default_cpu_isa
from exportkit.export.torch_patches import patched
from exportkit.export.torch_patches.patch_table import PATCHES
from exportkit.export.trace.traced import Traced
from exportkit.progress import silent
from exportkit.verify.filled_memory import CONTENTS, filled_memory
from tests.drawn import examples
from tests.export.compiled_code import kernels_of
from tests.export.function_models import CPU, spec_of, traced


def heads() -> Traced:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 1, 3).contiguous() + 1

    return traced(spec_of(function, torch.rand(2, 3, 50, 32), shapes={"x": {0: "batch[1:64]", 2: "rows[2:1000]"}}))


def _kernels(found: Traced, folder: Path, threads: int) -> str:
    """Returns the kernels that a machine with so many threads writes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plan, isa = CompilePlan(device=CPU, cache=False), default_cpu_isa()
        return kernels_of(lambda: compile_methods(found, folder, plan, isa, weights=None, progress=silent))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_rows_of_one_sample_are_divided_among_threads_whatever_machine_compiles(tmp_path: Path) -> None:
    found = heads()
    one, many = (re.findall("#pragma omp .*", _kernels(found, tmp_path / str(threads), threads)) for threads in (1, 64))
    assert one == many == ["#pragma omp parallel", "#pragma omp for collapse(2)"]


@pytest.mark.slow
def test_attention_has_memory_for_each_thread_that_runs_it(tmp_path: Path) -> None:
    """With torch's own code, a package that was exported with 2 threads crashed with 16."""
    inputs = [torch.rand(1, 2, 64, 16) for _ in range(3)]
    found = traced(spec_of(lambda q, k, v: flex_attention(q, k, v), *inputs))
    assert "int64_t num_thread = at::get_num_threads();" in _kernels(found, tmp_path / "compiled", 2)


@pytest.mark.slow
def test_attention_reads_no_keys_that_are_not_there() -> None:
    """torch's own code with vectors of eight takes the last 8 of 56 keys for 16."""
    torch.compiler.reset()
    q, k, v = (torch.rand(3, 56, 2, 16).transpose(1, 2) for _ in range(3))
    found = []
    with torch.no_grad(), changed_inductor(), config.patch({"cpp.simdlen": 256, "force_disable_caches": True}):
        compiled = torch.compile(flex_attention)
        for content in ("", *CONTENTS):
            with filled_memory(content):
                found += [compiled(q.clone(), k.clone(), v.clone()) for _ in range(5)]
    for each in found:
        torch.testing.assert_close(each, scaled_dot_product_attention(q, k, v))


def test_sums_that_may_be_long_are_added_in_chunks_whatever_the_examples_size(tmp_path: Path) -> None:
    """Inductor's own code notes that the sum is short, and takes that for a condition of all sizes from then on."""
    shapes = {"long": {0: "rows[1:65536]"}, "short": {0: "few[1:64]"}}
    spec = spec_of(lambda long, short: (long.sum(0), short.sum(0)), torch.rand(9, 8), torch.rand(5, 8), shapes=shapes)
    kernels = _kernels(traced(spec), tmp_path / "compiled", 2)
    loops = re.findall(
        r"x1<static_cast<int64_t>\((ks\d)\).*?(cascade_sum_combine|tmp_acc\d_vec \+)", kernels, re.DOTALL
    )
    assert [how for _, how in loops] == ["cascade_sum_combine", "tmp_acc0_vec +"], kernels


@pytest.mark.slow
def test_a_product_reads_its_input_where_it_is(tmp_path: Path) -> None:
    """Inductor's own code copies what gelu wrote: an image's gh * gw + 1 tokens do not look like whole rows to it."""
    first, wide, narrow = torch.rand(1, 1, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def tokens(x: Tensor) -> Tensor:
        patches = x.reshape(x.shape[0], x.shape[1] * x.shape[2], 8)
        return narrow(gelu(wide(torch.cat([first.expand(x.shape[0], -1, -1), patches], 1))))

    sizes = {"x": {0: "batch[1:64]", 1: "gh[2:60]", 2: "gw[2:60]"}}
    with torch.no_grad():
        found = traced(spec_of(tokens, torch.rand(2, 3, 5, 8), shapes=sizes))
    kernels = _kernels(found, tmp_path / "compiled", 2)
    assert ".erf()" in kernels
    assert "div_floor_integer" not in kernels, kernels


SYMBOLS = sympy.symbols("row gh gw column", integer=True, nonnegative=True)
TERMS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(SYMBOLS[1:])), min_size=1, max_size=3)


@settings(max_examples=examples(100))
@given(TERMS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2000), st.integers(-2, 2), st.data())
def test_joined_indices_have_the_same_value(terms, constant, divisor, scale, off, data) -> None:
    """`off` spoils the sum: then there is nothing to join."""
    row, *_, column = SYMBOLS
    size = sum((factor * symbol for factor, symbol in terms), sympy.Integer(constant))
    whole = FloorDiv(row, divisor * size)
    index = sympy.expand(scale * size * whole + scale * ModularIndexing(row, divisor, size) + off * whole + column)
    with changed_inductor():
        joined = sizevars.join_dimensions(index)
    values = {symbol: data.draw(st.integers(0, 10_000 if symbol in (row, column) else 60)) for symbol in SYMBOLS}
    assert joined.subs(values) == index.subs(values)
    assert joined.has(ModularIndexing) == (off != 0)


@pytest.mark.parametrize("wanted", [None, True])
def test_kernels_of_a_gpu_do_not_depend_on_what_else_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    """Inductor times no forms of kernels against each other, unless it is asked to. Simulated: there is a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = {} if wanted is None else read_inductor_config({"triton.autotune_pointwise": str(wanted)})
    seen = options_of(
        tmp_path, monkeypatch, CompilePlan(device=torch.device("cuda"), inductor_config=config, cache=False)
    )
    assert seen["triton.autotune_pointwise"] is bool(wanted)


def test_code_calls_no_functions_that_an_operator_library_offers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader opens libraries so that code cannot find their functions: operators are called as others are."""
    offered = {torch.ops.aten.relu.default: ["AOTITorchError aoti_torch_cpu_relu(AtenTensorHandle, AtenTensorHandle*)"]}
    with torch._inductor.config.patch("aot_inductor.custom_ops_to_c_shims", offered):
        seen = options_of(tmp_path, monkeypatch, CompilePlan(device=CPU, cache=False))
    assert seen["aot_inductor.custom_ops_to_c_shims"] == {}


def options_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: CompilePlan) -> dict[str, Any]:
    """What AOTInductor is told for a plan."""
    seen: dict[str, Any] = {}

    def compiled(module: Any, args: Any, kwargs: Any, *, options: dict[str, Any]) -> NoReturn:
        seen.update(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(torch._inductor, "aot_compile", compiled)
    with pytest.raises(ExportError, match="enough"):
        compile_methods(heads(), tmp_path / "target", plan, None, weights=None, progress=silent)
    return seen


def test_the_error_of_a_custom_operator_stops_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 writes a call that drops the error."""
    name, call = "generate_fallback_kernel_with_runtime_lookup_aot", "aoti_torch_proxy_executor_call_function(p, 0, t)"

    class Wrapper:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def writeline(self, line: str) -> None:
            self.lines.append(line)

    def written(self: Wrapper, op_overload: object, raw_args: object, output_args: object, raw_outputs: object) -> None:
        self.writeline(f"{call};")
        self.writeline("return;")

    patch = PATCHES[f"CppWrapperCpu.{name}"]
    monkeypatch.setattr(CppWrapperCpu, name, written)
    monkeypatch.setattr(patched, "PATCHES", {**PATCHES, patch.key: replace(patch, until="")})
    wrapper: Any = Wrapper()
    with changed_inductor():
        getattr(CppWrapperCpu, name)(wrapper, None, (), (), ())
    wrapper.writeline("done;")
    assert wrapper.lines == [f"AOTI_TORCH_ERROR_CODE_CHECK({call});", "return;", "done;"]


def test_an_export_does_not_wait_for_another_one_s_compiler(tmp_path: Path) -> None:
    held = _filelock.FileLock(str(tmp_path / MODEL_LOCK))
    with held, changed_inductor():
        with _filelock.FileLock(str(tmp_path / MODEL_LOCK), timeout=0):
            pass
        other = _filelock.FileLock(str(tmp_path / "other.lock"), timeout=0)
        with other:
            assert other.is_locked
    assert _filelock.FileLock is type(held)


@pytest.mark.parametrize(
    ("factor", "dtype", "holds"),
    [
        (10**9, torch.int32, False),
        (10**9, torch.int64, True),
        (10**18, torch.int64, False),
        (1, torch.int8, False),
        (1, torch.int16, True),
        (-1, torch.uint8, False),
        (6, torch.float16, True),
        (7, torch.float16, False),
    ],
)
def test_a_position_is_an_expression_where_its_dtype_has_all_its_values(
    factor: int, dtype: torch.dtype, holds: bool
) -> None:
    x = sympy.Symbol("x", integer=True)
    assert _holds_all(TypedExpr(factor * x, dtype), {x: ValueRanges(0, 299)}) is holds


def test_a_position_of_any_size_stays_an_expression_in_int64() -> None:
    x = sympy.Symbol("x", integer=True, nonnegative=True)
    assert _holds_all(TypedExpr(x + 1, torch.int64), {})
    assert not _holds_all(TypedExpr(x + 1, torch.int32), {})

"""Replaces private functions of torch while a block runs: the one place where export does so.

No torch that exports has an option for any of these, so export replaces:

- `GraphLowering.get_attr`, so that no weight is written into the code as numbers (`program_weights`), and other short
  tensors still are (`load_time`).
- `cpu_vec_isa.valid_vec_isa_list` and `cpp_builder._get_optimization_cflags`, so that the code is for
  the chosen instruction set and not for this machine, and can be unloaded (`toolchain`).
- `CppBuilder.build`, so that the sources of a model are compiled at the same time (`model_sources`).
- `sizevars.join_dimensions`, which misses rows that lie one after the other, `CppKernel.decide_parallel_depth`, so that
  every machine writes the same loops, and `cpp_flex_attention_template.parallel_num_threads`, so that every thread has
  its memory, and `CppMicroGemmFP32Vec.TEMPLATE_KERNEL`, so that attention reads no keys that are not there
  (`inductor_changes`).
- `CppKernel.need_use_acc_helper` and `_acc_helper_init`, `cpp.replace_cascade_sum_with_add` and
  `KernelGroup.codegen_group`, so that long sums are as accurate as eager's, and `lowering.use_two_step_variance`, so
  that variances are (`long_sums`), and, with `codegen_group` again,
  `TilingSelect.select_tiling` and `CppVecKernel.reduction_combine_vec`, so that they read whole rows (`wide_columns`).
- `CSEProxy.indirect_indexing`, `_default` and `device_assert_async`, `IndexPropagation.indirect_indexing`,
  `Kernel.indirect_assert` and `CppVecKernel.indirect_assert`, `TritonKernel.inductor_meta_common`,
  `CppWrapperCpu.generate_end` and `codegen_dynamic_select_index`, `AssertScalar.codegen`, and how `CppPrinter` prints
  divisions, so that code refuses values and goes on (`refusing_code`); `FallbackKernel.create` and the constructors of
  `IndexPutFallback` and `ScatterFallback`, so that eager's kernels get no index out of range (`guarded_indices`).
- `torch.get_num_threads`, so that a machine of one thread writes right code for more (`inductor_changes`).
- `CppVecKernel.store`, so that vectors are added to one element, and `DynamicSliceSize.__init__`, so that slices that
  end at a value have a beginning (`inductor_changes`).
- `compile_fx.select_decomp_table`, so that small convolutions become products (`small_convolutions`), that heads that
  share keys become queries (`shared_heads`), and, with `GraphLowering.call_function`,
  `InductorChoices.triton_kernel_kwargs` and `ForeachKernelSchedulerNode.combinable_nodes`, that products of one row
  read a GPU's memory fast, and kernels beside them are combined (`vector_products`), and
  `compile_fx.split_const_gm`, so that only what the graph was changed for is computed when the code is
  loaded (`load_time`).
- `ShapeEnv._log_guard`, so that an error names the line of the model that a size failed at (`guards`), that Inductor
  fixes no size (`assumed_sizes`), and that a decomposition does not branch on one (`exportkit.onnx.branches`); and
  `ShapeEnv.produce_guards`, so that torch refuses no condition that holds (`guards`).
- `proxy_tensor.maybe_handle_decomp`, so that operators that Python implements become their bodies (`operator_bodies`).
- `torch.compile`, where torch's own loops and branches call it, and `generic_associative_scan` (`control_flow`); the
  effect of `_linalg_check_errors` in loops, and `torch._library.utils.is_impure` with it (`branch_graphs`).
- `torch.fx.Interpreter.run_node`, so that a crash names the node, and `_out_variant.to_out_variant`, so that the code
  calls the operators that the model calls (`inductor_changes`).
- `Scheduler.codegen_extern_call` and `PythonWrapperCodegen.writeline`, so that an error of the C++ compiler names the
  operator (`compile_failure`).
- `FakeTensorMode.dispatch`, so that code reads the results of kernels where they are (`true_strides`), and
  `flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG`, so that its operators can be watched (`rounded_runs`).
- `FakeImplCtx.create_unbacked_symint`, so that sizes that depend on data begin at 0 (`data_sizes`).
- `can_auto_functionalize`, `FallbackKernel.codegen` and `post_grad.decompose_auto_functionalized`, so that operators
  that write may return lists of tensors, or be given nothing to write into (`writing_operators`).
- Python's `len`, so that the length of a tensor varies (`lengths`), and what `torch.functional` calls, so that
  the rows of `cdist` do (`distances`).
- `OpOverload.decompose` and, again, `compile_fx.select_decomp_table`, so that operators stay whole that torch takes for
  composites and that have a fake kernel (`opaque`).
- `torch.cov` and `torch.corrcoef`, which read a tensor (`covariances`).
- `Distribution._validate_args`, so that distributions read nothing to check it (`distributions`).
- `torch.utils._filelock.FileLock`, so that an export does not wait for others (`inductor_changes`).
- `ONNXRegistry.from_torchlib`, so that the table of translations to ONNX is made once (`exportkit.onnx.convert`).

`absent_gpu` replaces what asks for a GPU without `replaced`, because the fork in which it does so ends.

`quiet` adds an attribute instead, which an error does not have: with it, torch.export prints no half-traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from exportkit.errors import ExportError
from exportkit.support import exporting_torches


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or module of torch while the block runs.

    The replacement is seen by every thread of the process.

    Args:
        owner: The class or module that defines the attribute.
        name: The attribute's name.
        make: Takes the original and returns its replacement.

    Raises:
        ExportError: This torch does not define it. Exporting without the replacement could write a wrong package.
    """
    if name not in vars(owner):
        raise ExportError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which exportkit needs to replace",
            hint=f"Export with torch {exporting_torches()}.",
        )
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def all_replaced(*changes: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Makes several replacements while the block runs, each of which is what `replaced` takes."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(replaced(*change))
        yield

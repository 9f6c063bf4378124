"""Runs AOTInductor, with what export changes in it. Importing this takes two seconds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor import exc
from torch.utils._pytree import tree_structure

from exportkit.errors import CompilerError
from exportkit.export.compile.assumed_sizes import AssumedSizeError, no_assumed_sizes
from exportkit.export.compile.compile_failure import UncompiledError, described, failed_nodes, noted_lines, wrong_code
from exportkit.export.compile.compiled_cache import Code
from exportkit.export.compile.eager_kernels import can_leave, eager_kernels, with_tensors
from exportkit.export.compile.grid_samplers import grid_samplers_of_eager
from exportkit.export.compile.guarded_indices import guarded_indices
from exportkit.export.compile.inductor_changes import (
    attention_of_any_length,
    changed_inductor,
    opaque_operators_stay_whole,
)
from exportkit.export.compile.model_sources import compiling_model_sources
from exportkit.export.compile.packed_rnn_weights import packed_rnn_weights
from exportkit.export.compile.packed_weights import packed_weights
from exportkit.export.compile.refusable_values import may_refuse
from exportkit.export.compile.refusing_code import (
    RefusesValuesError,
    RefusingCode,
    writing_refusals,
)
from exportkit.export.compile.shared_heads import shared_heads
from exportkit.export.compile.small_convolutions import small_convolutions
from exportkit.export.compile.true_strides import true_strides
from exportkit.export.compile.usable_compiler import last_lines, refuse_full_disk
from exportkit.export.compile.vector_products import vector_products
from exportkit.export.models.source_lines import where_listed
from exportkit.export.record.cases import eager_mode
from exportkit.export.torch_patches.opaque import opaque_operators
from exportkit.export.torch_patches.tensors_of_sizes import from_zero
from exportkit.export.torch_patches.writing_operators import writing_operators
from exportkit.export.trace.explain import raised_text, refused_by_compiler
from exportkit.export.trace.hop_subgraphs import hand_over_sizes


def run_inductor(
    program: torch.export.ExportedProgram,
    device: torch.device,
    options: dict[str, Any],
    *,
    left_to_eager: Sequence[str],
    keep: bool,
    tf32: bool,
) -> Code:
    """Compiles a program with AOTInductor.

    `keep`: whether ccache may be used.

    Raises:
        UncompiledError: AOTInductor refused the program, or wrote code that is wrong or does not compile.
        CompilerError: The C++ compiler does not work.
    """
    compile_with = partial(_compiled, program, device, options, left_to_eager, keep=keep, tf32=tf32)
    try:
        return compile_with(refuses=may_refuse(program))
    except RefusesValuesError:  # an operator that was taken apart, of which that was not seen
        return compile_with(refuses=True)


def _compiled(
    program: torch.export.ExportedProgram,
    device: torch.device,
    options: dict[str, Any],
    left_to_eager: Sequence[str],
    *,
    refuses: bool,
    keep: bool,
    tf32: bool,
) -> Code:
    args, kwargs = program.example_inputs
    folder = Path(options["aot_inductor.output_path"])
    try:
        with ExitStack() as contexts:
            # Inductor decides about TF32 for the kernels that it writes.
            contexts.enter_context(eager_mode(tf32=tf32))
            contexts.enter_context(opaque_operators())
            contexts.enter_context(changed_inductor())
            contexts.enter_context(opaque_operators_stay_whole())
            contexts.enter_context(from_zero())
            contexts.enter_context(writing_operators())
            written = contexts.enter_context(noted_lines())
            if device.type == "cpu":
                contexts.enter_context(small_convolutions())
                contexts.enter_context(shared_heads())
                contexts.enter_context(packed_weights())
                contexts.enter_context(attention_of_any_length(program))
            else:
                contexts.enter_context(packed_rnn_weights())
                contexts.enter_context(vector_products())
            contexts.enter_context(compiling_model_sources(keep=keep))
            contexts.enter_context(warnings.catch_warnings())
            # torch 2.13 copies its own deprecated LeafSpec.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            module = returning_tensors(program.module(check_guards=False))
            left = (*left_to_eager, *grid_samplers_of_eager(module, device))
            contexts.enter_context(eager_kernels(left))  # the last word about how operators are taken apart
            if left:
                with_tensors(module, left)
            hand_over_sizes(module)
            contexts.enter_context(true_strides(program))
            refusing = RefusingCode(program, device)
            if refuses:
                kwargs = refusing.add_input(module, args, kwargs)
            contexts.enter_context(writing_refusals(refusing))
            contexts.enter_context(guarded_indices())
            contexts.enter_context(no_assumed_sizes(program))
            files = torch._inductor.aot_compile(module, args, kwargs, options=options)
    except (Exception, AssumedSizeError) as error:
        raise _uncompiled(error, program, written, folder) from error
    paths: list[Path] = []
    constants: dict[str, torch.Tensor] = {}
    for file in files:  # type: ignore[union-attr]  # with aot_inductor.package it is a list
        if isinstance(file, dict):  # the weights outside of the code: tensors with properties, by name
            constants |= {name: tensor for name, (tensor, _) in file.items()}
        else:
            paths.append(Path(str(file)))
    return Code(paths, constants)


def _uncompiled(
    error: BaseException, program: torch.export.ExportedProgram, written: Mapping[str, torch.fx.Node], folder: Path
) -> Exception:
    """Explains what Inductor raised."""
    # Inductor raises its own errors, wrapped or not, and a custom operator's fake kernel may raise anything.
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, RefusesValuesError):
        return cause
    refuse_full_disk(cause)
    fixes = cause if isinstance(cause, AssumedSizeError) else None
    nodes, said = failed_nodes(error), str(fixes or raised_text(cause))
    if isinstance(cause, (exc.CppCompileError, exc.InvalidCxxCompiler)):
        if (wrong := wrong_code(str(cause), written, folder)) is None:
            return CompilerError(
                f"the C++ compiler refused the generated code: {last_lines(str(cause), 8)}",
                hint="`exportkit doctor` shows which compiler is used. Set CXX to use another one.",
            )
        said, nodes = wrong
    at = described(nodes[0]) if nodes else where_listed(str(cause))
    refusal = fixes.refusal(at) if fixes else refused_by_compiler(said, program, at)
    places = [place for node in nodes for place in can_leave(node, program)]
    return UncompiledError(said, refusal, at, places)


def returning_tensors(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Removes the constants from the outputs of a program's module, in place.

    AOTInductor would return a tensor for None and for each number. The manifest has the constants and their positions.
    """
    output = module.graph.output_node()
    returned: Any = output.args[0]
    tensors = tuple(value for value in returned if isinstance(value, torch.fx.Node))
    if len(tensors) < len(returned):
        output.args = (tensors,)
        codegen: Any = module.graph._codegen
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_structure(tensors))
        module.recompile()
    return module

# ruff: noqa: E501  # one attribute a line
"""What export replaces within torch: each private function or value, why, and what torch should do instead.

torch has no option for any of these. `patched` is the door through which they are replaced, for the time of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ANY = "(...)"


@dataclass(frozen=True)
class Patch:
    """An attribute that export replaces.

    Attributes:
        owner: The module that defines it, or "module:Class".
        name: Its name there.
        why: What the replacement does.
        upstream: The issue or pull request, or the file in docs/upstream that is ready to be one.
        signatures: Its parameters, as this table was written against: one for each way in which versions of torch have
            them. `...` is any default, and ANY any parameters: the replacement hands them on. Empty: a value.
        until: The first version of torch that does not need the replacement. Empty: all need it.
        since: The first version of torch that has the attribute. Empty: all have it.
    """

    owner: str
    name: str
    why: str
    upstream: str
    signatures: tuple[str, ...] = ()
    until: str = ""
    since: str = ""

    @property
    def key(self) -> str:
        """The name in this table and in messages, such as "GraphLowering.get_attr" or "torch.compile"."""
        return f"{self.owner.replace(':', '.').rpartition('.')[2]}.{self.name}"


def _patches(
    why: str, upstream: str, attributes: Mapping[str, str], until: str = "", since: str = ""
) -> Iterator[Patch]:
    """Yields the patches of one reason, by the path of each, "module:name" or "module:Class.name"."""
    for path, signatures in attributes.items():
        module, _, place = path.partition(":")
        of, _, name = place.rpartition(".")
        known = tuple(signatures.split(" | ")) if signatures else ()
        yield Patch(f"{module}:{of}" if of else module, name, why, upstream, known, until, since)


_TABLE = (
    # While torch traces a model.
    *_patches(
        "An error names the line that a size failed at, and neither Inductor nor a decomposition may fix a size.",
        "docs/upstream/conditions-on-sizes.md",
        {"torch.fx.experimental.symbolic_shapes:ShapeEnv._log_guard": "(self, prefix, g, forcing_spec)"},
    ),
    *_patches(
        "torch refuses no condition on sizes that holds for all sizes declared.",
        "docs/upstream/conditions-on-sizes.md",
        {"torch.fx.experimental.symbolic_shapes:ShapeEnv.produce_guards": "(self, *args, **kwargs)"},
    ),
    *_patches(
        "torch fixes or narrows no size by a condition that fails for declared ones: eager judges it.",
        "docs/upstream/conditions-on-sizes.md",
        {
            "torch.fx.experimental.symbolic_shapes:ShapeEnv._maybe_guard_rel": "(self, expr)",
            "torch.fx.experimental.symbolic_shapes:ShapeEnv.get_implications": "(self, e)",
        },
    ),
    *_patches(
        "torch.export would unroll recurrent layers, which fixes their length; they stay whole.",
        "https://github.com/pytorch/pytorch/issues/126339",
        {
            "torch._VF:vf": "",
            "torch:lstm": ANY,
            "torch:gru": ANY,
            "torch:rnn_tanh": ANY,
            "torch:rnn_relu": ANY,
            "torch:_pack_padded_sequence": ANY,
            "torch:_pad_packed_sequence": ANY,
            "torch.nn.modules.rnn:RNNBase.get_expected_hidden_size": "(self, input, batch_sizes)",
            "torch.nn.modules.rnn:LSTM.forward": "(self, input, hx=...)",
            "torch.nn.modules.rnn:GRU.forward": "(self, input, hx=...)",
            "torch.nn.modules.rnn:RNN.forward": "(self, input, hx=...)",
        },
    ),
    *_patches(
        "Loops and branches run in eager mode, and are traced with copies where Dynamo refuses memory that is shared.",
        "https://github.com/pytorch/pytorch/issues/193810",
        {"torch:compile": ANY},
    ),
    *_patches(
        "What a model assigns to a buffer that is an argument of its program is written into that argument.",
        "docs/upstream/assigned-buffers.md",
        {"torch.export._trace:register_buffer_assignment_hook": "(mod, assigned_buffers)"},
    ),
    *_patches(
        "A gradient within a model is traced below autograd; torch.export traces above it.",
        "https://github.com/pytorch/pytorch/issues/125984",
        {"torch.export._trace:make_fx": ANY},
    ),
    *_patches(
        "It is seen that a model asks for gradients, which torch.export does not trace.",
        "https://github.com/pytorch/pytorch/issues/125984",
        {
            "torch.autograd:_engine_run_backward": "(t_outputs, *args, **kwargs)",
            "torch.autograd.forward_ad:enter_dual_level": "()",
            "torch._functorch.eager_transforms:grad_increment_nesting": "()",
            "torch._functorch.eager_transforms:jvp_increment_nesting": "()",
        },
    ),
    *_patches(
        "Operators with a fake kernel stay whole, though their one C++ kernel is taken for a composite.",
        "docs/upstream/composite-with-a-fake-kernel.md",
        {"torch._ops:OpOverload.decompose": "(self, *args, **kwargs)"},
    ),
    *_patches(
        "Sizes that depend on data begin at 0 where a fake kernel names no least one; by this older name, at 2.",
        "docs/upstream/sizes-from-zero.md",
        {"torch._library.fake_impl:FakeImplCtx.create_unbacked_symint": "(self, *, min=..., max=...)"},
    ),
    *_patches(
        "Distributions are traced without checks that read their arguments, as torch.compile does (pytorch#151094).",
        "https://github.com/pytorch/pytorch/pull/186291",
        {"torch.distributions.distribution:Distribution._validate_args": ""},
    ),
    *_patches(
        "Operators that Python implements become their bodies: hosts do not have their source. Known values are read.",
        "https://github.com/pytorch/pytorch/issues/134581",
        {"torch.fx.experimental.proxy_tensor:maybe_handle_decomp": "(proxy_mode, op, args, kwargs)"},
    ),
    *_patches(
        "torch.as_tensor([h, w]) and functions alike keep sizes, as torch.tensor([h, w]) does.",
        "docs/upstream/tensors-of-sizes.md",
        {"torch._export.non_strict_utils:_NonStrictTorchFunctionHandler._override": "(self, func, args, kwargs)"},
    ),
    *_patches(
        "Its operators can be watched: torch compiles the call, and refuses to where there is a mode.",
        "https://github.com/pytorch/pytorch/pull/196988",
        {"torch.nn.attention.flex_attention:_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": ""},
    ),
    # While Inductor writes code.
    *_patches(
        "No weight is written into the code as numbers, which other weights would get; other short tensors are.",
        "docs/upstream/weights-as-numbers.md",
        {"torch._inductor.graph:GraphLowering.get_attr": "(self, target, args, kwargs)"},
    ),
    *_patches(
        "Each tensor that code takes from outside has one name.",
        "docs/upstream/constants-of-one-name.md",
        {"torch._inductor.graph:GraphLowering.allocate_non_dup_const_name": "(self, name, data)"},
    ),
    *_patches(
        "On a GPU, products of one row are written by Inductor, with what comes after them, and read memory fast.",
        "docs/upstream/products-of-one-row.md",
        {
            "torch._inductor.graph:GraphLowering.call_function": "(self, target, args, kwargs)",
            "torch._inductor.scheduler:ForeachKernelSchedulerNode.combinable_nodes": "(cls, nodes)",
            "torch._inductor.choices:InductorChoices.triton_kernel_kwargs": "(self, kernel_cls, features, groups, kernel_kwargs)",
        },
    ),
    *_patches(
        "Code notes a value out of range and goes on; Inductor's assertion ends the process, or the GPU's context.",
        "https://github.com/pytorch/pytorch/issues/195402",
        {
            "torch._inductor.graph:GraphLowering.run_node": "(self, n)",
            "torch._inductor.ir:AssertScalar.codegen": "(self, wrapper)",
            "torch._inductor.codegen.common:CSEProxy.indirect_indexing": "(self, var, size, check=..., wrap_neg=...)",
            "torch._inductor.codegen.common:CSEProxy.load": "(self, name, index)",
            "torch._inductor.codegen.common:CSEProxy._default": "(self, name, args, kwargs)",
            "torch._inductor.codegen.common:CSEProxy.device_assert_async": "(self, cond, msg)",
            "torch._inductor.codegen.common:Kernel.indirect_assert": "(self, var, lower, upper, mask=...)",
            "torch._inductor.index_propagation:IndexPropagation.indirect_indexing": "(self, index, size, check=..., wrap_neg=...)",
            "torch._inductor.codegen.cpp:CppVecKernel.indirect_assert": "(self, var, lower, upper, mask=...)",
            "torch._inductor.codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.modification": "(self, subgraph_buffer, output_name, output_idx)",
            "torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.generate_end": "(self, result)",
            "torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.codegen_dynamic_select_index": "(self, node, clamp)",
            "torch._inductor.select_algorithm:TritonTemplateKernel.modification": "(self, subgraph_number, output_name, mask=..., input_shapes=..., **fixed_inputs) | (self, subgraph_number, output_name, mask=..., input_shapes=..., input_dtypes=..., **fixed_inputs)",
            "torch._inductor.select_algorithm:ModificationWrapper.indirect_indexing": "(self, index_var, size, check, wrap_neg=...)",
            "torch._inductor.codegen.triton:TritonKernel.inductor_meta_common": "(cls)",
        },
    ),
    *_patches(
        "Whether a product is padded, which is a matter of speed, becomes no condition on sizes.",
        "docs/upstream/conditions-on-sizes.md",
        {"torch._inductor.fx_passes.pad_mm:is_mm_compute_bound": "(M, K, N, dtype)"},
    ),
    *_patches(
        "Small convolutions become products, shared heads queries, and what is left to eager stays whole.",
        "docs/upstream/operators-left-to-eager.md",
        {"torch._inductor.compile_fx:select_decomp_table": "()"},
    ),
    *_patches(
        "Only what the graph was changed for is computed when code is loaded, not all that follows from weights.",
        "docs/upstream/computed-at-load.md",
        {
            "torch._inductor.compile_fx:split_const_gm": "(gm, skip_constructor=..., lifted_constant_names=..., skip_folding_node_fn=...)"
        },
    ),
    *_patches(
        "Inductor takes no operator apart that stays whole.",
        "docs/upstream/composite-with-a-fake-kernel.md",
        {"torch._inductor.lowering:decompositions": ""},
    ),
    *_patches(
        "A variance is two sums: a mean updated by each element is less accurate, and takes up to eight times as long.",
        "https://github.com/pytorch/pytorch/pull/170757",
        {"torch._inductor.lowering:use_two_step_variance": "(x, axis, keepdim) | (x, axis, keepdim, input_dtype)"},
    ),
    *_patches(
        "An operator that was asked to be left to eager's kernel is.",
        "docs/upstream/operators-left-to-eager.md",
        {"torch._inductor.graph:fallback_node_due_to_unsupported_type": "(node, allow_cpu_inputs=...)"},
    ),
    *_patches(
        "Rows that lie one after the other are seen as such where their length is a sum.",
        "docs/upstream/rows-of-a-sum.md",
        {"torch._inductor.sizevars:join_dimensions": "(expr)"},
    ),
    *_patches(
        "Code reads the results of eager's kernels with the strides that they have, where torch describes others.",
        "docs/upstream/strides-of-unique.md",
        {"torch._subclasses.fake_tensor:FakeTensorMode.dispatch": "(self, func, types, args=..., kwargs=...)"},
    ),
    *_patches(
        "Operators that write into arguments may return lists of tensors, or be given nothing to write into.",
        "docs/upstream/operators-that-write.md",
        {
            "torch._higher_order_ops.auto_functionalize:can_auto_functionalize": "(op)",
            "torch._higher_order_ops.auto_functionalize:auto_functionalized_v2_dense": "(_mutable_op, _only_clone_these_bases=..., **kwargs)",
            "torch._inductor.ir:can_auto_functionalize": "(op)",
            "torch._inductor.ir:FallbackKernel.codegen": "(self, wrapper)",
            "torch._inductor.fx_passes.post_grad:decompose_auto_functionalized": "(graph)",
        },
    ),
    *_patches(
        "Indices are brought into range before eager's own kernels read them: on a GPU others end the context.",
        "https://github.com/pytorch/pytorch/issues/195402",
        {
            "torch._inductor.ir:FallbackKernel.create": "(cls, kernel, *args, **kwargs)",
            "torch._inductor.ir:IndexPutFallback.__init__": "(self, op_overload, x, indices, values, accumulate)",
            "torch._inductor.ir:ScatterFallback.__init__": "(self, op_overload, x, dim, index, src, *, reduce=..., include_self=...)",
        },
    ),
    *_patches(
        "A slice that begins or ends at a value gets its other end: torch writes None into C++ there.",
        "docs/upstream/slices-with-one-end.md",
        {"torch._inductor.ir:DynamicSliceSize.__init__": "(self, unbacked_size_symbol, start, end, step, size)"},
    ),
    *_patches(
        "Branches of torch.cond read operands with the strides that they were lowered for.",
        "docs/upstream/strides-of-branches.md",
        {"torch._inductor.ir:Conditional.create": "(cls, predicate, true_fn, false_fn, operands)"},
        until="2.14",
    ),
    *_patches(
        "The same for torch.cond and torch.switch, which are one class from torch 2.14 on.",
        "docs/upstream/strides-of-branches.md",
        {"torch._inductor.ir:Switch.create": "(cls, selector, branches, operands, is_cond=...)"},
        since="2.14",
    ),
    *_patches(
        "An error of the C++ compiler names the operator.",
        "docs/upstream/errors-without-the-operator.md",
        {
            "torch._inductor.scheduler:Scheduler.codegen_extern_call": "(self, scheduler_node)",
            "torch._inductor.codegen.wrapper:PythonWrapperCodegen.writeline": "(self, line)",
        },
    ),
    *_patches(
        "A vector is added to one element, as by index_add into one column, where Inductor fails in an assertion.",
        "docs/upstream/index-add-of-one-column.md",
        {"torch._inductor.codegen.cpp:CppVecKernel.store": "(self, name, index, value, mode=...)"},
        until="2.14",
    ),
    *_patches(
        "What is computed from a position wraps, and rounds, as its dtype does.",
        "docs/upstream/wrapping-integers.md",
        {"torch._inductor.index_propagation:IndexPropagation.propagate_sympy": "(self, name, args, kwargs)"},
    ),
    *_patches(
        "A reduction over rows takes several vectors of a row at a time, and reads whole lines of the cache.",
        "docs/upstream/reductions-over-rows.md",
        {
            "torch._inductor.codegen.cpp:CppVecKernel.reduction_combine_vec": "(self, reduction_type, var, next_value, helper_val=..., index=..., horizontal_reduction=..., src_dtype=...)",
            "torch._inductor.codegen.cpp:TilingSelect.select_tiling": "(self, fn_list, var_sizes_list)",
        },
    ),
    *_patches(
        "Every machine writes the same loops, and threads share more than the one over the batch.",
        "docs/upstream/threads-of-another-machine.md",
        {"torch._inductor.codegen.cpp:CppKernel.decide_parallel_depth": "(self, max_parallel_depth, threads)"},
    ),
    *_patches(
        "All sums that may be long are added in cascades, as eager's are.",
        "https://github.com/pytorch/pytorch/pull/163144",
        {
            "torch._inductor.codegen.cpp:CppKernel.need_use_acc_helper": "(self, reduction_type, dtype, use_scalar)",
            "torch._inductor.codegen.cpp:CppKernel._acc_helper_init": "(self, reduction_type, helper_val, helper_range, dtype, num_threads=..., use_scalar=...)",
            "torch._inductor.codegen.cpp:replace_cascade_sum_with_add": "(buffer)",
        },
    ),
    *_patches(
        "The templates that long sums and several vectors need stand in the code.",
        "https://github.com/pytorch/pytorch/pull/163144",
        {"torch._inductor.codegen.cpp:KernelGroup.codegen_group": "(self, name=...)"},
    ),
    *_patches(
        "Each thread has its memory where code runs: torch writes how many threads this machine has.",
        "docs/upstream/threads-of-another-machine.md",
        {"torch._inductor.codegen.cpp_flex_attention_template:parallel_num_threads": "()"},
    ),
    *_patches(
        "With vectors of eight, attention reads no keys after the last.",
        "docs/upstream/keys-of-attention.md",
        {"torch._inductor.codegen.cpp_micro_gemm:CppMicroGemmFP32Vec.TEMPLATE_KERNEL": ""},
    ),
    *_patches(
        "Operators get lists without elements, infinity and other devices as they are; before 2.13, code stops where one fails.",
        "docs/upstream/arguments-of-operators.md",
        {
            "torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot": "(self, op_overload, raw_args, output_args, raw_outputs)"
        },
    ),
    *_patches(
        "A size that is divided by zero is an error, and does not end the process.",
        "https://github.com/pytorch/pytorch/issues/143649",
        {
            "torch.utils._sympy.printers:CppPrinter._print_FloorDiv": "(self, expr)",
            "torch.utils._sympy.printers:CppPrinter._print_PythonMod": "(self, expr)",
        },
    ),
    *_patches(
        "A crash of the compiler, and a size that Inductor would fix, name the node.",
        "docs/upstream/errors-without-the-operator.md",
        {"torch.fx.interpreter:Interpreter.run_node": "(self, n)"},
    ),
    *_patches(
        "A machine of one thread writes code that is right for more.",
        "docs/upstream/threads-of-another-machine.md",
        {"torch:get_num_threads": ANY},
    ),
    *_patches(
        "Code calls the operators that the model calls: for those with the tag `out`, torch writes what does not compile.",
        "https://github.com/pytorch/pytorch/pull/175117",
        {"torch._library._out_variant:to_out_variant": "(op)"},
    ),
    *_patches(
        "A tensor that is written with what another one was gets that, also where the other is written first.",
        "docs/upstream/values-before-writes.md",
        {"torch._inductor.fx_passes.post_grad:remove_noop_ops": "(graph)"},
        until="2.15",
    ),
    *_patches(
        "A pattern that does not name `alpha`, `beta` or `value` matches no node that has one: it would be dropped.",
        "https://github.com/pytorch/pytorch/issues/195442",
        {"torch._inductor.pattern_matcher:_TargetArgsExpr._match": "(self, node, ctx)"},
        until="2.15",
    ),
    *_patches(
        "Numbers left to their defaults are in the list of calls; without them a call ends with a mismatch of ints.",
        "https://github.com/pytorch/pytorch/pull/194261",
        {"torch._export.serde.serialize:GraphModuleSerializer.serialize_inputs": "(self, target, args, kwargs=...)"},
    ),
    *_patches(
        "The two C++ sources of a model are compiled at the same time.",
        "docs/upstream/sources-one-after-the-other.md",
        {"torch._inductor.cpp_builder:CppBuilder.build": "(self)"},
    ),
    *_patches(
        "An export does not wait for others: Inductor locks by the name of what it writes.",
        "docs/upstream/exports-that-wait.md",
        {"torch.utils._filelock:FileLock": ANY},
    ),
    *_patches(
        "Integers wrap; code can be unloaded, and is for the chosen instruction set, before torch 2.13.",
        "https://github.com/pytorch/pytorch/pull/184297",
        {"torch._inductor.cpp_builder:_get_optimization_cflags": "(cpp_compiler, min_optimize=...)"},
    ),
    *_patches(
        "Code is for the chosen instruction set, not for the richest of this machine.",
        "https://github.com/pytorch/pytorch/pull/184297",
        {"torch._inductor.cpu_vec_isa:valid_vec_isa_list": "()"},
    ),
    # While a program becomes ONNX.
    *_patches(
        "The table of translations is made once: making it takes longer than a small function does.",
        "docs/upstream/onnx-registry.md",
        {"torch.onnx._internal.exporter._registration:ONNXRegistry.from_torchlib": "(cls, opset_version=...)"},
    ),
)

PATCHES: Mapping[str, Patch] = {patch.key: patch for patch in _TABLE}

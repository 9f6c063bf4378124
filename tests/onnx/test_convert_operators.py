"""Every operator of arr_coc as an ONNX function answers like its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from exportkit import ExportSpec
from exportkit.arr_coc.ops import SPECS, OpSpec, Sample
from exportkit.arr_coc.ops import triton as triton_ops
from exportkit.errors import ExportError
from exportkit.onnx.trial import check_loads
from tests.arr_coc.ops.walked_specs import Call
from tests.export.function_models import spec_of
from tests.onnx.conversions import (
    checked,
    convert_spec,
    model_of_function,
    run,
    run_reference,
    session_of,
    tensors_of,
)

# Of the gradients, which belong to training, two: with several results, flags, and outputs of size 0.
ALL = {name for name in SPECS if not name.endswith("_grad")} | {"muladd_grad", "opponent_balance_grad"}
IN_FLOAT32 = ALL - {"compute_salience_forward"}  # compute_salience, with more results
IN_HALF = {
    "allocate_lod_tokens",
    "bias_relu",
    "compute_entropy",
    "fused_layer_norm",
    "query_alignment",
    "select_patches",
    "softmax",
    "top_k_patches",
}
LARGE = {"compute_salience", "fused_texture", "relevance_scores", "texture_statistics"}


class Calls(torch.nn.Module):
    """Calls each of some operators once."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, values: list[list[Tensor]]) -> list[Any]:
        # Some write into their arguments, which a model must not.
        return [call(*(value.clone() for value in given)) for call, given in zip(self.calls, values)]


def specs(dtype: torch.dtype) -> list[OpSpec]:
    names = IN_FLOAT32 if dtype == torch.float32 else IN_HALF
    return [SPECS[name] for name in sorted(names)]


def dynamic(spec: OpSpec) -> dict[str, dict[int, str]]:
    """The sizes that vary: of the large operators only the batch, because tracing all takes many seconds."""
    varying = spec.dynamic.items()
    return {name: {d: s for d, s in dims.items() if s == "B" or spec.name not in LARGE} for name, dims in varying}


def exportable(spec: OpSpec, samples: list[Sample]) -> Call:
    calls = (Call(spec, sample) for sample in samples)
    return next(c for c in calls if all(c.bound[n].shape[d] > 1 for n in c.names for d in spec.dynamic.get(n, {})))


def fits(call: Call, other: Call, varying: dict[str, dict[int, str]]) -> bool:
    """Whether another sample is a call of the same function: only sizes that vary differ, and none is 0."""
    if call.names != other.names or _constants(call) != _constants(other):
        return False
    for name in call.names:
        sizes, others, dims = call.bound[name].shape, other.bound[name].shape, varying.get(name, {})
        if len(sizes) != len(others) or any(a != b and d not in dims for d, (a, b) in enumerate(zip(sizes, others))):
            return False
        if 0 in others:
            return False
    return True


def _constants(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.bound.items() if name not in call.names}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_operators_answer_like_their_kernels_at_all_sizes_and_with_nan(dtype: torch.dtype) -> None:
    cpu, wrong, ran = torch.device("cpu"), [], 0
    samples = {spec.name: list(spec.samples(cpu, dtype)) for spec in specs(dtype)}
    calls = {spec.name: exportable(spec, samples[spec.name]) for spec in specs(dtype)}
    shapes: dict[str, dict[int, str]] = {}
    for number, (name, call) in enumerate(calls.items()):
        for place, tensor in enumerate(call.names):
            dims = dynamic(SPECS[name]).get(tensor, {})
            least = {"N": call.bound["k"]} if name == "top_k_patches" else {}
            shapes[f"values.{number}.{place}"] = {d: f"{name}_{s}[{least.get(s, 1)}:9999]" for d, s in dims.items()}
    spec = ExportSpec(
        model=Calls(list(calls.values())),
        example_inputs=([list(call.inputs()) for call in calls.values()],),
        dynamic_shapes=shapes,
    )
    model = checked(convert_spec(spec))
    assert {function.name for function in model.functions} == set(calls)
    assert {function.domain for function in model.functions} == {"arr_coc"}
    for name, call in calls.items():
        session = session_of(model_of_function(model, name, {n: call.bound[n] for n in call.names}))
        others = [Call(SPECS[name], sample) for sample in samples[name]]
        for sample, other in zip(samples[name], others):
            if not fits(call, other, dynamic(SPECS[name])):
                continue
            ran += 1
            answers = run(session, other.inputs())
            try:
                for answer, kernel in zip(answers, tensors_of(other(*other.inputs()))):
                    rtol, atol = SPECS[name].tolerance(kernel.dtype)
                    assert_close(answer, kernel, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{name}, {sample.label}: {error}")
    assert not wrong
    assert ran > 2 * len(calls)


@pytest.mark.slow
def test_a_triton_operator_becomes_a_function_of_its_reference() -> None:
    inputs = torch.randn(3, 8), torch.randn(8)
    spec = spec_of(lambda x, weight: triton_ops.rms_norm_quantize(x, weight), *inputs, shapes={"x": {0: "batch[1:64]"}})
    model = checked(convert_spec(spec))
    assert [(f.domain, f.name) for f in model.functions] == [("arr_coc_triton", "rms_norm_quantize")]
    for batch in (1, 5):
        inputs = torch.randn(batch, 8), torch.randn(8)
        quantized, scales = spec.model(*inputs)
        answered, answered_scales = run(session_of(model), inputs)
        assert (answered.int() - quantized.int()).abs().max() <= 1
        assert_close(answered_scales, scales)


def test_a_size_that_an_operator_takes_is_an_input_of_its_function() -> None:
    def best(scores: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.arr_coc.top_k_patches(scores, features, torch.sym_min(3, scores.shape[1]))

    def inputs(batch: int, patches: int) -> tuple[Tensor, Tensor]:
        scores = torch.randint(0, 3, (batch, patches)).float()  # with ties
        scores[0, 0] = torch.nan
        return scores, torch.randn(batch, patches, 4)

    sizes = {0: "batch[1:9]", 1: "n[1:9]"}
    model = checked(convert_spec(spec_of(best, *inputs(2, 5), shapes={"scores": sizes, "features": sizes})))
    (function,) = model.functions
    assert list(function.input) == ["relevance_scores", "features", "k"]
    for batch, patches in [(1, 1), (1, 2), (4, 3), (3, 9)]:
        given = inputs(batch, patches)
        for answers in (run(session_of(model), given), run_reference(model, given)):
            for answer, kernel in zip(answers, best(*given)):
                assert_close(answer, kernel, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_what_onnx_runtime_has_no_kernel_for_is_named_with_its_dtype() -> None:
    def add(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty_like(a)
        torch.ops.arr_coc.add_out(a, b, out)
        return out

    converted = convert_spec(spec_of(add, *torch.ones(2, 3).bfloat16()))
    refused = r"no CPU kernel for Add of bfloat16, which comes from the decomposition of arr_coc::add_out"
    with pytest.raises(ExportError, match=refused):
        check_loads(converted.model, converted.lines)

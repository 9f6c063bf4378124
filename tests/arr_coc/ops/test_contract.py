"""Every operator keeps its SPEC: walked over devices, so that a new operator is tested by existing."""

from __future__ import annotations

import pytest
import torch

from exportkit.arr_coc.ops import SPECS, OpSpec
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import tensors
from tests.arr_coc.ops.walked_specs import WALKED, samples_of

pytestmark = pytest.mark.slow

GRADIENT_CHECKS = {name for name in checks() if "grad" in name} | {"second-derivative"}


def not_applicable(spec: OpSpec, device: torch.device) -> set[str]:
    """The checks that have nothing to check. Every other one must have run."""
    subject = Subject.of_spec(spec, [device])
    names = {"declared-mutation"} if not subject.is_mutable else {"batch"}
    names |= {"own-float64", "influence"}  # the reference says more
    if spec.name in {"add_out", "compute_salience_grad"}:
        names.add("large")  # sizes that belong together in several arguments
    if spec.name in {"fused_layer_norm_grad", "scale_bias_relu_grad"}:
        names.add("batch")  # gradients of parameters are sums over the batch
    if not spec.differentiable:
        names |= GRADIENT_CHECKS
    if not any(str(argument.type) == "float" for argument in subject.overload._schema.arguments):
        names.add("float-parameter")
    packet = subject.overload.overloadpacket
    if not any("out" in {tag.name for tag in getattr(packet, each).tags} for each in packet.overloads()):
        names.add("out-overload")
    if len(spec.differentiable) < 2:
        names.add("gradient-alone")
    if device.type == "cpu" or len(tensors(subject.calls[0].args)) < 2:
        names.add("devices")
    return names


@pytest.mark.parametrize(("name", "spec"), WALKED, ids=[name for name, _ in WALKED])
def test_an_operator_keeps_the_contract_and_no_check_is_left_out_but_for_a_reason(
    name: str, spec: OpSpec, device: torch.device
):
    report = check_operator(Subject.of_spec(spec, [device]))
    assert not report.findings, "\n\n".join(finding.text for finding in report.findings)
    assert report.skipped.keys() <= not_applicable(spec, device)


@pytest.mark.parametrize("name", SPECS)
def test_memory_that_does_not_start_on_16_bytes_gives_the_same_bits(name: str, device: torch.device) -> None:
    """In every dtype, of which the contract's own check takes one."""
    for dtype in SPECS[name].dtypes:
        for sample in samples_of(SPECS[name], device, dtype):
            shifted = sample.with_tensors(lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t))
            expected, actual = (tensors(SPECS[name].overload(*s.args, **s.kwargs)) for s in (sample, shifted))
            assert first_difference(actual, expected) is None, (sample.label, dtype)


WITHOUT_GRADIENT = {
    "relevance_scores": r"inference.*compute_entropy.*query_alignment and opponent_balance",
    "rms_norm_quantize": "rms_norm_quantize is not differentiable",
    "select_patches": r"inference.* instead, top_k_patches and allocate_lod_tokens",
    "texture_statistics": r"texture_statistics is for inference.*fused_texture and means",
    "triton_rms_norm_quantize": "rms_norm_quantize is not differentiable",
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_gradient_is_refused_with_what_to_do_instead(name: str, device: torch.device) -> None:
    spec = dict(WALKED)[name]
    sample = samples_of(spec, device, torch.float32)[0]
    sample.tensors[0].requires_grad_()
    floating = [t for t in tensors(spec.wrapper(*sample.args, **sample.kwargs)) if t.requires_grad]
    with pytest.raises(RuntimeError, match=WITHOUT_GRADIENT[name]):
        torch.autograd.grad([t.sum() for t in floating], sample.tensors[0])

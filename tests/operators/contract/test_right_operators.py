"""A check blames no right operator: each call is made on tensors of its own, and what a kernel refuses is not valid."""

from __future__ import annotations

import pytest
import torch

from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import EXPANDED, FRAMED, STRIDED
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample
from tests.operators.contract.faulty_operators import WITHOUT_COMPILERS
from tests.operators.contract.right_operators import RIGHT


@pytest.mark.slow_but("writes to a single*", "finds one*", "takes no tensor")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_is_not_called_broken(name: str):
    broken = [f for f in check_operator(RIGHT[name], WITHOUT_COMPILERS).findings if f.severity is Severity.broken]
    assert not broken, broken


@pytest.mark.slow_but("takes no tensor", "finds one*")
@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["takes no tensor", "computes a size that is one in its smallest call", "finds one thing"]
)
def test_a_right_operator_is_exported(name: str):
    assert not check_operator(RIGHT[name], ["exports"]).findings


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 4), (1, 1), (2, 1, 3, 3), (2, 3), (0, 3)])
@pytest.mark.parametrize("layout", [each for each in STRIDED if each is not EXPANDED], ids=lambda each: each.name)
def test_a_layout_has_memory_of_its_own_or_is_the_tensor_itself(layout, shape):
    tensor = torch.randn(shape)
    laid = layout.apply(tensor)
    assert torch.equal(laid, tensor)
    shares = laid.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert (laid is tensor) == shares or not tensor.numel()
    assert layout is not FRAMED or laid is not tensor


def test_a_row_that_the_kernel_refuses_alone_is_said_to_be_so():
    report = check_operator(RIGHT["takes its sizes as an argument"], ["batch"])
    assert "the operator refuses a row of the call" in report.skipped["batch"]


def test_a_kernel_that_records_a_gradient_is_one_finding_with_advice():
    library = torch.library.Library("recording", "DEF")
    library.define("peak(Tensor x) -> (Tensor, Tensor)")
    library.impl("peak", lambda x: tuple(x.max(1)), "CPU")
    torch.library.register_fake(
        "recording::peak",
        lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.int64)),
        lib=library,
    )
    subject = Subject(torch.ops.recording.peak.default, tuple(Sample("", (torch.randn(n, 5),)) for n in (3, 4)))
    gradients = [name for name in checks() if "grad" in name or name == "second-derivative"]
    report = check_operator(subject, gradients)
    (finding,) = report.findings
    assert finding.check == "opcheck-autograd"
    assert finding.severity is Severity.broken
    assert "test_autograd_registration fails" in finding.message
    assert "torch.library.register_autograd" in finding.hint
    with pytest.raises(Exception, match="test_autograd_registration"):
        exec(finding.call, {"torch": torch})


@pytest.mark.parametrize(("atol", "said"), [(0.0, "1 of 3 elements differ, first [1]: 64 and 63"), (1.0, None)])
def test_a_tolerance_of_integers_counts(atol: float, said: str | None) -> None:
    actual, expected = torch.tensor([0, 64, 200], dtype=torch.uint8), torch.tensor([0, 63, 200], dtype=torch.uint8)
    assert difference(actual, expected, 0.0, atol) == said

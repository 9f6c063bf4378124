"""torch's own checks of custom operators."""

from __future__ import annotations

import torch

from exportkit.operators.contract.definition import Problem, of_call
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample

_EARLIER = ("determinism", "mutation", "aliasing")
_FAKES = ("fake-runs", "fake-shape", "fake-strides", "fake-dtype", "fake-device", "fake-layouts")
_HINT = "The documentation of torch.library.opcheck explains this test."


def _opcheck(trial: Trial, call: Sample, test: str, with_gradient: bool = False) -> Problem | None:
    if any(t.is_floating_point() and bool(t.isnan().any()) for t in trial.answer(call)):
        raise NotApplicable("opcheck takes NaN for a difference")
    own = call.copied()
    if with_gradient and not trial.subject.is_mutable:
        own = own.with_tensors(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    try:
        torch.library.opcheck(trial.subject.overload, own.args, dict(own.kwargs), test_utils=test)
    except Exception as error:
        said = " ".join(str(error).split())
        return Problem(
            f"torch.library.opcheck's {test} fails: {said[:400]}",
            shown=f'torch.library.opcheck({{op}}.default, args, test_utils="{test}")',
        )
    return None


@of_call("opcheck-schema", _HINT, order=80, dtypes="first", most=4, unless=_EARLIER)
def schema(trial: Trial, call: Sample) -> Problem | None:
    """The schema says what is written to and what is aliased."""
    return _opcheck(trial, call, "test_schema")


@of_call("opcheck-autograd", _HINT, order=80, dtypes="first", most=3, unless=("mutation", "aliasing"))
def autograd(trial: Trial, call: Sample) -> Problem | None:
    """A gradient is registered where torch finds it."""
    return _opcheck(trial, call, "test_autograd_registration", with_gradient=True)


@of_call("opcheck-fake", _HINT, order=80, dtypes="first", most=4, unless=(*_EARLIER, *_FAKES))
def faketensor(trial: Trial, call: Sample) -> Problem | None:
    """The fake kernel agrees with the kernel."""
    return _opcheck(trial, call, "test_faketensor")


@of_call("opcheck-dynamic", _HINT, order=80, dtypes="first", most=2, unless=(*_EARLIER, *_FAKES, "fake-symbolic"))
def dynamic(trial: Trial, call: Sample) -> Problem | None:
    """The operator is traced with symbolic sizes and compiled by AOTAutograd."""
    return _opcheck(trial, call, "test_aot_dispatch_dynamic")

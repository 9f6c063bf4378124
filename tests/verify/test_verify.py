"""Each way an artifact can be wrong has its own verdict: the whole way, with real processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportkit.errors import UsageError
from exportkit.export.artifact import export_aoti
from exportkit.export.models.resolve import resolve
from exportkit.export.record.cases import eager_mode
from exportkit.package import manifest as m
from exportkit.reference_model import ReferenceModel
from exportkit.verify.commands import LoadArtifact
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import (
    CallFailed,
    Crashed,
    EagerFailed,
    LoadFailed,
    Match,
    Mismatch,
    MissingOperator,
    NotRun,
    TimedOut,
)
from exportkit.verify.replay import blocked
from exportkit.verify.replay_worker import EXPORTER, BlockedImports, Replay
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.verify.verify_artifacts import MISBEHAVING_SCHEMA, Affine, Misbehaving, right
from tests.verify.verify_models import STATE

X = torch.arange(6.0).reshape(2, 3)
CASES = VerifyOptions(against="cases")


def verdicts(report, against="cases"):
    return [check.verdict for check in report.checks if check.against == against]


def test_right_and_wrong_answers_each_have_their_verdict(artifact):
    wrong = right(X)
    wrong["y"][1, 2] += 1
    cases = [(X, right(X)), (X, wrong), (X[:1], right(X[:1]))]
    report = verify(artifact(Affine(), cases), CASES)
    match, mismatch, other = verdicts(report)
    assert isinstance(match, Match)
    assert isinstance(mismatch, Mismatch)
    assert "y: 1 of 6 elements differ" in mismatch.message
    assert "(1, 2)" in mismatch.message
    assert isinstance(other, Match)
    assert [check.verdict.exit_code for check in report.checks] == [0, 1, 0]
    assert report.exit_code == 1
    (target,) = report.targets
    assert (target.name, target.device, report.torch) == ("program", "cpu", torch.__version__)
    assert {check.target for check in report.checks} == {"program"}
    assert report.checks[0].label == "case 0 (rows=2)"
    assert report.checks[0].seconds is not None


def test_misbehaviour_is_a_verdict_and_the_next_call_gets_a_new_process(
    artifact, misbehaving_library, tmp_path, monkeypatch
):
    inputs = [torch.full((1, 3), float(first)) for first in (0, 3, 1, 0, 2, 0)]
    operators = [m.Operator(name="misbehaving::act", schema=MISBEHAVING_SCHEMA)]
    path = artifact(Misbehaving(), [(x, right(x)) for x in inputs], operators=operators)

    report = verify(
        path, VerifyOptions(against="cases", eager=ReferenceModel(op_libraries=[misbehaving_library]), timeout=5.0)
    )
    found = verdicts(report)
    assert [type(v) for v in found] == [Match, CallFailed, Crashed, Match, TimedOut, NotRun]
    assert "the first element is 3" in found[1].message
    assert found[2].signal == signal.SIGSEGV
    assert "SIGSEGV" in found[2].message
    assert "misbehaving: about to crash" in found[2].message
    assert [v.exit_code for v in found] == [0, 12, 13, 0, 14, 0]

    # A module that loads the library serves as well. The process of the package does not import it.
    (tmp_path / "acting.py").write_text(f"import torch\ntorch.ops.load_library({str(misbehaving_library)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    one = artifact(Misbehaving(), [(x, right(x)) for x in inputs[:1]], operators=operators)
    found = verdicts(verify(one, VerifyOptions(against="cases", eager=ReferenceModel(op_libraries=["acting"]))))
    assert [type(v) for v in found] == [Match]
    (check,) = verify(one, VerifyOptions(against="cases", eager=ReferenceModel(op_libraries=["json"]))).checks
    assert isinstance(check.verdict, LoadFailed)
    assert "json loads no library that registers misbehaving::act" in check.verdict.message

    # A missing operator is named before anything runs.
    report = verify(path, CASES)
    (check,) = report.checks
    assert isinstance(check.verdict, MissingOperator)
    assert check.verdict.operator == "misbehaving::act"
    assert "--op-library" in check.verdict.message
    assert (report.exit_code, report.torch) == (15, None)
    assert [(target.name, target.left_out) for target in report.targets] == [("program", "an operator is missing")]


def test_eager_is_compared_at_the_ends_of_the_range_and_between(artifact):
    """Of a bare module: its inputs are made from the manifest."""
    path = artifact(Affine(), [], source="verify_models:Refusing", state_sha256=STATE)
    report = verify(path, VerifyOptions(shapes=3, eager=ReferenceModel("verify_models:Refusing")))
    failed, *matches = verdicts(report, "eager")
    assert isinstance(failed, EagerFailed)
    assert "at least 2 rows" in failed.message
    assert [type(v) for v in matches] == [Match] * 2
    assert [check.sizes["rows"] for check in report.checks][:2] == [1, 8]
    assert report.exit_code == 18


def test_asking_for_cases_where_there_are_none_is_refused_and_says_what_to_do(artifact):
    with pytest.raises(UsageError, match="--against eager"):
        verify(artifact(Affine(), []), CASES)


def test_the_replay_process_cannot_import_exporter_operators_or_model():
    hook = BlockedImports([EXPORTER, *blocked("mymodels:Net")])
    for name in ("exportkit.arr_coc.ops", "exportkit.arr_coc.model", "exportkit.export", "mymodels", "mymodels.net"):
        with pytest.raises(ModuleNotFoundError, match=name):
            hook.find_spec(name)
    for name in ("exportkit.runtime", "torch", "mymodels2"):
        assert hook.find_spec(name) is None


def test_the_replay_process_uses_tf32_only_where_the_cases_were_recorded_with_it(monkeypatch):
    """Convolutions on CUDA use it unless told otherwise, and would be compared at another precision than recorded."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr("exportkit.verify.replay_worker._opened", lambda command: SimpleNamespace(manifest=None))
    loaded = SimpleNamespace(device="cpu")
    monkeypatch.setattr("exportkit.runtime.loader.load_opened", lambda *arguments, **options: loaded)
    try:
        for tf32 in (True, False):
            with eager_mode(tf32=tf32):
                eager = [backend.allow_tf32 for backend in backends]
            Replay().load(LoadArtifact("", "t", "cpu", tf32, (), (), (), signature=None, unsigned=None))
            assert [backend.allow_tf32 for backend in backends] == eager == [tf32, tf32]
    finally:
        for backend, value in zip(backends, before):
            backend.allow_tf32 = value


# --- inputs in every layout ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_package_that_sees_pairs_as_complex_numbers_passes_in_every_layout() -> None:
    report = verify(artifact("rotated"), VerifyOptions(against="cases"))
    assert [check.verdict.message for check in report.checks if check.failed] == []
    assert [check.layouts for check in report.checks] == [1, 1, 1, 1]


def test_a_program_may_refuse_a_layout_which_eager_refuses_too() -> None:
    report = verify(artifact("rotated-program"), VerifyOptions(against="cases"))
    assert [check.verdict.message for check in report.checks if check.failed] == []
    assert len(report.checks) == 4


# --- what ends eager's process says nothing about the artifact -------------------------------------------------------


# As a kernel does that reads at any index that it is given.
MODEL = """
import os, signal, torch
from exportkit import ExportSpec

class Taken(torch.nn.Module):
    def forward(self, x, index):
        if not torch.compiler.is_compiling() and ((index < 0) | (index >= len(x))).any():
            os.kill(os.getpid(), signal.SIGSEGV)
        return x[index]

def spec():
    return ExportSpec(Taken(), (torch.rand(9), torch.tensor([3, 1, 4])), dynamic_shapes={"index": {0: "n[1:9]"}})
"""


@pytest.mark.slow
def test_a_kernel_that_does_not_check_its_indices_is_compared_at_those_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "taken.py").write_text(MODEL)
    artifact, model = tmp_path / "taken.pt2", f"{tmp_path}/taken.py:spec"
    export_aoti(resolve(model), artifact)
    report = verify(artifact, VerifyOptions(eager=ReferenceModel(model=model)))
    assert {check.label: check.verdict.message for check in report.checks if check.failed} == {}
    assert [check for check in report.checks if check.against == "eager"]

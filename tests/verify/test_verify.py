"""Each way an artifact can be wrong has its own verdict."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from verify_artifacts import MISBEHAVING_SCHEMA, Affine, Misbehaving, affine_call, right
from verify_models import STATE

from exportkit.errors import UsageError
from exportkit.package import manifest as m
from exportkit.verify.outcomes import (
    CallFailed,
    Crashed,
    EagerDiffers,
    EagerFailed,
    EagerUnavailable,
    LoadFailed,
    Match,
    Mismatch,
    MissingOperator,
    NotRun,
    TimedOut,
    WrongDtype,
    WrongShape,
    WrongStructure,
)
from exportkit.verify.verify import VerifyOptions, verify

X = torch.arange(6.0).reshape(2, 3)
CASES = VerifyOptions(against="cases")


def verdicts(report, against="cases"):
    return [check.verdict for check in report.checks if check.against == against]


def test_a_right_artifact_matches_in_a_process_without_the_exporter(artifact):
    report = verify(artifact(Affine(), [(X, right(X)), (X[:1], right(X[:1]))]), CASES)
    assert [type(v) for v in verdicts(report)] == [Match, Match]
    assert report.exit_code == 0
    assert (report.target, report.device, report.torch) == ("program", "cpu", torch.__version__)
    assert report.checks[0].label == "case 0 (rows=2)"
    assert report.checks[0].seconds is not None


def test_a_wrong_value_is_a_mismatch_that_names_the_output_and_the_place(artifact):
    wrong = right(X)
    wrong["y"][1, 2] += 1
    report = verify(artifact(Affine(), [(X, wrong)]), CASES)
    (verdict,) = verdicts(report)
    assert isinstance(verdict, Mismatch)
    assert report.exit_code == 1
    assert "y: 1 of 6 elements differ" in verdict.message
    assert "(1, 2)" in verdict.message


def test_given_tolerances_allow_it(artifact):
    wrong = right(X)
    wrong["y"] += 0.1
    path = artifact(Affine(), [(X, wrong)])
    assert verify(path, VerifyOptions(against="cases", rtol=0.0, atol=0.2)).exit_code == 0


def test_a_wrong_dtype_has_its_own_verdict(artifact):
    report = verify(artifact(Affine(), [(X, {**right(X), "n": torch.full((2,), 3, dtype=torch.int32)})]), CASES)
    assert verdicts(report) == [WrongDtype("n", "int32", "int64")]
    assert report.exit_code == 10


def test_a_wrong_shape_has_its_own_verdict(artifact):
    report = verify(artifact(Affine(), [(X, {**right(X), "n": torch.full((3,), 3)})]), CASES)
    assert verdicts(report) == [WrongShape("n", (3,), (2,))]
    assert report.exit_code == 11


def test_a_wrong_structure_has_its_own_verdict(artifact):
    items = (m.TensorNode(index=0), m.TensorNode(index=1))
    outputs = tuple(
        m.TensorOutput(name=str(i), dtype=o.dtype, shape=o.shape, tolerance=o.tolerance)
        for i, o in enumerate(affine_call().outputs)
    )
    call = affine_call(result=m.SequenceNode(kind="tuple", items=items), outputs=outputs)
    report = verify(artifact(Affine(), [(X, right(X))], call=call), CASES)
    (verdict,) = verdicts(report)
    assert isinstance(verdict, WrongStructure)
    assert report.exit_code == 11
    assert "mapping" in verdict.message


class TestMisbehaviour:
    @pytest.fixture
    def run(self, artifact, misbehaving_library):
        def go(*firsts, timeout=60.0, libraries=True):
            inputs = [torch.full((1, 3), float(first)) for first in firsts]
            operators = [m.Operator(name="misbehaving::act", schema=MISBEHAVING_SCHEMA)]
            path = artifact(Misbehaving(), [(x, right(x)) for x in inputs], operators=operators)
            given = (misbehaving_library,) if libraries else ()
            return verify(path, VerifyOptions(against="cases", op_libraries=given, timeout=timeout))

        return go

    def test_it_can_behave(self, run):
        assert run(0).exit_code == 0

    def test_a_crash_is_a_verdict_with_the_signal_and_the_next_call_gets_a_new_process(self, run):
        report = run(1, 0)
        crashed, match = verdicts(report)
        assert isinstance(crashed, Crashed)
        assert crashed.signal == signal.SIGSEGV
        assert "SIGSEGV" in crashed.message
        assert "misbehaving: about to crash" in crashed.message
        assert isinstance(match, Match)
        assert report.exit_code == 13

    def test_after_two_crashes_the_rest_is_not_run_and_says_so(self, run):
        report = run(1, 1.0, 0)
        assert [type(v) for v in verdicts(report)] == [Crashed, Crashed, NotRun]

    def test_a_stall_is_a_verdict(self, run):
        report = run(2, timeout=15.0)
        (verdict,) = verdicts(report)
        assert isinstance(verdict, TimedOut)
        assert report.exit_code == 14

    def test_an_error_is_a_verdict_with_its_message(self, run):
        report = run(3)
        (verdict,) = verdicts(report)
        assert isinstance(verdict, CallFailed)
        assert "the first element is 3" in verdict.message
        assert report.exit_code == 12

    def test_a_missing_operator_is_named_before_anything_runs(self, run):
        report = run(0, libraries=False)
        (check,) = report.checks
        assert isinstance(check.verdict, MissingOperator)
        assert check.verdict.operator == "misbehaving::act"
        assert "--op-library" in check.verdict.message
        assert report.exit_code == 15
        assert report.target is None


def test_a_damaged_artifact_fails_to_load_with_the_package_s_exit_code(artifact):
    path = artifact(Affine(), [(X, right(X))])
    data = bytearray(path.read_bytes())
    place = data.index(b"input.0")
    data[place] ^= 1
    path.write_bytes(data)
    report = verify(path, CASES)
    (check,) = report.checks
    assert isinstance(check.verdict, LoadFailed)
    assert check.verdict.error == "DigestMismatchError"
    assert report.exit_code == 3


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError):
        verify(tmp_path / "none.pt2", CASES)


def test_asking_for_cases_where_there_are_none_is_refused_and_says_what_to_do(artifact):
    with pytest.raises(UsageError, match="--against eager"):
        verify(artifact(Affine(), []), CASES)


class TestEager:
    @pytest.fixture(autouse=True)
    def _importable(self, monkeypatch):
        # The eager process finds the models; verify_models is in this folder.
        monkeypatch.setenv("PYTHONPATH", str(sys.modules["verify_models"].__file__).rpartition("/")[0])

    def run(self, artifact, source, *, cases=True, against="both", state=STATE, **options):
        recorded = [(X, right(X))] if cases else []
        path = artifact(Affine(), recorded, source=source, state_sha256=state)
        return verify(path, VerifyOptions(against=against, shapes=3, **options))

    def test_eager_is_compared_at_the_ends_of_the_range_and_between(self, artifact):
        report = self.run(artifact, "verify_models:affine")
        eager = [check for check in report.checks if check.against == "eager"]
        assert [type(check.verdict) for check in eager] == [Match] * 3
        assert [check.sizes["rows"] for check in eager][:2] == [1, 8]
        assert report.exit_code == 0

    def test_a_bare_module_gets_inputs_made_from_the_manifest(self, artifact):
        assert self.run(artifact, "verify_models:Affine", against="eager").exit_code == 0

    def test_eager_that_answers_otherwise_is_a_mismatch(self, artifact):
        report = self.run(artifact, "verify_models:tripling", against="eager")
        assert isinstance(verdicts(report, "eager")[0], Mismatch)
        assert report.exit_code == 1

    def test_eager_that_has_other_weights_is_not_compared(self, artifact):
        report = self.run(artifact, "verify_models:affine", state="1" * 64)
        assert isinstance(verdicts(report, "eager")[0], EagerDiffers)
        assert report.exit_code == 17

    def test_eager_that_refuses_a_size_of_the_range_is_a_failure_of_its_own(self, artifact):
        report = self.run(artifact, "verify_models:refusing", against="eager")
        failed = verdicts(report, "eager")
        assert [type(v) for v in failed] == [EagerFailed, Match, Match]
        assert "at least 2 rows" in failed[0].message
        assert report.exit_code == 18

    @pytest.mark.parametrize("source", ["no_such_module:model", None])
    def test_eager_that_cannot_be_imported_is_skipped_where_cases_spoke(self, artifact, source):
        report = self.run(artifact, source)
        (verdict,) = verdicts(report, "eager")
        assert isinstance(verdict, EagerUnavailable)
        assert report.exit_code == 0

    @pytest.mark.parametrize(("against", "cases"), [("eager", True), ("both", False)])
    def test_eager_that_cannot_be_imported_fails_where_nothing_else_was_compared(self, artifact, against, cases):
        report = self.run(artifact, "no_such_module:model", against=against, cases=cases)
        assert report.exit_code == 16

    def test_another_model_can_be_named(self, artifact):
        assert self.run(artifact, None, against="eager", model="verify_models:affine").exit_code == 0

    def test_sizes_beyond_the_budget_are_named(self, artifact):
        report = self.run(artifact, "verify_models:affine", against="eager", max_input_bytes=48)
        assert report.skipped == ("rows=8: its inputs take 96 bytes, more than the limit of 48 bytes",)
        assert max(check.sizes["rows"] for check in report.checks) == 4


def test_the_replay_process_cannot_import_exporter_operators_or_model(tmp_path):
    from exportkit.verify.child import EXPORTER, BlockedImports

    hook = BlockedImports([*EXPORTER, "mymodels"])
    for name in ("exportkit.ops", "exportkit.models.arr_coc", "exportkit.export", "mymodels", "mymodels.net"):
        with pytest.raises(ModuleNotFoundError, match=name):
            hook.find_spec(name)
    for name in ("exportkit.runtime", "torch", "mymodels2"):
        assert hook.find_spec(name) is None

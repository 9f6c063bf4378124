from __future__ import annotations

import math

import pytest
import torch

from exportkit.package.manifest import Accuracy, OutputTolerance, Size, TensorOutput
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.outcomes import Match, Mismatch, WrongDtype, WrongShape, WrongStructure


def output(name="y", dtype="float32", rtol=1e-3, atol=1e-3, ranking_of=None, rows_of=None):
    tolerance = OutputTolerance(rtol=rtol, atol=atol, ranking_of=ranking_of, rows_of=rows_of)
    return TensorOutput(name=name, dtype=dtype, shape=(), tolerance=tolerance)


def one(expected, actual, **tolerance):
    dtype = str(expected.dtype).removeprefix("torch.")
    return compare_outputs([output(dtype=dtype, **tolerance)], [expected], [actual])


EXACT, WIDE = {"rtol": 0, "atol": 0}, {"rtol": 1e9, "atol": 1e9}
NAN, INF = torch.tensor([math.nan]), torch.tensor([math.inf])
HUNDRED = torch.tensor([100.0, 0.0])
FLOATS = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("expected", "actual", "tolerance", "verdict"),
    [
        # The tolerance is absolute plus relative to the expected value.
        (HUNDRED, torch.tensor([100.05, 0.0009]), {}, Match),
        (HUNDRED, torch.tensor([100.0, 0.002]), {}, Mismatch),
        (HUNDRED, torch.tensor([100.2, 0.0]), {}, Mismatch),
        # NaN equals NaN and nothing else, an infinity itself and nothing else.
        (NAN, NAN.clone(), {}, Match),
        (NAN, torch.zeros(1), WIDE, Mismatch),
        (torch.zeros(1), NAN, WIDE, Mismatch),
        (INF, INF.clone(), {}, Match),
        (INF, -INF, {"rtol": 1.0}, Mismatch),
        (-INF, INF, {"rtol": 1.0}, Mismatch),
        (INF, torch.zeros(1), {"rtol": 1.0}, Mismatch),
        (torch.zeros(1), INF, {"rtol": 1.0}, Mismatch),
        # float64 cannot tell these apart.
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), EXACT, Mismatch),
        *((torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 2.0]).to(dtype), {}, Match) for dtype in FLOATS),
        *((torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 3.0]).to(dtype), {}, Mismatch) for dtype in FLOATS),
    ],
)
def test_elements_are_compared_by_tolerance_and_by_kind(expected, actual, tolerance, verdict):
    assert isinstance(one(expected, actual, **tolerance), verdict)


def test_equal_tensors_match_exactly():
    (result,) = one(torch.ones(3, 4), torch.ones(3, 4), **EXACT).outputs
    assert (result.max_abs, result.compared) == (0, 12)


def test_a_mismatch_says_how_many_how_far_and_where():
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[1, 2] = 1.5
    verdict = one(expected, actual)
    assert isinstance(verdict, Mismatch)
    (result,) = verdict.outputs
    assert (result.mismatched, result.compared, result.max_abs, result.max_abs_at) == (1, 6, 0.5, (1, 2))
    assert "y: 1 of 6 elements differ (16.67%)" in verdict.message
    assert "0.5 at (1, 2)" in verdict.message


def test_the_greatest_relative_difference_is_infinite_where_zero_was_expected():
    verdict = one(torch.zeros(2), torch.tensor([0.0, 0.5]))
    assert verdict.outputs[0].max_rel == math.inf
    assert verdict.outputs[0].max_rel_at == (1,)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integers_and_booleans_are_exact(dtype):
    expected = torch.tensor([1, 0, 1]).to(dtype)
    assert isinstance(one(expected, expected.clone(), rtol=0, atol=0), Match)
    flipped = (1 - expected.int()).to(dtype)
    assert one(expected, flipped, rtol=0, atol=0).outputs[0].mismatched == 3


def test_empty_outputs_match_and_say_that_nothing_was_compared():
    verdict = one(torch.empty(0, 3), torch.empty(0, 3))
    assert isinstance(verdict, Match)
    assert "nothing to compare" in str(verdict.outputs[0])


def test_another_dtype_shape_or_number_of_outputs_is_a_verdict_of_its_own():
    assert one(torch.ones(2), torch.ones(2).double()) == WrongDtype("y", "float32", "float64")
    assert one(torch.ones(2, 1), torch.ones(2)) == WrongShape("y", (2, 1), (2,))  # though it would broadcast
    assert isinstance(compare_outputs([output()], [torch.ones(1)], [torch.ones(1)] * 2), WrongStructure)


def test_given_tolerances_replace_those_of_floating_outputs_and_leave_integers_exact():
    floats, ints = torch.ones(2), torch.tensor([10])
    outputs = [output("f"), output("i", dtype="int64", rtol=0, atol=0)]
    verdict = compare_outputs(outputs, [floats, ints], [floats + 0.1, ints], rtol=0.0, atol=0.2)
    assert isinstance(verdict, Match)
    verdict = compare_outputs(outputs, [floats, ints], [floats, ints + 1], rtol=10.0, atol=10.0)
    assert isinstance(verdict, Mismatch)


class TestRanking:
    outputs = (
        output("scores", rtol=0, atol=1e-3),
        output("indices", dtype="int64", rtol=0, atol=0, ranking_of="scores"),
        output("features", rtol=0, atol=1e-6, rows_of="indices"),
    )
    scores = torch.tensor([[0.9, 0.5, 0.5001, 0.1]])
    features = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])

    def judge(self, indices, scores=None, features=None):
        """Eager picks 0, 2 of these scores."""
        expected = [self.scores, torch.tensor([[0, 2]]), self.features[:, [0, 2]]]
        indices = torch.tensor([indices])
        features = self.features[0, indices.clamp(0, 3)] if features is None else features
        return compare_outputs(self.outputs, expected, [self.scores if scores is None else scores, indices, features])

    def test_an_index_may_differ_within_a_tie_and_its_row_is_not_compared(self):
        verdict = self.judge([0, 1])
        assert isinstance(verdict, Match)
        assert verdict.outputs[1].note.startswith("1 indices differ where `scores` ties within its tolerance")
        assert "greatest gap in `scores` 0.0001 at (0, 1)" in verdict.outputs[1].note
        assert verdict.outputs[2].note == "1 of 2 rows compared: those whose `indices` agree"
        assert verdict.outputs[2].compared == 1

    @pytest.mark.parametrize("keepdim", [True, False])
    @pytest.mark.parametrize("dim", [0, 1, 2, -2])
    def test_every_dimension_is_ranked_as_the_last_is(self, dim, keepdim):
        scores = self.scores.reshape(1, 4, 1).movedim(1, dim)
        best = scores.argmax(dim, keepdim=keepdim)
        tolerance = OutputTolerance(rtol=0, atol=0, ranking_of="scores", dim=dim)
        outputs = (self.outputs[0], TensorOutput(name="best", dtype="int64", shape=(), tolerance=tolerance))
        near = self.scores.clone()
        near[0, 2] = near[0, 0] - 5e-4
        near = near.reshape(1, 4, 1).movedim(1, dim)
        for index, agrees in ((0, True), (2, True), (1, False), (4, False)):
            verdict = compare_outputs(outputs, [near, best], [near, torch.full_like(best, index)])
            assert isinstance(verdict, Match) is agrees
            assert verdict.outputs[1].shape == tuple(best.shape)

    def test_the_values_compared_are_each_side_s_own(self):
        # Both scores moved by less than the tolerance, so that the order of 1 and 2 changed.
        scores = torch.tensor([[0.9, 0.5005, 0.4996, 0.1]])
        assert isinstance(self.judge([0, 1], scores=scores), Match)

    def test_a_repeated_index_is_a_mismatch_even_where_the_values_tie(self):
        scores = torch.tensor([[0.5, 0.5, 0.5, 0.1]])
        expected = [scores, torch.tensor([[0, 1]]), self.features[:, [0, 1]]]
        actual = [scores, torch.tensor([[0, 0]]), self.features[:, [0, 0]]]
        verdict = compare_outputs(self.outputs, expected, actual)
        assert isinstance(verdict, Mismatch)
        assert "1 indices repeat" in verdict.message

    @pytest.mark.parametrize(
        ("index", "said"),
        [(3, "indices: 1 of 2 elements differ"), *((each, "1 indices are outside 0..3") for each in (-1, 4, 2**40))],
    )
    def test_an_index_that_is_no_tie_or_out_of_range_is_a_mismatch_and_no_error(self, index, said):
        verdict = self.judge([0, index])
        assert isinstance(verdict, Mismatch)
        assert said in verdict.message
        assert isinstance(self.judge([0, 2]), Match)

    def test_a_row_whose_index_agrees_is_compared(self):
        verdict = self.judge([0, 2], features=torch.tensor([[[1.0], [9.0]]]))
        assert isinstance(verdict, Mismatch)
        assert verdict.outputs[2].max_abs_at == (0, 1, 0)


class TestReference:
    """Eager in bfloat16 is off by its rounding; a package may be, too, and no more."""

    exact = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = output("y", dtype="bfloat16", rtol=0, atol=0)

    def judge(self, actual, *, eager=None, errors=(), fresh=True, **options):
        eager = (self.exact + 0.02 * self.noise).bfloat16() if eager is None else eager
        reference = Reference({"y": self.exact.float()}, {"y": errors}, fresh)
        return compare_outputs([self.y], [eager], [actual.bfloat16()], reference=reference, **options)

    def test_another_rounding_of_the_same_size_matches_beyond_every_tolerance(self):
        verdict = self.judge(self.exact - 0.02 * self.noise)
        assert isinstance(verdict, Match)
        (result,) = verdict.outputs
        assert result.max_abs > 0.05
        assert result.error.rms == pytest.approx(0.025, rel=0.5)
        assert str(result).startswith("y: as accurate as eager: rms error 0.02")

    def test_an_empty_output_matches_although_it_has_a_reference(self):
        empty, y = torch.empty(2, 0), output("y", dtype="bfloat16", rtol=0, atol=0)
        reference = Reference({"y": empty}, {"y": ()}, True)
        verdict = compare_outputs([y], [empty.bfloat16()], [empty.bfloat16()], reference=reference)
        assert isinstance(verdict, Match)
        (result,) = verdict.outputs
        assert (result.compared, result.error.greatest_at) == (0, (0, 0))

    def test_an_error_spread_over_all_elements_is_seen_in_the_rms(self):
        verdict = self.judge(self.exact + 0.15 * self.noise.sign())
        assert isinstance(verdict, Mismatch)
        assert verdict.outputs[0].mismatched == 0
        assert "y: less accurate than eager: rms error 0." in verdict.message

    def test_an_error_of_one_element_is_seen_in_the_greatest(self):
        actual = self.exact + 0.02 * self.noise
        actual[3, 4] += 2
        (result,) = self.judge(actual).outputs
        assert (result.agrees, result.mismatched, result.error.greatest_at) == (False, 1, (3, 4))
        assert result.error.rms <= result.error.rms_allowed

    def test_eagers_error_is_the_greatest_of_the_recorded_ones_and_this(self):
        eager, actual = self.exact.bfloat16(), self.exact + 0.05 * self.noise.sign()
        assert isinstance(self.judge(actual, eager=eager), Mismatch)
        recorded = [Accuracy(rms=0.0, greatest=0.0), Accuracy(rms=0.03, greatest=0.3)]
        assert isinstance(self.judge(actual, eager=eager, errors=recorded), Match)
        assert isinstance(self.judge(actual, eager=eager, errors=recorded, fresh=False), Match)

    def test_a_recorded_case_is_judged_by_the_recorded_errors_alone(self):
        exact = [Accuracy(rms=0.0, greatest=0.0)]
        assert isinstance(self.judge(self.exact + 0.02 * self.noise, errors=exact), Match)
        assert isinstance(self.judge(self.exact + 0.02 * self.noise, errors=exact, fresh=False), Mismatch)

    def test_given_tolerances_replace_the_reference(self):
        actual = self.exact - 0.02 * self.noise
        assert isinstance(self.judge(actual, rtol=0.0, atol=0.3), Match)
        assert isinstance(self.judge(actual, rtol=0.0, atol=0.01), Mismatch)


class TestRankingByReference:
    """Indices and rows are compared with the reference's, and the noise is that of the values that they rank."""

    outputs = (
        output("scores", rtol=0, atol=0),
        output("indices", dtype="int64", rtol=0, atol=0, ranking_of="scores"),
        output("features", rtol=0, atol=0, rows_of="indices"),
    )
    scores = torch.tensor([[0.9, 0.5, 0.51, 0.1]], dtype=torch.float64)
    features = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], dtype=torch.float64)

    def judge(self, picked, features=None, noise=0.01):
        """The reference picks 0, 2; eager is off by `noise` in its scores."""
        known = torch.tensor([[0, 2]])
        references = {"scores": self.scores, "indices": known, "features": self.features[:, [0, 2]]}
        eager = [(self.scores + noise).float(), known, self.features[:, [0, 2]].float()]
        picked = torch.tensor([picked])
        features = self.features[0, picked] if features is None else features
        actual = [self.scores.float(), picked, features.float()]
        return compare_outputs(self.outputs, eager, actual, reference=Reference(references, {}, fresh=True))

    def test_an_index_may_differ_within_the_noise_of_the_scores(self):
        assert isinstance(self.judge([0, 1]), Match)
        assert isinstance(self.judge([0, 1], noise=0.0), Mismatch)

    def test_an_index_beyond_the_noise_or_one_that_repeats_is_a_mismatch(self):
        assert isinstance(self.judge([0, 3]), Mismatch)
        assert isinstance(self.judge([0, 0]), Mismatch)

    def test_rows_are_compared_with_those_of_the_same_index_at_whatever_place(self):
        verdict = self.judge([2, 0], noise=0.2)
        assert isinstance(verdict, Match)
        assert verdict.outputs[2].compared == 2
        wrong = self.judge([2, 0], noise=0.2, features=torch.tensor([[[3.0], [1.5]]]))
        assert [result.name for result in wrong.outputs if not result.agrees] == ["features"]
        assert wrong.outputs[2].error.greatest_at == (0, 1, 0)

    def test_rows_that_the_reference_has_not_are_left_out_and_counted(self):
        verdict = self.judge([0, 1], features=torch.tensor([[[1.0], [99.0]]]))
        assert isinstance(verdict, Match)
        assert verdict.outputs[2].note == "1 of 2 elements compared: the rows of `indices` that the reference has"


def test_a_shape_the_manifest_does_not_allow_is_wrong_even_where_eager_has_it():
    exact = OutputTolerance(rtol=0, atol=0)
    batch = TensorOutput(name="y", dtype="float32", shape=(Size(dimension="batch"), None, 5), tolerance=exact)
    six, two = torch.zeros(6, 2, 5), torch.zeros(2, 2, 5)
    verdict = compare_outputs([batch], [six], [six], sizes={"batch": 16})
    assert verdict == WrongShape("y", (16, None, 5), (6, 2, 5))
    assert verdict.message == "output `y` has shape [6, 2, 5]; [16, *, 5] was expected"
    assert isinstance(compare_outputs([batch], [two], [two], sizes={"batch": 2}), Match)

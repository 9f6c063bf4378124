"""Steps of a session are timed, from the same state each time."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from exportkit.bench import packages
from exportkit.bench.contenders import Calls
from exportkit.bench.timing import Alternative, measure
from exportkit.errors import UsageError, WrongResultError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.onnx.export_onnx import export_onnx
from exportkit.reference_model import ReferenceModel
from tests.artifacts import artifact
from tests.bench import test_packages
from tests.onnx.small_models import write_small

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DECODER = ReferenceModel("tests/verify/state_models.py:decoder")
bench = functools.partial(test_packages.bench, eager=DECODER)


@pytest.fixture(scope="module")
def decoder() -> Path:
    return artifact("decoder")


def test_a_step_of_each_recorded_sequence_is_timed_beside_eagers_session(decoder):
    rows = bench(decoder, method="decode")
    assert {row.subject for row in rows} == {"Decoder decode"}
    assert len(rows) == 4
    for row in rows:
        assert [m.name for m in row.measurements] == ["exportkit", "eager"]
        assert all(m.call.median > 0 and m.error < 1e-5 for m in row.measurements)


def test_a_step_is_timed_at_a_size_that_is_given(decoder):
    (row,) = bench(decoder, method="decode", sizes=["batch=3,n=4"], against=["eager", "compile"])
    assert (row.subject, row.size) == ("Decoder decode", "batch=3")
    assert [m.name for m in row.measurements] == ["exportkit", "eager", "compile"]
    assert row.get("compile").call is not None, row.get("compile").note


def test_a_method_without_state_is_timed_as_before(decoder):
    rows = bench(decoder, method="similar", against=[])
    assert {row.subject for row in rows} == {"Decoder similar"}
    assert [row.size for row in rows] == ["count=3", "count=1", "count=8", "count=6"]


def test_onnx_runtime_is_given_the_state_that_it_gave_back(decoder, tmp_path):
    export_onnx(resolve("tests/verify/state_models.py:decoder"), tmp_path / "dec.onnx", TraceOptions(cases=1))
    onnx = tmp_path / "dec.onnx.exportkit"
    (row, *_) = bench(decoder, method="decode", onnx=onnx, against=[])
    assert [m.name for m in row.measurements] == ["exportkit", "onnxruntime"]
    assert row.get("onnxruntime").error < 1e-5
    other = write_small(tmp_path / "small.onnx")
    with pytest.raises(UsageError, match="has no method"):
        bench(decoder, method="decode", onnx=other, against=[])


def test_every_timed_call_begins_with_the_same_state(decoder, monkeypatch):
    """Twelve tokens fit into the cache; more calls than that would fail, or overwrite one another."""
    positions = []

    def watched(alternatives, *args, **options):
        for alternative in alternatives:
            with alternative.within():
                for _ in range(20):
                    alternative.before()
                    positions.append(alternative.calls[0]())
        return []

    monkeypatch.setattr(packages, "measure", watched)
    bench(decoder, method="decode", sizes=["batch=2,n=5"])
    ours, eagers = positions[:20], positions[20:]
    assert all(torch.equal(each, ours[0]) for each in ours)
    assert all(torch.equal(each, eagers[0]) for each in eagers)


def test_a_session_that_answers_something_else_is_refused(decoder, monkeypatch):
    monkeypatch.setattr(packages, "measure", lambda *args, **options: pytest.fail("timed"))
    right = Calls.answers

    def wrong(self):
        found, structures = right(self)
        return found | {"state.5": found["state.5"] + 1}, structures

    monkeypatch.setattr(Calls, "answers", wrong)
    with pytest.raises(WrongResultError, match=r"state position"):
        bench(decoder, method="decode")


def test_what_comes_before_a_call_is_not_timed_and_precedes_each():
    done = []
    step = Alternative("a", "a", [lambda: done.append("call")], before=lambda: done.append("before"))
    (measured,) = measure([step], CPU, 1e-3)
    assert measured.call.count >= 5
    assert done == ["before", "call"] * (len(done) // 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has several methods"),
        ({"method": "encode"}, "has no method encode"),
        ({"method": "decode", "sizes": ["batch=9,n=1"]}, "must be from"),
    ],
)
def test_what_cannot_be_timed_is_refused(decoder, options, message):
    with pytest.raises(UsageError, match=message):
        bench(decoder, **options)

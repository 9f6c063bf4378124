"""Operators are timed beside the alternatives, and only where they are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from exportkit.arr_coc.bench import operators, problem_sizes
from exportkit.arr_coc.bench.operators import OperatorOptions, bench_operators
from exportkit.arr_coc.ops import SPECS
from exportkit.errors import UsageError, WrongResultError
from tests.subprocesses import run_python

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUICK = OperatorOptions(names=["opponent_balance"], against=["eager"], sizes=["B1 "], seconds=1e-3)


def bench(**options):
    return list(bench_operators(CPU, lambda: 10.0, dataclasses.replace(QUICK, **options), lambda step: None))


@pytest.fixture
def changed(monkeypatch):
    """A subject that is not what it is elsewhere."""

    def install(name, **changes):
        found = problem_sizes.subjects(CPU)
        found[name] = dataclasses.replace(found[name], **changes)
        monkeypatch.setattr(operators, "subjects", lambda device: found)

    return install


def test_a_call_and_its_gradient_are_timed_beside_eager():
    forward, backward = bench(dtype=torch.float16)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.dtype == backward.dtype == "float16"
    assert [m.name for m in forward.measurements] == ["exportkit", "eager"]
    for row in (forward, backward):
        for measurement in row.measurements:
            assert measurement.call.count >= 5
            assert 0 < measurement.call.q1 <= measurement.call.median <= measurement.call.q3
            assert measurement.kernels is None
            assert measurement.peak_bytes >= 1024 * 2


@pytest.mark.slow
def test_a_gradient_can_be_the_first_thing_that_is_timed(tmp_path):
    """In a process in which nothing was compiled: torch imports parts of itself only then."""
    code = """
from tests.arr_coc.test_bench_operators import bench
(row,) = bench(directions=["backward"])
print(row.direction)
"""
    assert run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT)).split() == ["backward"]


def test_what_must_move_is_every_input_and_output_once():
    (row,) = bench(names=["fused_texture"], sizes=["1x3x448x448"], directions=["forward"])
    assert row.moved_bytes == 448 * 448 * (3 + 3 + 2) * 4
    assert row.limit == pytest.approx(row.moved_bytes / 10.0 / 1e6)
    (row,) = bench(names=["add_out"], sizes=["1024x768"], directions=["forward"])
    assert row.moved_bytes == 3 * 1024 * 768 * 4
    forward, backward = bench()
    assert forward.moved_bytes == 4 * 1024 * 4 + 3 * 4
    assert backward.moved_bytes == 2 * (3 * 1024 + 3) * 4 + 1024 * 4


@pytest.mark.parametrize("error", [0.01, float("nan")])
def test_a_wrong_result_is_refused_and_not_timed(changed, monkeypatch, error):
    monkeypatch.setattr(operators, "measure", lambda *args: pytest.fail("timed"))
    changed("opponent_balance", function=lambda *args: SPECS["opponent_balance"].wrapper(*args) + error)
    with pytest.raises(WrongResultError, match="forward at B1 N1024 in float32: 100"):
        bench()


def test_a_wrong_gradient_is_refused(changed):
    def half(*args):
        out = SPECS["opponent_balance"].wrapper(*args)
        return (out + out.detach()) / 2

    changed("opponent_balance", function=half)
    with pytest.raises(WrongResultError, match="gradient 0 is 0"):
        bench()


def test_a_library_that_is_not_installed_or_computes_something_else_is_said(changed):
    def library(what):
        found = problem_sizes.subjects(CPU)["opponent_balance"].benchmarks
        return tuple(dataclasses.replace(benchmark, library=what) for benchmark in found)

    changed("opponent_balance", benchmarks=library(problem_sizes.LibraryCall("x.y", abs, needs="no_such_package")))
    (row,) = bench(against=["library"], directions=["forward"])
    assert row.get("library").note == "no_such_package is not installed"
    changed(
        "opponent_balance",
        benchmarks=library(problem_sizes.LibraryCall("zeros", lambda e, s, a, w: torch.zeros_like(e))),
    )
    (row,) = bench(against=["library"], directions=["forward"])
    assert "of its results differ" in row.get("library").note
    changed("opponent_balance", benchmarks=library(problem_sizes.LibraryCall("broken", lambda *args: 1 / 0)))
    (row,) = bench(against=["library"], directions=["forward"])
    assert row.get("library").note.startswith("ZeroDivisionError")
    assert row.best is None


@pytest.mark.slow
def test_compile_is_an_alternative_forward_and_backward():
    for row in bench(against=["compile"], names=["opponent_balance"]):
        assert row.get("compile").call is not None, row.get("compile").note


def test_an_unknown_operator_or_size_is_a_usage_error_that_lists_what_there_is():
    with pytest.raises(UsageError, match=r"no operator 'opponent'[\s\S]*opponent_balance"):
        bench(names=["opponent"])
    with pytest.raises(UsageError, match=r"of size B7 [\s\S]*B1 N1024"):
        bench(sizes=["B7 "])


def test_a_gradient_that_is_a_view_is_not_timed():
    assert {row.direction for row in bench(names=["reduce_sum"], sizes=["1024x768 dim 1"])} == {"forward"}


def test_every_operator_but_the_parts_of_another_has_sizes_each_once():
    found = problem_sizes.subjects(CPU)
    assert {name for name in SPECS if not name.endswith(("_forward", "_grad"))} <= found.keys()
    assert all(subject.benchmarks for subject in found.values())
    for table in problem_sizes.TABLE.values():
        for on_gpu in (False, True):
            sizes = [benchmark.size for benchmark in table(on_gpu)]
            assert len(set(sizes)) == len(sizes)


def test_an_operator_without_an_entry_is_timed_at_its_samples(monkeypatch):
    monkeypatch.setattr(problem_sizes, "TABLE", {})
    labels = [benchmark.size for benchmark in problem_sizes.subjects(CPU)["compute_entropy"].benchmarks]
    assert "sharp temperature" in labels
    assert "features [0, 3, 4]" not in labels


@pytest.mark.slow
def test_libraries_compute_what_the_references_do():
    """At the table's sizes and in its dtypes, so that no alternative is left out for being wrong."""
    for name, subject in problem_sizes.subjects(CPU).items():
        benchmark = min(subject.benchmarks, key=lambda b: len(b.size))
        if benchmark.library is None or benchmark.library.missing is not None:
            continue
        for dtype in {benchmark.dtype, *(on_gpu.dtype for on_gpu in problem_sizes.TABLE[name](True))}:
            task = operators._Forward(subject, benchmark, dtype, CPU)
            expected = task.run(subject.reference)
            assert operators._disagreement(task, benchmark.library.function, expected) is None, (name, dtype)

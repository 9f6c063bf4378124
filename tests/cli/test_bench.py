from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from exportkit.arr_coc.bench import operators
from exportkit.arr_coc.bench.operators import bench_operators
from exportkit.bench import runs
from exportkit.bench.results import Results
from exportkit.errors import UsageError
from tests import commands
from tests.artifacts import ROOT, THIRD_PARTY, artifact
from tests.fixtures import softpool_library
from tests.subprocesses import run_exportkit


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


QUICK = ("--device", "cpu", "--against", "eager", "--seconds", "0.001", "--size", "B1 N1024")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(runs, "copy_rate", lambda device: 10.0)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return commands.run(capsys, "bench", *arguments)


def test_operators_are_timed_and_shown_as_a_table(capsys):
    threads = torch.get_num_threads()
    code, out, err = run(capsys, "opponent_balance", *QUICK, "--threads", 1)
    assert code == 0, err
    assert ", 1 thread on " in out
    assert "A large copy runs at 10 GB/s" in out
    calls, gradients = out.split("Gradients:")
    for text in (calls, gradients):
        assert "| opponent_balance | B1 N1024 |" in text
    assert "opponent_balance B1 N1024 float32 backward" in err
    assert torch.get_num_threads() == threads


def test_json_is_the_results_file(capsys, tmp_path):
    path = tmp_path / "results.json"
    code, out, _ = run(capsys, "opponent_balance", *QUICK, "--direction", "forward", "--json", "-o", path)
    assert code == 0
    document = json.loads(out)
    assert document["machine"]["threads"] == torch.get_num_threads()
    assert [row["subject"] for row in document["rows"]] == ["opponent_balance"]
    results = read(path)
    assert (results.copy_gb_s, len(results.rows)) == (10.0, 1)


@pytest.mark.slow
def test_a_package_is_timed_and_what_loading_took_is_said(capsys):
    path = artifact("arr-coc")
    code, out, err = run(capsys, path, *QUICK[:-1], "batch=2,gh=4,gw=4")
    assert code == 0, err
    head, line = (text for text in out.splitlines() if text.startswith(("| what", "| arr_coc")))
    assert "eager with operators ms" in head
    assert "limit" not in head
    assert "batch=2, gh=4, gw=4" in line
    assert "loading took exportkit" in out


def test_a_package_on_the_cpu_has_no_cuda_graphs(capsys):
    code, _, err = run(capsys, artifact("patches"), *QUICK[:-1], "batch=1,rows=2,columns=2", "--cuda-graphs")
    assert code == 2
    assert "cuda_graphs is for a model on CUDA" in err


@pytest.mark.slow
def test_a_bare_module_with_somebody_elses_operators_is_timed_too():
    """In a process of its own, since it loads their library."""
    path, library = artifact("softpool"), softpool_library.build()
    model = ("--model", "softpool.model:Classifier", "--op-library", library)
    arguments = ("bench", path, *model, "--json", *QUICK[:-1], "batch=2,length=4")
    environment = {"PYTHONPATH": f"{ROOT}:{THIRD_PARTY}", "SOFTPOOL_LIBRARY": str(library)}
    done = run_exportkit(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {tuple(m["name"] for m in row["measurements"]) for row in rows} == {("exportkit", "eager")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opponent_balance", "--size", "Z9"], "The sizes are"),
        (["opponent_balance", "x.pt2"], "cannot be timed together"),
        (["opponent_balance", "--model", "arr-coc"], "--model is for packages"),
        (["x.pt2", "--dtype", "float16"], "are for operators"),
        (["x.pt2", "--against", "library"], "is for operators"),
        (["opponent_balance", "--against", "freezing"], "--against freezing is for packages"),
        (["opponent_balance", "--cuda-graphs"], "--cuda-graphs is for packages"),
        (["opponent_balance", "--weights", __file__], "--weights is for packages"),
        (["opponent_balance", "--op-library", __file__], "--op-library is for packages"),
        (["opponent_balance", "--onnx", __file__], "--onnx is for packages"),
        (["m.onnx"], "exportkit bench PACKAGE.pt2 --onnx m.onnx"),
        (["opponent_balance", "--public-key", __file__], "--public-key is for packages"),
        (["opponent_balance", "--signature", __file__], "--signature is for packages"),
        (["x.pt2", "y.pt2", "--signature", __file__], "--signature works with one package only"),
        (["opponent_balance", "--output", "no_such_folder/x.json"], "there is no folder no_such_folder"),
        (["reduce_sum", "--direction", "backward", "--device", "cpu"], "reduce_sum has no backward"),
        ([], "Missing argument"),
        (["no_such_op", "--device", "cpu"], "no operator 'no_such_op'"),
        (["no_such_file.pt2", "--device", "cpu"], "no_such_file.pt2"),
        (["broken.pt2", "--device", "cpu"], "broken.pt2"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_timed(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(runs, "copy_rate", lambda device: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.pt2").write_bytes(b"not a package")
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (3 if "broken.pt2" in arguments else 2, ""), err
    assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_the_exit_code_says_that_this_machine_cannot(capsys):
    code, _, err = run(capsys, "opponent_balance", "--device", "cuda")
    assert code == 4
    assert "cannot use cuda" in err
    assert "Give --device cpu" in err


@pytest.mark.parametrize(
    ("failure", "message"), [(UsageError("it does not fit"), "it does not fit"), (KeyboardInterrupt(), "interrupted")]
)
def test_rows_before_a_failure_are_kept_and_shown(capsys, monkeypatch, tmp_path, failure, message):
    path = tmp_path / "results.json"

    def rows(device, rate, options, progress):
        yield from bench_operators(device, rate, options, progress)
        assert len(read(path).rows) == 1  # on disk before the next row begins
        raise failure

    monkeypatch.setattr(operators, "bench_operators", rows)
    code, out, err = run(capsys, "opponent_balance", *QUICK, "--direction", "forward", "-o", path)
    assert code != 0
    assert "| opponent_balance | B1 N1024 |" in out
    assert message in err
    assert [row.subject for row in read(path).rows] == ["opponent_balance"]


def test_ops_beside_a_name_is_refused(capsys):
    code, _, err = run(capsys, "ops", "muladd")
    assert (code, "give it alone" in err) == (2, True)

"""Programs over the C interface, in the languages whose compilers are here, each as its comments say it is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import exportkit
from exportkit.runtime.native import library_path
from tests.artifacts import artifact
from tests.learning.learning_models import batch
from tests.runtime import exportkit_run, sequences
from tests.serve.engine import rows
from tests.subprocesses import output_of

EXAMPLES = Path(__file__).parents[2] / "examples"
INCLUDE = library_path().parents[2] / "include"
LINK = [f"-L{library_path().parent}", "-lexportkit_runtime"]
RPATH = f"-Wl,-rpath,{library_path().parent},--allow-shlib-undefined"


@pytest.fixture(scope="module", autouse=True)
def _runtime():
    exportkit_run.require_built()


def require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: the example in its language was not tried")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"EXPORTKIT_CACHE": os.environ["EXPORTKIT_CACHE"]}
    for _ in range(8):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        # On busy machines the thread that looks for leaks crashes at times, which says nothing about them.
        if "LeakSanitizer has encountered a fatal error" not in done.stderr:
            break
    return done


def damaged(package: Path, folder: Path) -> Path:
    path = folder / "damaged.pt2"
    path.write_bytes(package.read_bytes()[:-1])
    return path


@pytest.fixture(scope="module", params=["c", "cpp"])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/c and examples/cpp, by their CMakeLists.txt.

    That of C is strict C99, and ends with an error where memory is lost or misused.
    """
    strict = "-std=c99 -pedantic -Wall -Wextra -Werror -fsanitize=address,undefined"
    options = [f"-DCMAKE_C_FLAGS={strict}"] if request.param == "c" else []
    return exportkit_run.build_example(EXAMPLES / request.param, tmp_path_factory.mktemp(request.param), *options)


@pytest.mark.slow_but("c")
def test_the_example_runs_a_package_and_loses_no_memory(example, tiny_package):
    done = run(example / "predict", tiny_package)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tiny 1 on cpu\ntakes:\n  image float32 batch 3 16*gh 8\n")
    assert done.stdout.endswith("case 0: ok\ncase 1: ok\ngot [1, 3]\ngot [1, 3, 16, 8]\ngot [1, 5]\n")


@pytest.mark.slow_but("c")
def test_the_example_ends_with_the_error_and_its_exit_code(example, tiny_package, tmp_path):
    done = run(example / "predict", tiny_package, "new.safetensors")
    # Where the program ends in the middle, what it still has is no loss.
    assert done.returncode == 2
    assert done.stderr.startswith("WeightsError: tiny has no weights outside its compiled code")
    assert "\n  To swap weights, export the model without --embed-weights" in done.stderr
    done = run(example / "predict", damaged(tiny_package, tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith("NotAnArchiveError: ")
    done = run(example / "session", tiny_package, tmp_path / "state.safetensors")
    assert done.returncode == 2
    assert "no recorded case with state" in done.stderr


@pytest.mark.slow_but("c")
def test_the_example_of_sessions_runs_a_sequence_and_loses_no_memory(example, tiny_package, tmp_path):
    package = sequences.write(tmp_path / "recorder.pt2", sequences.tensors())
    done = run(example / "session", package, tmp_path / "state.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    said = [
        "push needs a session", "peek needs a session", "embed needs no session", "fill needs no session",
        "ran push", "ran peek", "ran embed", "ran fill", "ran push",
        "after reset: another state", "after load_state: the same state",
    ]  # fmt: skip
    for line, start in zip(done.stdout.splitlines(), said, strict=True):
        assert line.startswith(start)


def test_the_cpp_example_trains_what_python_goes_on_with(tmp_path):
    example = exportkit_run.build_example(EXAMPLES / "cpp", tmp_path / "build")
    package, data, learnt = artifact("self-taught"), tmp_path / "data.safetensors", tmp_path / "learnt.safetensors"
    x, y = batch(32)
    save_file({"x": x, "y": y}, data)
    done = run(example / "train", package, data, learnt, "100")
    assert (done.returncode, done.stderr) == (0, "")
    (first, last) = (float(line.rpartition(" ")[2]) for line in done.stdout.splitlines())
    assert last < first / 2
    with exportkit.load(package) as model, model.session() as session, model.session() as python:
        session.load_state(learnt)
        for _ in range(100):
            python.step(x, y)
        assert all(torch.equal(session.state[name], tensor) for name, tensor in python.state.items())
    save_file({"x": x}, data)
    done = run(example / "train", package, data, learnt, "100")
    assert (done.returncode, "UsageError: " in done.stderr) == (2, True)
    assert "data.safetensors has no tensor y" in done.stderr


@pytest.mark.slow
def test_where_memory_ends_every_function_returns_an_error(tiny_package, tmp_path):
    require("g++")
    source, program = Path(__file__).with_name("no_memory.cpp"), tmp_path / "no_memory"
    output_of("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", source, *LINK, RPATH, "-o", program)
    for package in (tiny_package, rows.write(tmp_path / "rows.pt2", rows.example(2))):
        done = run(program, package)
        assert done.returncode == 0, done.stdout
        failures = dict(re.findall(r"^(\w+) (\d+)$", done.stdout, re.MULTILINE))
        assert set(failures) == {"describe", "read_case", "run", "run_requests", "replay", "open"}
        assert min(int(failures[name]) for name in ("read_case", "run", "run_requests", "replay", "open")) > 20


def test_the_fortran_example_runs_a_package(tiny_package, tmp_path):
    require("gfortran")
    sources, program = [EXAMPLES / "fortran" / name for name in ("exportkit.f90", "main.f90")], tmp_path / "predict"
    strict = ["-std=f2018", "-Wall", "-Wextra", "-Werror", "-fcheck=all", f"-J{tmp_path}"]
    output_of("gfortran", *strict, *sources, "-o", program, *LINK, RPATH)
    done = run(program, tiny_package)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "tiny on cpu", "takes image float32", "takes query.features float32", "takes offset float32", "case 1: ok",
        "case 2: ok", "got 3 1", "got 8 16 3 1", "got 5 1",
    ]  # fmt: skip
    done = run(program, damaged(tiny_package, tmp_path))
    assert done.returncode != 0
    assert "does not end like a zip archive" in done.stderr


@pytest.mark.slow
def test_the_rust_example_runs_a_package(tiny_package, tmp_path):
    require("rustc")
    program = tmp_path / "predict"
    link = ["-L", library_path().parent, "-C", f"link-args={RPATH}"]
    output_of("rustc", "--edition", "2021", "-D", "warnings", EXAMPLES / "rust" / "main.rs", "-o", program, *link)
    done = run(program, tiny_package)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "tiny on cpu", "takes image float32", "takes query.features float32", "takes offset float32", "case 0: ok",
        "case 1: ok", "got regions.mean [1, 3]", "got regions.doubled [1, 3, 16, 8]", "got rest.0 [1, 5]",
    ]  # fmt: skip
    done = run(program, damaged(tiny_package, tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith("NotAnArchiveError: ")

"""`Model::swap_weights` and the sources of `Model::open` in C++, in a program of its own: what Python's promise."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exportkit.errors import InputError, UsageError, WeightsError
from exportkit.runtime.native import library_path
from tests.artifacts import artifact
from tests.export.weights_models import Weighted
from tests.runtime import exportkit_run, tiny

SOURCE = Path(__file__).with_name("swap_threads.cpp")

State = dict[str, torch.Tensor]


def state(seed: int) -> State:
    return {name: tensor.detach().clone().contiguous() for name, tensor in Weighted(seed).state_dict().items()}


def eager(seed: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return Weighted(seed).eval()(x)


def save(path: Path, tensors: State, *left_out: str) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name not in left_out}, path)
    return path


@pytest.fixture(scope="module")
def program() -> Path:
    """The C++ program, built once for its source, the runtime and this torch."""
    exportkit_run.require_built()
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the program with")
    runtime, folder = library_path(), Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{runtime.parents[2] / 'include'}"]
    command += ["-isystem", str(folder / "include"), "-isystem", str(folder / "include/torch/csrc/api/include")]
    command += [
        str(SOURCE),
        f"-L{runtime.parent}",
        f"-L{folder / 'lib'}",
        f"-Wl,-rpath,{runtime.parent}:{folder / 'lib'}",
    ]
    command += [
        "-Wl,--allow-shlib-undefined",
        "-lexportkit_runtime",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    content = (SOURCE.read_bytes(), runtime.read_bytes(), repr((torch.__version__, command)).encode())
    built = tiny.CACHE / hashlib.sha256(b"".join(content)).hexdigest()[:16] / "swap_threads"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        temporary = built.with_name(f"{os.getpid()}")
        subprocess.run([*command, "-o", temporary], check=True)
        temporary.replace(built)
    return built


def run(program: Path, package: Path, answers: Path, old: Path, new: Path) -> None:
    copy = answers.with_name("package.pt2")  # which it writes to in the end
    shutil.copy(package, copy)
    environment = {name: os.environ[name] for name in ("EXPORTKIT_CACHE", "OMP_WAIT_POLICY")}
    command = [program, copy, answers, old, new]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("DigestMismatchError: package.pt2 was written to while it was open")


def test_every_call_has_old_or_new_weights_and_every_source_the_packages(program, tmp_path):
    # One of tied names will do.
    old, new = save(tmp_path / "old", state(1), "tied"), save(tmp_path / "new", state(2), "mix")
    run(program, artifact("weighted"), tmp_path / "answers", old, new)
    answers = load_file(tmp_path / "answers")
    for name, seed in (("packaged", 0), ("old", 1), ("new", 2)):
        torch.testing.assert_close(answers[name], eager(seed, answers["input"]))


@pytest.mark.cuda
def test_they_are_copied_to_the_gpu_and_swapped_there_while_calls_go_on(program, tmp_path):
    old, new = save(tmp_path / "old", state(1)), save(tmp_path / "new", state(2))
    run(program, artifact("weighted-cuda"), tmp_path / "answers", old, new)
    answers = load_file(tmp_path / "answers")
    for name, seed in (("packaged", 0), ("old", 1), ("new", 2)):
        torch.testing.assert_close(answers[name], eager(seed, answers["input"]), rtol=1e-4, atol=1e-5)


def test_weights_inside_the_code_are_not_swapped(tmp_path):
    x = save(tmp_path / "x", dict.fromkeys(("x", "bias"), torch.zeros(3, 5, 40)))
    file = save(tmp_path / "new", {"weight": torch.zeros(40)})
    with pytest.raises(WeightsError, match="Quantize has no weights outside its compiled code") as caught:
        exportkit_run.load(artifact("triton-cpu"), "--weights", file, "--input", x)
    assert "--embed-weights" in (caught.value.hint or "")


def test_exportkit_run_takes_other_weights_and_then_replays_no_case(tmp_path):
    x = torch.linspace(-1, 1, 48).reshape(3, 16)
    inputs, new = save(tmp_path / "x", {"x": x}), save(tmp_path / "new", state(1))
    arguments = (artifact("weighted"), "--weights", new, "--input", inputs, "--output", tmp_path / "y")
    document = exportkit_run.load(*arguments)
    assert document["weights"]["file"] == str(new)
    assert "cases" not in document
    (answer,) = load_file(tmp_path / "y").values()
    torch.testing.assert_close(answer, eager(1, x))
    said = exportkit_run.run(*arguments, json_output=False).document["text"]
    assert (
        f"runs with the weights of {new}; the recorded cases belong to the package's weights and are not replayed"
        in said
    )
    timed = exportkit_run.load(artifact("weighted"), "--weights", new, "--bench", "0.1")
    assert timed["bench"]["calls"] > 0
    assert "cases" not in timed
    with pytest.raises(
        UsageError, match="--weights needs --input or --bench: the recorded cases belong to the package's"
    ):
        exportkit_run.load(artifact("weighted"), "--weights", new)
    with pytest.raises(InputError):
        exportkit_run.load(artifact("weighted"), "--weights", new, "--input", new)

"""First calls that must not go well on a GPU: later ones are refused or answered, and none waits forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.artifacts import artifact
from tests.subprocesses import run_python

# torch's binding holds the GIL while it waits: faulthandler ends the process without it.
ATTEMPTS = """
import faulthandler, sys
import torch, exportkit
from exportkit.errors import ExportkitError
faulthandler.dump_traceback_later(100, exit=True)
def said(task):
    try:
        return task()
    except (ExportkitError, RuntimeError) as error:
        return f"{type(error).__name__} {error}".replace(chr(10), " ")
def break_the_gpu():
    memory = torch._C._construct_storage_from_data_pointer(1 << 20, torch.device("cuda", 0), 4)
    torch.empty(0, device="cuda").set_(memory, 0, (1,), (1,)).fill_(1)
    torch.cuda.synchronize()
def load():
    return exportkit.load(sys.argv[1], device="cuda", runners=int(sys.argv[2]))
"""
CALLS = """
model = load()
case = model.cases[0]
inputs = [argument.cuda() for argument in case.args]
print(said(break_the_gpu))
for _ in range(4):
    print(said(lambda: model(*inputs)))
"""
LOADS = """
torch.zeros(1, device="cuda")
print(said(break_the_gpu))
for _ in range(2):
    print(said(load))
"""
# torch prepares the code in the first call, which waits for the GPU since 2.13: it may be refused.
CAPTURES = """
model = load()
case = model.cases[0]
inputs = [argument.cuda() for argument in case.args]
def capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
        model(*inputs)
print(said(capture))
for _ in range(2):
    torch.testing.assert_close(model(*inputs).cpu(), case.outputs.cpu(), rtol=1e-3, atol=1e-3)
    print("answered")
"""
BROKEN = "an illegal memory access was encountered"


@pytest.mark.cuda
@pytest.mark.parametrize("runners", [1, 2])
def test_each_call_is_refused_where_the_gpu_is_broken(runtime: str, runners: int, tmp_path: Path) -> None:
    broken, *calls = run_python(ATTEMPTS + CALLS, artifact("weighted-cuda"), runners, cwd=tmp_path).splitlines()
    assert BROKEN in broken
    assert len(calls) == 4
    for call in calls:
        assert call.startswith("ModelRunError"), call  # with torch 2.11, only stderr has the reason


@pytest.mark.cuda
def test_each_load_says_that_the_gpu_is_broken(runtime: str, tmp_path: Path) -> None:
    broken, *loads = run_python(ATTEMPTS + LOADS, artifact("weighted-cuda"), 1, cwd=tmp_path).splitlines()
    assert BROKEN in broken
    assert len(loads) == 2
    for load in loads:
        assert BROKEN in load, load


@pytest.mark.cuda
def test_code_answers_after_a_first_call_in_a_capture(runtime: str, tmp_path: Path) -> None:
    capture, *calls = run_python(ATTEMPTS + CAPTURES, artifact("weighted-cuda"), 1, cwd=tmp_path).splitlines()
    if runtime == "python":
        assert capture.startswith("HostError a call cannot be captured in a CUDA graph without the C++ runtime")
    assert calls == ["answered", "answered"]

"""First calls that must not go well: the failure is said, later ones are refused or answered, none waits forever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import exportkit
from tests.artifacts import artifact
from tests.runtime import tiny
from tests.subprocesses import run_python

SIDE = 8192  # the code computes 256 MiB

# torch's binding holds the GIL while it waits: faulthandler ends the process without it.
PRELUDE = """
import faulthandler, resource, sys
import torch, exportkit
from exportkit.errors import ExportkitError
faulthandler.dump_traceback_later(100, exit=True)
def said(task):
    try:
        return task()
    except (ExportkitError, RuntimeError) as error:
        return f"{type(error).__name__} {error}".replace(chr(10), " ")
"""

# --- constants that code computes from its weights alone --------------------------------------------------------------

ATTEMPTS = """
model, rows = None, torch.tensor([3, 0, 8191])
def attempt():
    global model
    model = model or exportkit.load(sys.argv[1])
    numbers = torch.arange(8192.0)
    return torch.equal(model(rows)[0], numbers[rows, None] * numbers)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20), before[1]))
print(said(attempt))
print(said(attempt))
resource.setrlimit(resource.RLIMIT_AS, before)
print(said(attempt))
print(said(attempt))
"""


class Products(torch.nn.Module):
    """Gives rows of a table, which is large and follows from a small weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(float(SIDE)))

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [(self.numbers[:, None] * self.numbers)[rows]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, whose code computes the table once and not in every call."""
    files = tiny.compiled(Products(), (torch.arange(3),), None, use_runtime_constant_folding=True)
    call = tiny.tensors_call({"rows": ("int64", (3,))}, [("float32", (3, SIDE))])
    return tiny.write(tmp_path_factory.mktemp("products") / "products.pt2", files, call=call)


@pytest.mark.slow
def test_a_failure_is_said_each_time_and_is_over_when_its_cause_is(package: Path, runtime: str, tmp_path: Path) -> None:
    *failures, first, second = run_python(PRELUDE + ATTEMPTS, package, cwd=tmp_path).splitlines()
    if runtime == "cpp":  # it computes them when it loads
        said = f"ModelLoadError torch {torch.__version__} cannot load target cpu of products.pt2: the code failed where"
    else:
        said = "ModelRunError the compiled model failed on"
    assert len(failures) == 2
    for failure in failures:
        assert failure.startswith(said), failure
    assert (first, second) == ("True", "True")


def test_code_that_computes_none_is_loaded_and_called_without_a_word(
    tiny_package: Path, runtime: str, capfd: pytest.CaptureFixture[str]
) -> None:
    args, kwargs = tiny.example()
    exportkit.load(tiny_package)(*args, **kwargs)
    assert capfd.readouterr() == ("", "")


# --- a broken GPU -----------------------------------------------------------------------------------------------------

ON_GPU = (
    PRELUDE
    + """
def break_the_gpu():
    memory = torch._C._construct_storage_from_data_pointer(1 << 20, torch.device("cuda", 0), 4)
    torch.empty(0, device="cuda").set_(memory, 0, (1,), (1,)).fill_(1)
    torch.cuda.synchronize()
def load():
    return exportkit.load(sys.argv[1], device="cuda", runners=int(sys.argv[2]))
"""
)
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
    broken, *calls = run_python(ON_GPU + CALLS, artifact("weighted-cuda"), runners, cwd=tmp_path).splitlines()
    assert BROKEN in broken
    assert len(calls) == 4
    for call in calls:
        assert call.startswith("ModelRunError"), call  # with torch 2.11, only stderr has the reason


@pytest.mark.cuda
def test_each_load_says_that_the_gpu_is_broken(runtime: str, tmp_path: Path) -> None:
    broken, *loads = run_python(ON_GPU + LOADS, artifact("weighted-cuda"), 1, cwd=tmp_path).splitlines()
    assert BROKEN in broken
    assert len(loads) == 2
    for load in loads:
        assert BROKEN in load, load


@pytest.mark.cuda
def test_code_answers_after_a_first_call_in_a_capture(runtime: str, tmp_path: Path) -> None:
    capture, *calls = run_python(ON_GPU + CAPTURES, artifact("weighted-cuda"), 1, cwd=tmp_path).splitlines()
    if runtime == "python":
        assert capture.startswith("HostError a call cannot be captured in a CUDA graph without the C++ runtime")
    assert calls == ["answered", "answered"]

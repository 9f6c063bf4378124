"""Constants that code computes from its weights alone: a failure is said, and no later call waits forever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.package import manifest as m
from tests.runtime import tiny
from tests.subprocesses import run_python

SIDE = 8192  # the code computes 256 MiB

# torch's binding holds the GIL while it waits: faulthandler ends the process without it.
ATTEMPTS = """
import faulthandler, resource, sys
import torch, exportkit
from exportkit.errors import ExportkitError
faulthandler.dump_traceback_later(100, exit=True)
model, rows = None, torch.tensor([3, 0, 8191])
def attempt():
    global model
    try:
        model = model or exportkit.load(sys.argv[1])
        numbers = torch.arange(8192.0)
        print(torch.equal(model(rows), numbers[rows, None] * numbers))
    except ExportkitError as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20), before[1]))
attempt()
attempt()
resource.setrlimit(resource.RLIMIT_AS, before)
attempt()
attempt()
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
    exact = m.OutputTolerance(rtol=0.0, atol=0.0)
    call = m.Call(
        parameters=(m.Parameter(name="rows", kind="positional", value=m.TensorNode(index=0)),),
        inputs=(m.TensorInput(name="rows", dtype="int64", shape=(3,), written=None),),
        result=m.TensorNode(index=0),
        outputs=(m.TensorOutput(name="0", dtype="float32", shape=(3, SIDE), tolerance=exact),),
        dimensions=(),
    )
    return tiny.write(tmp_path_factory.mktemp("products") / "products.pt2", files, call=call)


def test_a_failure_is_said_each_time_and_is_over_when_its_cause_is(package: Path, runtime: str, tmp_path: Path) -> None:
    *failures, first, second = run_python(ATTEMPTS, package, cwd=tmp_path).splitlines()
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

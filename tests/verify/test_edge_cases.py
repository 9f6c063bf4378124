"""Kernels that are wrong for edge values only are caught, whatever the values that were drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures import stable_library
from tests.subprocesses import run_python

FOLDER = Path(__file__).parent

# By what EXPORTKIT_PLANTED plants: what the label of a failing case says.
WRONG = {
    "ties": "ties in x",
    "negative values": "negative values in x",
    "positive values": "positive values in x",
    "-0": "zeros in x",
    "NaN": "NaN in x",
    "infinities": "infinities in x",
    "subnormal values": "subnormal values in x",
    "the greatest values": "the greatest values in x",
    "one value": "one value in x",
    "-128": "in levels",
    "nothing selected": "nothing in mask",
    "one selected": "one place in mask",
    "everything selected": "every place in mask",
    "strides": "x transposed",
    "strides of 0": "with strides of 0",
    "alignment": "x from the second element",
}
# One process exports, and verifies with each error injected: the children's commands are done in it.
_SCRIPT = """
import json, os, sys
from pathlib import Path
# The replay lets nobody import the exporter.
import exportkit.export.models.eager_model
from exportkit.reference_model import ReferenceModel
from exportkit.export.artifact import export_program
from exportkit.export.models.resolve import resolve
from exportkit.verify import replay
from exportkit.verify.commands import LoadArtifact
from exportkit.verify.options import VerifyOptions
from exportkit.verify.replay_worker import Replay, handlers
from exportkit.verify.verify import verify

from tests.verify.told_worker import HereWorker

ONCE, LOADED = handlers(Replay()), []

def load_once(command):  # the library tells from its environment what is injected
    if not LOADED:
        LOADED.append(ONCE[LoadArtifact](command))
    return LOADED[0]

class Here(HereWorker):
    def __init__(self, module, **options):
        self._handlers, self.alive = {**ONCE, LoadArtifact: load_once}, True

library, out = map(Path, sys.argv[1:3])
export_program(resolve("tests/verify/faulty_models.py:looks", op_libraries=[library]), out)
replay.VerifyWorker = Here
found = {}
# Another variable of the environment that changes would have each verification import torch in a new process.
for wrong in ["", "memory", *sys.argv[3:]]:
    os.environ["EXPORTKIT_PLANTED"] = wrong
    report = verify(out, VerifyOptions(against="cases", eager=ReferenceModel(op_libraries=(library,))))
    found[wrong] = {check.label: check.verdict.message for check in report.checks if check.failed}

print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """What is found with each error that a test of this run injects."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["injected"] for item in here}
    chosen = [wrong for wrong in WRONG if wrong in asked]
    library = stable_library.build(FOLDER / "faulty_kernels.cpp", name="injected")
    out = tmp_path_factory.mktemp("injected") / "injected.pt2"
    printed = run_python(_SCRIPT, library, out, *chosen, cwd=FOLDER.parents[1], PLANTED_LIBRARY=str(library))
    return json.loads(printed.splitlines()[-1])


def test_the_right_kernel_passes(failures):
    assert failures[""] == {}


@pytest.mark.slow_but("ties", "NaN", "-128", "nothing selected", "strides of 0")
@pytest.mark.parametrize("injected", WRONG)
def test_a_wrong_kernel_is_caught_and_its_edge_case_named(injected, failures):
    assert any(WRONG[injected] in label for label in failures[injected]), failures[injected]


def test_a_kernel_that_reads_what_nothing_wrote_is_caught(failures):
    assert any("agrees where memory was not filled with NaN: " in said for said in failures["memory"].values())

"""examples/crystals answers as CHGNet's own class did, whose answers published_crystals.json has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.crystal_structures import structures
from tests.fresh import run_python
from tests.operators.scaffold.scaffolded import imported

EXAMPLE = Path(__file__).parents[2] / "examples" / "crystals" / "crystals.py"
PUBLISHED = json.loads(Path(__file__).with_name("published_crystals.json").read_text())

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("chgnet") is None,
    reason="there is no chgnet: pip install -c constraints.txt chgnet==0.3.8",
)

# In a process of its own: the model without its class, which the file of the program replaces.
VERIFY = """
import json, sys
from pathlib import Path
from exportkit.eager_source import EagerSource
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.resolve import resolve
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
model, program = sys.argv[1:]
export_program(resolve(model), Path(program), TraceOptions(cases=1))
report = verify(Path(program), VerifyOptions(eager=EagerSource(model=model), shapes=1))
print(json.dumps([report.exit_code, [(check.against, check.verdict.kind) for check in report.checks]]))
"""
ANSWERS = """
import sys, torch
from pathlib import Path
from exportkit.export.program_file import load_program
program, graphs, answers = map(Path, sys.argv[1:])
forward = load_program(program).programs["forward"].module(check_guards=False)
torch.save([forward(**graph) for graph in torch.load(graphs)], answers)
assert "chgnet" not in sys.modules
"""


@pytest.fixture(scope="module")
def crystal() -> Any:
    """The example's model."""
    return imported("crystals", EXAMPLE).Crystal().eval()


def held(answer: dict[str, torch.Tensor], name: str, atoms: int) -> None:
    """Compares an answer with the publisher's of a structure."""
    published = PUBLISHED[name]
    assert abs(answer["energy"].item() / atoms - published["energy_per_atom"]) < 1e-5
    torch.testing.assert_close(answer["forces"].detach(), torch.tensor(published["forces"]), rtol=0, atol=2e-5)
    torch.testing.assert_close(answer["stress"].detach(), torch.tensor(published["stress"]), rtol=0, atol=2e-4)


def test_the_wrapped_model_is_the_published_one(crystal: Any) -> None:
    for name, structure in structures().items():
        held(crystal(**crystal.graph_of(structure)), name, len(structure))


@pytest.mark.process
def test_a_program_of_it_has_the_published_answers_and_true_forces(crystal: Any, tmp_path: Path) -> None:
    program, graphs, answers = (tmp_path / name for name in ("program.pt2", "graphs.pt", "answers.pt"))
    printed = run_python(VERIFY, f"{EXAMPLE}:spec", program, cwd=tmp_path)
    code, checks = json.loads(printed.splitlines()[-1])
    assert code == 0
    assert ["gradients", "gradients_hold"] in checks
    torch.save([crystal.graph_of(structure) for structure in structures().values()], graphs)
    run_python(ANSWERS, program, graphs, answers, cwd=tmp_path)
    for (name, structure), answer in zip(structures().items(), torch.load(answers)):
        held(answer, name, len(structure))

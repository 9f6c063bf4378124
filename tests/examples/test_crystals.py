"""examples/crystals answers as CHGNet's own class did, whose answers published_crystals.json has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported
from tests.runtime import exportkit_run
from tests.serve.page.in_thread import served_packages
from tests.serve.protocol.messages import triton_inputs
from tests.subprocesses import run_python


@dataclass(frozen=True)
class Structure:
    """What CHGNet's converter asks a pymatgen.core.Structure for."""

    matrix: tuple[tuple[float, ...], ...]
    numbers: tuple[int, ...]
    places: tuple[tuple[float, ...], ...]

    @property
    def lattice(self) -> Any:
        return SimpleNamespace(matrix=np.array(self.matrix))

    @property
    def frac_coords(self) -> np.ndarray:
        return np.array(self.places)

    @property
    def composition(self) -> Any:
        return SimpleNamespace(formula="")

    @property
    def sites(self) -> list[Any]:
        return [SimpleNamespace(specie=SimpleNamespace(Z=number)) for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self):
        return iter(self.sites)

    def get_neighbor_list(self, r: float, sites: object, numerical_tol: float) -> tuple[np.ndarray, ...]:
        """Returns centres, neighbours, cells of these and distances of all pairs up to `r` apart."""
        reach = int(np.ceil(r / min(np.linalg.norm(row) for row in self.matrix))) + 2
        cells = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing="ij"), -1).reshape(-1, 3)
        steps = self.frac_coords[None, :, None] + cells - self.frac_coords[:, None, None]
        distances = np.linalg.norm(steps @ self.lattice.matrix, axis=-1)
        centres, neighbours, images = ((distances <= r) & (distances > numerical_tol)).nonzero()
        return centres, neighbours, cells[images].astype(float), distances[centres, neighbours, images]


def structures() -> dict[str, Structure]:
    """Returns structures by name."""
    return {
        "Cu": Structure(
            ((2.208364779650318, 0, 1.275), (0.7361215932167727, 2.0820662813657007, 1.275), (0, 0, 2.6)),
            (29,),
            ((0, 0, 0),),
        ),
        "TiO2": Structure(
            ((4.6, 0, 0), (0, 4.6, 0), (0, 0, 2.96)),
            (22, 22, 8, 8, 8, 8),
            (
                *((0, 0, 0), (0.5, 0.5, 0.5), (0.305, 0.335, 0.02)),
                *((0.195, 0.805, 0.5), (0.805, 0.195, 0.5), (0.695, 0.695, 0)),
            ),
        ),
        "NaCl": Structure(
            ((5.69, 0, 0), (0, 5.69, 0), (0, 0, 5.69)),
            (11, 11, 11, 11, 17, 17, 17, 17),
            (
                *((0.02, 0.01, 0), (0.5, 0.5, 0), (0.5, 0, 0.5), (0, 0.5, 0.5)),
                *((0.5, 0.5, 0.5), (0, 0, 0.5), (0, 0.5, 0), (0.5, 0, 0)),
            ),
        ),
    }


PUBLISHED = json.loads(Path(__file__).with_name("published_crystals.json").read_text())
# In a process of its own, for the model's class is here.
ANSWERS = """
import sys, exportkit
from safetensors.torch import load_file, save_file
with exportkit.load(sys.argv[1]) as model:
    for graph in sys.argv[2:]:
        save_file(model(**load_file(graph)), graph + ".answers")
assert "chgnet" not in sys.modules
"""


@pytest.fixture(scope="module")
def crystal() -> Any:
    """The example's model."""
    example_packages.require_wheels("chgnet")
    from tests.examples import chgnet_alone  # noqa: F401

    return imported("crystals", example_packages.EXAMPLES / "crystals" / "crystals.py").Crystal().eval()


@pytest.fixture(scope="module")
def graphs(crystal: Any) -> dict[str, dict[str, Tensor]]:
    """What the model takes, of each structure."""
    made = {name: crystal.graph_of(structure) for name, structure in structures().items()}
    return {name: {key: value.contiguous() for key, value in graph.items()} for name, graph in made.items()}


def held(answer: dict[str, Tensor], name: str, *, rounding: float = 1.0) -> None:
    """Compares an answer with the publisher's of a structure; code may round otherwise than eager."""
    published = PUBLISHED[name]
    assert abs(answer["energy"].item() / len(published["forces"]) - published["energy_per_atom"]) < 1e-5
    for output, near in (("forces", 2e-5), ("stress", 2e-4)):
        expected = torch.tensor(published[output])
        torch.testing.assert_close(answer[output].detach(), expected, rtol=0, atol=near * rounding)


def test_the_wrapped_model_is_the_published_one(crystal: Any, graphs: dict[str, dict[str, Tensor]]) -> None:
    for name, graph in graphs.items():
        held(crystal(**graph), name)


def test_a_package_has_the_published_answers_wherever_it_runs(
    graphs: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    package = example_packages.made("crystal")  # which verified it, the forces beside the energy's differences
    for name, graph in graphs.items():
        save_file(graph, tmp_path / name)
    run_python(ANSWERS, package, *(tmp_path / name for name in graphs), cwd=tmp_path)
    for name in graphs:
        held(load_file(tmp_path / f"{name}.answers"), name, rounding=5)

    given = triton_inputs(triton, {key: value.numpy() for key, value in graphs["NaCl"].items()})
    with served_packages(package) as site, triton.InferenceServerClient(f"127.0.0.1:{site.port}") as client:
        answer = client.infer("Crystal", given)
    names = [output["name"] for output in answer.get_response()["outputs"]]
    held({name: torch.from_numpy(np.array(answer.as_numpy(name))) for name in names}, "NaCl", rounding=5)

    ran = exportkit_run.run(package, "--input", tmp_path / "TiO2", "--output", tmp_path / "out")
    assert ran.code == 0, ran.document
    held(load_file(tmp_path / "out"), "TiO2", rounding=5)

"""Crystals that the tests of examples/crystals compute: from one atom to many, distorted so that forces are not 0."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


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

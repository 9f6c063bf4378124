"""Crystals that the tests of examples/crystals compute: from one atom to many, distorted so that forces are not 0."""

from __future__ import annotations

from typing import Any


def structures() -> dict[str, Any]:
    """Returns structures of pymatgen by name."""
    from pymatgen.core import Lattice, Structure

    salt = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.69), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    salt.translate_sites([0], [0.02, 0.01, 0.0])
    titania = Structure.from_spacegroup(
        "P4_2/mnm", Lattice.tetragonal(4.6, 2.96), ["Ti", "O"], [[0, 0, 0], [0.305, 0.305, 0]]
    )
    titania.translate_sites([2], [0.0, 0.03, 0.02])
    return {
        "Cu": Structure(Lattice.from_parameters(2.55, 2.55, 2.6, 60, 60, 60), ["Cu"], [[0, 0, 0]]),
        "TiO2": titania,
        "NaCl": salt,
    }

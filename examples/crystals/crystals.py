"""A published interatomic potential, with its class and its trained weights: CHGNet, of any number of atoms and bonds.

README.md has the commands.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from chgnet.model import layers, model
    from chgnet.model.model import BatchedGraph, CHGNet
except ImportError as error:
    raise ImportError(f"{error}: pip install chgnet==0.3.8") from error

from exportkit import ExportSpec, Tolerance


def summed(data: Tensor, owners: Tensor, *, average: bool = True, num_owner: int | None = None) -> Tensor:
    """Sums rows by owner, as CHGNet's `aggregate` does, which counts owners to know how many there are.

    Without a number of owners, they are crystals: one.
    """
    if num_owner is None:
        return data.sum(0, keepdim=True)
    return data.new_zeros(num_owner, data.shape[1]).index_add(0, owners, data)


def first_size(it: object) -> int:
    """Returns the `len` of anything. Python makes a number of a tensor's, which a trace would have for ever."""
    return it.shape[0] if isinstance(it, Tensor) else len(it)


layers.aggregate = summed
vars(model)["len"] = vars(layers)["len"] = first_size


class Crystal(nn.Module):
    """One crystal: energy in eV, forces in eV/A, stress in GPa.

    The graph of bonds and angles is made outside, by CHGNet's own converter: `graph_of`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = CHGNet.load(use_device="cpu", verbose=False)
        self.net.is_intensive = False  # an energy, whose gradients are the forces; not one for each atom

    def forward(
        self,
        numbers: Tensor,
        positions: Tensor,
        lattice: Tensor,
        bonds: Tensor,
        images: Tensor,
        pair_of_bond: Tensor,
        bond_of_pair: Tensor,
        angles: Tensor,
    ) -> dict[str, Tensor]:
        """Takes what `graph_of` returns."""
        positions = positions.detach().requires_grad_()
        strain = torch.zeros_like(lattice).requires_grad_()
        deformed = torch.eye(3, dtype=strain.dtype, device=strain.device) + strain
        places, cell = positions @ deformed, lattice @ deformed
        radial, radial_near, directions = self.net.bond_basis_expansion(
            center=places[bonds[:, 0]],
            neighbor=places[bonds[:, 1]],
            undirected2directed=bond_of_pair,
            image=images,
            lattice=cell,
        )
        graph = BatchedGraph(
            atomic_numbers=numbers,
            bond_bases_ag=radial,
            bond_bases_bg=radial_near,
            angle_bases=self.net.angle_basis_expansion(directions[angles[:, 2]], directions[angles[:, 4]]),
            batched_atom_graph=bonds,
            batched_bond_graph=angles[:, [0, 1, 3]],
            atom_owners=torch.zeros_like(numbers),
            directed2undirected=pair_of_bond,
            atom_positions=[positions],
            strains=[strain],
            volumes=torch.dot(lattice[0], torch.linalg.cross(lattice[1], lattice[2])).view(1),
        )
        found = self.net._compute(graph, compute_force=True, compute_stress=True)
        alone = self.net.composition_model.fc.weight[0][numbers - 1]
        return {"energy": found["e"].sum() + alone.sum(), "forces": found["f"][0], "stress": found["s"][0]}

    def graph_of(self, structure) -> dict[str, Tensor]:
        """Returns what `forward` takes for a pymatgen.core.Structure."""
        graph = self.net.graph_converter(structure)
        return {
            "numbers": graph.atomic_number,
            "positions": (graph.atom_frac_coord @ graph.lattice).detach(),
            "lattice": graph.lattice.detach(),
            "bonds": graph.atom_graph,
            "images": graph.neighbor_image,
            "pair_of_bond": graph.directed2undirected,
            "bond_of_pair": graph.undirected2directed,
            "angles": graph.bond_graph,
        }


def draw_inputs(sizes, generator):
    """Draws atoms, bonds and angles at random; no bond goes from an atom to itself, or makes an angle with itself.

    An atom has some sixty neighbours within the 6 A that the model looks at. More bonds are drawn longer, and do
    nothing: of the sum of 8,000 messages at one atom float32 has two digits, in eager as well.
    """
    atoms, bonds, pairs, angles = (sizes[name] for name in ("atoms", "bonds", "pairs", "angles"))

    def below(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, dtype=torch.int32)

    images = below(3, bonds, 3).float() - 1
    images[:, 0] = 1
    images[60 * atoms :, 0] = 9
    one, other = below(bonds, angles), below(bonds - 1, angles)
    other = (one + 1 + other) % bonds
    pair_of_bond = below(pairs, bonds)
    return (), {
        "numbers": 1 + below(94, atoms),
        "positions": torch.rand(atoms, 3, generator=generator),
        "lattice": torch.eye(3) * 3 + torch.rand(3, 3, generator=generator) / 2,
        "bonds": below(atoms, bonds, 2),
        "images": images,
        "pair_of_bond": pair_of_bond,
        "bond_of_pair": below(bonds, pairs),
        "angles": torch.stack([below(atoms, angles), pair_of_bond[one], one, pair_of_bond[other], other], 1),
    }


def spec() -> ExportSpec:
    """For `exportkit export crystals.py:spec`."""
    _, inputs = draw_inputs({"atoms": 4, "bonds": 40, "pairs": 20, "angles": 30}, torch.Generator().manual_seed(0))
    return ExportSpec(
        model=Crystal().eval(),
        example_inputs=(),
        example_kwargs=inputs,
        dynamic_shapes={
            "numbers": {0: "atoms[1:100]"},
            "positions": {0: "atoms"},
            "bonds": {0: "bonds[2:8000]"},
            "images": {0: "bonds"},
            "pair_of_bond": {0: "bonds"},
            "bond_of_pair": {0: "pairs[1:4000]"},
            "angles": {0: "angles[1:8000]"},
        },
        # The radial basis has sines of up to a hundred radians, whose derivatives turn a rounding into a hundred. Two
        # units in the last place more or less in each operator change float32's answers for drawn graphs by up to 1e-4
        # eV, 1e-4 eV/A and 4e-3 GPa, which is up to 150 times eager's own error; code may round so.
        tolerances={
            "energy": Tolerance(atol=1e-4, rtol=1e-5),
            "forces": Tolerance(atol=5e-4, rtol=1e-4, gradient_of=("energy", "positions"), scale=-1),
            "stress": Tolerance(atol=2e-2, rtol=1e-4),
        },
        draw_inputs=draw_inputs,
    )

"""An interatomic potential: an energy, its forces and their scatter, through an operator in C++ with gradients."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

LIBRARY = Path(__file__).with_name("libgaussians.so")
torch.ops.load_library(LIBRARY)


@torch.library.register_fake("potential::gaussians")
def _fake(r: Tensor, centres: Tensor, width: float, order: int) -> Tensor:
    torch._check(r.dim() == 1 and centres.dim() == 1, lambda: "gaussians: r and centres must have 1 dimension")
    torch._check(r.dtype == centres.dtype, lambda: "gaussians: r and centres must have one dtype")
    return r.new_empty(r.shape[0], centres.shape[0])


def _keep(ctx, inputs, output):
    r, centres, ctx.width, ctx.order = inputs
    ctx.save_for_backward(r, centres)


def _backward(ctx, gradient):
    r, centres = ctx.saved_tensors
    slope = torch.ops.potential.gaussians(r, centres, ctx.width, ctx.order + 1) * gradient
    return slope.sum(1), -slope.sum(0), None, None


torch.library.register_autograd("potential::gaussians", _backward, setup_context=_keep)


class Potential(nn.Module):
    """Pairs within a cutoff: energy, forces on the atoms, and what the forces give in a direction (the Hessian)."""

    def __init__(self, count: int = 8, cutoff: float = 4.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.net = nn.Sequential(nn.Linear(count, 16), nn.SiLU(), nn.Linear(16, 1))
        self.register_buffer("centres", torch.linspace(0.5, cutoff, count))

    def energy(self, positions: Tensor, edges: Tensor) -> Tensor:
        """Returns the energy of each atom [N]. `edges` [2, E] are pairs of atoms, from a neighbour list."""
        across = positions[edges[1]] - positions[edges[0]]
        distance = (across.square().sum(1) + 1e-6).sqrt()
        radial = torch.ops.potential.gaussians(distance, self.centres, 0.6, 0)
        smooth = 0.5 * (torch.cos(torch.pi * distance.clamp(max=self.cutoff) / self.cutoff) + 1)
        pairs = self.net(radial).squeeze(1) * smooth
        return positions.new_zeros(positions.shape[0]).index_add(0, edges[0], pairs)

    def forward(self, positions: Tensor, edges: Tensor, direction: Tensor) -> dict[str, Tensor]:
        """Returns the energy, and its first and second derivatives by the positions."""
        positions = positions.detach().requires_grad_()
        energies = self.energy(positions, edges)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        (bend,) = torch.autograd.grad((slope * direction).sum(), positions)
        return {"energy": energies.sum(), "energies": energies, "forces": -slope, "bend": bend}


def draw_inputs(sizes, generator):
    """Draws atoms and pairs of them."""
    atoms, edges = sizes["atoms"], sizes["edges"]
    positions = torch.rand(atoms, 3, generator=generator) * 4
    pairs = torch.randint(0, atoms, (2, edges), generator=generator)
    return (positions, pairs, torch.randn(atoms, 3, generator=generator)), {}


def spec():
    """For `exportkit export potential.py:spec`."""
    import exportkit

    torch.manual_seed(0)
    inputs, _ = draw_inputs({"atoms": 6, "edges": 30}, torch.Generator().manual_seed(0))
    return exportkit.ExportSpec(
        model=Potential(),
        example_inputs=inputs,
        dynamic_shapes={
            "positions": {0: "atoms[2:500]"},
            "edges": {1: "edges[2:20000]"},
            "direction": {0: "atoms"},
        },
        tolerances={"forces": exportkit.Tolerance(gradient_of=("energy", "positions"), scale=-1)},
        operator_libraries=[LIBRARY],
        draw_inputs=draw_inputs,
    )

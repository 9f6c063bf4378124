"""A right gradient is never blamed, and one that is a little off is found, in float64 and in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit.verify.gradient_paths import PathFinding, held_along_paths

POTENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "repulsion and attraction": lambda r: (r**-6 - r**-3).sum(),
    "springs": lambda r: ((r - 1.5) ** 2).sum() / 2,
    "Morse": lambda r: ((1 - torch.exp(1.2 - r)) ** 2).sum(),
    "springs, far from zero": lambda r: ((r - 1.5) ** 2).sum() / 2 + 1e3,
    "a kink": lambda r: (torch.relu(2 - r) * 3).sum(),
    "float32 inside": lambda r: ((r.float() - 1.5) ** 2).sum().to(r.dtype) / 2,
    "constant": lambda r: (0 * r).sum() + 1,
}


def jumps(r: Tensor) -> Tensor:
    """Has no energy that is conserved: a path that is longer than the way to the jump differs from its work."""
    return torch.where(r < 2, (r - 1) ** 2, 0 * r).sum()


def held(
    potential: Callable[[Tensor], Tensor], dtype: torch.dtype, seed: int, error: Callable[[Tensor], Tensor]
) -> PathFinding:
    generator = torch.Generator().manual_seed(seed)
    start = (torch.rand(6, 3, generator=generator, dtype=torch.float64) * 4).to(dtype)
    one, other = torch.triu_indices(6, 6, 1)

    def evaluate(places: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        found = []
        for place in places:
            leaf = place.clone().requires_grad_()
            energy = potential(((leaf[one] - leaf[other]).square().sum(1) + 0.3).sqrt())
            (gradient,) = torch.autograd.grad(energy, leaf)
            found.append((float(energy.detach()), error(gradient)))
        return found

    return held_along_paths(evaluate, start, seed=seed, precision=torch.finfo(dtype).eps)


@pytest.mark.slow_but("springs", "a kink")
@pytest.mark.parametrize("name", POTENTIALS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_right_gradient_is_never_blamed(name: str, seed: int, dtype: torch.dtype) -> None:
    assert not held(POTENTIALS[name], dtype, seed, lambda gradient: gradient).wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_jump_that_is_not_at_the_point_itself_is_not_blamed(dtype: torch.dtype) -> None:
    assert not any(held(jumps, dtype, seed, lambda gradient: gradient).wrong for seed in range(5))


@pytest.mark.parametrize("name", [name for name in POTENTIALS if name != "constant"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_two_percent_off_is_found(name: str, dtype: torch.dtype) -> None:
    finding = held(POTENTIALS[name], dtype, 1, lambda gradient: 1.02 * gradient)
    assert finding.wrong
    assert finding.visible < 0.02


def test_the_wrong_sign_and_one_wrong_row_are_found() -> None:
    springs = POTENTIALS["springs"]
    assert held(springs, torch.float32, 0, torch.neg).wrong
    one_row = torch.ones(6, 1, dtype=torch.float64)
    one_row[2] = 1.1
    assert held(springs, torch.float64, 0, lambda gradient: gradient * one_row).wrong


def test_what_is_not_finite_is_not_judged() -> None:
    finding = held(lambda r: (r * torch.inf).sum(), torch.float64, 0, lambda gradient: gradient)
    assert not finding.wrong
    assert finding.visible == torch.inf

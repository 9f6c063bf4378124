"""Lets `torch.cov` and `torch.corrcoef` be traced: torch reads a tensor to know whether it must warn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from exportkit.export.within_torch.torch_internals import replaced


@contextmanager
def traceable_covariances() -> Iterator[None]:
    """Computes them as torch does, without the warning, while the block runs."""
    with ExitStack() as changes:
        for name, ours in (("cov", _cov), ("corrcoef", _corrcoef)):
            changes.enter_context(replaced(torch, name, _always(ours)))
            setattr(Tensor, name, ours)  # before the method of the class in C++
            changes.callback(delattr, Tensor, name)
        yield


def _always(ours: Callable[..., Tensor]) -> Callable[[object], Callable[..., Tensor]]:
    return lambda _: ours


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    rows = input.view(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        mean = rows.sum(1) / rows.shape[1]
        centred = rows - mean.unsqueeze(1)
        product = centred @ centred.t().conj()
        return (product / torch.sym_max(rows.shape[1] - correction, 0)).squeeze()
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    assert weights is not None
    total = weights.sum()
    freedom = total - correction
    if aweights is not None and correction != 0:
        freedom = total - correction * (weights * aweights).sum() / total
    centred = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
    return (centred @ (centred * weights).t().conj() / freedom.clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    products = _cov(input)
    if products.dim() == 0:
        return products / products
    deviations = products.diagonal().real.sqrt()
    found = products / deviations.view(-1, 1) / deviations.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)

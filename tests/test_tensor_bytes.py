"""The bytes of a tensor are read whatever its strides are."""

from __future__ import annotations

import pytest
import torch

from exportkit.tensor_bytes import tensor_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3).expand(1),  # contiguous, with a stride of 0
        torch.tensor([7]).expand(3),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(6.0, requires_grad=True)[2:],
        torch.tensor([True, False]),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
    ],
)
def test_bytes_are_those_of_the_elements_in_order(tensor: torch.Tensor) -> None:
    expected = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    assert bytes(tensor_bytes(tensor).tolist()) == bytes(expected.view(torch.uint8).tolist())

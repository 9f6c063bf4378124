"""Clamps, extremes and sorts treat NaN, infinities and equal elements as torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from exportkit import ExportSpec
from tests.onnx.conversions import checked, convert_spec, run, session_of


class Net(torch.nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        results = {
            "clamp": x.clamp(2, 4),
            "clamp min": x.clamp(min=2),
            "clamp max": x.clamp(max=2),
            "amax": x.amax(-1),
            "amin": x.amin((0, 1), keepdim=True),
            "max": x.max(),
            "min": x.min(),
            "argmax": x.argmax(),
            "argmax kept": x.argmax(keepdim=True),
            "argmax of a dimension": x.argmax(1),
            "argmin": x.argmin(-1, keepdim=True),
        }
        pairs = {
            "max of a dimension": x.max(1),
            "min of a dimension": x.min(-1, keepdim=True),
            "stable": x.sort(dim=1, stable=True),
            "stable, descending": x.sort(dim=-1, descending=True, stable=True),
        }
        for name, (values, indices) in pairs.items():
            results[name], results[f"indices of {name}"] = values, indices
        results["topk"] = x.topk(2, dim=1).values  # torch promises nothing about the indices of equal elements
        results["topk of the least"] = x.topk(3, dim=-1, largest=False).values
        results["sort"] = x.sort(1).values
        return results


def draw(rows: int, dtype: torch.dtype) -> Tensor:
    """Few different numbers; NaN and both infinities in every other place, if the dtype has them."""
    numbers = torch.randint(0, 6, (rows, 4, 7)).to(dtype)
    if not dtype.is_floating_point:
        return numbers
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype)[torch.randint(0, 4, numbers.shape)]
    mixed = torch.where(torch.rand(numbers.shape) < 0.3, special, numbers)
    return torch.where(torch.rand(rows, 4, 1) < 0.5, numbers, mixed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_nan_infinities_and_ties_are_as_in_torch(dtype: torch.dtype) -> None:
    spec = ExportSpec(Net(), (draw(3, dtype),), dynamic_shapes={"x": {0: "rows[1:64]"}})
    session = session_of(checked(convert_spec(spec)))
    for rows in (1, 2, 9, 40):
        x = draw(rows, dtype)
        for (name, expected), answer in zip(Net()(x).items(), run(session, [x]), strict=True):
            assert_close(answer, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name}: {answer} for {expected}")

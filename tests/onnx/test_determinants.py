"""Determinants, inverses and their gradients in ONNX: they work, or the refusal says what to write, which does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.linalg import cross

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.onnx.export_onnx import export_onnx

pytest.importorskip("onnxruntime")

Function = Callable[[Tensor], Any]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def exported(function: Function, folder: Path) -> None:
    """Exports a model, which is compared with eager in ONNX Runtime."""
    torch.manual_seed(0)
    example = torch.randn(4, 3, 3) + 2 * torch.eye(3)
    spec = ExportSpec(Model(function).eval(), (example,), dynamic_shapes={"x": {0: "n[1:9]"}})
    export_onnx(spec, folder / "net.onnx", TraceOptions(cases=1, edge_cases=False))


def gradient(function: Function) -> Function:
    def differentiated(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).square().sum(), x)[0]

    return differentiated


def signed_logarithm(x: Tensor) -> tuple[Tensor, Tensor]:
    d = torch.linalg.det(x)
    return d.sign(), d.abs().log()


def determinant(x: Tensor) -> Tensor:
    a, b, c = x.unbind(-2)
    return (a * cross(b, c)).sum(-1)


def inverse(x: Tensor) -> Tensor:
    a, b, c = x.unbind(-2)
    return torch.stack([cross(b, c), cross(c, a), cross(a, b)], -1) / determinant(x)[..., None, None]


WORKS: dict[str, Function] = {
    "determinant": torch.linalg.det,
    "its logarithm": lambda x: torch.logdet(x @ x.mT),
    "advice for slogdet": signed_logarithm,
    "advice for the gradient of det": gradient(determinant),
    "advice for inv": inverse,
    "advice for the gradient of inv": gradient(inverse),
    "advice for solve": lambda x: inverse(x) @ x.sum(-1, keepdim=True),
}


def test_the_advice_is_right() -> None:
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(determinant(x), torch.linalg.det(x))
    torch.testing.assert_close(inverse(x), torch.linalg.inv(x))
    torch.testing.assert_close(signed_logarithm(x), tuple(torch.linalg.slogdet(x)))


@pytest.mark.slow_but("advice for slogdet")
@pytest.mark.parametrize("name", WORKS)
def test_it_is_onnx(name: str, tmp_path: Path) -> None:
    exported(WORKS[name], tmp_path)


REFUSED: dict[str, tuple[Function, str]] = {
    "slogdet": (torch.linalg.slogdet, r"d\.sign\(\) and d\.abs\(\)\.log\(\)"),
    "gradient of det": (gradient(torch.linalg.det), r"gradient of torch\.linalg\.det .* \(a \* torch\.linalg\.cross"),
    "gradient of slogdet": (gradient(lambda x: torch.linalg.slogdet(x)[1]), r"Write d = torch\.linalg\.det"),
    "inv": (torch.linalg.inv, r"torch\.stack\(\[cross\(b, c\), cross\(c, a\), cross\(a, b\)\], -1\)"),
    "gradient of inv": (gradient(torch.linalg.inv), r"torch\.stack\(\[cross\(b, c\)"),
    "solve": (lambda x: torch.linalg.solve(x, x.sum(-1, keepdim=True)), r"Multiply by an inverse"),
}


@pytest.mark.slow_but("solve")
@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_lacks_is_refused_with_what_to_write(name: str, tmp_path: Path) -> None:
    function, advice = REFUSED[name]
    with pytest.raises(ExportError, match=r"test_determinants\.py:\d+.*torch\.onnx does not translate aten") as refused:
        exported(function, tmp_path)
    assert refused.match(advice)

"""Loads the compiled operators, and has what their fake kernels share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARIES = {device: path for device in ("cpu", "cuda") for path in Path(__file__).parent.glob(f"_{device}.*so")}
"""The compiled libraries by device. exportkit takes from here what a package of a model needs."""

if "cpu" not in LIBRARIES:
    raise ImportError("paged_cache is not compiled: run `python setup.py build_ext --inplace` in its folder")
for _device, _library in LIBRARIES.items():
    if _device == "cpu" or torch.version.cuda:
        torch.ops.load_library(_library)

ops = torch.ops.paged_cache

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype that kernels compute in: float32 for float16 and bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check(holds: Any, *parts: Any) -> None:
    """Raises RuntimeError unless `holds`, which may be symbolic. csrc/common.h has the same messages."""
    torch._check(holds, lambda: "".join(_text(part) for part in parts))


def _text(part: Any) -> str:
    return str(list(part)) if isinstance(part, torch.Size) else str(part).removeprefix("torch.")


def check_tensors(op: str, tensors: dict[str, tuple[Tensor, str]], least: dict[str, int]) -> None:
    """Checks the tensors of a call as `Checks` of csrc/common.h does.

    Args:
        op: The operator's name.
        tensors: By name, each with its dimensions, such as "T H D", or "T: int64" for indices.
        least: The smallest sizes of dimensions.

    Raises:
        RuntimeError: A rank, a dtype, a device or a size is not as it must be.
    """
    first = next(iter(tensors))
    base = tensors[first][0]
    seen: dict[str, tuple[str, Any]] = {}
    for name, (tensor, text) in tensors.items():
        dims, _, dtype = text.partition(":")
        symbols = dims.split()
        check(tensor.dim() == len(symbols), f"{op}: {name} must be [{', '.join(symbols)}], got shape ", tensor.shape)
        if dtype:
            check(tensor.dtype == torch.int64, f"{op}: {name} must be int64, got ", tensor.dtype)
        elif name == first:
            check(tensor.dtype in _FLOATING, f"{op}: {name} must be float32, float64, float16 or bfloat16, got ",
                  tensor.dtype)  # fmt: skip
        else:
            check(tensor.dtype == base.dtype, f"{op}: {name} is ", tensor.dtype, f", {first} is ", base.dtype,
                  "; they must have one dtype")  # fmt: skip
        check(tensor.device == base.device, f"{op}: {name} and {first} must be on one device")
        for symbol, size in zip(symbols, tensor.shape):
            if symbol not in seen and symbol in least:
                smallest = f"{symbol} >= {least[symbol]}"
                check(size >= least[symbol], f"{op}: {name} must have {smallest}, got shape ", tensor.shape)
            other, expected = seen.setdefault(symbol, (name, size))
            if other != name:
                check(size == expected, f"{op}: {name} has {symbol} = ", size, f", {other} has {symbol} = ", expected,
                      "; they must be equal")  # fmt: skip

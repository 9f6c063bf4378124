"""Modules that call operators of a third party's library (operators.cpp), each with something missing or wrong."""

import torch
from torch import Tensor, nn

library = "operators.cpp"
ops = torch.ops.exportkit_gallery

for _name, _fake in {
    "good": torch.empty_like,
    "wrong_signature": lambda: torch.empty(()),
    "wrong_beyond": torch.empty_like,
    "without_kernel": torch.empty_like,
    "copied": torch.empty_like,
}.items():
    torch.library.register_fake(f"exportkit_gallery::{_name}", _fake)

_OUT = torch.library.Library("exportkit_gallery", "FRAGMENT")
_OUT.define(
    "copied.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    tags=(torch.Tag.out,) if hasattr(torch.Tag, "out") else (),  # torch 2.13 has it
)


@torch.library.custom_op("exportkit_gallery_python::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


twice.register_fake(torch.empty_like)


class Complete(nn.Module):
    """An operator with a kernel and a fake."""

    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return ops.good(x) + 1


class OutVariant(nn.Module):
    """An operator with an overload that has the tag out (pytorch#161001)."""

    onnx = "has no decomposition, so ONNX cannot compute it"
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return ops.copied(x + 1) - 1


class WithoutFake(nn.Module):
    """An operator without a fake kernel (pytorch#150809, pytorch#140048)."""

    says = "has no fake kernel, so torch.export cannot know the shape it returns"

    def forward(self, x: Tensor) -> Tensor:
        return ops.without_fake(x)


class WrongSignature(nn.Module):
    """A fake kernel that takes other arguments (pytorch#181851)."""

    says = "the fake kernel of exportkit_gallery::wrong_signature"

    def forward(self, x: Tensor) -> Tensor:
        return ops.wrong_signature(x)


class WrongBeyond(nn.Module):
    """A fake kernel that is right at the example's size and wrong beyond (ao#3824)."""

    says = "it says [8, 3], the kernel returned [6, 3], at batch=8"
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return ops.wrong_beyond(x)


class Composite(nn.Module):
    """A composite kernel in C++, where a size is a number: 625 went into a graph this way (ao#3824)."""

    says = "`return ops.composite(x) + x.sum()` needs x:0 == 4"
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return ops.composite(x) + x.sum()


class WithoutKernel(nn.Module):
    """An operator without a kernel for this device."""

    says = "has no kernel for cpu"

    def forward(self, x: Tensor) -> Tensor:
        return ops.without_kernel(x)


class InPython(nn.Module):
    """An operator in Python whose body calls NumPy (pytorch#143786)."""

    says = "is implemented in Python, hosts do not have its source, and its body cannot be traced in its place"

    def forward(self, x: Tensor) -> Tensor:
        return twice(x)

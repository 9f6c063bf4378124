"""Models that end the process which exports them."""

import os
import signal

import torch
from torch._inductor import lowering

import exportkit


class Dies(torch.nn.Module):
    """Ends the process in its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return x


class DiesOfNan(torch.nn.Module):
    """Ends the process if it is given a NaN, as LAPACK's eigenvalues do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any():
            os.kill(os.getpid(), signal.SIGSEGV)
        return x.sin() + 1


class Sine(torch.nn.Module):
    """A model with nothing wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


def spec(when: str) -> exportkit.ExportSpec:
    """A model that dies in its first call, of a NaN, or when it is compiled."""
    if when == "compiling":
        # As a kernel does that the compiler runs to fold a constant, or to choose the fastest.
        lowering.lowerings[torch.ops.aten.sin.default] = lambda *_: os.kill(os.getpid(), signal.SIGABRT)
    model = {"checking": Dies, "edge_case": DiesOfNan}.get(when, Sine)()
    return exportkit.ExportSpec(model=model, example_inputs=(torch.rand(2, 3),))

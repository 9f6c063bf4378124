"""The messages between a process and the worker of a package that was loaded with `isolate=True`.

They travel through a TensorSocket, which carries the tensors of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct

from exportkit.child.messages import Message
from exportkit.precision import Float32Precision


class TorchSettings(Struct, frozen=True):
    """Settings of torch that change results. The worker copies those of the process that loads the package."""

    threads: int
    precision: Float32Precision

    @classmethod
    def current(cls) -> TorchSettings:
        """The settings of this process."""
        return cls(torch.get_num_threads(), Float32Precision.current())

    def apply(self) -> None:
        """Makes them the settings of this process."""
        torch.set_num_threads(self.threads)
        self.precision.apply()


class LoadPackage(Message, frozen=True):
    """The first message: the arguments of `exportkit.load`. The answer is PackageLoaded."""

    path: str
    options: dict[str, Any]
    settings: TorchSettings


class PackageLoaded(Message, frozen=True):
    """The package is loaded. `manifest_sha256` says which content was checked."""

    target: str
    device: str
    manifest_sha256: str


class Connect(Message, frozen=True):
    """Brings a socket for calls, as an open file. There is no answer."""


class Run(Message, frozen=True):
    """A call. Its tensors are flat inputs that the package allows. The answer is Ran."""


class RunRequests(Message, frozen=True):
    """A call for several requests: `Model.run_requests`. Its tensors are the inputs of one after the other."""

    requests: int
    outputs: tuple[int, ...]


class Capture(Message, frozen=True):
    """Makes a CUDA graph for the sizes of its tensors: `Model.capture`. The answer is Ran."""


class ReportGraphs(Message, frozen=True):
    """Asks which CUDA graphs there are. The answer is Ran."""


class Swap(Message, frozen=True):
    """Other weights: a safetensors file, or the message's tensors with these names. The answer is Ran."""

    path: str | None
    names: tuple[str, ...]


class Ran(Message, frozen=True):
    """What was asked for is done. Its tensors are a call's flat outputs, or those that were wanted.

    Attributes:
        seconds: How long each step of a call for several requests took.
        graphs: Whether the model has CUDA graphs, for `Capture`.
        report: What `Runner.graph_report` says, for `ReportGraphs`.
    """

    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    graphs: bool = False
    report: str | None = None


Question = Run | RunRequests | Capture | ReportGraphs | Swap

"""The messages between a process and the worker of a package that was loaded with `isolate=True`.

They travel through a TensorSocket, which carries the tensors of a call.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from msgspec import Struct

from exportkit.child.messages import Message
from exportkit.precision import Float32Precision
from exportkit.runtime.requests import TriedRows


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
    """The first message: the arguments of `exportkit.load`. The answer is PackageLoaded.

    Without a path, the package's open file comes with the message. `signature` is the content of its signature file;
    None if the options have a path, or nothing.
    """

    path: str | None
    options: dict[str, Any]
    settings: TorchSettings
    signature: bytes | None = None


class PackageLoaded(Message, frozen=True):
    """The package is loaded. `manifest_sha256` says which content was checked."""

    target: str
    device: str
    manifest_sha256: str


class Connect(Message, frozen=True):
    """Brings a socket for calls, as an open file. There is no answer."""


class Run(Message, frozen=True):
    """A call of a method, in a session if it has state. Its tensors are flat inputs that the package allows.

    The answer is Ran, with what was written as well.
    """

    method: str
    session: int | None


class RunRequests(Message, frozen=True):
    """A call for several requests: `Model.run_requests`. Its tensors are the inputs of one after the other."""

    method: str
    requests: int
    outputs: tuple[int, ...]


class TryRows(Message, frozen=True):
    """Asks how many rows a call may have: `Model.try_rows`. The answer is Ran."""

    method: str
    most: int


class Capture(Message, frozen=True):
    """Makes a CUDA graph: `Runner.capture`. Its tensors are the inputs, and the state has these sizes."""

    method: str
    sizes: dict[str, int]


class ReportGraphs(Message, frozen=True):
    """Asks which CUDA graphs of a method there are. The answer is Ran."""

    method: str


class Swap(Message, frozen=True):
    """Other weights: a safetensors file, or the message's tensors with these names. The answer is Ran."""

    path: str | None
    names: tuple[str, ...]


class MakeSession(Message, frozen=True):
    """Makes a session: one of these sizes, or a copy of another one. The answer is Ran."""

    sizes: dict[str, int]
    copy_of: int | None = None


class AccessState(Message, frozen=True):
    """Reads the state of a session, replaces some by the message's tensors of these names, or restores its beginning.

    With a row, that one is replaced of each. The answer is Ran, with the tensors in the manifest's order.
    """

    session: int
    use: Literal["read", "write", "reset"]
    names: tuple[str, ...] = ()
    row: int | None = None


class CloseSessions(Message, frozen=True):
    """Frees sessions. The answer is Ran."""

    sessions: tuple[int, ...]


class Ran(Message, frozen=True):
    """What was asked for is done. Its tensors are a call's flat outputs, or those that were wanted.

    `seconds` is how long each step of `RunRequests` took; `graphs`, whether the model has CUDA graphs, for `Capture`.
    The others answer the questions that have their names.
    """

    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    graphs: bool = False
    report: str | None = None
    session: int = -1
    rows: TriedRows = TriedRows(0)


Question = Run | RunRequests | TryRows | Capture | ReportGraphs | Swap | MakeSession | AccessState | CloseSessions

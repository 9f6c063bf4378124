"""The worker process of a package that was loaded with `isolate=True`, and the messages it is sent and answers.

Of the caller it has what `exportkit.load` was given. The first socket brings others, one for each call that may run at
a time, and calls come through those.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from typing import Any

import torch
from msgspec import Struct

from exportkit import errors
from exportkit.errors import ExportkitError
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.runtime.tensor_socket import TensorSocket

_PR_SET_PDEATHSIG = 1


class Settings(Struct, frozen=True):
    """Of torch, in the process that loads: what computes there computes alike here."""

    threads: int
    matmul_tf32: bool
    cudnn_tf32: bool

    @classmethod
    def here(cls) -> Settings:
        """Those of this process."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return cls(torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32)


class Load(Struct, frozen=True, tag=True):
    """The first message: the arguments of `exportkit.load`."""

    path: str
    options: dict[str, Any]
    settings: Settings


class Loaded(Struct, frozen=True, tag=True):
    """The answer to it. `manifest_sha256` says which content was checked."""

    target: str
    device: str
    manifest_sha256: str


class Connect(Struct, frozen=True, tag=True):
    """Brings a socket for calls, as an open file; no answer."""


class Run(Struct, frozen=True, tag=True):
    """A call; its tensors are flat inputs that the package allows."""


class Swap(Struct, frozen=True, tag=True):
    """Other weights: a safetensors file, or the message's tensors, by these names."""

    path: str | None
    names: tuple[str, ...]


class Ran(Struct, frozen=True, tag=True):
    """The answer to either; its tensors are a call's flat outputs."""


class Failed(Struct, frozen=True, tag=True):
    """The answer where an error was raised: its class, and what it says."""

    error: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Of any error."""
        if isinstance(error, ExportkitError):
            return cls(type(error).__name__, error.message, error.hint)
        text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        return cls(RuntimeError.__name__, text, None)

    def exception(self) -> Exception:
        """The same again: an error of exportkit.errors, or a RuntimeError."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, ExportkitError):
            return kind(self.message, hint=self.hint)
        return RuntimeError(self.message)


def main(connection: int, parent: int) -> None:
    """Entry point of the process: `connection` is the open socket to the parent, whose process id is `parent`."""
    _end_with(parent)
    control: TensorSocket[Load | Connect] = TensorSocket(socket.socket(fileno=connection), Load | Connect)
    try:
        message, _, _ = control.receive()
        assert isinstance(message, Load)
        try:
            model = _load(message)
        except Exception as error:
            control.send(Failed.of(error))
            return
        control.send(Loaded(model.target.name, str(model.device), model._reader.manifest_sha256))
        while True:
            _, _, descriptor = control.receive()
            assert descriptor is not None
            calls: TensorSocket[Run | Swap] = TensorSocket(socket.socket(fileno=descriptor), Run | Swap)
            threading.Thread(target=_serve, args=(model, calls, message.settings.threads), daemon=True).start()
    except ConnectionError:
        # The parent let go. What this process unpacked is the parent's to remove, and calls that nobody waits for any
        # more need not end in order.
        os._exit(0)


def _end_with(parent: int) -> None:
    """Whatever this process is doing, the kernel kills it when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone already
        os._exit(0)


def _load(message: Load) -> Model:
    torch.set_num_threads(message.settings.threads)
    torch.backends.cuda.matmul.allow_tf32 = message.settings.matmul_tf32
    torch.backends.cudnn.allow_tf32 = message.settings.cudnn_tf32
    return load(message.path, **message.options)


def _serve(model: Model, calls: TensorSocket[Run | Swap], threads: int) -> None:
    """Answers one call after the other, until the parent closes the socket."""
    torch.set_num_threads(threads)  # which OpenMP keeps for each thread
    try:
        while True:
            message, tensors, _ = calls.receive()
            try:
                calls.send(Ran(), _answer(model, message, tensors))
            except ConnectionError:
                raise
            except Exception as error:
                calls.send(Failed.of(error))
    except ConnectionError:
        calls.close()


def _answer(model: Model, message: Run | Swap, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(message, Swap):
        model.swap_weights(dict(zip(message.names, tensors)) if message.path is None else message.path)
        return []
    runner = model._runner
    assert runner is not None
    return runner.run([tensor.to(model.device) for tensor in tensors])

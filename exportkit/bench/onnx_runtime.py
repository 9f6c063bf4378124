"""Times ONNX Runtime beside a package, on the same tensors and the same number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from exportkit.errors import UsageError
from exportkit.onnx.files import described, model_paths, named_model, open_onnx
from exportkit.onnx.interface import Interface
from exportkit.onnx.onnx_session import Bits, OnnxSession, bits_type
from exportkit.package.core import Demand
from exportkit.package.manifest import Manifest
from exportkit.package.structure import builder

ONNX_RUNTIME = "onnxruntime"


class OnnxSteps:
    """The ONNX models of a package's methods in one session: what comes out as state goes into the next call.

    Attributes:
        methods: By method, what to call with the arguments of its torch method. Its results are those of that.
        state: The tensors that the next call begins with, by name.
        what: A description.
        load_ms: How long loading took.
    """

    def __init__(self, path: Path, device: torch.device, demand: Demand, methods: Collection[str]) -> None:
        """Loads the models of some methods, with as many threads as torch has.

        Args:
            path: The `.onnx`, with its sidecar beside it.
            device: The benchmark's device.
            demand: The caller's required signatures.
            methods: The methods' names.

        Raises:
            UsageError: It is not an ONNX model, the device is not the CPU, or a method does not exist.
            PackageError: A file of the model is missing or was changed, or lacks a required signature.
            ModelLoadError: ONNX Runtime refuses a model.
            HostError: ONNX Runtime is not installed.
        """
        model, start = _onnx_model(path, device), time.perf_counter()
        with open_onnx(model, demand=demand) as sidecar:
            self.manifest = sidecar.manifest
            paths = model_paths(sidecar)
            self._sessions = {}
            for name in methods:
                interface = Interface.of(self.manifest.method(name), self.manifest.state)
                file, onnx = paths.get(name, model), described(sidecar, name)
                self._sessions[name] = OnnxSession(file, onnx, interface, threads=torch.get_num_threads())
                self.what = f"ONNX Runtime {self._sessions[name].version}, opset {onnx.opset}"
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.methods = {name: partial(self._call, name, _Method(self.manifest, name)) for name in methods}
        self.state: dict[str, Tensor] = {}
        self._written: list[tuple[Tensor, Tensor]] = []

    def settle(self) -> None:
        """Puts what the last call wrote into its inputs there, which a call does not do itself."""
        for given, new in self._written:
            given.copy_(new)

    def _call(self, name: str, method: _Method, *args: Any, **kwargs: Any) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        past = [self.state[each] for each in method.taken]
        outputs = [_tensor(output) for output in self._sessions[name].run([_bits(t) for t in (*inputs, *past)])]
        results, written = len(method.call.outputs), len(method.written)
        self.state.update(zip(method.changed, outputs[results + written :]))
        self._written = list(zip([inputs[place] for place in method.written], outputs[results:]))
        return method.build(outputs)


class _Method:
    """What a call of a method takes and gives beside its arguments and its result."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        described = manifest.method(name)
        self.call = described.call
        self.taken = [manifest.state[use.index].name for use in described.state]
        self.changed = [manifest.state[use.index].name for use in described.state if use.written]
        self.written = [place for place, each in enumerate(self.call.inputs) if each.written is not None]
        self.build: Callable[[Sequence[Tensor]], Any] = builder(self.call.result)


def _onnx_model(path: Path, device: torch.device) -> Path:
    if device.type != "cpu":
        raise UsageError("--onnx times ONNX Runtime's CPUExecutionProvider", hint="Give --device cpu.")
    if (model := named_model(path)) is None:
        raise UsageError(f"{path} is not an ONNX model", hint="`exportkit export --format onnx` writes one.")
    return model


def _bits(tensor: Tensor) -> Bits:
    """Returns a tensor's memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Bits(dtype, tensor.detach().contiguous().view(getattr(torch, bits_type(dtype))).numpy())


def _tensor(output: Bits) -> Tensor:
    return torch.from_numpy(output.array).view(getattr(torch, output.dtype))

"""Times ONNX Runtime beside a package, on the same tensors and the same number of threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from exportkit.errors import UsageError
from exportkit.onnx.files import described, model_path, named_model, open_onnx
from exportkit.onnx.interface import Interface
from exportkit.onnx.session import Bits, OnnxSession, bits_type
from exportkit.package.core import Demand
from exportkit.package.manifest import Call, PackagedMethod

ONNX_RUNTIME = "onnxruntime"


@dataclass(frozen=True)
class OnnxModel:
    """A loaded ONNX model, which is called with the arguments of its torch model and returns its outputs flat."""

    session: OnnxSession
    method: PackagedMethod
    what: str

    @property
    def call(self) -> Call:
        """How it is called."""
        return self.method.call

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Calls the model. Outputs keep the memory that ONNX Runtime allocated."""
        inputs = [_bits(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return [_tensor(output) for output in self.session.run(inputs)]


def load_onnx(path: Path, device: torch.device, demand: Demand, method: str | None = None) -> OnnxModel:
    """Loads the ONNX model of a method with as many threads as torch has.

    Args:
        path: The `.onnx`, with its companion beside it.
        device: The benchmark's device.
        demand: The caller's required signatures.
        method: The method's name; None for the default one.

    Raises:
        UsageError: It is not an ONNX model, the device is not the CPU, or the method has state or does not exist.
        PackageError: A file of the model is missing or was changed, or lacks a required signature.
        ModelLoadError: ONNX Runtime refuses the model.
        HostError: ONNX Runtime is not installed.
    """
    if device.type != "cpu":
        raise UsageError("--onnx times ONNX Runtime's CPUExecutionProvider", hint="Give --device cpu.")
    if (model := named_model(path)) is None:
        raise UsageError(f"{path} is not an ONNX model", hint="`exportkit export --format onnx` writes one.")
    with open_onnx(model, demand=demand) as companion:
        chosen = companion.manifest.method(method)
        if chosen.state:
            raise UsageError(f"{chosen.name} of {path} has state, and --onnx times models without")
        onnx = described(companion, chosen.name)
        file = model if len(companion.manifest.onnx) == 1 else model_path(companion, chosen.name)
        session = OnnxSession(file, onnx, Interface.of(chosen, ()), threads=torch.get_num_threads())
    return OnnxModel(session, chosen, f"ONNX Runtime {session.version}, opset {onnx.opset}")


def _bits(tensor: Tensor) -> Bits:
    """Returns a tensor's memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Bits(dtype, tensor.detach().contiguous().view(getattr(torch, bits_type(dtype))).numpy())


def _tensor(output: Bits) -> Tensor:
    return torch.from_numpy(output.array).view(getattr(torch, output.dtype))

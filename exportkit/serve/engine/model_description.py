"""What a served model says about itself: the protocol's metadata and Triton's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exportkit.package.manifest import Call, Dimension, Manifest, StateTensor, TensorInput, TensorOutput
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.checked_request import DEFAULT_PRIORITY
from exportkit.serve.engine.servable import Servable
from exportkit.serve.protocol.datatypes import datatype_of
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.sizes import input_bytes, state_bytes, state_dimensions

PLATFORM = "torch_aoti"  # as Triton's PyTorch backend has it


@dataclass(frozen=True)
class ModelDescription:
    """What the descriptions of one version are made from.

    Attributes:
        name: The name by which it is served.
        version: Its version.
        manifest: The package's manifest.
        batching: Whether requests run together.
        limits: What may wait.
        devices: The device of each replica.
        runners: The number of runners of each replica.
        weights: The file of weights that replaced the package's; None: it did not.
        method: The method that is served.
        offered: What is served of the package, and what is not.
        sequences: The limits of sequences.
    """

    name: str
    version: str
    manifest: Manifest
    batching: Batching
    limits: BatchLimits
    devices: tuple[str, ...]
    runners: int
    weights: str | None
    method: str
    offered: Servable
    sequences: SequenceLimits = field(default_factory=SequenceLimits)

    @property
    def call(self) -> Call:
        """How it is called."""
        return self.manifest.method(self.method).call

    @property
    def stateful(self) -> bool:
        """Whether each request is a step of a sequence."""
        return bool(self.manifest.method(self.method).state)

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's model metadata; `batching`, `dimensions` and `methods` are additions to it.

        `methods` is there if the package has several: by name, what it is served as (null: it is not), why not, and its
        inputs and outputs.
        `sequences` is there if the method has state: what that is, and after how many seconds without a step it goes.
        """
        call = self.call
        batch = self.batching.dimension
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [_metadata(tensor) for tensor in call.inputs],
            "outputs": [_metadata(tensor) for tensor in call.outputs],
            "batching": {
                "enabled": self.batching.enabled,
                "reason": self.batching.reason,
                "dimension": batch.name if batch else None,
                "max_rows": self.batching.max_rows,
                "bit_equal": self.batching.bit_equal,
            },
            "dimensions": {each.name: {"min": each.min, "max": each.max} for each in call.dimensions},
            **({"sequences": self._sequences()} if self.stateful else {}),
            **({"methods": self._methods()} if len(self.manifest.methods) > 1 else {}),
        }

    def _sequences(self) -> dict[str, Any]:
        state = [self.manifest.state[use.index] for use in self.manifest.method(self.method).state]
        return {
            "idle_seconds": self.sequences.idle_seconds,
            "most": self.sequences.most,
            "state": [{"name": each.name, "dtype": each.dtype, "shape": _dims(each)} for each in state],
        }

    def _methods(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in self.manifest.methods:
            names = self.offered.names
            found[each.name] = {"served_as": names.get(each.name), "reason": self.offered.left_out.get(each.name)}
            if each.name in names:
                found[each.name] |= {
                    "inputs": [_metadata(tensor) for tensor in each.call.inputs],
                    "outputs": [_metadata(tensor) for tensor in each.call.outputs],
                    "sequences": bool(each.state),
                }
        return found

    def largest_inputs(self) -> int:
        """Returns the most bytes that the inputs of one request can have: more than any machine holds, perhaps."""
        call = self.call
        sizes = {dimension.name: dimension.max for dimension in call.dimensions}
        if self.batching.dimension is not None:
            sizes[self.batching.dimension.name] = self.batching.max_rows
        return input_bytes(call, sizes)

    def warnings(self) -> Iterator[str]:
        """Yields which limits the model can never meet."""
        limits, batching = self.limits, self.batching
        if limits.max_rows is not None and limits.max_rows > batching.max_rows:
            why = batching.reason or f"a batch has at most {batching.max_rows} rows"
            yield f"--max-batch {limits.max_rows} is never reached by {self.name}: {why}"
        least = input_bytes(self.call, {each.name: each.min for each in self.call.dimensions})
        if least > limits.max_queued_bytes:
            said = f"--max-queue-bytes {limits.max_queued_bytes} refuses every request of {self.name}"
            yield f"{said}, whose inputs have at least {least} bytes"
        most = self.sequences.most_bytes
        least = state_bytes(self.manifest, {name: low for name, (low, _) in state_dimensions(self.manifest).items()})
        if self.stateful and least > most:
            said = f"--max-sequence-bytes {most} refuses every sequence of {self.name}"
            yield f"{said}, whose state has at least {least} bytes"

    def config(self) -> dict[str, Any]:
        """Returns Triton's ModelConfig in JSON."""
        call = self.call
        batched = self.batching.enabled
        config: dict[str, Any] = {
            "name": self.name,
            "platform": PLATFORM,
            "backend": "pytorch",
            "version_policy": {"all": {}},
            "max_batch_size": self.batching.max_rows if batched else 0,
            "input": [
                {"name": tensor.name, "data_type": _type(tensor), "dims": _dims(tensor)[batched:]}
                for tensor in call.inputs
            ],
            "output": [
                {"name": tensor.name, "data_type": _type(tensor), "dims": _dims(tensor)[batched:]}
                for tensor in call.outputs
            ],
            "instance_group": [
                {
                    "name": f"{self.name}_{place}",
                    "kind": "KIND_GPU" if device.startswith("cuda") else "KIND_CPU",
                    "count": self.runners,
                    "gpus": [int(device.partition(":")[2] or 0)] if device.startswith("cuda") else [],
                }
                for place, device in enumerate(self.devices)
            ],
            "default_model_filename": "model.pt2",
            "parameters": {key: {"string_value": value} for key, value in self._parameters().items()},
            "model_transaction_policy": {"decoupled": False},
        }
        if self.stateful:  # each sequence has a slot of its own, and one replica runs all of its steps
            idle = round(self.sequences.idle_seconds * 1e6)
            config["sequence_batching"] = {"max_sequence_idle_microseconds": idle, "direct": {}}
        elif batched:
            config["dynamic_batching"] = {
                "preferred_batch_size": [],
                "max_queue_delay_microseconds": round(self.limits.max_delay * 1e6),
                "preserve_ordering": False,
                "priority_levels": DEFAULT_PRIORITY,
                "default_priority_level": DEFAULT_PRIORITY,
            }
        return config

    def _parameters(self) -> dict[str, str]:
        found = {
            "batching": "enabled" if self.batching.enabled else f"disabled: {self.batching.reason}",
            "bit_equal": str(self.batching.bit_equal).lower(),
            "package": f"{self.manifest.name} {self.manifest.version}",
        }
        if len(self.manifest.methods) > 1:  # gRPC's metadata has no field for them
            found["methods"] = msgspec.json.encode(self._methods()).decode()
        return found | ({"weights": self.weights} if self.weights else {})


def _metadata(tensor: TensorInput | TensorOutput) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": datatype_of(tensor.dtype), "shape": _dims(tensor)}


def _dims(tensor: TensorInput | TensorOutput | StateTensor) -> list[int]:
    """Returns the sizes; -1 for those that vary."""
    return [size if isinstance(size, int) else -1 for size in tensor.shape]


def _type(tensor: TensorInput | TensorOutput) -> str:
    return f"TYPE_{datatype_of(tensor.dtype)}"


@dataclass(frozen=True)
class Batching:
    """Whether requests run together.

    Attributes:
        dimension: The dimension of which each request brings a part; None if each request runs alone.
        max_rows: The most rows of a batch; 1 if each request runs alone, whatever its rows.
        reason: Why each request runs alone; None if they do not.
        bit_equal: Whether answers are the same to the last bit, however requests are put together, as far as the
            recorded cases show. A model without batches always answers the same.
    """

    dimension: Dimension | None
    max_rows: int = 1
    reason: str | None = None
    bit_equal: bool = True

    @classmethod
    def impossible(cls, reason: str) -> Batching:
        """Each request runs alone."""
        return cls(None, reason=reason)

    @property
    def enabled(self) -> bool:
        """Whether requests run together."""
        return self.dimension is not None

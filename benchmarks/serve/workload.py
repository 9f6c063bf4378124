"""One request of a package at chosen sizes, as each engine wants to have it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exportkit.bench.steps import parse_sizes
from exportkit.package.archive import PackageReader
from exportkit.serve.protocol.datatypes import datatype_of
from exportkit.sizes import shape_at


@dataclass(frozen=True)
class Workload:
    """A request's inputs: floating numbers from 0 to 1, zeros for everything else.

    Attributes:
        package: The package.
        model: The name by which `exportkit serve` serves it, and KServe here.
        names, datatypes, shapes: Of each input.
        arrays: The inputs' bytes.
        rows: The rows of a request.
    """

    package: Path
    model: str
    names: Sequence[str]
    datatypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    arrays: Sequence[bytes]
    rows: int

    @property
    def size(self) -> int:
        """The bytes of all inputs."""
        return sum(map(len, self.arrays))

    def infer_request(self, **parameters: object) -> bytes:
        """An HTTP request of the Open Inference Protocol, with binary tensors in both directions."""
        inputs = [
            {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            for name, datatype, shape, data in zip(self.names, self.datatypes, self.shapes, self.arrays)
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}).encode()
        fields = {"Inference-Header-Content-Length": len(head)}
        return http_post(f"/v2/models/{self.model}/infer", head + b"".join(self.arrays), fields)

    def shared_request(self, region: str) -> bytes:
        """The same request, whose inputs lie one after the other in a region of shared memory that the server knows."""
        inputs, offset = [], 0
        for name, datatype, shape, data in zip(self.names, self.datatypes, self.shapes, self.arrays):
            place = {"region": region, "offset": offset, "byte_size": len(data)}
            parameters = {f"shared_memory_{key}": value for key, value in place.items()}
            inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": parameters})
            offset += len(data)
        body = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        return http_post(f"/v2/models/{self.model}/infer", body, {})

    def plain_request(self, path: str) -> bytes:
        """An HTTP request whose body is the inputs' bytes, for engines that have no protocol for tensors."""
        return http_post(path, b"".join(self.arrays), {})


def http_post(path: str, body: bytes, fields: Mapping[str, object]) -> bytes:
    """Returns a whole HTTP request."""
    fields = {"Host": "localhost", "Content-Type": "application/octet-stream", "Content-Length": len(body), **fields}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def workload(package: Path, sizes: str, seed: int = 0) -> Workload:
    """Draws a request. `sizes` gives each dimension, as `batch=1,gh=32,gw=32`."""
    with PackageReader(package) as reader:
        name, call = reader.manifest.name, reader.manifest.call
    random = np.random.default_rng(seed)
    chosen = parse_sizes(sizes, call)
    shapes = [shape_at(tensor, chosen) for tensor in call.inputs]
    arrays = []
    for tensor, shape in zip(call.inputs, shapes):
        if tensor.dtype in ("float16", "float32", "float64"):
            arrays.append(random.random(shape, dtype=np.float32).astype(tensor.dtype).tobytes())
        elif tensor.dtype == "bfloat16":  # the upper half of float32
            arrays.append((random.random(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
        else:
            arrays.append(bytes(math.prod(shape) * np.dtype(tensor.dtype).itemsize))
    return Workload(
        package=package,
        model=name,
        names=[tensor.name for tensor in call.inputs],
        datatypes=[datatype_of(tensor.dtype) for tensor in call.inputs],
        shapes=shapes,
        arrays=arrays,
        rows=shapes[0][0],
    )

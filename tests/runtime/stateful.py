"""A small model with state, compiled and described by hand: what the runtime must do with sessions.

It keeps the last rows that it was given, and counts them. The exporter has no part in it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

ROWS = 6  # that it can keep; the compiled code refuses one more
WIDTH = 4
GAIN = torch.tensor([1.0, -0.5, 2.0, 0.25])  # the initial value of a state


class Recorder(torch.nn.Module):
    """The eager model: the oracle of these tests. Its buffers are those of one session."""

    def __init__(self, batch: int = 2) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(batch, ROWS, WIDTH))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", GAIN.expand(batch, WIDTH).clone())

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return Push().forward(x, self.cache, self.position, self.gain)

    def peek(self, scale: torch.Tensor) -> torch.Tensor:
        return Peek().forward(scale, self.cache)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return Embed().forward(x)

    def fill(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return Fill().forward(x, out)


class Push(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        gain.mul_(1.125)
        torch._check(position.item() < ROWS)  # compiled code has this check, and raises
        cache.index_put_((torch.arange(x.shape[0]), position.expand(x.shape[0])), x)
        position.add_(1)
        return (cache.sum(1) * gain).sin()


class Peek(torch.nn.Module):
    def forward(self, scale: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return cache.mean(1) * scale


class Embed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2


class Fill(torch.nn.Module):
    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.mul_(2).add_(x)
        return out.sum(1)


METHODS: dict[str, tuple[type[torch.nn.Module], dict[str, tuple[Any, ...]], tuple[int, ...], tuple[bool, ...]]] = {
    "push": (Push, {"x": (tiny.BATCH, WIDTH)}, (0, 1, 2), (True, True, True)),
    "peek": (Peek, {"scale": (tiny.BATCH, 1)}, (0,), (False,)),
    "embed": (Embed, {"x": (tiny.BATCH, WIDTH)}, (), ()),
    "fill": (Fill, {"x": (tiny.BATCH, WIDTH), "out": (tiny.BATCH, WIDTH)}, (), ()),
}


def _call(inputs: dict[str, tuple[Any, ...]], method: str) -> m.Call:
    last = (tiny.BATCH,) if method == "fill" else (tiny.BATCH, WIDTH)
    described = {name: ("float32", shape) for name, shape in inputs.items()}
    return tiny.tensors_call(described, ("float32", last), tolerance=tiny.NEAR, written=("out",), batch=(1, 8))


def state() -> tuple[tuple[m.StateTensor, ...], dict[str, bytes]]:
    """The manifest's state, and the records of its initial values."""
    content = GAIN.numpy().tobytes()
    record = f"exportkit/state/{hashlib.sha256(content).hexdigest()}"
    shapes = {"cache": (tiny.BATCH, ROWS, WIDTH), "position": (), "gain": (tiny.BATCH, WIDTH)}
    described = tuple(
        m.StateTensor(
            name=name,
            aliases=("counter",) if name == "position" else (),
            dtype="int64" if name == "position" else "float32",
            shape=shape,
            initial=record if name == "gain" else None,
            tolerance=tiny.NEAR if name != "position" else tiny.EXACT,
        )
        for name, shape in shapes.items()
    )
    return described, {record: content}


def write(path: Path, *, extra: Mapping[str, bytes] | None = None, **changes: Any) -> Path:
    """Writes the package, with further records."""
    batch = torch.export.Dim("batch", min=1, max=8)
    eager = Recorder(3)
    records: dict[str, bytes | Path] = {}
    for name, (kind, inputs, used, _) in METHODS.items():
        args = [torch.rand([3 if isinstance(size, m.Size) else size for size in shape]) for shape in inputs.values()]
        args += [list(eager.buffers())[index].clone() for index in used]
        shapes = {
            key: {0: batch} if value.dim() > 1 else None for key, value in zip(_parameters(kind), args, strict=True)
        }
        for file, source in tiny.compiled(kind(), tuple(args), shapes).items():
            records[f"data/aotinductor/{m.code_folder('cpu', name)}/{file}"] = source
    described, initial = state()
    methods = tuple(
        m.PackagedMethod(
            name=name,
            call=_call(inputs, name),
            state=tuple(m.StateUse(index=index, written=wrote) for index, wrote in zip(used, written)),
        )
        for name, (_, inputs, used, written) in METHODS.items()
    )
    target = tiny.target(constants={name: {} for name in METHODS})
    return tiny.write(
        path,
        {},
        extra={**records, **initial, **(extra or {})},
        **{"targets": (target,), "methods": methods, "state": described, "name": "recorder", **changes},
    )


def _parameters(kind: type[torch.nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


def bits(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The bytes of a state, by name."""
    return {name: tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}

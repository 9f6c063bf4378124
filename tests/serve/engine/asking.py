"""What the engine's tests share: requests from tensors, tensors from answers, and a repository that serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.checked_request import bytes_of
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.datatypes import DATATYPES
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InputTensor
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import LoadOptions, ServeOptions

GATHERING = BatchLimits(max_delay=0.2)  # requests that come at the same time run together, however fast a runner is
_DTYPES = {datatype: getattr(torch, dtype) for dtype, datatype in DATATYPES.items()}


def given(name: str, tensor: torch.Tensor) -> InputTensor:
    datatype = DATATYPES[str(tensor.dtype).removeprefix("torch.")]
    return InputTensor(name, datatype, tuple(tensor.shape), bytes_of(tensor.contiguous()))


def request(inputs: Mapping[str, torch.Tensor], **options: Any) -> InferRequest:
    return InferRequest(tuple(given(name, tensor) for name, tensor in inputs.items()), **options)


def tensors(answer: InferAnswer) -> dict[str, torch.Tensor]:
    found = {}
    for output in answer.outputs:
        content = torch.frombuffer(bytearray(output.data), dtype=torch.uint8) if output.data else torch.empty(0)
        found[output.name] = content.view(_DTYPES[output.datatype]).view(output.shape)
    return found


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@asynccontextmanager
async def serving(
    *packages: Path,
    repository: Path | None = None,
    batch: BatchLimits | None = None,
    sequences: SequenceLimits | None = None,
    adapters: Path | None = None,
    report: Callable[[str], object] = lambda line: None,
    **load: Any,
) -> AsyncIterator[Repository]:
    """A repository that is open, and drained at the end; that waits for no sequence unless `sequences` says so."""
    sequences = sequences or SequenceLimits(finish_seconds=0)
    options = ServeOptions(packages, repository, LoadOptions(**load), batch or BatchLimits(), sequences, adapters)
    served = Repository(options, report)
    await served.open()
    try:
        yield served
    finally:
        await served.drain()


def only(repository: Repository) -> ServedModel:
    (model,) = repository.models()
    return model


@asynccontextmanager
async def serving_model(package: Path, **options: Any) -> AsyncIterator[ServedModel]:
    """The only model of a package that is served."""
    async with serving(package, **options) as repository:
        yield only(repository)


async def until(condition: Callable[[], object]) -> None:
    """Returns when a condition holds."""
    while not condition():
        await asyncio.sleep(0.002)


def play(package: Path, scenario: Callable[[Any], Any], **options: Any) -> None:
    """Runs a scenario with the model that a repository serves on the CPU, for two minutes at most."""

    async def run() -> None:
        async with serving_model(package, devices=("cpu",), **options) as model:
            await scenario(model)

    asyncio.run(asyncio.wait_for(run(), 120))

"""Inputs of several requests are put together to the byte, on the CPU and through pinned memory on CUDA."""

from __future__ import annotations

import asyncio

import pytest
import torch

import exportkit
from exportkit.serve.engine.transfer import HostTransfer, transfer_to
from exportkit.serve.protocol.datatypes import DATATYPES
from tests.artifacts import artifact
from tests.serve.engine.asking import only, request, serving, tensors


def drawn(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 100, (*shape, kind.itemsize), dtype=torch.uint8).view(kind).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


@pytest.mark.parametrize("dtype", DATATYPES)
def test_rows_of_every_dtype_are_put_together(device, dtype):
    transfer = transfer_to(device)
    with transfer.on_stream():
        for sizes in ((2, 1, 3), (1, 1), (40,), (0, 2)):  # the pinned memory grows, and is used again
            parts = [[drawn(dtype, size, 3, 2), drawn(dtype, size)] for size in sizes]
            joined = transfer.join(parts)
            assert all(tensor.device.type == device.type for tensor in joined)
            transfer.finish()
            back = transfer.back(joined)
            assert same(back[0], torch.cat([part[0].view(torch.uint8) for part in parts]).view(back[0].dtype))
            assert [tuple(tensor.shape) for tensor in back] == [(sum(sizes), 3, 2), (sum(sizes),)]


def test_scalars_and_empty_tensors_go_and_come(device):
    transfer = transfer_to(device)
    with transfer.on_stream():
        inputs = [torch.tensor(3.5), torch.zeros(2, 0), torch.zeros(0, dtype=torch.int64)]
        assert all(map(torch.equal, transfer.back(transfer.join([inputs])), inputs))


def test_a_request_that_runs_alone_is_not_copied():
    inputs = [torch.rand(2, 3)]
    assert HostTransfer().join([inputs])[0] is inputs[0]
    assert HostTransfer().back(inputs)[0] is inputs[0]
    turned = torch.rand(3, 2).t()
    assert HostTransfer().back([turned])[0].is_contiguous()


@pytest.mark.parametrize(("asked", "runners"), [(None, 1), (2, 2)])
def test_a_cpu_runs_one_batch_at_a_time_unless_more_are_asked_for(rows_package, asked, runners):
    async def ask():
        async with serving(rows_package, devices=("cpu",), runners=asked) as repository:
            return only(repository).counted.runners

    assert asyncio.run(ask()) == runners


@pytest.mark.cuda
def test_runners_on_cuda_answer_as_direct_calls_do():
    package = artifact("weighted-cuda")
    inputs = [torch.randn(1 + count % 3, 16) for count in range(100)]

    async def ask():
        async with serving(package, devices=("cuda",)) as repository:
            model = only(repository)
            assert model.counted.runners == 2
            answers = await asyncio.gather(*(model.infer(request({"x": each})) for each in inputs))
            return answers, model.counted.executions, model.config()["instance_group"][0]["kind"]

    answers, executions, kind = asyncio.run(ask())
    assert (executions < 100, kind) == (True, "KIND_GPU")
    with exportkit.load(package, device="cuda") as direct:
        for each, answer in zip(inputs, answers):
            (output,) = tensors(answer).values()
            torch.testing.assert_close(output, direct(each.cuda()).cpu())

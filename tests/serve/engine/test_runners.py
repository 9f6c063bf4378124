"""Inputs of several requests are put together to the byte, on the CPU and on CUDA, with and without the C++ runtime."""

from __future__ import annotations

import asyncio

import pytest
import torch

import exportkit
from exportkit.runtime.native import use_native
from exportkit.serve.engine.transfer import HostTransfer, transfer_to
from exportkit.serve.protocol.datatypes import DATATYPES
from tests.artifacts import artifact
from tests.runtime import exportkit_run
from tests.serve.engine.asking import only, request, serving, tensors


def drawn(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 100, (*shape, kind.itemsize), dtype=torch.uint8).view(kind).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


@pytest.mark.parametrize("dtype", DATATYPES)
@pytest.mark.parametrize("runtime", ["auto", "python"])
def test_rows_of_every_dtype_are_put_together(device, dtype, runtime, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    transfer = transfer_to(device)
    with transfer.on_stream():
        for sizes in ((2, 1, 3), (1, 1), (40,), (0, 2)):
            parts = [[drawn(dtype, size, 3, 2), drawn(dtype, size)] for size in sizes]
            joined = transfer.join(parts)
            assert all(tensor.device.type == device.type for tensor in joined)
            transfer.finish()
            back = transfer.back(joined)
            assert same(back[0], torch.cat([part[0].view(torch.uint8) for part in parts]).view(back[0].dtype))
            assert [tuple(tensor.shape) for tensor in back] == [(sum(sizes), 3, 2), (sum(sizes),)]


@pytest.mark.parametrize("runtime", ["auto", "python"])
def test_scalars_and_empty_tensors_go_and_come(device, runtime, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
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


@pytest.fixture
def native():
    exportkit_run.require_built()
    assert use_native()
    return torch.ops.exportkit


@pytest.mark.parametrize("dtype", DATATYPES)
def test_the_cpp_runtime_puts_requests_together(native, dtype):
    for sizes in ((2, 1, 3), (1,), (0, 2), (0,)):
        parts = [[drawn(dtype, size, 3, 2), drawn(dtype, size)] for size in sizes]
        joined = native.join([tensor for part in parts for tensor in part], len(sizes), torch.device("cpu"))
        expected = HostTransfer().join(parts)
        assert all(map(same, joined, expected))
        assert all(map(same, native.fetch(joined), expected))


def test_the_cpp_runtime_refuses_what_does_not_fit_together(native):
    one, cpu = torch.zeros(2, 3), torch.device("cpu")
    for other in (torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2).t()):
        with pytest.raises(RuntimeError, match=r"fit together|not contiguous"):
            native.join([one, other], 2, cpu)
    for given, requests in (([one], 0), ([one], -1), ([one, one, one], 2), ([torch.tensor(1.0)] * 2, 2)):
        with pytest.raises(RuntimeError, match=r"of -?\d requests|fit together"):
            native.join(given, requests, cpu)
    turned = torch.rand(3, 2).t()
    assert native.fetch([turned])[0].is_contiguous()
    assert torch.equal(native.fetch([turned])[0], turned)


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

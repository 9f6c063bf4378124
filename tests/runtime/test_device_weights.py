"""Weights are on a device once: one piece of memory, which is lent to the code and given back."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.package.manifest import Target
from exportkit.runtime.weights import borrowed, copied_together, on_device

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6))
def test_copies_lie_together_with_dtypes_strides_and_bits(described: list[tuple[torch.dtype, list[int], bool]]) -> None:
    weights = {}
    for number, (dtype, shape, turned) in enumerate(described):
        tensor = torch.randint(-3, 9, shape).to(dtype)
        weights[str(number)] = tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor
    copies = copied_together(weights, CPU)
    assert list(copies) == list(weights)
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) <= 1
    end = 0
    for name, copy in copies.items():
        source = weights[name]
        assert (copy.dtype, copy.shape, copy.stride()) == (source.dtype, source.shape, source.stride())
        assert content(copy) == content(source)
        begin = copy.storage_offset() * copy.itemsize
        assert begin % 512 == 0
        assert begin >= end
        end = begin + copy.nbytes


def test_a_borrowed_tensor_does_not_keep_memory_alive() -> None:
    tensor = torch.randn(4, 6).t()
    lent, memory = borrowed(tensor), weakref.ref(tensor)
    assert torch.equal(lent, tensor)
    assert (lent.stride(), lent.data_ptr()) == (tensor.stride(), tensor.data_ptr())
    del tensor
    gc.collect()
    assert memory() is None


def test_the_cpu_reads_the_weights_where_they_are() -> None:
    weights = {name: torch.randn(3) for name in ("used", "shared", "other")}
    constants = {"one": {"a": "used", "b": "shared"}, "two": {"c": "shared"}}
    target = Target("cpu", "cpu", "linux-x86_64", "x86-64-v3", None, False, "2.11", "2.13.0", None, constants)
    chosen = on_device(target, weights, CPU)
    assert chosen.keys() == {"used", "shared"}
    assert all(chosen[name] is weights[name] for name in chosen)

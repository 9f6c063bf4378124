"""The operators of examples/paged_cache keep the contract, and refuse what is not in the cache."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.operator_trial import Subject
from tests.operators.scaffold.scaffolded import check_needs, compiled_for_cuda

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def calls(on_path: Path) -> ModuleType:
    """tests/examples/paged_calls.py, which imports the operators."""
    return importlib.import_module("tests.examples.paged_calls")


@pytest.mark.parametrize("name", ["WRITE", "READ"])
def test_an_operator_keeps_the_contract(name: str, calls: ModuleType, device: torch.device) -> None:
    # "batch" takes a vector for a weight; context_lens is a vector of the batch. The next test is in its place.
    report = check_operator(Subject.of_spec(getattr(calls, name), [device]), [c for c in checks() if c != "batch"])
    assert report.findings == ()
    assert {"reference", "mutation", "strides", "refusals", "exports", "compiles"} <= {*report.passed}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_beside_any_others(
    calls: ModuleType, device: torch.device, dtype: torch.dtype
) -> None:
    q, kc, vc, tables, lengths, scale = calls.read_call([300, 9, 41, 600], 16, 8, 2, 64, device=device, dtype=dtype)
    together = calls.paged_attention(q, kc, vc, tables, lengths, scale)
    for at in range(4):
        alone = calls.paged_attention(q[at : at + 1], kc, vc, tables[at : at + 1], lengths[at : at + 1], scale)
        assert torch.equal(alone[0], together[at])


def test_what_is_beyond_a_context_is_not_read(calls: ModuleType, device: torch.device) -> None:
    q, kc, vc, tables, lengths, scale = calls.read_call([5, 8], 4, 4, 2, 8, columns=3, device=device)
    expected = calls.paged_attention(q, kc, vc, tables, lengths, scale)
    for cache in (kc, vc):
        cache[tables[0, 1], 1:] = torch.nan  # of sequence 0, tokens 5 and on
    tables[0, 2], tables[1, 2] = -7, 1 << 40
    assert torch.equal(calls.paged_attention(q, kc, vc, tables, lengths, scale), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_is_read(calls: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    """Tokens in the order of a sequence, in scattered blocks, against torch's attention."""
    tokens, size, width = 37, 8, 64
    k, v, kc, vc, _ = calls.write_call(tokens, 6, size, 2, width, device=device, dtype=dtype)
    table = torch.randperm(6, device=device)[None]
    at = torch.arange(tokens, device=device)
    calls.reshape_and_cache(k, v, kc, vc, table[0, at // size] * size + at % size)
    q = torch.randn(1, 4, width, device=device, dtype=dtype)
    actual = calls.paged_attention(q, kc, vc, table, torch.tensor([tokens], device=device), 0.125)
    heads = [rows.repeat_interleave(2, 1).transpose(0, 1).float() for rows in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q[0, :, None].float(), *heads, scale=0.125)
    torch.testing.assert_close(actual[0], expected[:, 0].to(dtype), rtol=1.6e-2, atol=8e-3)


def test_a_slot_beyond_the_cache_is_refused_and_nothing_is_written(calls: ModuleType) -> None:
    k, v, kc, vc, slots = calls.write_call(4, 3, 5, 2, 8)
    slots[3] = 15
    before = kc.clone(), vc.clone()
    with pytest.raises(RuntimeError, match=r"slots\[3\] is 15, but the caches have 15 slots; a negative one leaves"):
        calls.reshape_and_cache(k, v, kc, vc, slots)
    assert torch.equal(kc, before[0])
    assert torch.equal(vc, before[1])


@pytest.mark.parametrize(
    ("tensor", "place", "value", "message"),
    [
        (3, (1, 2), 6, r"block_tables\[1, 2\] is 6, but the caches have 6 blocks"),
        (3, (0, 0), -1, r"block_tables\[0, 0\] is -1, but the caches have 6 blocks"),
        (4, (0,), 10, r"context_lens\[0\] is 10, but its row of block_tables has room for 9"),
        (4, (1,), -1, r"context_lens\[1\] is -1; it must be >= 0"),
    ],
)
def test_blocks_and_lengths_that_cannot_be_are_refused(calls, tensor, place, value, message) -> None:
    args = calls.read_call([5, 9], 3, 4, 2, 8)
    args[tensor][place] = value
    with pytest.raises(RuntimeError, match=message):
        calls.paged_attention(*args)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [8, 5])
def test_on_a_gpu_a_slot_beyond_the_cache_leaves_its_token_out(calls: ModuleType, width: int) -> None:
    """In the middle of larger memory, of which nothing else changes."""
    k, v, kc, vc, slots = calls.write_call(4, 3, 5, 2, width, device="cuda")
    memory = torch.full((5, *kc.shape), 7.0, device="cuda")
    kc, vc = memory[1].copy_(kc), memory[3].copy_(vc)
    expected = memory.clone()
    slots[1], slots[2] = 15, 1 << 40
    calls.reshape_and_cache_reference(k[[0, 3]], v[[0, 3]], expected[1], expected[3], slots[[0, 3]])
    calls.reshape_and_cache(k, v, kc, vc, slots)
    assert torch.equal(memory, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [[5, 9, 4], [400, 600, 300]])
@pytest.mark.parametrize(("tensor", "value"), [(3, 1 << 40), (3, -1), (4, 1 << 40), (4, -1)])
def test_on_a_gpu_a_sequence_gets_nan_for_what_cannot_be(calls, lengths, tensor: int, value: int) -> None:
    args = calls.read_call(lengths, 3, 4, 2, 8, device="cuda")
    expected = calls.paged_attention(*args)
    args[tensor][(1, 0) if tensor == 3 else 1] = value
    answer = calls.paged_attention(*args)
    assert answer[1].isnan().all()
    assert torch.equal(answer[[0, 2]], expected[[0, 2]])


def test_the_libraries_need_the_stable_abi_of_torch_2_11_and_no_python(on_path: Path) -> None:
    libraries = sorted((on_path / "paged_cache").glob("*.so"))
    assert libraries
    for path in libraries:
        check_needs(path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_compile(on_path: Path) -> None:
    assert compiled_for_cuda(on_path).stat().st_size > 0

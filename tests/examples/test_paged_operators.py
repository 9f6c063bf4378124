"""The operators of examples/paged_cache keep the contract, and refuse what is not in the cache."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.operator_trial import Subject
from exportkit.package import elf
from tests.artifacts import ROOT
from tests.examples.paged_package import compiled_for_cuda

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BAD_CALLS = {
    "a slot": "args = write_call(4, 3, 5, 2, 8, device='cuda'); args[4][1] = 15; reshape_and_cache(*args)",
    "a block": "args = read_call([5, 9], 3, 4, 2, 8, device='cuda'); args[3][1, 2] = 6; paged_attention(*args)",
    "a length": "args = read_call([5, 9], 3, 4, 2, 8, device='cuda'); args[4][0] = 10; paged_attention(*args)",
}


@pytest.fixture
def calls(on_path: Path) -> ModuleType:
    """tests/examples/paged_calls.py, which imports the operators."""
    return importlib.import_module("tests.examples.paged_calls")


@pytest.mark.parametrize("name", ["WRITE", "READ"])
def test_an_operator_keeps_the_contract(name: str, calls: ModuleType, device: torch.device) -> None:
    # "batch" takes a vector for a weight; context_lens is a vector of the batch. The next test is in its place.
    report = check_operator(Subject.of_spec(getattr(calls, name), [device]), [c for c in checks() if c != "batch"])
    assert report.findings == ()
    assert {"reference", "fake-symbolic", "mutation", "strides", "refusals", "exports", "compiles"} <= {*report.passed}


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
@pytest.mark.parametrize("what", BAD_CALLS)
def test_what_is_not_in_the_cache_ends_the_work_of_a_gpu(what: str, on_path: Path) -> None:
    """By an assertion in the kernel, after which the process cannot use the GPU: as torch's own indexing."""
    code = f"import torch; from tests.examples.paged_calls import *; {BAD_CALLS[what]}; torch.cuda.synchronize()"
    paths = f"import sys; sys.path[:0] = [{str(on_path)!r}, {str(ROOT)!r}]; "
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "device-side assert" in done.stderr
    assert "Assertion `" in done.stderr


def test_the_libraries_need_the_stable_abi_of_torch_2_11_and_no_python(on_path: Path) -> None:
    libraries = sorted((on_path / "paged_cache").glob("*.so"))
    assert libraries
    for path in libraries:
        library = elf.read_elf(path)
        assert library.registers_operators
        assert elf.is_stable(library.undefined)
        assert library.torch_symbols <= elf.stable_abi()
        assert not [name for name in library.undefined if name.startswith(("Py", "_Py"))]


def test_it_compiles_without_a_warning(on_path: Path) -> None:
    log = (on_path / "first.log").read_text()
    assert "reshape_and_cache.cpp" in log
    assert "-Wall -Wextra" in log
    assert "warning" not in log


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_compile(on_path: Path) -> None:
    assert compiled_for_cuda(on_path).stat().st_size > 0

"""Many weights go to a GPU through pinned memory; every bit arrives, or the driver's own way is taken."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from exportkit.package.archive import PackageReader
from exportkit.runtime.native import use_native
from tests.cpp_reader import CppReader, program
from tests.package import samples
from tests.runtime.runtime_parts import RUNTIME, build
from tests.runtime.test_mapped_weights import package_of
from tests.subprocesses import run_python

WORTH_STAGING = 64 << 20  # of csrc/runtime/staged_copies.h


@pytest.mark.slow
def test_random_weights_arrive_or_the_drivers_refusal_is_told(tmp_path: Path) -> None:
    """Over a driver whose copies are as late as they may be (staged_copies.cpp)."""
    sources = [Path(__file__).with_name("staged_copies.cpp"), RUNTIME / "staged_copies.cpp"]
    built = build(tmp_path / "staged_copies", *sources)
    ran = subprocess.run([built, "0", "3000"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def odd_weights(least: int) -> list[torch.Tensor]:
    """Dense weights with at least so many bytes: of several dtypes, empty, turned, and from the middle of others."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 256, (least + 12_345,), dtype=torch.uint8, generator=generator)
    some = large[: 7 * 6 * 5 * 8].view(torch.float64).view(7, 6, 5)
    return [
        *(some.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        some.view(torch.complex64).permute(2, 0, 1),
        large[1:2],
        torch.empty(0, 3, dtype=torch.int64),
        large[3:],  # at an odd address
        some.permute(1, 2, 0),
        torch.tensor(True),
        torch.empty(3, 0, dtype=torch.float8_e4m3fn),
    ]


def check_copied(weights: list[torch.Tensor], device: torch.device) -> None:
    assert use_native()
    copies = torch.ops.exportkit.copied_together(weights, device)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    for weight, copy in zip(weights, copies, strict=True):
        assert (copy.dtype, copy.shape, copy.stride()) == (weight.dtype, weight.shape, weight.stride())
        assert copy.storage_offset() * copy.itemsize % 512 == 0
        flat = [torch.as_strided(each, (each.numel(),), (1,)).view(torch.uint8) for each in (weight, copy.cpu())]
        assert torch.equal(*flat)


@pytest.mark.parametrize("least", [0, WORTH_STAGING])
def test_odd_weights_are_copied_bit_by_bit(device: torch.device, least: int) -> None:
    check_copied(odd_weights(least), device)


@pytest.mark.cuda
def test_copies_wait_for_what_the_stream_still_does_with_the_memory() -> None:
    weights = [torch.randint(0, 256, (WORTH_STAGING,), dtype=torch.uint8)]
    for _ in range(3):
        before = torch.empty(WORTH_STAGING, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(100_000_000)  # cycles
        before.fill_(1)
        del before  # torch gives the next one this memory at once
        check_copied(weights, torch.device("cuda"))


# Reads nothing through the mapping, whose pages would count as this process's memory. CUDA's own mappings may grow.
FROM_A_FILE = """
import sys, torch
from exportkit.package.archive import PackageReader
from exportkit.runtime.native import use_native
from exportkit.runtime.weights import mapped_weights
def resident():
    kib = 0
    for line in open("/proc/self/smaps"):
        first, *others = line.split()
        if not first.endswith(":"):
            of_package = others[-1] == sys.argv[1]
        elif first == "Rss:" and of_package:
            kib += int(others[0])
    return kib
assert use_native()
with PackageReader(sys.argv[1]) as reader:
    weights = mapped_weights(reader)
[copy] = torch.ops.exportkit.copied_together([weights["a"]], torch.device("cuda"))
assert resident() < 1024, resident()
assert torch.equal(copy.cpu(), weights["a"])
assert resident() > 32768, "the mapping's pages are not seen"
"""


def package_with(path: Path, size: int) -> Path:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    return package_of(path, {"a": (samples.weight(dtype="uint8", shape=(size,), strides=(1,)), content)})


@pytest.mark.cuda
def test_mapped_weights_are_read_from_their_file(tmp_path: Path) -> None:
    run_python(FROM_A_FILE, package_with(tmp_path / "x.pt2", WORTH_STAGING + 1), cwd=tmp_path)


def test_a_file_that_is_cut_short_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    path = package_with(tmp_path / "x.pt2", 100_000)
    with PackageReader(path) as reader:
        [record] = [weight.record for weight in reader.manifest.weights]
        assert record is not None
        digest = reader.record(record).sha256
    cpp = CppReader(program())
    assert cpp.ask("weights", path) == {"ok": True, "value": {record: digest}}
    answer = cpp.ask("weights", path, 50_000)
    cpp.close()
    assert answer["error"] == "DigestMismatchError"
    assert "became shorter while its weights were loaded" in answer["message"]

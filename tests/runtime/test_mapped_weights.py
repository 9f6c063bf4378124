"""From the manifest to tensors in the package's own pages, and from there to a GPU."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.consistency import WEIGHTS_DIR
from exportkit.package.dtypes import DTYPES, ITEM_BYTES
from exportkit.package.manifest import Weight
from exportkit.runtime.native import use_native
from exportkit.runtime.weights import borrowed, mapped_weights
from tests.artifacts import artifact
from tests.cpp_reader import CppReader, program
from tests.package import samples
from tests.runtime.runtime_parts import RUNTIME, build
from tests.subprocesses import run_python


def package_of(path: Path, weights: Mapping[str, tuple[Weight, bytes]]) -> Path:
    """A package whose code takes nothing, with these weights."""
    records: dict[str, Any] = {name: content for name, content in samples.RECORDS.items() if name != samples.WEIGHT}
    listed = []
    for name, (weight, content) in weights.items():
        record = f"{WEIGHTS_DIR}/{hashlib.sha256(content).hexdigest()}"
        records[record] = content
        listed.append(msgspec.structs.replace(weight, name=name, aliases=(), record=record))
    target = samples.target(constants={"forward": {}})
    write_package(path, samples.manifest(targets=(target,), weights=tuple(listed)), records)
    return path


@st.composite
def dense(draw: st.DrawFn) -> tuple[Weight, bytes]:
    """A weight of any dtype and shape, its dimensions in memory in any order, and its content."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides, step = [0] * len(shape), 1
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    weight = samples.weight(dtype=dtype, shape=tuple(shape), strides=tuple(strides))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return weight, draw(st.binary(min_size=size, max_size=size))


@given(st.dictionaries(st.sampled_from("abcd"), dense(), min_size=1))
def test_every_tensor_has_the_bytes_the_manifest_gives_it(weights: dict[str, tuple[Weight, bytes]]) -> None:
    path = Path(os.environ["EXPORTKIT_CACHE"] + ".pt2")
    with PackageReader(package_of(path, weights)) as reader:
        mapped = mapped_weights(reader)
    assert mapped.keys() == weights.keys()
    for name, (weight, content) in weights.items():
        for tensor in (mapped[name], borrowed(mapped[name])):
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{weight.dtype}", weight.shape)
            assert 0 in weight.shape or tensor.stride() == weight.strides
            # An oracle of its own: element by element, by address.
            for index in itertools.product(*map(range, weight.shape)):
                place = sum(i * stride for i, stride in zip(index, weight.strides)) * tensor.element_size()
                element = tensor[index].reshape(1).view(torch.uint8)
                assert bytes(element.tolist()) == content[place : place + tensor.element_size()]


def test_weights_of_equal_content_share_their_place(tmp_path: Path) -> None:
    one, content = samples.weight(), bytes(24)
    with PackageReader(package_of(tmp_path / "x.pt2", {"a": (one, content), "b": (one, content)})) as reader:
        mapped = mapped_weights(reader)
    assert mapped["a"].data_ptr() == mapped["b"].data_ptr()
    assert mapped["a"].data_ptr() % 64 == 0


def mappings(path: Path) -> list[str]:
    """How this process has a file mapped: the permissions of each mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(path))]


def test_the_mapping_cannot_be_written_to_and_goes_with_the_last_tensor(tmp_path: Path) -> None:
    with PackageReader(package_of(tmp_path / "x.pt2", {"a": (samples.weight(), bytes(24))})) as reader:
        mapped = mapped_weights(reader)
    assert [permissions[:3] for permissions in mappings(tmp_path / "x.pt2")] == ["r--"]
    kept = mapped.pop("a")[1]
    gc.collect()
    assert len(mappings(tmp_path / "x.pt2")) == 1
    assert kept.tolist() == [0, 0, 0]
    del kept
    assert mappings(tmp_path / "x.pt2") == []


def test_a_package_that_gets_another_file_in_its_place_keeps_its_weights(tmp_path: Path) -> None:
    one = (samples.weight(dtype="uint8", shape=(3,), strides=(1,)), b"\1\2\3")
    other = (one[0], b"\4\5\6")
    with PackageReader(package_of(tmp_path / "x.pt2", {"a": one})) as reader:
        mapped = mapped_weights(reader)
        package_of(tmp_path / "x.pt2", {"a": other})
    assert mapped["a"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("runtime", ["cpp", "python"])
def test_a_closed_model_leaves_nothing_mapped(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    path = artifact("weighted")
    for _ in range(3):
        with exportkit.load(path) as model:
            assert len(mappings(path)) == 1
            model(torch.randn(2, 16))
        del model
        gc.collect()
        assert mappings(path) == []


# The first load hashes the file through its descriptor, which takes no memory of the process; the second does not.
MEMORY = """
import sys, exportkit, torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
index = torch.tensor([0, 5, 2**19 - 1])
exportkit.load(sys.argv[2])(torch.randn(2, 16))  # torch's own start
before = resident()
model = exportkit.load(sys.argv[1])
answer = model(index)
grown = resident() - before
assert answer.tolist() == [sum(range(64 * i, 64 * i + 64)) for i in (0, 5)] + [answer[2].item()], answer
assert grown < 2**24, grown
mapped = [line for line in open("/proc/self/maps") if line.rstrip().endswith(sys.argv[1])]
assert len(mapped) == 1
"""


def test_loading_128_mib_of_weights_neither_copies_nor_reads_them(tmp_path: Path) -> None:
    for _ in range(2):
        run_python(MEMORY, artifact("table"), artifact("weighted"), cwd=tmp_path)


# --- to a GPU, through pinned memory: every bit arrives, or the driver's own way is taken -----------------------------

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

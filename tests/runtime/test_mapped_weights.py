"""From the manifest to tensors in the package's own pages."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.consistency import WEIGHTS_DIR
from exportkit.package.dtypes import DTYPES, ITEM_BYTES
from exportkit.package.manifest import Weight
from exportkit.runtime.weights import borrowed, mapped_weights
from tests.artifacts import artifact
from tests.package import samples
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


def test_a_borrowed_tensor_does_not_keep_memory_alive() -> None:
    tensor = torch.randn(4, 6).t()
    lent, memory = borrowed(tensor), weakref.ref(tensor)
    assert torch.equal(lent, tensor)
    assert (lent.stride(), lent.data_ptr()) == (tensor.stride(), tensor.data_ptr())
    del tensor
    gc.collect()
    assert memory() is None


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


def test_a_closed_model_leaves_nothing_mapped() -> None:
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

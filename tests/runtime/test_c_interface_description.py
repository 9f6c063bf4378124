"""exportkit.h, what a package is: its methods, sizes, state and cases, bytes and threads."""

from __future__ import annotations

import ctypes as c
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import exportkit
from exportkit.package import manifest as m
from tests.artifacts import artifact
from tests.runtime import c_interface, c_structures, tiny
from tests.runtime.c_interface import Refused, view

USAGE = 200


def listed(elements: Any, count: int) -> list[Any]:
    return [elements[place].contents for place in range(count)]


def described(tensor: c_structures.TensorInfo) -> tuple[object, ...]:
    sizes = listed(tensor.shape, tensor.ndim)
    dtype = {(2, 32): b"float32", (0, 64): b"int64"}[tensor.dl_dtype.code, tensor.dl_dtype.bits]
    assert (tensor.dtype, tensor.dl_dtype.lanes) == (dtype, 1)
    return tensor.name, tensor.dtype, [(s.min, s.max, s.step, s.text, s.dimension, s.scale, s.offset) for s in sizes]


def recorded(tensor: m.TensorInput | m.TensorOutput | m.StateTensor, ranges: dict[str, m.Dimension]) -> tuple:
    sizes: list[tuple[object, ...]] = []
    for size in tensor.shape:
        if isinstance(size, m.Size):
            ends = (size.at({size.dimension: end}) for end in (ranges[size.dimension].min, ranges[size.dimension].max))
            place = list(ranges).index(size.dimension)
            sizes.append((*ends, size.scale, str(size).encode(), place, size.scale, size.offset))
        else:
            sizes.append((size, size, 1, str(size).encode(), -1, 0, 0))
    return tensor.name.encode(), tensor.dtype.encode(), sizes


@pytest.fixture(params=["tiny", "recorder", "softpool"])
def package(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_package")


def check_method(found: c_structures.MethodInfo, method: m.PackagedMethod) -> None:
    ranges = {each.name: each for each in method.call.dimensions}
    dimensions = [(each.name.decode(), each.min, each.max) for each in listed(found.dimensions, found.dimension_count)]
    inputs, outputs = listed(found.inputs, found.input_count), listed(found.outputs, found.output_count)
    assert (found.name, bool(found.stateful)) == (method.name.encode(), bool(method.state))
    assert dimensions == [(name, each.min, each.max) for name, each in ranges.items()]
    assert list(map(described, inputs)) == [recorded(tensor, ranges) for tensor in method.call.inputs]
    assert [bool(tensor.written) for tensor in inputs] == [tensor.written is not None for tensor in method.call.inputs]
    assert list(map(described, outputs)) == [recorded(tensor, ranges) for tensor in method.call.outputs]
    uses = [(found.state[i], bool(found.state_written[i])) for i in range(found.state_count)]
    assert uses == [(use.index, use.written) for use in method.state]


def test_a_model_is_described_as_its_manifest_says(c_library, package):
    with c_library.open(package) as model, exportkit.load(package) as loaded:
        about, manifest = model.about, loaded.manifest
        words = [manifest.name, manifest.version, loaded.target.name, "cpu"]
        assert [about.name, about.version, about.target, about.device] == [word.encode() for word in words]
        assert (about.dl_device.device_type, about.dl_device.device_id) == (c_interface.CPU, 0)
        for found, method in zip(listed(about.methods, about.method_count), manifest.methods, strict=True):
            check_method(found, method)
        sizes = listed(about.state_dimensions, about.state_dimension_count)
        ranges = {
            each.name.decode(): m.Dimension(name=each.name.decode(), min=each.min, max=each.max) for each in sizes
        }
        state = [described(tensor) for tensor in listed(about.state, about.state_count)]
        assert state == [recorded(tensor, ranges) for tensor in manifest.state]
        names = [method.name for method in manifest.methods]
        for case, wanted in zip(listed(about.cases, about.case_count), manifest.cases, strict=True):
            for call, given in zip(listed(case.calls, case.call_count), wanted.calls, strict=True):
                assert names[call.method] == given.method
                assert call.dimensions[: len(given.sizes)] == list(given.sizes.values())


def test_what_run_takes_is_that_of_forward_and_nothing_without_it(c_model, c_library, recorder_package):
    about = c_model.about
    (forward,) = listed(about.methods, about.method_count)
    for one, other in ((about.inputs, forward.inputs), (about.outputs, forward.outputs)):
        assert [described(one[place].contents) for place in range(3)] == [described(each) for each in listed(other, 3)]
    assert about.cases[1].contents.dimensions[:2] == [4, 6]
    with c_library.open(recorder_package) as model:
        about = model.about
        assert (about.input_count, about.output_count, about.dimension_count) == (0, 0, 0)


@pytest.mark.slow
def test_bytes_are_those_of_the_weights_and_of_a_sessions_state(c_library, recorder_package):
    with c_library.open(artifact("words")) as model:
        assert model.about.bytes == 10 * 4 * 4  # of an embedding
    with c_library.open(recorder_package) as model:
        assert model.about.bytes == 0
        for batch in (1, 3):
            session = model.session(batch=batch)
            size = c.c_uint64(1)
            whole = sum(array.nbytes for array in session.state().values())  # which nothing shares any more
            model.library.call("session_bytes", session.handle, c.byref(size))
            assert size.value == whole
            session.close()
            with pytest.raises(Refused, match="does not belong to an open session"):
                model.library.call("session_bytes", session.handle, c.byref(size))
            assert size.value == 0
        with pytest.raises(Refused, match="bytes must not be null"):
            model.library.call("session_bytes", session.handle, None)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_has_as_many_threads_as_were_asked_for(c_library, tiny_package, threads):
    """A thread that has called nothing gets helpers with its first call, and keeps them."""
    args, kwargs = tiny.example(4, 6)
    arrays = [tensor.numpy() for tensor in (args[0], args[1]["features"], kwargs["offset"])]
    helpers = []

    def call(model: c_interface.Model) -> None:
        before = len(os.listdir("/proc/self/task"))
        model.run(*map(view, arrays))
        helpers.append(len(os.listdir("/proc/self/task")) - before)

    with c_library.open(tiny_package, threads=threads) as model:
        thread = threading.Thread(target=call, args=(model,))
        thread.start()
        thread.join()
    assert helpers == [threads - 1]


@pytest.mark.parametrize("threads", [-1, 4097, 2**62])
def test_a_number_of_threads_that_is_none_is_refused(c_library, tiny_package, threads):
    with pytest.raises(Refused) as error:
        c_library.open(tiny_package, threads=threads)
    assert (error.value.code, error.value.message) == (USAGE, f"threads must be from 0 to 4096, got {threads}")

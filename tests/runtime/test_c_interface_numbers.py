"""exportkit.h in numbers: sizes by their dimensions, the state of methods, bytes and threads."""

from __future__ import annotations

import ctypes as c
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import exportkit
from exportkit.package import manifest as m
from tests.artifacts import artifact
from tests.runtime import c_interface, c_structures, tiny
from tests.runtime.c_interface import OWN_STREAM, Refused, view

USAGE = 200


def numbers(tensor: c_structures.TensorInfo) -> list[tuple[int, int, int]]:
    sizes = (tensor.shape[axis].contents for axis in range(tensor.ndim))
    return [(size.dimension, size.scale, size.offset) for size in sizes]


def recorded(shape: tuple[int | m.Size | None, ...], dimensions: list[str]) -> list[tuple[int, int, int]]:
    return [
        (dimensions.index(size.dimension), size.scale, size.offset) if isinstance(size, m.Size) else (-1, 0, 0)
        for size in shape
    ]


@pytest.fixture(params=["tiny", "recorder", "softpool"])
def package(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_package")


def test_sizes_are_those_of_the_manifest(c_library, package):
    with c_library.open(package) as model, exportkit.load(package) as loaded:
        about, manifest = model.about, loaded.manifest
        for method in manifest.methods:
            found, names = model.method(method.name), [each.name for each in method.call.dimensions]
            assert [found.dimensions[i].contents.name.decode() for i in range(found.dimension_count)] == names
            for place, tensor in enumerate(method.call.inputs):
                assert numbers(found.inputs[place].contents) == recorded(tensor.shape, names)
            for place, tensor in enumerate(method.call.outputs):
                assert numbers(found.outputs[place].contents) == recorded(tensor.shape, names)
            uses = [(found.state[i], bool(found.state_written[i])) for i in range(found.state_count)]
            assert uses == [(use.index, use.written) for use in method.state]
        names = [about.state_dimensions[i].contents.name.decode() for i in range(about.state_dimension_count)]
        for place, state in enumerate(manifest.state):
            assert numbers(about.state[place].contents) == recorded(state.shape, names)


def test_bytes_are_those_of_the_weights_and_of_a_sessions_state(c_library, recorder_package):
    with c_library.open(artifact("words")) as model:
        assert model.about.bytes == 10 * 4 * 4  # of an embedding
    with c_library.open(recorder_package) as model:
        assert model.about.bytes == 0
        for batch in (1, 3):
            session = model.session(batch=batch)
            size = c.c_uint64(1)
            model.library.call("session_bytes", session.handle, c.byref(size))
            assert size.value == sum(array.nbytes for array in session.state().values())
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


def test_on_a_cpu_a_stream_of_the_threads_own_changes_nothing(c_model, arrays):
    for one, other in zip(c_model.run(*map(view, arrays)), c_model.run(*map(view, arrays), flags=OWN_STREAM)):
        np.testing.assert_array_equal(np.from_dlpack(one), np.from_dlpack(other))

"""exportkit.h: what a program in C, or in a language that calls C, is promised."""

from __future__ import annotations

import ctypes as c
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exportkit
from exportkit.package import manifest as m
from exportkit.verify.layouts import LAYOUTS, laid_out
from tests.artifacts import artifact
from tests.runtime import c_interface, c_structures, everything, tiny
from tests.runtime.c_interface import Refused, raw_view, view
from tests.runtime.fine_tunes import X, eager, save, state
from tests.serve.engine import rows

FLOAT32 = (2, 32, 1)


def expected(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    image, features, offset = map(torch.from_numpy, arrays)
    return tiny.Flat()(image, features, offset)


def test_versions_are_those_of_the_package_and_of_torch(c_library):
    assert c_library.raw.exportkit_version().decode() == exportkit.__version__
    assert c_library.raw.exportkit_torch_version().decode() == torch.__version__.partition("+")[0]
    assert c_library.raw.exportkit_abi_version() == c_interface.ABI_VERSION


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_arrays_of_numpy_go_in_and_come_out_without_a_copy(c_model, arrays):
    before = [array.copy() for array in arrays]
    outputs = c_model.run(*map(view, arrays))
    addresses = [output.view.data for output in outputs]
    taken = [np.from_dlpack(output) for output in outputs]  # numpy frees them
    assert [array.ctypes.data for array in taken] == addresses
    for array, wanted in zip(taken, expected(arrays), strict=True):
        torch.testing.assert_close(torch.from_numpy(array), wanted)
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_numbers_or_is_refused_in_a_sentence(c_model, arrays, layout):
    given = [laid_out(torch.from_numpy(array), layout) for array in arrays]
    views = [raw_view(x.data_ptr() - 64, FLOAT32, x.shape, x.stride(), byte_offset=64) for x in given]
    if any(x.data_ptr() % 4 for x in given):
        assert c_interface.refused(c_model, *views).message.startswith("`image` must be aligned to its elements")
        return
    for output, wanted in zip(c_model.run(*views), expected(list(map(torch.Tensor.numpy, given))), strict=True):
        torch.testing.assert_close(torch.from_dlpack(output), wanted)


def at_capsule(capsule: object, name: bytes) -> int:
    """The address in a capsule of DLPack."""
    get = c.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c.c_void_p, (c.py_object, c.c_char_p)
    return get(capsule, name)


def test_tensors_of_other_libraries_are_inputs_in_both_forms_of_dlpack(c_model, arrays):
    image, features, offset = arrays
    old = image.__dlpack__()
    new = features.__dlpack__(max_version=(1, 0))
    of_torch = torch.utils.dlpack.to_dlpack(torch.from_numpy(offset))
    views = [
        c_structures.Tensor.from_address(at_capsule(old, b"dltensor")),  # DLManagedTensor begins with a DLTensor
        c_structures.Managed.from_address(at_capsule(new, b"dltensor_versioned")).dl_tensor,
        c_structures.Tensor.from_address(at_capsule(of_torch, b"dltensor")),
    ]
    assert views[0].data == image.ctypes.data
    for output, wanted in zip(c_model.run(*views), expected(arrays)):
        torch.testing.assert_close(torch.from_dlpack(output), wanted)


def test_pinned_memory_is_memory_of_the_cpu(c_model, arrays):
    views = list(map(view, arrays))
    views[0].device.device_type = c_interface.CUDA_HOST
    assert len(c_model.run(*views)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "`image` has no data: the pointer is null"),
        ({"byte_offset": 2}, "`image` must be aligned to its elements of 4 bytes"),
        ({"ndim": -1}, "`image` must have 0 to 64 dimensions, got -1"),
        ({"ndim": 65}, "`image` must have 0 to 64 dimensions, got 65"),
        ({"shape": None}, "`image` has no shape: the pointer is null"),
        ({"dtype": (2, 32, 2)}, "`image` has a dtype that no package takes: DLPack's code 2 with 32 bits and 2 lanes"),
        ({"dtype": (3, 64, 1)}, "`image` has a dtype that no package takes: DLPack's code 3"),
        ({"device": (c_interface.CUDA, 1)}, "`image` must be on cpu, where the model is; got one on cuda:1"),
        ({"device": (c_interface.CUDA_MANAGED, 0)}, "`image` must be on cpu, where the model is; got one on cuda:0"),
        ({"device": (8, 0)}, "`image` must be on cpu, where the model is; got one on DLPack's device type 8:0"),
        ({"shape": (2, 3, 48, -8)}, "`image` has a negative size, shape [2, 3, 48, -8]"),
        ({"shape": (1 << 40, 1 << 40, 1, 8)}, "`image` is too large for memory"),
        ({"shape": (1 << 61, 1, 1, 1)}, "`image` is too large for memory"),
        ({"shape": (0, 1 << 62, 1 << 62, 8)}, "`image` is too large for memory"),
        ({"strides": (1152, 384, -8, 1)}, "`image` has negative strides [1152, 384, -8, 1]"),
        ({"strides": (1 << 62, 1 << 62, 1, 1)}, "`image` is too large for memory"),
    ],
)
def test_what_is_no_tensor_of_the_model_is_refused_and_named(c_model, arrays, change, message):
    plain = {"data": arrays[0].ctypes.data, "dtype": FLOAT32, "shape": arrays[0].shape}
    set_later = {name: value for name, value in change.items() if name == "ndim" or value is None}
    first = raw_view(**plain | {name: value for name, value in change.items() if name not in set_later})
    for name, value in set_later.items():
        setattr(first, name, value)
    error = c_interface.refused(c_model, first, *map(view, arrays[1:]))
    assert (error.code, error.name) == (201, "InputError")
    assert error.message.startswith(message)


def test_a_wrong_number_of_tensors_is_refused(c_model, arrays):
    views = list(map(view, arrays))
    assert (
        "2 tensors were given; the package takes 3: (image, query.features, offset)"
        in c_interface.refused(c_model, *views[:2]).message
    )
    assert "4 tensors were given" in c_interface.refused(c_model, *views, views[0]).message
    assert "0 tensors were given" in c_interface.refused(c_model).message
    places, none = c_interface.places(3), (c.POINTER(c_structures.Tensor) * 1)()
    with pytest.raises(c_interface.Refused, match=f"{2**64 - 1} tensors were given"):  # and none of them is looked at
        c_model.library.call("run", c_model.handle, none, 2**64 - 1, places, 3, None)


@pytest.mark.parametrize("dtype", [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64",
    "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
])  # fmt: skip
def test_every_dtype_is_known_by_its_code(c_model, arrays, dtype):
    """The oracle is torch's own export to DLPack."""
    tensor = torch.zeros(2, 3, 48, 8).to(getattr(torch, dtype))
    capsule = tensor.__dlpack__(max_version=(1, 1))
    managed = c_structures.Managed.from_address(at_capsule(capsule, b"dltensor_versioned"))
    error = c_interface.refused(c_model, managed.dl_tensor, *map(view, arrays[1:]))
    assert error.message == f"`image` must be float32, got {dtype}"


def test_integers_booleans_and_bfloat16_are_computed_with(c_library, tmp_path):
    example = rows.example(5)
    with c_library.open(rows.write(tmp_path / "rows.pt2", example)) as model:
        dtypes = [model.about.inputs[i].contents.dl_dtype for i in range(5)]
        assert [(d.code, d.bits) for d in dtypes] == [(2, 32), (2, 32), (0, 64), (6, 8), (4, 16)]
        views = []
        for tensor, dtype in zip(example.values(), dtypes, strict=True):
            views.append(raw_view(tensor.data_ptr(), (dtype.code, dtype.bits, 1), tensor.shape))
        for output, wanted in zip(model.run(*views), rows.answer(example).values(), strict=True):
            taken = torch.from_dlpack(output)
            assert taken.dtype == wanted.dtype
            torch.testing.assert_close(taken, wanted)


@pytest.mark.slow
def test_outputs_never_refer_to_the_memory_of_inputs(c_library, tmp_path):
    x, number, nothing = np.arange(12, dtype="f4").reshape(4, 3), np.array(1.5, "f2"), np.zeros((2, 0), "i4")
    wanted = everything.Odd()(*map(torch.from_numpy, (x.copy(), number, nothing)))
    with c_library.open(everything.write_odd(tmp_path / "odd.pt2")) as model:
        plain = model.run(view(x), view(number), raw_view(None, (0, 32, 1), (2, 0)))
        compact = model.run(
            view(x), view(number), view(nothing), flags=c_interface.CONTIGUOUS_OUTPUTS | c_interface.HOST_TENSORS
        )
    x[:] = -1
    assert [output.shape for output in plain] == [[4, 3], [3, 4], [], [2, 0], [4, 3]]
    assert [output.strides for output in plain] == [[3, 1], [1, 3], [], [1, 1], [1, 4]]
    assert [output.strides for output in compact] == [[3, 1], [4, 1], [], [1, 1], [3, 1]]
    assert plain[3].view.data is None
    for outputs in (plain, compact):
        for output, answer in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(torch.from_dlpack(output), answer, rtol=0, atol=0)


@pytest.mark.cuda
def test_a_cuda_model_takes_memory_of_its_device_on_a_stream_and_memory_of_the_host(c_library, tmp_path):
    x, answer = X, eager(0)
    with c_library.open(artifact("weighted-cuda"), device=b"cuda:0") as model:
        model.replay(0)
        (on_host,) = model.run(view(x.numpy()), flags=c_interface.HOST_TENSORS)
        assert on_host.__dlpack_device__() == (c_interface.CPU, 0)
        torch.testing.assert_close(torch.from_dlpack(on_host), answer, rtol=1e-4, atol=1e-5)
        given = x.cuda()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for number in (0, 1, 2, stream.cuda_stream):  # the default by both names, that of the thread, one of torch's
            (output,) = model.run(raw_view(given.data_ptr(), FLOAT32, x.shape, device=(2, 0)), stream=number)
            assert output.__dlpack_device__() == (c_interface.CUDA, 0)
            torch.cuda.synchronize()
            torch.testing.assert_close(torch.from_dlpack(output).cpu(), answer, rtol=1e-4, atol=1e-5)
        error = c_interface.refused(model, view(x.numpy()))
        assert (error.code, "`x` must be on cuda:0, where the model is; got one on cpu" in error.message) == (201, True)
        error = c_interface.refused(model, raw_view(x.data_ptr(), FLOAT32, x.shape, device=(c_interface.CUDA, 0)))
        assert (error.code, "`x` cannot be read on cuda:0" in error.message) == (201, True)
        model.swap_weights(save(tmp_path / "new", state(1)))
        (swapped,) = model.run(view(x.numpy()), flags=c_interface.HOST_TENSORS)
        torch.testing.assert_close(torch.from_dlpack(swapped), eager(1), rtol=1e-4, atol=1e-5)


# --- what a package is ------------------------------------------------------------------------------------------------


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

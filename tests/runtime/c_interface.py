"""exportkit.h by ctypes, as a program without torch would write it. This imports neither torch nor exportkit."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.runtime.c_structures import (
    FUNCTIONS,
    DataType,
    Description,
    Device,
    Managed,
    MethodInfo,
    OpenOptions,
    RunOptions,
    Size,
    Tensor,
)

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLDataTypeCode by numpy's kind
ABI_VERSION = 6
VERIFY_ALWAYS = 1
CUDA_GRAPHS = 2
HOST_TENSORS, CONTIGUOUS_OUTPUTS, OWN_STREAM = 1, 2, 4


class Refused(Exception):
    """A call failed: the error's parts."""

    def __init__(self, code: int, name: str, message: str, hint: str) -> None:
        super().__init__(f"{name}: {message}")
        self.code, self.name, self.message, self.hint = code, name, message, hint


class Library:
    """The functions of the library, which raise Refused. Those of `raw` are ctypes' own."""

    def __init__(self, path: str) -> None:
        self.raw = c.CDLL(path)
        for name, (arguments, result) in FUNCTIONS.items():
            self.function(name).argtypes, self.function(name).restype = arguments, result

    def function(self, name: str) -> Any:
        """What ctypes knows of `exportkit_<name>`."""
        return getattr(self.raw, f"exportkit_{name}")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function whose last argument is the error."""
        error = c.c_void_p(1)  # as if it were not initialised
        code = self.function(name)(*arguments, c.byref(error))
        if code == 0:
            assert error.value is None
            return
        refused = self.taken(error)
        assert refused.code == code
        raise refused

    def taken(self, error: Any) -> Refused:
        """The parts of an error, which is freed."""
        texts = [self.function(f"error_{part}")(error).decode() for part in ("name", "message", "hint")]
        refused = Refused(self.function("error_code")(error), *texts)
        self.function("error_free")(error)
        return refused

    def open(self, path: Any, **options: Any) -> Model:
        """Opens a package with these members of exportkit_open_options."""
        return self.open_as("open", str(path).encode(), **options)

    def open_as(self, function: str, *source: Any, **options: Any) -> Model:
        """The same by another function, from what it takes."""
        given = OpenOptions(size=c.sizeof(OpenOptions), **options)
        return Model(self, self.handle_of(function, *source, c.byref(given)))

    def handle_of(self, function: str, *arguments: Any) -> int:
        """What a function opens. It writes 0 where it fails."""
        handle = c.c_uint64(1)
        try:
            self.call(function, *arguments, c.byref(handle))
        except Refused:
            assert handle.value == 0
            raise
        return handle.value


class Model:
    """An open model."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library, self.handle = library, handle

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes it."""
        self.library.call("close", self.handle)

    @property
    def about(self) -> Description:
        """The library's own description."""
        found = c.POINTER(Description)()
        self.library.call("describe", self.handle, c.byref(found))
        return found.contents

    def run(self, *views: Tensor, **options: Any) -> list[Lent]:
        """Runs these inputs with these members of exportkit_run_options."""
        return run(self.library, ("run", self.handle), self.about.output_count, views, options)

    def method(self, name: str) -> MethodInfo:
        """What the library says of a method."""
        methods = [self.about.methods[i].contents for i in range(self.about.method_count)]
        return next(method for method in methods if method.name.decode() == name)

    def run_method(self, name: str, *views: Tensor, **options: Any) -> list[Lent]:
        """Runs a method."""
        start = ("run_method", self.handle, name.encode())
        return run(self.library, start, self.method(name).output_count, views, options)

    def session(self, **sizes: int) -> Session:
        """Opens a session."""
        given = (Size * max(len(sizes), 1))(*(Size(name.encode(), size) for name, size in sizes.items()))
        return Session(self, self.library.handle_of("open_session", self.handle, given, len(sizes)))

    def read_case(self, index: int) -> tuple[list[Lent], list[Lent]]:
        """A recorded case."""
        inputs, outputs = places(self.about.input_count), places(self.about.output_count)
        self.library.call("read_case", self.handle, index, inputs, len(inputs), outputs, len(outputs))
        return [Lent(place) for place in inputs], [Lent(place) for place in outputs]

    def replay(self, index: int) -> None:
        """Runs a recorded case again."""
        self.library.call("replay", self.handle, index)

    def swap_weights(self, path: Any) -> None:
        """Takes other weights."""
        self.library.call("swap_weights", self.handle, str(path).encode())


class Session:
    """An open session."""

    def __init__(self, model: Model, handle: int) -> None:
        self.model, self.library, self.handle = model, model.library, handle

    def run(self, method: str, *views: Tensor, **options: Any) -> list[Lent]:
        """Runs a method of the model."""
        start = ("session_run", self.handle, method.encode())
        return run(self.library, start, self.model.method(method).output_count, views, options)

    def fork(self) -> Session:
        """Another one with a copy of the state."""
        return Session(self.model, self.library.handle_of("session_fork", self.handle))

    def reset(self) -> None:
        """Begins again."""
        self.library.call("session_reset", self.handle)

    def save(self, path: Any) -> None:
        """Writes the state."""
        self.library.call("session_save", self.handle, str(path).encode())

    def load_state(self, path: Any) -> None:
        """Reads the state."""
        self.library.call("session_load_state", self.handle, str(path).encode())

    def load_partial_state(self, path: Any, row: int | None = None) -> tuple[str, ...]:
        """Sets what the file names; returns it."""
        flags = (c.c_uint8 * self.model.about.state_count)()
        where = (str(path).encode(), -1 if row is None else row)
        self.library.call("session_load_partial_state", self.handle, *where, flags, len(flags))
        return tuple(name for name, flag in zip(self.state_names, flags) if flag)

    @property
    def state_names(self) -> list[str]:
        """In the order of the description."""
        about = self.model.about
        return [about.state[i].contents.name.decode() for i in range(about.state_count)]

    def state(self) -> dict[str, np.ndarray]:
        """The live state, by name, without a copy."""
        tensors = places(self.model.about.state_count)
        self.library.call("session_state", self.handle, tensors, len(tensors))
        return {name: np.from_dlpack(Lent(tensor)) for name, tensor in zip(self.state_names, tensors, strict=True)}

    def close(self) -> None:
        """Closes it."""
        self.library.call("session_close", self.handle)


def run(
    library: Library, start: tuple[Any, ...], count: int, views: Sequence[Tensor], options: dict[str, Any]
) -> list[Lent]:
    """Calls a function that begins with these arguments and runs inputs."""
    outputs = places(count)
    inputs = (c.POINTER(Tensor) * max(len(views), 1))(*(c.pointer(view) for view in views))
    given = RunOptions(size=c.sizeof(RunOptions), **options)
    try:
        library.call(*start, inputs, len(views), outputs, len(outputs), c.byref(given))
    except Refused:
        assert not any(outputs)
        raise
    return [Lent(place) for place in outputs]


def places(count: int) -> Any:
    """Where outputs are written; they hold what is no pointer."""
    return (c.POINTER(Managed) * count)(*[c.cast(8, c.POINTER(Managed))] * count)


class Lent:
    """A tensor from the library, which numpy and torch take with `from_dlpack`; freed with this object otherwise."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    @property
    def view(self) -> Tensor:
        """It, as an input of another call."""
        return self.pointer.contents.dl_tensor

    @property
    def shape(self) -> list[int]:
        """Its sizes."""
        return self.view.shape[: self.view.ndim]

    @property
    def strides(self) -> list[int]:
        """Its strides, in elements."""
        return self.view.strides[: self.view.ndim]

    def __dlpack__(self, **_: object) -> Any:
        new = c.pythonapi.PyCapsule_New
        new.restype, new.argtypes = c.py_object, (c.c_void_p, c.c_char_p, c.c_void_p)
        capsule = new(c.cast(self.pointer, c.c_void_p), b"dltensor_versioned", None)
        self.pointer = None  # who takes the capsule frees the tensor
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.device.device_type, self.view.device.device_id

    def __del__(self) -> None:
        if self.pointer:
            self.pointer.contents.deleter(self.pointer)


def view(array: np.ndarray, *, byte_offset: int = 0, strides: bool = True) -> Tensor:
    """A view of the array's memory. The array must outlive it."""
    kind = CODES[array.dtype.kind]
    return raw_view(
        array.ctypes.data - byte_offset,
        (kind, array.itemsize * 8, 1),
        array.shape,
        [step // array.itemsize for step in array.strides] if strides else None,
        byte_offset=byte_offset,
    )


def raw_view(
    data: int | None,
    dtype: tuple[int, int, int],
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    device: tuple[int, int] = (CPU, 0),
    byte_offset: int = 0,
) -> Tensor:
    """A DLTensor of these members."""
    sizes = (c.c_int64 * len(shape))(*shape)
    steps = None if strides is None else (c.c_int64 * len(shape))(*strides)
    return Tensor(data, Device(*device), len(shape), DataType(*dtype), sizes, steps, byte_offset)


def refused(model: Model, *views: Tensor, **options: int) -> Refused:
    """Why the model does not run these inputs."""
    try:
        model.run(*views, **options)
    except Refused as error:
        return error
    raise AssertionError("the inputs were accepted")

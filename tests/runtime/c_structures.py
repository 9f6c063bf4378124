"""The structures of exportkit.h and dlpack.h, as ctypes has them. This imports neither torch nor exportkit."""

from __future__ import annotations

import ctypes as c


class Device(c.Structure):
    """DLDevice."""

    _fields_ = (("device_type", c.c_int32), ("device_id", c.c_int32))


class DataType(c.Structure):
    """DLDataType."""

    _fields_ = (("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16))


class Tensor(c.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", c.c_void_p),
        ("device", Device),
        ("ndim", c.c_int32),
        ("dtype", DataType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    )


class Managed(c.Structure):
    """DLManagedTensorVersioned."""


Managed._fields_ = (
    ("version", c.c_uint32 * 2),
    ("manager_ctx", c.c_void_p),
    ("deleter", c.CFUNCTYPE(None, c.POINTER(Managed))),
    ("flags", c.c_uint64),
    ("dl_tensor", Tensor),
)


class OpenOptions(c.Structure):
    """exportkit_open_options."""

    _fields_ = (
        ("size", c.c_size_t),
        ("flags", c.c_uint64),
        ("device", c.c_char_p),
        ("target", c.c_char_p),
        ("runners", c.c_int64),
        ("public_keys", c.POINTER(c.c_char_p)),
        ("public_key_count", c.c_size_t),
        ("signature", c.c_char_p),
        ("warn", c.CFUNCTYPE(None, c.c_char_p, c.c_void_p)),
        ("warn_context", c.c_void_p),
        ("signature_content", c.c_char_p),
        ("signature_content_size", c.c_size_t),
        ("stream_limit", c.c_uint64),
        ("threads", c.c_int64),
    )


class RunOptions(c.Structure):
    """exportkit_run_options."""

    _fields_ = (("size", c.c_size_t), ("flags", c.c_uint64), ("stream", c.c_void_p))


class SizeRange(c.Structure):
    """exportkit_size_range."""

    _fields_ = (
        ("min", c.c_int64),
        ("max", c.c_int64),
        ("step", c.c_int64),
        ("text", c.c_char_p),
        ("dimension", c.c_int64),
        ("scale", c.c_int64),
        ("offset", c.c_int64),
    )


class TensorInfo(c.Structure):
    """exportkit_tensor_info."""

    _fields_ = (
        ("name", c.c_char_p),
        ("dtype", c.c_char_p),
        ("dl_dtype", DataType),
        ("ndim", c.c_int32),
        ("shape", c.POINTER(c.POINTER(SizeRange))),
        ("written", c.c_int32),
    )


class Dimension(c.Structure):
    """exportkit_dimension."""

    _fields_ = (("name", c.c_char_p), ("min", c.c_int64), ("max", c.c_int64))


class MethodInfo(c.Structure):
    """exportkit_method_info."""

    _fields_ = (
        ("name", c.c_char_p),
        ("stateful", c.c_int32),
        ("input_count", c.c_size_t),
        ("inputs", c.POINTER(c.POINTER(TensorInfo))),
        ("output_count", c.c_size_t),
        ("outputs", c.POINTER(c.POINTER(TensorInfo))),
        ("dimension_count", c.c_size_t),
        ("dimensions", c.POINTER(c.POINTER(Dimension))),
        ("state_count", c.c_size_t),
        ("state", c.POINTER(c.c_size_t)),
        ("state_written", c.POINTER(c.c_int32)),
        ("row_dimension", c.c_int64),
        ("row_reason", c.c_char_p),
    )


class CallInfo(c.Structure):
    """exportkit_call_info."""

    _fields_ = (("method", c.c_size_t), ("dimensions", c.POINTER(c.c_int64)))


class CaseInfo(c.Structure):
    """exportkit_case_info."""

    _fields_ = (
        ("dimensions", c.POINTER(c.c_int64)),
        ("call_count", c.c_size_t),
        ("calls", c.POINTER(c.POINTER(CallInfo))),
    )


class Description(c.Structure):
    """exportkit_description."""

    _fields_ = (
        ("name", c.c_char_p),
        ("version", c.c_char_p),
        ("target", c.c_char_p),
        ("device", c.c_char_p),
        ("dl_device", Device),
        ("input_count", c.c_size_t),
        ("inputs", c.POINTER(c.POINTER(TensorInfo))),
        ("output_count", c.c_size_t),
        ("outputs", c.POINTER(c.POINTER(TensorInfo))),
        ("dimension_count", c.c_size_t),
        ("dimensions", c.POINTER(c.POINTER(Dimension))),
        ("case_count", c.c_size_t),
        ("cases", c.POINTER(c.POINTER(CaseInfo))),
        ("method_count", c.c_size_t),
        ("methods", c.POINTER(c.POINTER(MethodInfo))),
        ("state_count", c.c_size_t),
        ("state", c.POINTER(c.POINTER(TensorInfo))),
        ("state_dimension_count", c.c_size_t),
        ("state_dimensions", c.POINTER(c.POINTER(Dimension))),
        ("bytes", c.c_uint64),
    )


class Size(c.Structure):
    """exportkit_size."""

    _fields_ = (("dimension", c.c_char_p), ("size", c.c_int64))


class Piece(c.Structure):
    """exportkit_piece."""

    _fields_ = (("data", c.c_void_p), ("size", c.c_uint64), ("device", Device))


class RequestInput(c.Structure):
    """exportkit_request_input."""

    _fields_ = (
        ("dtype", DataType),
        ("ndim", c.c_int32),
        ("shape", c.POINTER(c.c_int64)),
        ("piece_count", c.c_size_t),
        ("pieces", c.POINTER(Piece)),
    )


class Request(c.Structure):
    """exportkit_request."""

    _fields_ = (
        ("size", c.c_size_t),
        ("input_count", c.c_size_t),
        ("inputs", c.POINTER(RequestInput)),
        ("session", c.c_uint64),
        ("error", c.c_void_p),
    )


Place = c.CFUNCTYPE(
    c.c_int,
    c.c_size_t,
    c.c_size_t,
    DataType,
    c.c_int32,
    c.POINTER(c.c_int64),
    c.c_uint64,
    c.POINTER(c.c_void_p),
    c.POINTER(Device),
    c.c_void_p,
)
Ended = c.CFUNCTYPE(None, c.c_size_t, c.c_void_p)


class Answers(c.Structure):
    """exportkit_answers."""

    _fields_ = (("size", c.c_size_t), ("place", Place), ("ended", Ended), ("context", c.c_void_p))

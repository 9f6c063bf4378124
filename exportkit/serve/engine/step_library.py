"""Calls the library in which plain steps of sequences are read, gathered and answered (csrc/steps), through ctypes.

`csrc/steps/steps.h` documents each call. The event loop's calls take microseconds and keep Python's lock: to take it
again would cost more. Those of a runner give it away.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_long,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from exportkit.libraries import STEPS_LIBRARY

BOUNDS = 16


class StepCount(Structure):
    """`ek_steps_count`."""

    _fields_ = (("queue", c_uint64), ("steps", c_uint64), ("rows", c_uint64), ("bytes", c_uint64))


class ReadCall(Structure):
    """`ek_steps_read_call`."""

    _fields_ = (("call", c_uint64), ("frame_bytes", c_uint64), ("message_bytes", c_uint64))


class ReadResult(Structure):
    """`ek_steps_read_result`."""

    _fields_ = (
        ("call_count", c_size_t),
        ("queue_count", c_size_t),
        ("calls", POINTER(ReadCall)),
        ("queues", POINTER(StepCount)),
    )


class StepAnswers(Structure):
    """`ek_steps_answers`."""

    _fields_ = (
        ("call", c_uint64),
        ("count", c_uint64),
        ("largest", c_uint64),
        ("data", c_void_p),
        ("size", c_size_t),
        ("own", c_uint64),
        ("place", c_uint64),
    )


class StepPlace(Structure):
    """`ek_steps_place`."""

    _fields_ = (("call", c_uint64), ("place", c_uint64), ("sequence", c_uint64), ("step", c_uint64))


class Dropped(Structure):
    """`ek_steps_dropped`."""

    _fields_ = (("queued", StepCount), ("count", c_size_t), ("places", POINTER(StepPlace)), ("gone", c_int))


_NUMBERS, _SECONDS = POINTER(c_uint64), POINTER(c_double)


class FinishedBatch(Structure):
    """`ek_steps_finished`."""

    _fields_ = (
        ("call_count", c_size_t),
        ("calls", POINTER(StepAnswers)),
        ("answered", StepCount),
        ("failed", StepCount),
        ("unwanted", StepCount),
        ("seconds", c_double),
        ("waited", c_double),
        ("bounds", c_uint64 * BOUNDS),
        ("failed_count", c_size_t),
        ("rested_count", c_size_t),
        ("gone_count", c_size_t),
        ("failures", POINTER(StepPlace)),
        ("rested", _NUMBERS),
        ("gone", _NUMBERS),
        ("next", StepCount),
    )


class Taken(Structure):
    """`ek_steps_taken`."""

    _fields_ = (("batch", c_void_p), ("count", StepCount))


_POINTERS = POINTER(c_void_p)
_LOOP: dict[str, tuple[Any, ...]] = {  # the type of the result, then those of the arguments
    "ek_steps_open": (c_void_p, _SECONDS, c_size_t),
    "ek_steps_close": (None, c_void_p),
    "ek_steps_add_form": (
        c_int, c_void_p, c_uint64, c_char_p, c_size_t, _NUMBERS, POINTER(c_uint32), c_size_t, c_uint64,
    ),
    "ek_steps_remove_form": (None, c_void_p, c_uint64),
    "ek_steps_read_head": (c_long, c_char_p, c_size_t, c_char_p, c_size_t, c_char_p, _NUMBERS),
    "ek_steps_open_client": (c_void_p, c_void_p),
    "ek_steps_close_client": (None, c_void_p),
    "ek_steps_open_call": (c_void_p, c_void_p, c_uint64, c_uint32, c_uint64),
    "ek_steps_allow": (None, c_void_p, c_int, c_int, c_uint64),
    "ek_steps_close_call": (c_size_t, c_void_p, POINTER(_NUMBERS)),
    "ek_steps_read": (c_size_t, c_void_p, c_char_p, c_size_t, c_size_t),
    "ek_steps_read_message": (c_int, c_void_p, c_char_p, c_size_t),
    "ek_steps_count_read": (None, c_void_p, POINTER(ReadResult)),
    "ek_steps_knows": (c_int, c_void_p, c_char_p, c_size_t),
    "ek_steps_keep_place": (c_uint64, c_void_p),
    "ek_steps_put": (None, c_void_p, c_uint64),
    "ek_steps_next": (None, c_void_p, POINTER(StepAnswers)),
    "ek_steps_waiting": (c_uint64, c_void_p),
    "ek_steps_open_queue": (
        c_void_p, c_void_p, c_uint64, c_double, c_uint64, _NUMBERS, c_size_t, _NUMBERS, c_char_p, c_char_p, c_size_t,
    ),
    "ek_steps_queue_bytes": (POINTER(c_int64), c_void_p),
    "ek_steps_set_answer": (
        c_int, c_void_p, c_uint64, c_char_p, c_size_t, c_char_p, c_size_t, _NUMBERS, c_size_t,
    ),
    "ek_steps_close_queue": (None, c_void_p),
    "ek_steps_open_sequence": (
        c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_int, c_uint64, c_char_p, c_size_t, _POINTERS,
    ),
    "ek_steps_leave_sequence": (c_uint64, c_void_p),
    "ek_steps_close_sequence": (None, c_void_p, POINTER(Dropped)),
    "ek_steps_used": (c_size_t, c_void_p, POINTER(_NUMBERS), POINTER(_SECONDS)),
    "ek_steps_due": (c_double, c_void_p),
    "ek_steps_take": (None, c_void_p, c_uint64, c_double, POINTER(Taken)),
    "ek_steps_fail": (None, c_void_p, c_size_t),
    "ek_steps_rows": (c_uint64, c_void_p, c_size_t, c_size_t),
    "ek_steps_finish": (None, c_void_p, c_double, POINTER(FinishedBatch)),
}  # fmt: skip
_RUNNER: dict[str, tuple[Any, ...]] = {  # without Python's lock
    "ek_steps_gather": (None, c_void_p, c_size_t, c_size_t, _POINTERS, _POINTERS),
    "ek_steps_scatter": (None, c_void_p, c_size_t, c_size_t, _POINTERS),
    "ek_steps_answer": (c_int, c_void_p, c_size_t, c_size_t, _POINTERS),
}


class StepLibrary:
    """The library's functions, by their names without `ek_steps_`."""

    def __init__(self, path: Path) -> None:
        """Loads it. Raises OSError or AttributeError if it is not there, or another one."""
        for kind, functions in ((ctypes.PyDLL, _LOOP), (ctypes.CDLL, _RUNNER)):
            loaded = kind(str(path))
            for name, (result, *arguments) in functions.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ek_steps_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{STEPS_LIBRARY} has no function ek_steps_{name}")


@functools.cache
def step_library() -> StepLibrary | str:
    """Returns the library, or why it cannot be used: then Python reads and answers all steps."""
    try:
        return StepLibrary(STEPS_LIBRARY)
    except (OSError, AttributeError) as error:
        return str(error)


def pointers(addresses: list[int]) -> Any:
    """Returns an array of pointers for the library."""
    return (c_void_p * len(addresses))(*addresses)


def numbers(values: list[int]) -> Any:
    """Returns an array of numbers for the library."""
    return (c_uint64 * len(values))(*values)

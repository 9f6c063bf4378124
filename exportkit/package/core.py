"""Calls the library that reads and writes packages (csrc/package) through ctypes, which releases the GIL.

Only that library implements the rules of FORMAT.md. Its results are checked. `package.h` documents each call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import msgspec

from exportkit import errors
from exportkit.errors import HostError, UsageError

LIBRARY = Path(__file__).parents[1] / "lib" / "libexportkit_package.so"
_ABI = 4

KeySource = str | os.PathLike[str]  # the path of a PEM file, or PEM text
SignatureSource = str | os.PathLike[str] | bytes  # the path of a signature file, or its content


class Text(ctypes.Structure):
    """`ek_text`."""

    _fields_ = (("data", c_void_p), ("size", c_size_t))

    def bytes(self) -> bytes:
        """Copies the text."""
        return ctypes.string_at(self.data, self.size) if self.size else b""


class Demand(ctypes.Structure):
    """`ek_demand`: the signatures that the caller requires. This machine's policies may require more."""

    _fields_ = (
        ("keys", POINTER(c_char_p)),
        ("key_count", c_size_t),
        ("signature", c_char_p),
        ("signature_content", c_char_p),
        ("signature_content_size", c_size_t),
    )

    def __init__(self, keys: Sequence[KeySource], signature: SignatureSource | None) -> None:
        sources = [encoded(key) for key in keys]
        self._kept = (c_char_p * len(sources))(*sources)  # the structure holds only the address
        if isinstance(signature, bytes):
            super().__init__(self._kept, len(sources), None, signature, len(signature))
        else:
            super().__init__(self._kept, len(sources), None if signature is None else encoded(signature))


class _Error(ctypes.Structure):
    _fields_ = (("kind", c_char_p), ("message", c_char_p), ("hint", c_char_p), ("path", c_char_p), ("number", c_int))


_TEXT, _DEMAND, _HANDLE = POINTER(Text), POINTER(Demand), POINTER(c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the type of the result, then those of the arguments
    "ek_abi_version": (c_int,),
    "ek_last_error": (POINTER(_Error),),
    "ek_take_warnings": (Text,),
    "ek_before_fork": (None,),
    "ek_after_fork": (None, c_int),
    "ek_package_open": (c_int, c_char_p, _DEMAND, _HANDLE),
    "ek_package_open_descriptor": (c_int, c_int, _DEMAND, _HANDLE),
    "ek_package_open_arrived": (c_int, c_void_p, _DEMAND, _HANDLE),
    "ek_arriving_new": (c_int, c_char_p, c_uint64, _HANDLE),
    "ek_arriving_write": (c_int, c_void_p, c_void_p, c_size_t),
    "ek_arriving_close": (None, c_void_p),
    "ek_package_close": (None, c_void_p),
    "ek_package_name": (c_char_p, c_void_p),
    "ek_package_manifest": (Text, c_void_p),
    "ek_package_manifest_sha256": (c_char_p, c_void_p),
    "ek_package_size": (c_uint64, c_void_p),
    "ek_package_fd": (c_int, c_void_p),
    "ek_package_state_digest": (c_int, c_void_p, _TEXT),
    "ek_package_match_state_file": (c_int, c_void_p, c_char_p, c_char_p, c_int, _TEXT),
    "ek_package_sha256": (c_int, c_void_p, POINTER(c_char_p)),
    "ek_package_data_offset": (c_int, c_void_p, c_char_p, POINTER(c_uint64)),
    "ek_package_read": (c_int, c_void_p, c_char_p, c_void_p, c_size_t),
    "ek_package_extract": (c_int, c_void_p, c_char_p, c_char_p, c_uint),
    "ek_package_verify": (c_int, c_void_p),
    "ek_package_verify_once": (c_int, c_void_p, c_int, POINTER(c_int)),
    "ek_package_check_case": (c_int, c_void_p, c_size_t, c_char_p, c_size_t),
    "ek_package_check_unchanged": (c_int, c_void_p),
    "ek_package_signers": (Text, c_void_p),
    "ek_package_signature_files": (c_int, c_void_p, _TEXT),
    "ek_package_map": (c_int, c_void_p, _HANDLE),
    "ek_mapping_data": (c_void_p, c_void_p, c_char_p),
    "ek_mapping_close": (None, c_void_p),
    "ek_package_unpack_library": (c_int, c_void_p, c_char_p, c_int, _HANDLE),
    "ek_package_unpack_target": (c_int, c_void_p, c_char_p, c_int, _HANDLE),
    "ek_compiled_entry": (c_int, c_char_p, _HANDLE),
    "ek_limit_compiled": (c_int, c_int64),
    "ek_entry_folder": (c_char_p, c_void_p),
    "ek_entry_library": (c_char_p, c_void_p),
    "ek_entry_close": (None, c_void_p),
    "ek_cache_directory": (c_int, _TEXT),
    "ek_cache_items": (c_int, c_char_p, c_void_p, _TEXT),
    "ek_host": (c_int, _TEXT),
    "ek_parse_device": (c_int, c_char_p, _TEXT),
    "ek_survey": (c_int, c_char_p, c_char_p, c_char_p, c_char_p, _TEXT),
    "ek_library_rejection": (c_int, c_char_p, c_char_p, _TEXT),
    "ek_ptx_rejection": (c_int, c_char_p, c_size_t, c_char_p, _TEXT),
    "ek_fat_entries": (c_int, c_char_p, c_size_t, _TEXT),
    "ek_gpu_degree": (c_int, c_char_p, c_char_p, c_char_p, _TEXT),
    "ek_check_manifest": (c_int, c_char_p, c_size_t),
    "ek_is_name": (c_int, c_char_p),
    "ek_match_state": (c_int, c_char_p, c_char_p, c_char_p, _TEXT),
    "ek_public_key": (c_int, c_char_p, _TEXT),
    "ek_signatures": (c_int, c_char_p, _TEXT),
    "ek_public_key_hash": (c_int, c_char_p, _TEXT),
    "ek_verify_signature": (c_int, c_char_p, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p),
    "ek_demanded": (c_int, _DEMAND, _TEXT),
    "ek_revocation_list": (c_int, c_char_p, _TEXT),
    "ek_revocations": (c_int, _TEXT),
    "ek_typical_magnitude": (c_int, c_void_p, c_size_t, POINTER(c_double)),
    "ek_measure_error": (c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_double, c_double, c_void_p),
    "ek_allowed_error": (c_int, c_void_p, c_char_p, c_void_p),
    "ek_writer_new": (c_void_p,),
    "ek_writer_add_bytes": (c_int, c_void_p, c_char_p, c_void_p, c_size_t),
    "ek_writer_add_file": (c_int, c_void_p, c_char_p, c_char_p),
    "ek_writer_add_record": (c_int, c_void_p, c_char_p, c_void_p, c_char_p),
    "ek_writer_records": (c_int, c_void_p, _TEXT),
    "ek_writer_finish": (c_int, c_void_p, c_char_p, c_char_p, c_size_t),
    "ek_writer_close": (None, c_void_p),
    "ek_write_file": (c_int, c_char_p, c_char_p, c_size_t),
    "ek_folder_new": (c_int, c_char_p, c_char_p, _HANDLE),
    "ek_folder_path": (c_char_p, c_void_p),
    "ek_folder_close": (None, c_void_p),
}


@functools.cache
def library() -> Any:
    """Loads the library once.

    Raises:
        HostError: The library was not built, or it does not load here.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise HostError(
            f"the library that reads packages cannot be loaded: {error}", hint="`make build` builds it."
        ) from error
    try:
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        abi = loaded.ek_abi_version()
    except AttributeError as error:
        raise HostError(
            f"{LIBRARY} belongs to another version of exportkit: {error}", hint="`make build` builds it."
        ) from error
    if abi != _ABI:
        raise HostError(f"{LIBRARY} has interface {abi}; this exportkit needs {_ABI}", hint="`make build` builds it.")
    return loaded


def call(function: str, *arguments: Any) -> None:
    """Calls a function that may fail.

    Raises:
        ExportkitError: The library refused the call. It names the class of the error.
        OSError: The operating system refused an operation.
    """
    failed = getattr(library(), function)(*arguments)
    del arguments  # the traceback of the error would keep a package open
    if failed:
        raise _failure()


def text(function: str, *arguments: Any) -> bytes:
    """Calls a function that fills an `ek_text`, its last argument. Errors are the same as for `call`."""
    answer = Text()
    try:
        call(function, *arguments, byref(answer))
    finally:
        del arguments
    return answer.bytes()


def handle(function: str, *arguments: Any) -> int:
    """Calls a function that makes an object, its last argument. Errors are the same as for `call`."""
    made = c_void_p()
    try:
        call(function, *arguments, byref(made))
    finally:
        del arguments
    assert made.value is not None
    return made.value


def warnings() -> list[str]:
    """Returns and clears the warnings of this thread's calls."""
    said: list[str] = msgspec.json.decode(library().ek_take_warnings().bytes())
    return said


def encoded(value: str | os.PathLike[str]) -> bytes:
    """Encodes a path or text for C.

    Raises:
        UsageError: The value has a NUL, or a character that cannot be encoded.
    """
    name = os.fspath(value)
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise UsageError(f"{name!r} is not a valid file name: {error.reason}") from error
    if b"\0" in data:
        raise UsageError(f"{name!r} is not a valid file name: it contains a NUL character")
    return data


def _failure() -> Exception:
    error = library().ek_last_error().contents
    kind, message, hint, path = (
        field.decode(errors="backslashreplace") for field in (error.kind, error.message, error.hint, error.path)
    )
    if kind == OSError.__name__:
        return OSError(error.number, message, path) if path else OSError(error.number, message)
    failure: Exception = getattr(errors, kind)(message, hint=hint or None)
    return failure

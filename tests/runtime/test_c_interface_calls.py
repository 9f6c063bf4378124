"""exportkit.h: what its functions refuse, what opening checks, and what threads may do."""

from __future__ import annotations

import ctypes as c
import json
import os
import sys

import pytest
import torch

from exportkit.runtime.native import library_path
from tests.artifacts import ROOT
from tests.runtime import c_interface, c_structures
from tests.runtime.c_interface import Refused, view
from tests.runtime.c_structures import Tensor
from tests.serve.engine import rows
from tests.subprocesses import output_of

# --- arguments --------------------------------------------------------------------------------------------------------


def test_null_pointers_are_errors_and_no_crash(c_library, c_model, tiny_package):
    raw, handle, path = c_library.raw, c_model.handle, str(tiny_package).encode()
    number, description = c.c_uint64(), c.POINTER(c_structures.Description)()
    one = (c.POINTER(c_structures.Managed) * 3)()
    null_element = (c.POINTER(Tensor) * 3)()
    for name, arguments, missing in [
        ("open", (None, None, c.byref(number)), "path"),
        ("open", (path, None, None), "model"),
        ("describe", (handle, None), "description"),
        ("run", (handle, None, 3, one, 3, None), "inputs"),
        ("run", (handle, None, 0, None, 3, None), "outputs"),
        ("swap_weights", (handle, None), "path"),
        ("read_case", (handle, 0, None, 3, None, 0), "inputs"),
        ("read_case", (handle, 0, None, 0, None, 3), "outputs"),
    ]:
        with pytest.raises(Refused) as caught:
            c_library.call(name, *arguments)
        assert (caught.value.code, caught.value.message) == (200, f"{missing} must not be null")
        assert c_library.function(name)(*arguments, None) == 200  # the error is not wanted either
    with pytest.raises(Refused, match="`image` must be a tensor, got a null pointer"):
        c_library.call("run", handle, null_element, 3, one, 3, None)
    assert [raw.exportkit_error_name(None), raw.exportkit_error_message(None), raw.exportkit_error_hint(None)] == [
        b"", b"", b""
    ]  # fmt: skip
    assert raw.exportkit_error_code(None) == 0
    raw.exportkit_error_free(None)
    c_library.call("describe", handle, c.byref(description))
    c_library.call("read_case", handle, 0, None, 0, None, 0)


def test_results_must_have_room_for_all_tensors(c_library, c_model, arrays):
    places = (c.POINTER(c_structures.Managed) * 4)()
    inputs = (c.POINTER(Tensor) * 3)(*(c.pointer(view(array)) for array in arrays))
    for count in (0, 2, 4):
        with pytest.raises(Refused, match=f"outputs must have room for 3 tensors, got {count}"):
            c_library.call("run", c_model.handle, inputs, 3, places, count, None)
        with pytest.raises(Refused, match=f"inputs must have room for 3 tensors, got {count}"):
            c_library.call("read_case", c_model.handle, 0, places, count, None, 0)


def test_a_closed_model_is_an_error_for_every_function(c_library, tiny_package):
    model = c_library.open(tiny_package)
    model.close()
    description, places = c.POINTER(c_structures.Description)(), (c.POINTER(c_structures.Managed) * 3)()
    for handle in (model.handle, 0, 2**64 - 1):
        for name, arguments in {
            "close": (),
            "describe": (c.byref(description),),
            "run": (None, 0, places, 3, None),
            "swap_weights": (b"x",),
            "read_case": (0, None, 0, None, 0),
            "replay": (0,),
        }.items():
            with pytest.raises(Refused, match=f"handle {handle} does not belong to an open model") as caught:
                c_library.call(name, handle, *arguments)
            assert (caught.value.code, caught.value.name) == (103, "ModelClosedError")


def test_options_of_newer_and_broken_callers_are_told_apart(c_library, tiny_package, c_model, arrays):
    path, handle = str(tiny_package).encode(), c.c_uint64()

    class Newer(c.Structure):
        _fields_ = (("known", c_structures.OpenOptions), ("added", c.c_int64))

    def open_with(options: Newer) -> None:
        c_library.call("open", path, c.cast(c.byref(options), c.POINTER(c_structures.OpenOptions)), c.byref(handle))

    newer = Newer(c_structures.OpenOptions(size=c.sizeof(Newer)), 0)
    open_with(newer)
    c_library.call("close", handle)
    newer.added = 1
    with pytest.raises(Refused, match=r"exportkit_open_options has members that exportkit .* does not know"):
        open_with(newer)
    for size in (0, 79, 4097, 2**63):
        newer.known.size = size
        with pytest.raises(Refused, match=r"exportkit_open_options\.size must be sizeof\(exportkit_open_opt"):
            open_with(newer)
    with pytest.raises(Refused, match=r"exportkit_open_options\.flags has flags .*: 4$"):
        c_library.open(tiny_package, flags=5)
    views = list(map(view, arrays))
    assert r"exportkit_run_options.flags has flags" in c_interface.refused(c_model, *views, flags=8).message
    assert "stream must be null: the model is on cpu" in c_interface.refused(c_model, *views, stream=1).message


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"device": b"tpu"}, 200, "tpu"),
        ({"target": b"none"}, 200, "the package has no target 'none'"),
        ({"device": b"cuda:0"}, 401, "cuda"),
        ({"flags": c_interface.CUDA_GRAPHS}, 200, "CUDA graphs are for a model on CUDA"),
        ({"runners": -1}, 200, "runners must be a positive integer, got -1"),
        ({"public_key_count": 1}, 200, "public_keys must not be null"),
        ({"public_keys": (c.c_char_p * 1)(), "public_key_count": 1}, 200, "an element of public_keys must not be null"),
        ({"signature": b"x"}, 200, "without a public key"),
    ],
)
def test_options_are_refused_as_exportkit_load_refuses_them(c_library, tiny_package, options, code, message):
    with pytest.raises(Refused) as caught:
        c_library.open(tiny_package, **options)
    assert caught.value.code == code
    assert message in caught.value.message


def test_options_that_are_given_are_followed(c_library, tiny_package):
    flags = c_interface.VERIFY_ALWAYS
    with c_library.open(tiny_package, device=b"cpu", target=b"cpu", runners=2, flags=flags) as model:
        model.replay(0)


# --- what open checks -------------------------------------------------------------------------------------------------


def test_a_damaged_package_is_refused_with_the_class_and_the_hint(c_library, tiny_package, tmp_path):
    short = tmp_path / "short.pt2"
    short.write_bytes(tiny_package.read_bytes()[:-1])
    for path, code, name in [(short, 301, "NotAnArchiveError"), (tmp_path / "absent.pt2", 200, "UsageError")]:
        with pytest.raises(Refused) as caught:
            c_library.open(path)
        assert (caught.value.code, caught.value.name) == (code, name)
        assert caught.value.message
    # A path is bytes, and a message is text.
    with pytest.raises(Refused, match=r"caf\\xe9") as caught:
        c_library.call("open", os.fsencode(tmp_path) + b"/caf\xe9.pt2", None, c.byref(c.c_uint64()))


def test_warnings_go_to_the_caller(c_library, tiny_package, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_CACHE", "/proc/nowhere")
    said = []

    @c.CFUNCTYPE(None, c.c_char_p, c.c_void_p)
    def warn(message: bytes, context: int) -> None:
        said.append((message.decode(), context))

    c_library.open(tiny_package, warn=warn, warn_context=7).close()
    assert said
    assert all(message.startswith("exportkit cannot use its cache /proc/nowhere") for message, _ in said)
    assert {context for _, context in said} == {7}


# --- cases and weights ------------------------------------------------------------------------------------------------


def test_recorded_cases_are_read_run_and_replayed(c_library, c_model):
    for index in range(2):
        c_model.replay(index)
        c_library.call("synchronize", c_model.handle, None)
        inputs, outputs = c_model.read_case(index)
        for output, wanted in zip(c_model.run(*(tensor.view for tensor in inputs)), outputs, strict=True):
            torch.testing.assert_close(torch.from_dlpack(output), torch.from_dlpack(wanted))
    for call in (c_model.replay, c_model.read_case):
        with pytest.raises(Refused, match="index must be less than 2, the number of recorded cases; got 2") as caught:
            call(2)
        assert caught.value.code == 200


def test_a_case_that_differs_is_an_error_that_says_where_and_by_how_much(c_library, tmp_path):
    with c_library.open(rows.write(tmp_path / "wrong.pt2", rows.example(5), wrong=0.25)) as model:
        with pytest.raises(Refused) as caught:
            model.replay(0)
        assert (caught.value.code, caught.value.name) == (101, "WrongResultError")
        assert caught.value.message.startswith("case 0 differs from the eager model: sum: 15 of 15 elements differ (")
        assert "greatest difference 0.25" in caught.value.message
        assert "next" not in caught.value.message


# --- a process without torch ------------------------------------------------------------------------------------------

ALONE = """
import _ctypes, json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from tests.runtime import c_interface
model = c_interface.Library(sys.argv[2]).open(sys.argv[3])
inputs, outputs = model.read_case(0)
arrays = [np.from_dlpack(tensor) for tensor in inputs]
outcome = model.run(*map(c_interface.view, arrays))
model.close()
_ctypes.dlclose(model.library.raw._handle)  # does not take away what frees the tensors
pairs = zip(map(np.from_dlpack, outcome), map(np.from_dlpack, outputs), strict=True)
differences = [float(np.abs(one - other).max()) for one, other in pairs]
del arrays, outcome, outputs, pairs
print(json.dumps([differences, [name for name in ("torch", "exportkit") if name in sys.modules]]))
"""


def test_a_process_that_imports_no_torch_runs_a_package(c_library, tiny_package):
    environment = {"EXPORTKIT_CACHE": os.environ["EXPORTKIT_CACHE"]}
    said = output_of(sys.executable, "-I", "-c", ALONE, ROOT, library_path(), tiny_package, env=environment)
    differences, imported = json.loads(said)
    assert max(differences) < 1e-5
    assert imported == []

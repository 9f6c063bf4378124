"""A small manifest with two methods and state, and its records: `decode` appends to a cache, `forward` has no state."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from exportkit.package import manifest as m
from tests.package import samples

CODE = "data/aotinductor/decode.cpu_v3/model.wrapper.so"
SEQUENCE = "exportkit/cases/1.safetensors"

_ROW = struct.pack("<4f", *range(4))
INITIAL = f"exportkit/state/{hashlib.sha256(_ROW).hexdigest()}"


def sequence() -> dict[str, np.ndarray]:
    """The tensors of the recorded sequence: decode, forward, decode, with two rows."""
    rows, wide = np.ones((2, 4), np.float32), np.ones((2, 4), np.float64)
    decode = {"input.0": np.array([1, 2]), "input.1": np.zeros((2, 3), np.float16), "output.0": rows}
    decode |= {"written.1": np.ones((2, 3), np.float16), "reference.0": wide}
    decode["written_reference.1"] = np.ones((2, 3), np.float32)
    forward = {"input.0": np.ones((2, 3), np.float32), "output.0": np.ones((2, 7), np.float32)}
    calls = {f"{i}.{name}": value for i, call in enumerate((decode, forward, decode)) for name, value in call.items()}
    return calls | {
        "state.0": rows,
        "state.1": np.array(2),
        "state_reference.0": wide,
        "state_reference.1": np.array(2),
    }


RECORDS: Mapping[str, bytes] = {
    **samples.RECORDS,
    CODE: b"\x7fELF compiled code",
    INITIAL: _ROW,
    SEQUENCE: save(sequence()),
}


def manifest(**changes: Any) -> m.Manifest:
    """A manifest that is consistent with RECORDS, with some of its top-level keys changed."""
    plain = samples.manifest()
    error, rows = m.Accuracy(rms=1e-8, greatest=1e-7), {"batch": 2}
    decode = m.CaseCall(method="decode", sizes=rows, accuracy={"0": error, "written.scratch": error})
    sequence = m.Case(
        record=SEQUENCE,
        calls=(decode, m.CaseCall(method="forward", sizes=rows), decode),
        reference_dtype="float64",
        state_accuracy={"cache.keys": error, "step": None},
    )
    constants = {**plain.targets[0].constants, "decode": {}}
    whole = msgspec.structs.replace(
        plain,
        methods=(*plain.methods, decode_method()),
        state=state(),
        targets=(samples.target(constants=constants),),
        cases=(*plain.cases, sequence),
    )
    return msgspec.structs.replace(whole, **changes)


def state() -> tuple[m.StateTensor, ...]:
    """A cache with a row for each sample, and a counter that begins at zero."""
    shape, near = (samples.BATCH, 4), samples.NEAR
    cache = m.StateTensor(
        name="cache.keys", aliases=("cache.k",), dtype="float32", shape=shape, initial=INITIAL, tolerance=near
    )
    return cache, m.StateTensor(name="step", aliases=(), dtype="int64", shape=(), initial=None, tolerance=near)


def decode_method() -> m.PackagedMethod:
    """It takes a token and a tensor that it writes, and uses all state."""
    inputs = {"token": ("int64", (samples.BATCH,)), "scratch": ("float16", (samples.BATCH, 3))}
    output = ("float32", (samples.BATCH, 4))
    call = samples.tensors_call(inputs, output, tolerance=samples.NEAR, written=("scratch",), batch=(1, 64))
    uses = (m.StateUse(index=1, written=True), m.StateUse(index=0, written=True))
    return m.PackagedMethod(name="decode", call=call, state=uses)

"""Small manifests and records: what a package looks like, without compiling one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from exportkit.package import manifest as m

CODE = "data/aotinductor/cpu_v3/model.wrapper.so"
LIBRARY = "exportkit/ops/linux-x86_64/libtoy_cpu.so"
CASE = "exportkit/cases/0.safetensors"

_ELEMENTS = struct.pack("<6f", *range(6))
WEIGHT = f"data/weights/{hashlib.sha256(_ELEMENTS).hexdigest()}"

RECORDS: Mapping[str, bytes] = {
    CODE: b"\x7fELF compiled code",
    "data/aotinductor/cpu_v3/model.wrapper.cpp": b"",
    LIBRARY: b"\x7fELF operator library",
    WEIGHT: _ELEMENTS,
    CASE: b"safetensors" * 20,
}
SCHEMA = "toy::twice(Tensor x) -> Tensor"


Described = tuple[str, tuple[int | m.Size | None, ...]]  # a tensor: its dtype and its sizes
EXACT, NEAR = m.OutputTolerance(rtol=0.0, atol=0.0), m.OutputTolerance(rtol=1e-5, atol=1e-6)
BATCH = m.Size(dimension="batch")


def tensors_call(
    inputs: Mapping[str, Described],
    outputs: Mapping[str, Described] | list[Described] | Described,
    *,
    tolerance: m.OutputTolerance = EXACT,
    written: Collection[str] = (),
    **ranges: tuple[int, int],
) -> m.Call:
    """A call that takes tensors by position, and returns a dict, a list or one.

    What is floating has this tolerance, and inputs that are written have it too.
    """
    listed = [outputs] if isinstance(outputs, tuple) else outputs
    named = listed if isinstance(listed, Mapping) else {str(i): each for i, each in enumerate(listed)}
    items = tuple(m.TensorNode(index=i) for i in range(len(named)))
    result: m.Node = m.SequenceNode(kind="list", items=items)
    if outputs is not listed:
        result = items[0]
    elif named is outputs:
        result = m.MappingNode(keys=tuple(named), items=items)
    return m.Call(
        parameters=tuple(
            m.Parameter(name=name, kind="positional", value=m.TensorNode(index=i)) for i, name in enumerate(inputs)
        ),
        inputs=tuple(
            m.TensorInput(name=n, dtype=d, shape=shape, written=tolerance if n in written else None)
            for n, (d, shape) in inputs.items()
        ),
        result=result,
        outputs=tuple(
            m.TensorOutput(name=n, dtype=d, shape=shape, tolerance=tolerance if "float" in d else EXACT)
            for n, (d, shape) in named.items()
        ),
        dimensions=tuple(m.Dimension(name=name, min=least, max=most) for name, (least, most) in ranges.items()),
    )


def manifest(**changes: Any) -> m.Manifest:
    """A manifest that is consistent with RECORDS, with some of its top-level keys changed."""
    inputs, outputs = {"image": ("float32", (BATCH, 3))}, {"scores": ("float32", (BATCH, None))}
    call = tensors_call(inputs, outputs, tolerance=NEAR, batch=(1, 64))
    operator = m.Operator(name="toy::twice", schema=SCHEMA)
    library = m.Library(
        record=LIBRARY,
        sha256=hashlib.sha256(RECORDS[LIBRARY]).hexdigest(),
        platform="linux-x86_64",
        device="cpu",
        kernels=("cpu",),
        defines=(operator,),
        needs_torch="2.11",
        torch_bound=None,
        needs=("GLIBC_2.34",),
    )
    whole = bare_manifest(
        "toy",
        methods=(m.PackagedMethod(name="forward", call=call, state=()),),
        source=m.Source(model="toy:spec", model_kwargs={}, dtype=None, seed=0, state_sha256="0" * 64),
        targets=(target(),),
        weights=(weight(),),
        operators=(operator,),
        libraries=(library,),
        cases=(m.Case(record=CASE, calls=(m.CaseCall(method="forward", sizes={"batch": 2}),)),),
    )
    return msgspec.structs.replace(whole, **changes)


def bare_manifest(name: str, methods: tuple[m.PackagedMethod, ...], source: m.Source, **changes: Any) -> m.Manifest:
    """A manifest of a model without code, cases and operators, with some of its top-level keys changed."""
    plain = m.Manifest(
        format_version=m.FORMAT_VERSION,
        name=name,
        version="1",
        methods=methods,
        targets=(),
        program=None,
        operators=(),
        libraries=(),
        cases=(),
        source=source,
        provenance=m.Provenance(exportkit="0.1.0", torch="2.13.0", commit=None, dirty=None, tf32=False),
        records=(),
    )
    return msgspec.structs.replace(plain, **changes)


PROGRAM = "exportkit/program.pt2"


def program_manifest(built_with_torch: str = "2.13.0", **changes: Any) -> m.Manifest:
    """What describes a program, PROGRAM, and no compiled code."""
    program = m.Program(records={"forward": PROGRAM}, device="cpu", built_with_torch=built_with_torch)
    return manifest(targets=(), weights=(), libraries=(), operators=(), program=program, **changes)


SIDECAR_RECORDS: Mapping[str, bytes] = {CASE: RECORDS[CASE]}


def sidecar(**changes: Any) -> m.Manifest:
    """What stands beside an ONNX model, consistent with SIDECAR_RECORDS; with some keys of `onnx` changed."""
    function = m.OnnxFunction(operator="toy::twice", domain="toy", name="twice", overload="float32")
    data = m.OnnxData(name="model.onnx.data", size=2**40, sha256="1" * 64)
    onnx = m.Onnx(method="forward", size=1, sha256="0" * 64, data=data, opset=20, functions=(function,))
    described = msgspec.structs.replace(onnx, **changes)
    return manifest(targets=(), weights=(), libraries=(), onnx=(described,))


def target(**changes: Any) -> m.Target:
    """A CPU target, with some of its keys changed."""
    plain = m.Target(
        name="cpu_v3",
        device="cpu",
        platform="linux-x86_64",
        cpu_isa="x86-64-v3",
        cuda_architecture=None,
        cuda_ptx=False,
        needs_torch="2.11",
        built_with_torch="2.13.0",
        built_with_cuda=None,
        constants={"forward": {"head.weight": "head.weight"}},
    )
    return msgspec.structs.replace(plain, **changes)


def weight(**changes: Any) -> m.Weight:
    """A tied weight, with some of its keys changed."""
    plain = m.Weight(
        name="head.weight",
        aliases=("tied.weight",),
        state=True,
        dtype="float32",
        shape=(2, 3),
        strides=(3, 1),
        record=WEIGHT,
    )
    return msgspec.structs.replace(plain, **changes)

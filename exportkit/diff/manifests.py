"""Compares what two manifests say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from exportkit.diff.difference import Difference, Effect, both, fields, paired, plain
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import (
    Call,
    Dimension,
    Library,
    Manifest,
    Operator,
    OutputTolerance,
    Target,
    TensorInput,
    TensorOutput,
)
from exportkit.sizes import shape_text

_TARGET: Mapping[str, Effect | None] = {
    "device": "load",
    "platform": "load",
    "cpu_isa": "load",
    "cuda_architecture": "load",
    "cuda_ptx": "load",
    "needs_torch": "load",
    "built_with_torch": None,
    "built_with_cuda": None,
}
_LIBRARY: Mapping[str, Effect | None] = {
    "sha256": "answer",  # another build may compute something else
    "device": "load",
    "kernels": "load",
    "needs_torch": "load",
    "torch_bound": "load",
    "needs": "load",
}


def identity(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares name, version and format."""
    yield from fields("package", "", a, b, {"name": None, "version": None, "format_version": "load"})


def call(a: Call, b: Call) -> Iterator[Difference]:
    """Compares how the models are called and what they return."""
    yield from _tensors("input", {t.name: t for t in a.inputs}, {t.name: t for t in b.inputs})
    yield from _tensors("output", {t.name: t for t in a.outputs}, {t.name: t for t in b.outputs})
    for kind in ("inputs", "outputs"):
        here, there = ([tensor.name for tensor in getattr(side, kind)] for side in (a, b))
        if here != there and sorted(here) == sorted(there):
            yield Difference("call", f"order of {kind}", ", ".join(here), ", ".join(there), "answer")
    ranges = both(lambda side: {dimension.name: dimension for dimension in side.dimensions}, a, b)
    for found in paired("call", "dimension", *ranges, "answer", _range_text):
        if isinstance(found, Difference):
            yield found
        elif found[1] != found[2]:
            yield Difference("call", f"dimension {found[0]}", _range_text(found[1]), _range_text(found[2]), "answer")
    parameters = both(lambda side: {parameter.name: parameter for parameter in side.parameters}, a, b)
    for given in paired("call", "parameter", *parameters, "answer", plain):
        if isinstance(given, Difference):
            yield given
        else:
            name, one, other = given
            yield from fields("call", f"parameter {name}", one, other, {"kind": "answer", "value": "answer"})
    yield from fields("call", "", a, b, {"result": "answer"})


def _tensors(
    kind: str, a: Mapping[str, TensorInput | TensorOutput], b: Mapping[str, TensorInput | TensorOutput]
) -> Iterator[Difference]:
    for found in paired("call", kind, a, b, "answer", _tensor_text):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        if _tensor_text(one) != _tensor_text(other):
            yield Difference("call", f"{kind} {name}", _tensor_text(one), _tensor_text(other), "answer")
        if isinstance(one, TensorOutput) and isinstance(other, TensorOutput) and one.tolerance != other.tolerance:
            # It decides about a verification, not about an answer.
            yield Difference("call", f"{kind} {name}: tolerance", *both(_tolerance, one.tolerance, other.tolerance))


def _tensor_text(tensor: TensorInput | TensorOutput) -> str:
    return f"{tensor.dtype}{shape_text(tensor.shape)}"


def _range_text(dimension: Dimension) -> str:
    return f"{dimension.min}..{dimension.max}"


def _tolerance(tolerance: OutputTolerance) -> str:
    return ", ".join(f"{name} {plain(getattr(tolerance, name))}" for name in tolerance.__struct_fields__)


def operators(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the operators that the graphs call."""
    yield from _operators("operators", "", a.operators, b.operators)


def _operators(part: str, what: str, a: tuple[Operator, ...], b: tuple[Operator, ...]) -> Iterator[Difference]:
    schemas = both(lambda side: {operator.name: operator.schema for operator in side}, a, b)
    for found in paired(part, what, *schemas, "load"):
        if isinstance(found, Difference):
            yield found
        elif found[1] != found[2]:
            yield Difference(part, f"{what} {found[0]}".strip(), found[1], found[2], "load")


def targets(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the compiled targets: what they need, the weights that they read, and their files."""
    by_name = both(lambda side: {target.name: target for target in side.targets}, a, b)
    for found in paired("targets", "", *by_name, "load", _target_text):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        yield from fields("targets", name, one, other, _TARGET)
        for constant in paired("targets", f"{name}: constant", one.constants, other.constants, "answer"):
            if isinstance(constant, Difference):
                yield constant
            elif _unhashed(constant[1]) != _unhashed(constant[2]):
                yield Difference("targets", f"{name}: constant {constant[0]}", constant[1], constant[2], "answer")
        files = _digests(a, f"{AOTINDUCTOR_DIR}/{name}/"), _digests(b, f"{AOTINDUCTOR_DIR}/{name}/")
        for file in paired("targets", f"{name}: file", *files, "answer"):
            if isinstance(file, Difference):
                yield file
            elif file[1] != file[2]:
                yield Difference("targets", f"{name}: {file[0]}", file[1], file[2], "answer", "the compiled code")


def _target_text(target: Target) -> str:
    level = target.cuda_architecture or target.cpu_isa
    return f"{target.device}{f' {level}' if level else ''}, {target.platform}, torch {target.needs_torch} or newer"


def _unhashed(weight: str) -> str:
    """Returns a weight's name without the digest that a constant's has. The weights are compared by themselves."""
    return weight.partition("@")[0]


def _digests(manifest: Manifest, folder: str) -> dict[str, str]:
    return {r.name.removeprefix(folder): r.sha256 for r in manifest.records if r.name.startswith(folder)}


def library(record: str, a: Library, b: Library) -> Iterator[Difference]:
    """Compares two operator libraries of the same name and platform."""
    yield from fields("libraries", record, a, b, _LIBRARY)
    yield from _operators("libraries", f"{record}: defines", a.defines, b.defines)


def origin(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares where the artifacts come from. None of it changes an answer."""
    for part, one, other in (("source", a.source, b.source), ("provenance", a.provenance, b.provenance)):
        yield from fields(part, "", one, other, dict.fromkeys(one.__struct_fields__))

"""Compares what two manifests say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from exportkit.diff.difference import Difference, Effect, both, entries, fields, paired, plain
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import (
    Call,
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
    yield from entries("call", "dimension", *ranges, "answer", lambda each: f"{each.min}..{each.max}")
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
    yield from entries("call", kind, a, b, "answer", lambda tensor: f"{tensor.dtype}{shape_text(tensor.shape)}")
    for name, one in a.items():
        other = b.get(name)
        if isinstance(one, TensorOutput) and isinstance(other, TensorOutput) and one.tolerance != other.tolerance:
            # It decides about a verification, not about an answer.
            yield Difference("call", f"{kind} {name}: tolerance", *both(_tolerance, one.tolerance, other.tolerance))


def _tolerance(tolerance: OutputTolerance) -> str:
    return ", ".join(f"{name} {plain(getattr(tolerance, name))}" for name in tolerance.__struct_fields__)


def operators(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the operators that the graphs call."""
    yield from _operators("operators", "", a.operators, b.operators)


def _operators(part: str, what: str, a: tuple[Operator, ...], b: tuple[Operator, ...]) -> Iterator[Difference]:
    schemas = both(lambda side: {operator.name: operator.schema for operator in side}, a, b)
    yield from entries(part, what, *schemas, "load")


def targets(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the compiled targets: what they need, the weights that they read, and their files."""
    by_name = both(lambda side: {target.name: target for target in side.targets}, a, b)
    for found in paired("targets", "", *by_name, "load", _target_text):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        yield from fields("targets", name, one, other, _TARGET)
        yield from entries("targets", f"{name}: constant", one.constants, other.constants, "answer", _unhashed)
        files = _digests(a, f"{AOTINDUCTOR_DIR}/{name}/"), _digests(b, f"{AOTINDUCTOR_DIR}/{name}/")
        yield from entries("targets", f"{name}: file", *files, "answer", note="the compiled code")


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

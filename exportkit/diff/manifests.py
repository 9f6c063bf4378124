"""Compares what two manifests say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec

from exportkit.diff.difference import Difference, Effect, both, entries, fields, paired, plain
from exportkit.package.case_files import results_of
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import (
    Call,
    Library,
    Manifest,
    Operator,
    OutputTolerance,
    PackagedMethod,
    Target,
    TensorInput,
    TensorOutput,
    code_folder,
)
from exportkit.sizes import shape_text
from exportkit.spec import FORWARD

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


def methods(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the methods by name: how they are called, what they return, and which state they use."""
    by_name = both(lambda side: {method.name: method for method in side.methods}, a, b)
    for found in paired("call", "method", *by_name, "answer", lambda method: _signature(method.call)):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        prefix = "" if name == FORWARD else f"{name}: "
        for difference in _call(one.call, other.call):
            yield dataclasses.replace(difference, what=f"{prefix}{difference.what}")
        yield from entries("call", f"{prefix}state", _uses(one, a), _uses(other, b), "answer")


def _call(a: Call, b: Call) -> Iterator[Difference]:
    """Compares how two methods are called and what they return."""
    yield from _tensors("input", {t.name: t for t in a.inputs}, {t.name: t for t in b.inputs})
    yield from _tensors("output", {t.name: t for t in results_of(a)}, {t.name: t for t in results_of(b)})
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


def _signature(call: Call) -> str:
    given = ", ".join(f"{each.name}: {each.dtype}{shape_text(each.shape)}" for each in call.inputs)
    return f"({given}) -> {', '.join(each.name for each in call.outputs) or 'nothing'}"


def _uses(method: PackagedMethod, manifest: Manifest) -> dict[str, str]:
    """Returns by state tensor what a method does with it. The code takes them in this order."""
    return {manifest.state[use.index].name: "written" if use.written else "read" for use in method.state}


def state(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the tensors that a session remembers, by name. Their first values are compared as tensors."""
    by_name = both(lambda side: {each.name: each for each in side.state}, a, b)
    for found in paired("state", "", *by_name, "answer", lambda each: f"{each.dtype}{shape_text(each.shape)}"):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        types = both(lambda each: f"{each.dtype}{shape_text(each.shape)}", one, other)
        if types[0] != types[1]:
            yield Difference("state", name, *types, "answer")
        yield from fields("state", name, one, other, {"aliases": None})
        if one.tolerance != other.tolerance:
            yield Difference("state", f"{name}: tolerance", *both(_tolerance, one.tolerance, other.tolerance))


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
    return ", ".join(f"{name} {plain(value)}" for name, value in msgspec.to_builtins(tolerance).items())


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
        here, there = ([method.name for method in side.methods] for side in (a, b))
        for method in [each for each in here if each in there]:
            code = code_folder(name, method)
            constants = one.constants.get(method, {}), other.constants.get(method, {})
            yield from entries("targets", f"{code}: constant", *constants, "answer", _unhashed)
            files = _digests(a, f"{AOTINDUCTOR_DIR}/{code}/"), _digests(b, f"{AOTINDUCTOR_DIR}/{code}/")
            yield from entries("targets", f"{code}: file", *files, "answer", note="the compiled code")


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

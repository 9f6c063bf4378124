"""Puts compiled artifacts and operator libraries into one package."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from exportkit.errors import ManifestSyntaxError, MergeError, MissingLibraryError, SchemaChangedError, UsageError
from exportkit.package import core
from exportkit.package.archive import Content, PackageReader, StoredRecord, write_package
from exportkit.package.attestations import add_attestations
from exportkit.package.consistency import libraries_for, loading_order, may_serve, missing_operators, operators_of
from exportkit.package.cuda_code import arch_list
from exportkit.package.manifest import (
    Call,
    Library,
    Manifest,
    Operator,
    PackagedMethod,
    Parameter,
    Target,
    TensorInput,
    TensorOutput,
    Weight,
    check,
    encode_manifest,
)
from exportkit.package.operators_gpus import OperatorsFit, namespaces, operators_fits


def assemble(
    artifacts: Sequence[Path],
    libraries: Sequence[tuple[Path, Library]],
    out: Path,
    *,
    name: str | None = None,
    version: str | None = None,
    attestations: Sequence[Path] = (),
    demand: core.Demand | None = None,
) -> Manifest:
    """Merges compiled artifacts of one model, adds operator libraries, and writes the package.

    The same inputs give the same bytes. The methods, the state, the cases (eager's outputs on one device), the source
    and the provenance come from the first artifact. The others add their targets, and a program if the first has none.

    Args:
        artifacts: Artifacts from `exportkit export`, or packages. Each has one or several targets.
        libraries: Library files, each with its description by `describe_with_needed`. The artifacts' own libraries
            are kept.
        out: The package to write.
        name: The package's name. Default: the first artifact's.
        version: The model's version. Default: the first artifact's.
        attestations: In-toto statements about the libraries.
        demand: The required signatures of each artifact, as for `PackageReader`.

    Returns:
        The new manifest.

    Raises:
        UsageError: The name is invalid, no artifact was given, or a statement is about no library of the package.
        MergeError: The artifacts differ in model, methods or state, or contain two builds of one target or library.
        SchemaChangedError: A library defines an operator with another schema than in the traced graph.
        MissingLibraryError: No library has an operator, or its kernel, that a target needs, or code for its GPU.
        PackageError: An artifact breaks a rule of the format or lacks a required signature.
    """
    if not artifacts:
        raise UsageError("no artifact was given", hint="`exportkit export` writes one.")
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(PackageReader(artifact, demand=demand)) for artifact in artifacts]
        for other in parts[1:]:
            _check_same_model(parts[0], other)
        records = _merge_records(parts)
        merged = _merge_manifests(parts, name, version)
        merged = add_libraries(merged, libraries, records)
        check_libraries(merged, records)
        merged = add_attestations(merged, attestations, records)
        return write_package(out, merged, records)


# --- merging ----------------------------------------------------------------------------------------------------------


def _check_same_model(first: PackageReader, other: PackageReader) -> None:
    both = f"{first.path.name} and {other.path.name}"
    _check_same_methods(both, first.manifest.methods, other.manifest.methods)
    mine, its = first.manifest.state, other.manifest.state
    if mine != its:
        difference = next(
            (f"{_json(a)} and {_json(b)}" for a, b in zip(mine, its) if a != b), f"{len(mine)} and {len(its)} tensors"
        )
        raise MergeError(
            f"{both} have different state: {difference}",
            hint="The targets of a package share their state. Export them from the same model with the same --state.",
        )
    ours, theirs = first.manifest.source, other.manifest.source
    if ours.state_sha256 != theirs.state_sha256:
        raise MergeError(
            f"{both} were exported with different weights: sha256 {ours.state_sha256} and {theirs.state_sha256}",
            hint="The targets of a package share their weights. Export them with the same weights.",
        )


def _check_same_methods(both: str, ours: Sequence[PackagedMethod], theirs: Sequence[PackagedMethod]) -> None:
    hint = "The targets of a package share their methods. Export them with the same methods, inputs, ranges and dtype."
    names, others = ([method.name for method in methods] for methods in (ours, theirs))
    if names != others:
        raise MergeError(f"{both} have different methods: {', '.join(names)} and {', '.join(others)}", hint=hint)
    for mine, its in zip(ours, theirs):
        if difference := _difference(mine.call, its.call):
            raise MergeError(f"{both} take different calls of {mine.name}: {difference}", hint=hint)
        if mine.state != its.state:
            difference = f"{_json(mine.state)} and {_json(its.state)}"
            raise MergeError(f"{both} use different state in {mine.name}: {difference}", hint=hint)


def _difference(ours: Call, theirs: Call) -> str | None:
    """Describes the first difference of two calls."""
    for key in Call.__struct_fields__:
        mine, other = getattr(ours, key), getattr(theirs, key)
        if mine == other:
            continue
        if isinstance(mine, tuple):
            if len(mine) != len(other):
                return f"{len(mine)} and {len(other)} {key}"
            mine, other = next((a, b) for a, b in zip(mine, other) if a != b)
        told = _json if _text(mine) == _text(other) else _text
        return f"{key}: {told(mine)} and {told(other)}"
    return None


def _text(part: object) -> str:
    if isinstance(part, (TensorInput, TensorOutput)):
        sizes = ", ".join("?" if size is None else str(size) for size in part.shape)
        return f"{part.name} {part.dtype}[{sizes}]"
    return part.name if isinstance(part, Parameter) else _json(part)


def _json(value: object) -> str:
    return ascii(msgspec.json.encode(value).decode())[1:-1]


def _merge_records(parts: Sequence[PackageReader]) -> dict[str, Content]:
    """Merges the records of all parts. Cases come from the first part that has some."""
    with_cases = next((part for part in parts if part.manifest.cases), None)
    found: dict[str, PackageReader] = {}
    for part in parts:
        cases = {case.record for case in part.manifest.cases}
        for name in part.names:
            if name in cases and part is not with_cases:
                continue
            other = found.setdefault(name, part)
            if other.record(name).sha256 != part.record(name).sha256:
                raise MergeError(
                    f"{other.path.name} and {part.path.name} have different records with the name {name}",
                    hint="A package holds one build of a target, program or library. Leave one artifact out.",
                )
    return {name: StoredRecord(part, name) for name, part in found.items()}


def _merge_manifests(parts: Sequence[PackageReader], name: str | None, version: str | None) -> Manifest:
    manifests = [part.manifest for part in parts]
    targets: dict[str, Target] = {}
    libraries: dict[str, Library] = {}
    operators: dict[str, Operator] = {}
    for manifest in manifests:
        for target in manifest.targets:
            if targets.setdefault(target.name, target) != target:
                raise MergeError(f"two artifacts have different targets with the name {target.name}")
        for library in manifest.libraries:
            # Two hosts may have described the same file; the first description counts.
            libraries.setdefault(library.record, library)
        for operator in manifest.operators:
            if (other := operators.setdefault(operator.name, operator)) != operator:
                raise SchemaChangedError(
                    f"the artifacts were traced with different schemas of {operator.name}: {other.schema!r} and "
                    f"{operator.schema!r}",
                    hint="Export them again with the same build of the operator library.",
                )
    return msgspec.structs.replace(
        manifests[0],
        name=manifests[0].name if name is None else _checked_name(manifests[0], name),
        version=manifests[0].version if version is None else version,
        targets=tuple(targets.values()),
        weights=_merge_weights(parts),
        program=next((manifest.program for manifest in manifests if manifest.program), None),
        operators=tuple(operators[key] for key in sorted(operators)),
        libraries=tuple(libraries.values()),
        cases=next((manifest.cases for manifest in manifests if manifest.cases), ()),
    )


def _merge_weights(parts: Sequence[PackageReader]) -> tuple[Weight, ...]:
    """Merges the weights of all parts. A part with its weights inside the code has none to merge."""
    found: dict[str, tuple[Weight, PackageReader]] = {}
    for part in parts:
        for weight in part.manifest.weights:
            other, brought_by = found.setdefault(weight.name, (weight, part))
            if other.record is None:  # no earlier part's code reads it
                found[weight.name] = other, brought_by = msgspec.structs.replace(other, record=weight.record), part
            if other != msgspec.structs.replace(weight, record=weight.record or other.record):
                raise MergeError(
                    f"{brought_by.path.name} and {part.path.name} have different weights named {weight.name!r}: "
                    f"{_json(other)} and {_json(weight)}",
                    hint="The targets of a package share their weights. Export them from the same model.",
                )
    return tuple(weight for weight, _ in found.values())


def _checked_name(manifest: Manifest, name: str) -> str:
    try:
        check(encode_manifest(msgspec.structs.replace(manifest, name=name)))
    except ManifestSyntaxError as error:
        raise UsageError(
            f"invalid package name {name!r}: use at most 128 letters, digits and _.-, starting with a letter or digit"
        ) from error
    return name


def add_libraries(manifest: Manifest, given: Sequence[tuple[Path, Library]], records: dict[str, Content]) -> Manifest:
    """Adds libraries to the manifest and their files to `records`.

    Args:
        manifest: The manifest.
        given: Library files, each with its description by `describe_with_needed`.
        records: The package's records, which are changed.

    Raises:
        MergeError: Two builds of a library are given.
    """
    libraries = {library.record: library for library in manifest.libraries}
    # A library that others need may have been described twice, and then CPU targets need it, too.
    for path, library in sorted(given, key=lambda item: item[1].device != "cpu"):
        other = libraries.setdefault(library.record, library)
        if other.sha256 != library.sha256:
            raise MergeError(
                f"two libraries have the name {library.record}: sha256 {other.sha256} and {library.sha256}, the "
                f"second from {path}",
                hint="A package has one build of a library per platform. Give only one, built for all GPUs "
                "(TORCH_CUDA_ARCH_LIST), or rename one.",
            )
        records.setdefault(library.record, path)
    return msgspec.structs.replace(manifest, libraries=loading_order(libraries.values()))


# --- required contents ------------------------------------------------------------------------------------------------


def check_libraries(manifest: Manifest, records: Mapping[str, Content]) -> None:
    """Checks that the libraries of a package have every operator that its targets need, as it was traced.

    Raises:
        SchemaChangedError: A library defines an operator with another schema than in the traced graph.
        MissingLibraryError: No library has an operator, or its kernel, that a target needs, or code for its GPU.
    """
    _check_schemas(manifest)
    code = {library.record: _bytes(records[library.record]) for library in manifest.libraries}
    for target in manifest.targets:
        _check_definitions(manifest, target)
        _check_kernels(manifest, target)
    for fit in operators_fits(manifest, code.__getitem__):
        _check_gpu(fit)


def _check_schemas(manifest: Manifest) -> None:
    traced = {operator.name: operator.schema for operator in manifest.operators}
    for library in manifest.libraries:
        for operator in library.defines:
            if traced.get(operator.name, operator.schema) != operator.schema:
                raise SchemaChangedError(
                    f"{library.record} defines {operator.schema!r}; the model was traced with "
                    f"{traced[operator.name]!r}",
                    hint="Export the model again with this library, or give the library of the export.",
                )


def _check_definitions(manifest: Manifest, target: Target) -> None:
    """Checks that the target's libraries have every operator of the graph."""
    for operator in missing_operators(manifest, target):
        elsewhere = [library.record for library in manifest.libraries if operator.name in operators_of(library)]
        reason = f"; {elsewhere[0]} has it for another platform" if elsewhere else ""
        raise MissingLibraryError(
            f"no library for target {target.name} ({target.platform}, {target.device}) has the operator "
            f"{operator.name}{reason}",
            hint="Name the library that has it, or the Python module that loads it: --op-library <path or module>. "
            f"Or name the model whose module loads it: --model net.py:Net. The schema is {operator.schema!r}",
        )


def _check_kernels(manifest: Manifest, target: Target) -> None:
    """Checks that every namespace of the graph has a library with kernels for the target's device."""
    for namespace in namespaces(manifest):
        libraries = [library for library in libraries_for(manifest, target) if may_serve(library, namespace)]
        if not any({target.device, "any"} & {*library.kernels} for library in libraries):
            had = ", ".join(f"{library.record} ({', '.join(library.kernels)})" for library in libraries)
            raise MissingLibraryError(
                f"target {target.name} runs on {target.device}, but no library has {target.device} kernels for the "
                f"operators {namespace}::*{had and f'; the libraries have: {had}'}",
                hint=f"Give the library with the {target.device} kernels as well: --op-library <path>",
            )


def _check_gpu(fit: OperatorsFit) -> None:
    """Checks that the driver of the target's GPU runs the operators' kernels."""
    if fit.degree != "no":
        return
    name = str(fit.target.cuda_architecture)
    number = name.removeprefix("sm_").rstrip("af")
    files = ", ".join(PurePosixPath(library.record).name for library in fit.libraries)
    raise MissingLibraryError(
        f"target {fit.target.name} is for {name}, but the operators {fit.namespace}::* have code for {fit.code} "
        f"({files}), which that GPU does not run",
        hint=f"Build them for sm_{number}, too: with TORCH_CUDA_ARCH_LIST="
        f'"{arch_list((*fit.code.machine, f"sm_{number}"))}" for torch\'s CUDAExtension, or '
        f"-gencode=arch=compute_{number},code=sm_{number} for nvcc. Or leave the target out.",
    )


def _bytes(content: Content) -> bytes:
    if isinstance(content, StoredRecord):
        return content.reader.read(content.name)
    return content.read_bytes() if isinstance(content, Path) else bytes(content)

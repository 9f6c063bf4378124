"""Puts compiled artifacts and operator libraries into one package."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from exportkit.errors import ManifestSyntaxError, MergeError, MissingLibraryError, SchemaChangedError, UsageError
from exportkit.package import core
from exportkit.package.archive import Content, PackageReader, StoredRecord, write_package
from exportkit.package.consistency import libraries_for, missing_operators
from exportkit.package.manifest import Call, Library, Manifest, Operator, Target, Weight, check, encode_manifest


def assemble(
    artifacts: Sequence[Path],
    libraries: Sequence[tuple[Path, Library]],
    out: Path,
    *,
    name: str | None = None,
    version: str | None = None,
    demand: core.Demand | None = None,
) -> Manifest:
    """Merges compiled artifacts of one model, adds operator libraries, and writes the package.

    The same inputs give the same bytes. The call, the cases (eager's answers on one device), the source and the
    provenance are the first artifact's; the others add their targets, and a program if the first has none.

    Args:
        artifacts: What `exportkit export` wrote, or packages, one or several targets each.
        libraries: Files with what `describe_library` said of them. Those that the artifacts bring are kept.
        out: The package to write.
        name: Of the package; the first artifact's by default.
        version: Of the model; the first artifact's by default.
        demand: Whose signature each artifact must have, as `PackageReader` takes it.

    Returns:
        The manifest as written.

    Raises:
        UsageError: The name is no name, or there is no artifact.
        MergeError: The artifacts are not of one model with one call, or bring two builds of one target or library.
        SchemaChangedError: A library defines an operator with another schema than the graph was traced with.
        MissingLibraryError: A target needs an operator, or its kernel, that no library has.
        PackageError: An artifact breaks a rule of the format, or is not signed as was asked for.
    """
    if not artifacts:
        raise UsageError("no artifact was given", hint="`exportkit export` writes one.")
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(PackageReader(artifact, demand=demand)) for artifact in artifacts]
        for other in parts[1:]:
            _check_same_model(parts[0], other)
        records = _merge_records(parts)
        merged = _merge_manifests(parts, name, version)
        merged = _add_libraries(merged, libraries, records)
        _check_schemas(merged)
        code = {library.record: _bytes(records[library.record]) for library in merged.libraries}
        for target in merged.targets:
            _check_definitions(merged, target)
            _check_kernels(merged, target, code)
        return write_package(out, merged, records)


# --- merging ----------------------------------------------------------------------------------------------------------


def _check_same_model(first: PackageReader, other: PackageReader) -> None:
    both = f"{first.path.name} and {other.path.name}"
    if difference := _difference(first.manifest.call, other.manifest.call):
        raise MergeError(
            f"{both} are called in different ways: {difference}",
            hint="The targets of one package share one call; export them with the same inputs, ranges and dtype.",
        )
    ours, theirs = first.manifest.source, other.manifest.source
    if ours.state_sha256 != theirs.state_sha256:
        raise MergeError(
            f"{both} were exported with different weights: sha256 {ours.state_sha256} and {theirs.state_sha256}",
            hint="The targets of one package must give one answer; export them from the same weights.",
        )


def _difference(ours: Call, theirs: Call) -> str | None:
    """The first part of two calls that differs, in words."""
    for key in Call.__struct_fields__:
        mine, other = getattr(ours, key), getattr(theirs, key)
        if mine == other:
            continue
        if isinstance(mine, tuple):
            if len(mine) != len(other):
                return f"{len(mine)} and {len(other)} {key}"
            mine, other = next((a, b) for a, b in zip(mine, other) if a != b)
        return f"{key}: {_json(mine)} and {_json(other)}"
    return None


def _json(value: object) -> str:
    return ascii(msgspec.json.encode(value).decode())[1:-1]


def _merge_records(parts: Sequence[PackageReader]) -> dict[str, Content]:
    """Every part's records but the cases, which are the first part's that has any."""
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
                    f"{other.path.name} and {part.path.name} have different records of the name {name}",
                    hint="Two builds of one target, program or library cannot share a package; leave one artifact out.",
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
                raise MergeError(f"two artifacts have different targets of the name {target.name}")
        for library in manifest.libraries:
            # Two hosts may have described one file; what the first says of it holds.
            libraries.setdefault(library.record, library)
        for operator in manifest.operators:
            if (other := operators.setdefault(operator.name, operator)) != operator:
                raise SchemaChangedError(
                    f"the artifacts were traced with two schemas of {operator.name}: {other.schema!r} and "
                    f"{operator.schema!r}",
                    hint="Export them again with one build of the operator library.",
                )
    return msgspec.structs.replace(
        manifests[0],
        name=manifests[0].name if name is None else _checked_name(manifests[0], name),
        version=manifests[0].version if version is None else version,
        targets=tuple(targets.values()),
        weights=_merge_weights(parts),
        program=next((manifest.program for manifest in manifests if manifest.program), None),
        operators=tuple(operators[key] for key in sorted(operators)),
        libraries=tuple(libraries[key] for key in sorted(libraries)),
        cases=next((manifest.cases for manifest in manifests if manifest.cases), ()),
    )


def _merge_weights(parts: Sequence[PackageReader]) -> tuple[Weight, ...]:
    """Every part's weights, each once. A part whose code has its weights inside brings none."""
    found: dict[str, tuple[Weight, PackageReader]] = {}
    for part in parts:
        for weight in part.manifest.weights:
            other, brought_by = found.setdefault(weight.name, (weight, part))
            if other.record is None:  # no code of the parts before reads it
                found[weight.name] = other, brought_by = msgspec.structs.replace(other, record=weight.record), part
            if other != msgspec.structs.replace(weight, record=weight.record or other.record):
                raise MergeError(
                    f"{brought_by.path.name} and {part.path.name} have different weights of the name {weight.name!r}: "
                    f"{_json(other)} and {_json(weight)}",
                    hint="The targets of one package share their weights; export them from the same model.",
                )
    return tuple(weight for weight, _ in found.values())


def _checked_name(manifest: Manifest, name: str) -> str:
    try:
        check(encode_manifest(msgspec.structs.replace(manifest, name=name)))
    except ManifestSyntaxError as error:
        raise UsageError(
            f"{name!r} is no name for a package: at most 128 letters, digits and _.-, starting with a letter or digit"
        ) from error
    return name


def _add_libraries(manifest: Manifest, given: Sequence[tuple[Path, Library]], records: dict[str, Content]) -> Manifest:
    """The manifest with the given libraries beside its own; their files go into `records`."""
    libraries = {library.record: library for library in manifest.libraries}
    for path, library in given:
        other = libraries.setdefault(library.record, library)
        if other.sha256 != library.sha256:
            raise MergeError(
                f"two libraries would have the name {library.record}: sha256 {other.sha256} and {library.sha256}, the "
                f"second from {path}",
                hint="A package has one build of a library for each platform; give one, or rename one.",
            )
        records.setdefault(library.record, path)
    return msgspec.structs.replace(manifest, libraries=tuple(libraries[key] for key in sorted(libraries)))


# --- what a package must have -----------------------------------------------------------------------------------------


def _check_schemas(manifest: Manifest) -> None:
    traced = {operator.name: operator.schema for operator in manifest.operators}
    for library in manifest.libraries:
        for operator in library.defines:
            if traced.get(operator.name, operator.schema) != operator.schema:
                raise SchemaChangedError(
                    f"{library.record} defines {operator.schema!r}; the model was traced with "
                    f"{traced[operator.name]!r}",
                    hint="Export the model again with this library, or give the library it was traced with.",
                )


def _check_definitions(manifest: Manifest, target: Target) -> None:
    """Every operator of the graph is defined by a library that the target loads."""
    for operator in missing_operators(manifest, target):
        elsewhere = [lib.record for lib in manifest.libraries if any(op.name == operator.name for op in lib.defines)]
        reason = f"; {elsewhere[0]} does, for another platform or device" if elsewhere else ""
        raise MissingLibraryError(
            f"no library for target {target.name} ({target.platform}, {target.device}) defines the operator "
            f"{operator.name}{reason}",
            hint=f"Give the library that defines it: --op-library <path>. Its schema is {operator.schema!r}",
        )


def _check_kernels(manifest: Manifest, target: Target, code: Mapping[str, bytes]) -> None:
    """Every namespace of the graph has a library whose kernels run where the target does.

    A library that only adds kernels does not tell which operators they are of, but the namespace is a string in it,
    alone or before an operator's name.
    """
    for namespace in sorted({operator.name.partition("::")[0] for operator in manifest.operators}):
        mention = re.compile(namespace.encode() + b"(\0|::)")
        libraries = [library for library in libraries_for(manifest, target) if mention.search(code[library.record])]
        if not any({target.device, "any"} & {*library.kernels} for library in libraries):
            had = ", ".join(f"{library.record} ({', '.join(library.kernels)})" for library in libraries)
            raise MissingLibraryError(
                f"target {target.name} runs on {target.device}, and no library has {target.device} kernels for the "
                f"operators {namespace}::*; the package would have: {had}",
                hint=f"Give the library with the {target.device} kernels as well: --op-library <path>",
            )


def _bytes(content: Content) -> bytes:
    if isinstance(content, StoredRecord):
        return content.reader.read(content.name)
    return content.read_bytes() if isinstance(content, Path) else bytes(content)

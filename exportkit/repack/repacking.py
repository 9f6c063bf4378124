"""Replaces parts of a package and verifies it again before it gets its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from exportkit.errors import UsageError
from exportkit.export.models.find_libraries import library_files
from exportkit.onnx.files import named_model, refuse_sidecar
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import STOCK_RECORDS, Content, PackageReader, StoredRecord, write_package
from exportkit.package.assemble import add_libraries, check_libraries
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.case_files import edge_case_of
from exportkit.package.consistency import AOTINDUCTOR_DIR, is_complete, libraries_for, missing_operators
from exportkit.package.describe_library import describe_with_needed
from exportkit.package.keys import PrivateKey
from exportkit.package.manifest import Case, Library, Manifest, code_folder
from exportkit.package.signing import signature_path
from exportkit.package.trust import Trust
from exportkit.packaging import PackOptions, verify_and_rename
from exportkit.progress import Progress, silent
from exportkit.reference_model import ReferenceModel, unnamed
from exportkit.repack.recording import record_again
from exportkit.verify.options import Against
from exportkit.verify.report import Report


@dataclass(frozen=True)
class Changes:
    """What a repacking replaces.

    Attributes:
        weights: A safetensors file with the whole state of another fine-tune.
        op_libraries: Operator libraries, or modules whose import loads some. Each replaces the libraries that have its
            name or define one of its operators; if there is none, it is added.
        name: The package's new name.
        version: The model's new version.
        drop_targets: The names of targets to leave out.
    """

    weights: Path | None = None
    op_libraries: Sequence[Path | str] = ()
    name: str | None = None
    version: str | None = None
    drop_targets: Sequence[str] = ()


@dataclass(frozen=True)
class Repacked:
    """The result of a repacking.

    Attributes:
        manifest: The new package's manifest.
        report: The verification's report; None if it was skipped. The package was written if it passed.
        done: What was replaced, added, left out and recorded again, a line for each.
    """

    manifest: Manifest
    report: Report | None
    done: tuple[str, ...]


def is_package(artifact: Path, trust: Trust) -> bool:
    """Whether a file has operator libraries, and so is more than compiled code."""
    with PackageReader(artifact, demand=trust.demand()) as reader:
        return bool(reader.manifest.libraries)


def repack(
    package: Path,
    output: Path,
    changes: Changes,
    options: PackOptions = PackOptions(),
    *,
    progress: Progress = silent,
) -> Repacked:
    """Replaces parts of a package. `output` is written only if the new package passes its verification.

    All other records stay byte for byte. With other weights the recorded answers cannot hold. They are recorded again
    with the recorded inputs: by the eager model if one may be imported, else by the package's ExportedProgram.
    Signatures are not taken over. The package is signed last, after it passed.

    Args:
        package: A package or an artifact.
        output: The file to write. It may be `package`, which then stays as it is until the new one is complete.
        changes: What to replace.
        options: How the new package is verified and signed. The eager model gets the weights and libraries of
            `changes`.
        progress: Called with each step before it starts.

    Raises:
        UsageError: There is nothing to change, a target does not exist, the weights do not fit, nothing can record
            cases for them, or a signature of another package would stand beside `output`.
        PackageError: The package is bad or lacks a required signature, or its libraries would not fit its targets.
        ExportError: The model that records cases fails.
    """
    if changes == Changes():
        raise UsageError(
            "there is nothing to change",
            hint="Give --weights, --op-library, --name, --model-version or --drop-target. `exportkit sign` only signs.",
        )
    if named_model(package) is not None:
        raise UsageError(f"{package.name} is an ONNX model, which is not a package", hint="Export it again instead.")
    check_writable(output, package.stat().st_size)
    _refuse_old_signatures(output, options.sign_key)
    trust = options.verification.trust
    eager = ReferenceModel(options.verification.eager.model, changes.weights, changes.op_libraries)
    progress(f"checking {package.name}")
    with (
        PackageReader(package, demand=trust.demand()) as reader,
        temporary_folder(output.parent, f".{output.name[:200]}") as folder,
    ):
        refuse_sidecar(reader)
        reader.verify()
        new = _NewPackage.of(reader)
        new.drop_targets(changes.drop_targets)
        if changes.op_libraries:
            operators = [operator.name for operator in reader.manifest.operators]
            new.replace_libraries(library_files(changes.op_libraries, operators, progress), progress)
        if missing := [one for target in new.manifest.targets for one in missing_operators(new.manifest, target)]:
            raise UsageError(
                f"{package.name} is no package: it has no library for {missing[0].name}",
                hint="Package it first, without --weights and --drop-target; then change the package.",
            )
        new.change(**{key: value for key in ("name", "version") if (value := getattr(changes, key)) is not None})
        if changes.weights is not None:
            new.replace_weights(changes.weights, progress)
        if changes.weights is not None and reader.manifest.cases:
            progress("recording the cases again")
            recorded, by, timeout = reader.manifest.source.model, trust.demanded_by(), options.verification.timeout
            recorder = replace(eager, model=eager.model_of(recorded, by))
            why = unnamed(recorded, by)
            new.take_cases(*record_again(reader, new.manifest, recorder, folder, timeout=timeout, unnamed=why))
        unverified = folder / output.name
        progress("writing the package")
        manifest = write_package(unverified, new.manifest, new.records)
        reader.check_unchanged()
        against: Against = "cases" if manifest.cases else "eager"
        options = replace(options, verification=replace(options.verification, against=against, eager=eager))
        report = verify_and_rename(unverified, output, manifest, options, progress)
    return Repacked(manifest, report, tuple(new.done))


def _refuse_old_signatures(output: Path, sign_key: PrivateKey | None) -> None:
    """Refuses to leave the signature of another package beside the new one."""
    written = signature_path(output, sign_key) if sign_key is not None else None
    for suffix in (own.SUFFIX, openssf.SUFFIX):
        old = output.with_name(output.name + suffix)
        if old.exists() and old != written:
            raise UsageError(
                f"{old} is beside {output.name} and would not belong to the new package",
                hint="Remove it, or write another file. --sign-key signs the new package.",
            )


@dataclass
class _NewPackage:
    """The new package's manifest and records, and what was done so far."""

    reader: PackageReader
    manifest: Manifest
    records: dict[str, Content]
    done: list[str]

    @classmethod
    def of(cls, reader: PackageReader) -> _NewPackage:
        records: dict[str, Content] = {
            name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS
        }
        return cls(reader, reader.manifest, records, [])

    def change(self, **changes: object) -> None:
        self.manifest = msgspec.structs.replace(self.manifest, **changes)

    def drop_targets(self, names: Sequence[str]) -> None:
        """Leaves out targets, with the libraries and constants that only they need."""
        if not names:
            return
        there = [target.name for target in self.manifest.targets]
        if unknown := [name for name in names if name not in there]:
            raise UsageError(f"there is no target {unknown[0]}", hint=f"The package has {', '.join(there) or 'none'}.")
        kept = tuple(target for target in self.manifest.targets if target.name not in names)
        if not kept:
            raise UsageError("a package needs a target, and all would be left out", hint="Keep one of them.")
        for name in names:
            folders = [code_folder(name, method.name) for method in self.manifest.methods]
            code = tuple(f"{AOTINDUCTOR_DIR}/{folder}/" for folder in folders)
            self._remove(record for record in self.records if record.startswith(code))
            self.done.append(f"left out target {name}")
        self.change(targets=kept)
        loaded = {library.record for target in kept for library in libraries_for(self.manifest, target)}
        self._keep_libraries(loaded, "no target needs it")
        read = {weight for target in kept for constants in target.constants.values() for weight in constants.values()}
        weights = tuple(weight for weight in self.manifest.weights if weight.state or weight.name in read)
        needed = {weight.record for weight in weights}
        self._remove(str(weight.record) for weight in self.manifest.weights if weight.record not in needed)
        self.change(weights=weights)

    def replace_libraries(self, files: Sequence[Path], progress: Progress) -> None:
        """Replaces the libraries that have the name, or define an operator, of a given one."""
        described: list[tuple[Path, Library]] = []
        for file in dict.fromkeys(files):
            progress(f"inspecting {file.name}")
            described += describe_with_needed(file)
        complete = is_complete(self.manifest)
        given = {library.record for _, library in described}
        defined = {(library.platform, operator.name) for _, library in described for operator in library.defines}
        replaced = {
            library.record: library.sha256
            for library in self.manifest.libraries
            if library.record in given
            or any((library.platform, operator.name) in defined for operator in library.defines)
        }
        self._keep_libraries({lib.record for lib in self.manifest.libraries} - replaced.keys(), None)
        self.manifest = add_libraries(self.manifest, described, self.records)
        # A library that only the replaced ones needed registers nothing.
        needed = {name for library in self.manifest.libraries for name in library.needs}
        useful = {
            library.record
            for library in self.manifest.libraries
            if library.defines or library.kernels or library.record in given or Path(library.record).name in needed
        }
        self._keep_libraries(useful, "no library needs it any more")
        for _, library in described:
            old = replaced.pop(library.record, None)
            self.done.append(_change_text(library, old))
        self.done += [f"left out {record}: a given library defines its operators" for record in replaced]
        if complete or self.manifest.libraries:
            check_libraries(self.manifest, self.records)

    def replace_weights(self, weights: Path, progress: Progress) -> None:
        """Replaces the weights. The new manifest has no cases."""
        progress(f"replacing the weights with {weights.name}")
        from exportkit.fine_tune import replace_weights  # imports torch's compiler, which takes seconds

        had_program = self.manifest.program is not None
        self.manifest = replace_weights(self.reader, self.manifest, self.records, weights)
        self.done.append(f"replaced the weights with {weights.name}")
        if had_program:
            self.done.append("left out the ExportedProgram: it has the old weights")

    def take_cases(self, cases: Sequence[Case], records: Mapping[str, Path], by: str) -> None:
        """Adds cases that were recorded again."""
        self.change(cases=tuple(cases))
        self.records |= records
        drawn = [case for case in cases if not edge_case_of(records[case.record].read_bytes())]
        self.done.append(f"recorded {len(drawn)} cases again, with {by}")

    def _keep_libraries(self, kept: Collection[str], reason: str | None) -> None:
        gone = [library.record for library in self.manifest.libraries if library.record not in kept]
        self._remove(gone)
        self.change(libraries=tuple(library for library in self.manifest.libraries if library.record in kept))
        if reason is not None:
            self.done += [f"left out {record}: {reason}" for record in gone]

    def _remove(self, names: Iterable[str]) -> None:
        for name in list(names):
            self.records.pop(name, None)


def _change_text(library: Library, old: str | None) -> str:
    if old is None:
        return f"added {library.record}, sha256 {library.sha256[:16]}"
    if old == library.sha256:
        return f"kept {library.record}: the given library is the same"
    return f"replaced {library.record}: sha256 {old[:16]} by {library.sha256[:16]}"

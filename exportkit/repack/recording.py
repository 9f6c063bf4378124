"""Records the cases of a package again, for other weights, in another process. recording_worker.py is the other side.

The inputs stay; the model that has the new weights gives the outputs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed, Message
from exportkit.child.process import describe_end
from exportkit.errors import ExportError, MissingOperatorError, ModelNotFoundError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Case, Manifest
from exportkit.reference_model import ReferenceModel, ReferenceModelFiles
from exportkit.verify.verify_worker import LOAD_TIMEOUT


class RecordCases(Message, frozen=True):
    """Tells the process to make a model with other weights and to call it. The answer is CasesRecorded.

    Attributes:
        eager: MODEL, made as the manifest's source says, with the weights: the model's whole state. Without MODEL the
            program runs.
        programs: The file of the exported program of each method; None to make MODEL.
        manifest: The new package's manifest without cases, as JSON.
        device: The model's device.
        initial: By record, the file with what a state begins with.
        cases: The old cases.
        files: For each case, the file that has the inputs, and the file to write.
    """

    eager: ReferenceModelFiles
    programs: dict[str, str] | None
    manifest: str
    device: str
    initial: dict[str, str]
    cases: tuple[Case, ...]
    files: tuple[tuple[str, str], ...]


class CasesRecorded(Message, frozen=True):
    """The new cases, with the records of the old ones, of which some may have been left out."""

    cases: tuple[Case, ...]


def record_again(
    reader: PackageReader, manifest: Manifest, eager: ReferenceModel, folder: Path, *, timeout: float, unnamed: str
) -> tuple[tuple[Case, ...], dict[str, Path], str]:
    """Records the cases of a package again.

    Args:
        reader: The package with the old weights, whose digests hold. It may have a program.
        manifest: The new package's manifest. Its source has the digest of the new state.
        eager: The weights, and MODEL if one may be imported.
        folder: A private folder for the new cases, which must live until the package is written.
        timeout: Seconds that a call may take. Making the model always gets at least 600.
        unnamed: Why no MODEL may be imported, if none may.

    Returns:
        The cases for the manifest, their records, and what recorded them.

    Raises:
        UsageError: Neither MODEL nor a program can record them.
        ExportError: The model fails.
        HostError: This machine does not have the device.
    """
    refusal: ModelNotFoundError | None = None
    if eager.model is not None:
        by = f"the eager model {eager.model}"
        try:
            return *_record(reader, manifest, eager, folder, timeout, None), by
        except MissingOperatorError:
            # Its module loads no library of its own, so that the package's cannot be a second one.
            return *_record(reader, manifest, eager, folder, timeout, None, with_libraries=True), by
        except ModelNotFoundError as error:
            refusal = error
    if reader.manifest.program is None:
        reason = refusal.message if refusal is not None else unnamed
        raise UsageError(
            f"the recorded answers belong to the old weights, and nothing can give the new ones: {reason}",
            hint="Name the model with --model. Or export it with these weights.",
        ) from refusal
    programs = {}
    for number, (method, record) in enumerate(reader.manifest.program.records.items()):
        programs[method] = folder / f"program-{number}.pt2"
        reader.extract(record, programs[method])
    by = "the package's ExportedProgram" + ("s" if len(programs) > 1 else "")
    return *_record(reader, manifest, eager, folder, timeout, programs), by


def _record(
    reader: PackageReader,
    manifest: Manifest,
    eager: ReferenceModel,
    folder: Path,
    timeout: float,
    programs: Mapping[str, Path] | None,
    *,
    with_libraries: bool = False,
) -> tuple[tuple[Case, ...], dict[str, Path]]:
    cases, files = reader.manifest.cases, []
    for number, case in enumerate(cases):
        old, recorded = folder / f"old-{number}.safetensors", folder / f"{number}.safetensors"
        reader.extract(case.record, old)
        files.append((str(old), str(recorded)))
    initial = {}
    for number, name in enumerate(sorted({each.initial for each in manifest.state if each.initial is not None})):
        initial[name] = str(folder / f"state-{number}")
        reader.extract(name, Path(initial[name]))
    source = ReferenceModelFiles.of(eager, eager.model if programs is None else None)
    if programs is not None or with_libraries:
        packed = _packed_libraries(reader, folder, {Path(each).name for each in source.libraries})
        source = msgspec.structs.replace(source, libraries=(*source.libraries, *packed))
    command = RecordCases(
        eager=source,
        programs=None if programs is None else {method: str(path) for method, path in programs.items()},
        manifest=msgspec.json.encode(msgspec.structs.replace(manifest, cases=())).decode(),
        device="cpu" if any(target.device == "cpu" for target in manifest.targets) else "cuda",
        initial=initial,
        cases=cases,
        files=tuple(files),
    )
    calls = sum(len(case.calls) for case in cases)
    whole = max(timeout, LOAD_TIMEOUT) + calls * timeout
    answer = _ask(command, eager.model if programs is None else "the exported program", whole)
    written = {case.record: Path(recorded) for case, (_, recorded) in zip(cases, files)}
    return answer.cases, {case.record: written[case.record] for case in answer.cases}


def _packed_libraries(reader: PackageReader, folder: Path, given: set[str]) -> list[str]:
    """Extracts the package's CPU libraries, which a model needs that loads none, but for those that are replaced."""
    found = []
    for library in reader.manifest.libraries:
        path = folder / Path(library.record).name
        if library.device == "cpu" and path.name not in given:
            reader.extract(library.record, path)
            found.append(str(path))
    return found


def _ask(command: RecordCases, name: str | None, timeout: float) -> CasesRecorded:
    """Records in a child process, and raises its errors."""
    with ChildClient("exportkit.repack.recording_worker", search_path="caller") as child:
        try:
            answer = child.ask(command, CasesRecorded, timeout=timeout)
        except TimeoutError as error:
            raise ExportError(
                f"recording the cases with {name} took more than {timeout:.0f} seconds", hint="--timeout allows more."
            ) from error
        except ChildEndedError as error:
            printed = child.printed()
            raise ExportError(
                f"a process that records the cases with {name} {describe_end(error.status)}"
                + (f":\n{printed}" if printed else "")
            ) from error
    if isinstance(answer, Failed):
        raise answer.exception()
    return answer

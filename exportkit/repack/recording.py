"""Records the cases of a package again, for other weights, in another process. recording_worker.py is the other side.

The inputs stay; the model that has the new weights gives the outputs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.child.conversation import ChildEndedError, Conversation
from exportkit.child.messages import Failed, Message
from exportkit.child.process import describe_end
from exportkit.errors import ExportError, ModelNotFoundError, UsageError
from exportkit.package.archive import Content, PackageReader
from exportkit.package.manifest import Accuracy, Case, Manifest
from exportkit.verify.verify_worker import LOAD_TIMEOUT


class RecordCases(Message, frozen=True):
    """Tells the process to make a model with other weights and to call it. The answer is CasesRecorded.

    Attributes:
        model: MODEL, made as `source` says; None to run the program.
        program: The file of the exported program; None to make MODEL.
        manifest: The new package's manifest without cases, as JSON.
        weights: The safetensors file with the model's whole state.
        libraries: Operator libraries to load first: absolute paths, or names of modules that load some.
        device: The model's device.
        cases: For each case, the file that has the inputs, the file to write, and the sizes.
    """

    model: str | None
    program: str | None
    manifest: str
    weights: str
    libraries: tuple[str, ...]
    device: str
    cases: tuple[tuple[str, str, dict[str, int]], ...]


class RecordedAccuracy(msgspec.Struct, frozen=True):
    """What a manifest says of a case: what its references were computed in, and eager's errors."""

    reference_dtype: Literal["float64", "float32"] | None
    accuracy: dict[str, Accuracy | None]


class CasesRecorded(Message, frozen=True):
    """What the manifest says of each case."""

    cases: tuple[RecordedAccuracy, ...]


@dataclass(frozen=True)
class NewWeights:
    """What the cases are recorded again with.

    Attributes:
        weights: The safetensors file with the model's whole state.
        model: MODEL, or None if none may be imported.
        op_libraries: Operator libraries that MODEL needs, or modules that load some.
        timeout: Seconds that a call may take. Making the model always gets at least 600.
    """

    weights: Path
    model: str | None
    op_libraries: Sequence[Path | str]
    timeout: float


def record_again(
    reader: PackageReader, manifest: Manifest, new: NewWeights, folder: Path
) -> tuple[tuple[Case, ...], dict[str, Content], str]:
    """Records the cases of a package again.

    Args:
        reader: The package with the old weights, whose digests hold. It may have a program.
        manifest: The new package's manifest. Its source has the digest of the new state.
        new: The weights, and MODEL.
        folder: A private folder for the new cases, which must live until the package is written.

    Returns:
        The cases for the manifest, their records, and what recorded them.

    Raises:
        UsageError: Neither MODEL nor a program can record them.
        ExportError: The model fails.
        HostError: This machine does not have the device.
    """
    refusal: ModelNotFoundError | None = None
    if new.model is not None:
        try:
            return *_record(reader, manifest, new, folder, None), f"the eager model {new.model}"
        except ModelNotFoundError as error:
            refusal = error
    if reader.manifest.program is None:
        reason = refusal.message if refusal is not None else "no MODEL may be imported"
        raise UsageError(
            f"the recorded answers belong to the old weights, and nothing can give the new ones: {reason}",
            hint="Name the model with --model. Or export it with these weights.",
        ) from refusal
    program = folder / "program.pt2"
    reader.extract(reader.manifest.program.record, program)
    return *_record(reader, manifest, new, folder, program), "the package's ExportedProgram"


def _record(
    reader: PackageReader, manifest: Manifest, new: NewWeights, folder: Path, program: Path | None
) -> tuple[tuple[Case, ...], dict[str, Content]]:
    cases, files = reader.manifest.cases, []
    for number, case in enumerate(cases):
        old, recorded = folder / f"old-{number}.safetensors", folder / f"{number}.safetensors"
        reader.extract(case.record, old)
        files.append((str(old), str(recorded), dict(case.sizes)))
    libraries = [str(each.resolve() if isinstance(each, Path) else each) for each in new.op_libraries]
    if program is not None:
        libraries += _packed_libraries(reader, folder, {Path(each).name for each in libraries})
    command = RecordCases(
        model=new.model if program is None else None,
        program=None if program is None else str(program),
        manifest=msgspec.json.encode(msgspec.structs.replace(manifest, cases=())).decode(),
        weights=str(new.weights.resolve()),
        libraries=tuple(libraries),
        device="cpu" if any(target.device == "cpu" for target in manifest.targets) else "cuda",
        cases=tuple(files),
    )
    timeout = max(new.timeout, LOAD_TIMEOUT) + len(files) * new.timeout
    answer = _ask(command, new.model if program is None else "the exported program", timeout)
    made = tuple(
        msgspec.structs.replace(case, reference_dtype=found.reference_dtype, accuracy=found.accuracy)
        for case, found in zip(cases, answer.cases)
    )
    return made, {case.record: Path(recorded) for case, (_, recorded, _) in zip(made, files)}


def _packed_libraries(reader: PackageReader, folder: Path, given: set[str]) -> list[str]:
    """Extracts the package's CPU libraries, which a program needs, but for those that are replaced."""
    found = []
    for library in reader.manifest.libraries:
        path = folder / Path(library.record).name
        if library.device == "cpu" and path.name not in given:
            reader.extract(library.record, path)
            found.append(str(path))
    return found


def _ask(command: RecordCases, name: str | None, timeout: float) -> CasesRecorded:
    """Records in a child process, and raises its errors."""
    with Conversation("exportkit.repack.recording_worker", search_path="caller") as child:
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

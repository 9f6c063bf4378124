"""Records the cases of a package again, for other weights, in another process. recording_worker.py is the other side.

The inputs stay; MODEL with the new weights gives the outputs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed, Message
from exportkit.child.process import describe_end
from exportkit.errors import ExportError, MissingOperatorError
from exportkit.package.archive import Content, PackageReader, StoredRecord
from exportkit.package.manifest import Case, Manifest
from exportkit.reference_model import ReferenceModel, ReferenceModelFiles
from exportkit.verify.verify_worker import LOAD_TIMEOUT


class RecordCases(Message, frozen=True):
    """Tells the process to make a model with other weights and to call it. The answer is CasesRecorded.

    Attributes:
        eager: MODEL, made as the manifest's source says, with the weights: the model's whole state.
        manifest: The new package's manifest without cases, as JSON.
        device: The model's device.
        initial: By record, the file with what a state begins with.
        cases: The old cases.
        files: For each case, the file that has the inputs, and the file to write.
    """

    eager: ReferenceModelFiles
    manifest: str
    device: str
    initial: dict[str, str]
    cases: tuple[Case, ...]
    files: tuple[tuple[str, str], ...]


class CasesRecorded(Message, frozen=True):
    """The new cases, with the records of the old ones, of which some may have been left out."""

    cases: tuple[Case, ...]


def record_again(
    reader: PackageReader,
    manifest: Manifest,
    model: str,
    weights: Path,
    state: Mapping[str, Content],
    folder: Path,
    *,
    timeout: float,
) -> tuple[tuple[Case, ...], dict[str, Path]]:
    """Records the cases of a package again.

    Args:
        reader: The package with the old weights.
        manifest: The new package's manifest. Its source has the digest of the new state.
        model: MODEL.
        weights: A safetensors file with its whole state, or of a session's.
        state: By record, what sessions begin with.
        folder: A private folder for the new cases, which must live until the package is written.
        timeout: Seconds that a call may take. Making the model always gets at least 600.

    Returns:
        The cases for the manifest, and their records.

    Raises:
        ExportError: The model fails.
        HostError: This machine does not have the device.
    """
    cases, files = reader.manifest.cases, []
    for number, case in enumerate(cases):
        old, recorded = folder / f"old-{number}.safetensors", folder / f"{number}.safetensors"
        reader.extract(case.record, old)
        files.append((str(old), str(recorded)))
    initial = {}
    for number, (name, content) in enumerate(sorted(state.items())):
        initial[name] = str(folder / f"state-{number}")
        if isinstance(content, StoredRecord):
            reader.extract(name, Path(initial[name]))
        else:
            Path(initial[name]).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    command = RecordCases(
        eager=ReferenceModelFiles.of(ReferenceModel(weights=weights), model),
        manifest=msgspec.json.encode(msgspec.structs.replace(manifest, cases=())).decode(),
        device="cpu" if any(target.device == "cpu" for target in manifest.targets) else "cuda",
        initial=initial,
        cases=cases,
        files=tuple(files),
    )
    whole = max(timeout, LOAD_TIMEOUT) + sum(len(case.calls) for case in cases) * timeout
    try:
        answer = _ask(command, whole)
    except MissingOperatorError:
        # MODEL loads no library of its own, so that the package's cannot be a second one.
        eager = msgspec.structs.replace(command.eager, libraries=tuple(_packed_libraries(reader, folder)))
        answer = _ask(msgspec.structs.replace(command, eager=eager), whole)
    written = {case.record: Path(recorded) for case, (_, recorded) in zip(cases, files)}
    return answer.cases, {case.record: written[case.record] for case in answer.cases}


def _packed_libraries(reader: PackageReader, folder: Path) -> list[str]:
    """Extracts the package's CPU libraries."""
    found = []
    for library in reader.manifest.libraries:
        if library.device == "cpu":
            path = folder / Path(library.record).name
            reader.extract(library.record, path)
            found.append(str(path))
    return found


def _ask(command: RecordCases, timeout: float) -> CasesRecorded:
    """Records in a child process, and raises its errors."""
    name = command.eager.model
    with ChildClient("exportkit.fine_tune.recording_worker", search_path="caller") as child:
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

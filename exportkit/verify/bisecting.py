"""Finds the first node of the graph where compiled code and eager differ.

The graph is cut after one node after the other, by bisection. What a cut leaves is compiled like the whole model, and
verified like any artifact: against one case, which the same graph in eager mode has recorded, with float64 references.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.onnx.files import named_model
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.compiled_with import GivenOptions, compiled_with
from exportkit.package.manifest import Library
from exportkit.progress import Progress, silent
from exportkit.verify.eager_plan import plan_eager
from exportkit.verify.graph_bisection import BisectedCall, BisectedGraph, GraphBisection
from exportkit.verify.located import Located
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Mismatch
from exportkit.verify.report import Check, Report
from exportkit.verify.reproducing import Reproduced, reproduce


def bisect_artifact(
    artifact: Path,
    report: Report,
    options: VerifyOptions,
    *,
    budget: int | None = None,
    reproduced: Path | None = None,
    progress: Progress = silent,
) -> tuple[Located, Reproduced | None]:
    """Finds the first node where the target of a failed check and eager differ.

    The graph is traced again from MODEL; if none may be imported, the artifact's ExportedProgram is used. Each cut
    takes a compilation. Of a sequence, the first call that differs is repeated from the state that eager has before.

    Args:
        artifact: The artifact.
        report: The report of `verify` with the same options, which failed.
        options: The options of the verification.
        budget: The number of cuts to compile. None compiles as many as needed.
        reproduced: A file to write that shows the difference with torch alone.
        progress: Called with each step before it starts.

    Raises:
        UsageError: No call failed, the artifact is an ONNX model, there is neither a MODEL nor a program, or there is
            no MODEL for a method with state.
        ExportkitError: The graph cannot be traced again.
    """
    with searching(artifact, report, options, progress=progress) as search:
        located = search.locate(budget)
        return located, None if reproduced is None else reproduce(search, located, reproduced, progress)


@contextmanager
def searching(
    artifact: Path, report: Report, options: VerifyOptions, *, ours: bool = False, progress: Progress = silent
) -> Iterator[GraphBisection]:
    """Yields a search for the node where the target of a failed check and eager differ.

    Arguments and errors are the same as for `bisect_artifact`. Cuts are compiled with the options that the artifact
    remembers; unless it is `ours`, a file of the caller's own, only with those that name nothing.
    """
    if named_model(artifact) is not None:
        raise UsageError("--bisect compares compiled targets with eager", hint="Leave it out for an ONNX model.")
    called = (check for check in report.checks if check.target is not None and check.against in ("cases", "eager"))
    check = next((check for check in called if check.failed), None)
    if check is None:
        raise UsageError(
            f"no call of {artifact.name} fails, so that there is nothing to search for",
        )
    with (
        PackageReader(artifact, demand=options.trust.demand()) as reader,
        temporary_folder(None, "exportkit-bisect") as folder,
    ):
        reader.verify()
        subject = _subject(reader, check, options, folder, ours=ours)
        with GraphBisection(subject, options, folder, progress) as search:
            yield search


def _subject(reader: PackageReader, check: Check, options: VerifyOptions, folder: Path, *, ours: bool) -> BisectedGraph:
    """Describes what is cut: the graph of the call that failed."""
    manifest = reader.manifest
    call = _failed_call(reader, check, options, folder)
    target = next((target for target in manifest.targets if target.name == check.target), None)
    given = compiled_with(reader, target) if target else GivenOptions()
    program = None
    if manifest.program is not None:
        program = folder / "program.pt2"
        reader.extract(manifest.program.records[call.method.name], program)
    by_program = manifest.program.device if manifest.program else "cpu"
    return BisectedGraph(
        manifest=manifest,
        label=check.label,
        call=call,
        target=str(check.target),
        device=target.device if target else by_program,
        compiled=target is not None,
        cpu_isa=target.cpu_isa if target else None,
        embed_weights=not manifest.weights,
        given=given if ours else given.plain,
        libraries=_extract_libraries(reader, folder),
        program=program,
        demanded_by=options.trust.demanded_by(),
    )


def _extract_libraries(reader: PackageReader, folder: Path) -> tuple[tuple[Path, Library], ...]:
    found = []
    for number, library in enumerate(reader.manifest.libraries):
        place = folder / f"library-{number}"
        place.mkdir()
        path = place / Path(library.record).name
        reader.extract(library.record, path)
        found.append((path, library))
    return tuple(found)


def _failed_call(reader: PackageReader, check: Check, options: VerifyOptions, folder: Path) -> BisectedCall:
    manifest = reader.manifest
    if check.against == "cases":
        case = manifest.cases[int(check.label.split()[1])]
        path = folder / "case.safetensors"
        reader.extract(case.record, path)
        number = _first_wrong_call(check, len(case.calls))
        call = case.calls[number]
        return BisectedCall(
            manifest.method(call.method),
            number,
            call.sizes,
            path,
            options.seed,
            before=tuple(each.method for each in case.calls[:number]),
            session_sizes={name: size for each in case.calls for name, size in each.sizes.items()},
        )
    for plan in plan_eager(manifest, options):
        labels = [plan.label(sizes) for sizes in plan.sizes.sizes]
        if check.label in labels:
            seed, sizes = options.seed + labels.index(check.label), check.sizes
            if plan.method is not None:
                return BisectedCall(manifest.method(plan.method), 0, sizes, None, seed)
            # As sessions are drawn without a draw_sequence; the process that draws them looks.
            stateful = [method for method in manifest.methods if method.state]
            number = _first_wrong_call(check, 0)
            method = stateful[min(number, len(stateful) - 1)]
            return BisectedCall(method, number, sizes, None, seed, session_sizes=sizes)
    raise UsageError(f"the check {check.label} is not of this artifact", hint="Give the report of the artifact.")


def _first_wrong_call(check: Check, count: int) -> int:
    """Returns the number of the first call that differs; the last one's if only the state after it does."""
    if not isinstance(check.verdict, Mismatch):
        return 0
    found = next(output.call for output in check.verdict.outputs if not output.agrees)
    return max(0, count - 1) if found is None else found

"""`exportkit verify`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress
from exportkit.cli.shared_options import (
    OUTPUT_FILE,
    PACKAGE,
    check_tolerances,
    device_option,
    eager_options,
    flag,
    public_key_options,
    seed_option,
    timeout_option,
    tolerance_options,
)
from exportkit.errors import ExportkitError, UsageError
from exportkit.progress import Progress
from exportkit.verify import outcomes
from exportkit.verify.options import Against, RunBy, VerifyOptions

if TYPE_CHECKING:
    from exportkit.verify.outcomes import Verdict
    from exportkit.verify.report import Check, Report

_DEFAULTS = VerifyOptions()


@exportkit_command(
    "verify", common=("against", "shapes", "device", "model", "weights", "public_keys", "page", "bisecting")
)
@click.argument("artifact", type=PACKAGE)
@click.option(
    "--against",
    type=click.Choice(get_args(Against)),
    default=_DEFAULTS.against,
    help="Compare with recorded cases, the eager model, or both. `both` skips eager without MODEL.",
)
@click.option(
    "--shapes",
    type=click.IntRange(min=1),
    default=_DEFAULTS.shapes,
    help="Number of sizes to compare with eager: of each method without state, and of sequences of the others.",
)
@click.option(
    "--case",
    "cases",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Replay only this recorded case, and compare nothing else. May be repeated.",
)
@tolerance_options
@device_option("Run the targets of this device; auto: every target that runs here.", default=_DEFAULTS.device)
@click.option("--target", metavar="NAME", help="Run only this target. `exportkit inspect` lists the names.")
@click.option(
    "--runner",
    type=click.Choice(get_args(RunBy)),
    default=_DEFAULTS.runner,
    help="What replays the cases: exportkit's runtime, or exportkit-run, all in C++, which compares nothing else.",
)
@eager_options("the artifact")
@public_key_options("ARTIFACT")
@seed_option("Seed of the sizes and inputs.")
@timeout_option
@click.option(
    "--report", "page", type=OUTPUT_FILE, metavar="FILE.html", help="Write a page as `inspect` does, with this."
)
@flag("--bisect", "If a call fails, search for the first node of the graph that differs.", to="bisecting")
def command(
    artifact: Path,
    page: Path | None,
    bisecting: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run every target of ARTIFACT that this machine can run, each in a fresh process, and compare the outputs.

    The process has only the package and torch. It cannot import the exporter, or the source of the model or operators.
    It first replays the recorded cases: sequences of calls, if the model has state. Sessions are then compared with one
    another: two in turns, a fork, a reset, and a saved state. Then the outputs are compared with eager's at sizes from
    the dynamic ranges, including their ends, if --model names MODEL or an installed package has registered the name
    that ARTIFACT recorded: nothing else that a file names is imported. Targets that cannot run here are listed with the
    reason; if no target can run, verification fails. The first failed check gives the exit code.

    ARTIFACT may be an ONNX model of `exportkit export --format onnx`. ONNX Runtime then runs it on the CPU, in a
    process that has neither torch nor the exporter, and its outputs are compared in the same way. It may also be a
    folder: an OCI layout of `exportkit oci`, or one with a single .pt2.

    With --public-key, or if this machine's policy requires signatures, signatures are checked first. A signature does
    not cover the model's source, so then only --model counts.

    A case may have values that show what is wrong with a kernel, such as ties, and inputs are laid out in memory in
    several ways. A failure names both; --case N replays its case alone.

    Where eager decides by a value at the border, such as a threshold, an argmax or a routing in bfloat16, it answers
    otherwise when it rounds otherwise. An output that is as far from eager's as that cannot be judged, and only that:
    if nothing else fails, the exit code is 21.

    With --bisect, a call that fails is repeated on parts of the graph: cut after a node, compiled, and compared with
    what eager and a float64 reference compute up to that node. The first node that differs is named, with its errors.
    Each part takes eager's decisions as inputs, so that what cannot be judged as a whole is compared as well.
    A cut takes as long as an export; 1,000 nodes take about ten.

    \b
    exportkit verify arr_coc.pt2
    exportkit verify net.pt2 --model net.py:Net --against eager --shapes 20 --json
    exportkit verify arr_coc.pt2 --bisect
    exportkit verify arr_coc.pt2 --public-key release.pub.pem
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    check_tolerances(options["rtol"], options["atol"])
    from exportkit.child.process import start_forkserver_early

    start_forkserver_early()
    from exportkit.verify.verify import verify

    if page is not None:
        from exportkit.cli.page import check_page

        check_page(page, artifact)
    if options["cases"]:
        if options["against"] == "eager":
            raise click.UsageError("--case replays a recorded case: leave out --against eager.")
        options["against"] = "cases"
    bisection: dict[str, Any] = {}
    with progress() as step:
        asked = VerifyOptions(**options)
        report = verify(artifact, asked, progress=step)
        if bisecting:
            bisection = _bisect(artifact, report, asked, step)
    if page is not None:
        _write_page(page, artifact, report)
    if as_json:
        print_json(report_document(report) | ({"bisection": bisection} if bisecting else {}))
    else:
        print_report(report, bisecting=bisecting)
        if bisecting and report.exit_code:
            click.echo("\nBisection:")
            click.echo(printable_lines(bisection["message"], "  | "))
        elif bisecting:
            click.echo(f"--bisect: {printable(bisection['message'])}")
    if report.exit_code:
        raise click.exceptions.Exit(report.exit_code)


def _bisect(artifact: Path, report: Report, options: VerifyOptions, step: Progress) -> dict[str, Any]:
    """Returns what a bisection found, or why there is none. The report is shown in any case."""
    from exportkit.verify.bisecting import bisect_artifact

    try:
        return bisect_artifact(artifact, report, options, progress=step).document()
    except ExportkitError as error:
        return {"message": str(error), "node": None}


def _write_page(page: Path, artifact: Path, report: Report) -> None:
    """Writes the page of an artifact that could be read, with what was verified."""
    from exportkit.cli.page import write_page
    from exportkit.inspect.sections import Section
    from exportkit.onnx.files import open_artifact

    if report.manifest_sha256 is None:
        return
    checks = Section("Verification", [(*_row(check), check.target or "") for check in report.checks])
    with open_artifact(artifact) as reader:
        if reader.manifest_sha256 != report.manifest_sha256:
            raise UsageError(f"{artifact} is no longer the artifact that was verified", hint="Verify it again.")
        write_page(page, reader, [checks] if checks.rows else [], _errors(report), _tried(report))


def _errors(report: Report) -> dict[str, dict[str, list[float]]]:
    """Returns the errors of outputs that have a reference, and what was allowed."""
    found: dict[str, dict[str, list[float]]] = {}
    for output in (each for check in report.checks for each in getattr(check.verdict, "outputs", ())):
        if output.error is not None:
            errors = found.setdefault(output.name, {"package": [], "allowed": []})
            errors["package"].append(output.error.rms)
            errors["allowed"].append(output.error.rms_allowed)
    return found


def _tried(report: Report) -> str:
    """Says which sizes were tried."""
    tried: dict[str, set[int]] = {}
    for check in report.checks:
        for name, size in (check.sizes or {}).items():
            tried.setdefault(name, set()).add(size)
    texts = [f"{name} {', '.join(map(str, sorted(sizes)))}" for name, sizes in tried.items()]
    return f"Sizes tried: {'; '.join(texts)}." if texts else ""


def report_document(report: Report) -> dict[str, Any]:
    """Returns the report as JSON. Every verdict has its kind, message and exit code."""
    import msgspec

    document = msgspec.to_builtins(report)
    for check, item in zip(report.checks, document["checks"]):
        verdict = {"kind": check.verdict.kind, "exit_code": check.verdict.exit_code, "message": check.verdict.message}
        item["verdict"] = {**verdict, **item["verdict"]}
    outcome = {"ok": report.exit_code == 0, "exit_code": report.exit_code}
    return {**outcome, "compared_with_eager": _compared_with_eager(report), **document}


def _compared_with_eager(report: Report) -> bool:
    return any(check.against == "eager" and check.calls + check.edge_cases for check in report.checks)


def print_report(report: Report, *, written: bool = True, bisecting: bool = False) -> None:
    """Prints the report: the checks of each target under its name, then the failures in full.

    What to do next depends on whether the artifact was `written`, and on whether a bisection follows.
    """
    versions = {"torch": report.torch, "ONNX Runtime": report.onnxruntime}
    ran_by = next((f"{name} {version}" for name, version in versions.items() if version), "not loaded")
    click.echo(f"{printable(report.artifact)}: {ran_by}")
    print_table([_row(check) for check in report.checks if check.target is None])
    for target in report.targets:
        if target.left_out is None:
            loaded = f", loaded in {target.load_seconds * 1e3:.0f} ms" if target.load_seconds is not None else ""
            click.echo(f"  {target.name} on {target.device}{loaded}")
            print_table([_row(check) for check in report.checks if check.target == target.name], indent=4)
    for target in report.targets:
        if target.left_out is not None:
            click.echo(f"  not run  {target.name}: {printable(target.left_out)}")
    for note in report.skipped:
        click.echo(f"  left out  {printable(note)}")
    for check in report.checks:
        if check.failed:
            of = f" of {check.target}" if check.target else ""
            click.echo(f"\n{check.against}, {printable(check.label)}{of}:")
            click.echo(printable_lines(check.verdict.message, "  | "))
    if report.failure is not None:
        _print_failure(report, report.failure, "" if bisecting else _advice(report, report.failure, written))
        return
    counts = [sum(getattr(check, kind) for check in report.checks) for kind in ("calls", "edge_cases")]
    made = " and ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in zip(counts, ("call", "edge case")) if n)
    ran = sum(target.left_out is None for target in report.targets)
    of = f"; {ran} of {len(report.targets)} targets were run" if len(report.targets) > 1 else ""
    click.echo(f"ok: {made or 'no calls'} agree{'s' * (sum(counts) == 1)}{of}{_not_compared(report)}")


def _not_compared(report: Report) -> str:
    """Returns what the last line adds where the recorded cases alone were compared, and eager was to be, too."""
    eager = next((c.verdict for c in report.checks if isinstance(c.verdict, outcomes.EagerUnavailable)), None)
    if eager is None or _compared_with_eager(report):
        return ""
    cure = re.search(r"--model \S+$", eager.reason)
    with_model = f"; {cure[0]} compares it" if cure else ""
    return printable(f"; with the recorded answers only, not with eager PyTorch{with_model}")


def _print_failure(report: Report, failure: Check, advice: str) -> None:
    """Prints how many checks failed, or could not be judged where none failed, and what to do next."""
    alike = sum(check.failed and check.wrong == failure.wrong for check in report.checks)
    if advice:
        click.echo(f"\n{advice}")
    what = "FAILED" if failure.wrong else "CANNOT BE JUDGED"
    click.echo(f"\n{what}: {alike} of {len(report.checks)} checks; exit code {report.exit_code}")


def _advice(report: Report, failure: Check, written: bool) -> str:
    """Returns what to do about a failure; the empty string where its message says that."""
    if not failure.wrong:
        return "`verify --bisect` compares them node by node, along the decisions that eager takes."
    if isinstance(failure.verdict, (outcomes.EagerDiffers, outcomes.EagerFailed)):
        return "What the package answers was not judged by this model."
    answers = [c.verdict for c in report.checks if c.wrong and c.target and c.against in ("cases", "eager")]
    if all(isinstance(verdict, outcomes.EagerUnavailable) for verdict in answers):
        return ""
    first = "" if written else "With --no-verify the package is written all the same: then "
    return (
        f"{first}`verify --bisect` names the node. If an operator of a library is wrong, the library has changed since "
        "the export: export again. For other nodes, `export --repair` makes code that is right."
    )


def _row(check: Check) -> tuple[str, ...]:
    took = f"{check.seconds * 1e3:.1f} ms" if check.seconds is not None else ""
    text = check.verdict.kind if check.failed else check.verdict.message.partition("\n")[0]
    return _state(check.verdict), check.against, check.label, took, text


def _state(verdict: Verdict) -> str:
    """Returns the mark of a verdict."""
    if verdict.exit_code:
        return "FAIL" if verdict.wrong else "?"
    return "--" if isinstance(verdict, (outcomes.NotRun, outcomes.EagerUnavailable)) else "ok"

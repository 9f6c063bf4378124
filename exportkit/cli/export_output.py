"""What `exportkit export` prints: the file it wrote, or what keeps a model from being exported."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.output import print_json, print_table, printable, printable_lines
from exportkit.errors import ExportError
from exportkit.onnx.files import method_path, sidecar_path
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from exportkit.cli.repair import Repair
    from exportkit.export.trace.draft import Draft
    from exportkit.package.manifest import Manifest

_FOLLOWING = {"aoti": "package {} -o OUT.pt2", "program": "export {} -o OUT.pt2", "onnx": "verify {}"}


def print_written(
    output: Path,
    output_format: str,
    manifest: Manifest,
    as_json: bool,
    more: dict[str, Any],
    libraries: Sequence[Path | str],
    repair: Repair | None = None,
) -> int:
    """Prints what was written, and the next command.

    Args:
        output: The file that was asked for.
        output_format: Its format.
        manifest: What it holds.
        as_json: Whether to print JSON.
        more: What else the JSON has.
        libraries: The operator libraries that the next command names.
        repair: How the compiled code was repaired, if it was to be.
    """
    # ONNX models of several methods are files beside one sidecar, which stands for them.
    written = output if len(manifest.onnx) < 2 else sidecar_path(output)
    if as_json:
        import msgspec

        file = {"path": str(written), "size": written.stat().st_size}
        print_json({"file": file, "manifest": msgspec.to_builtins(manifest), **more})
        return 0
    _print_manifest(output, manifest)
    if repair is not None:
        _print_repair(repair)
    needed = () if output_format == "onnx" else [f"--op-library {shlex.quote(str(each))}" for each in libraries]
    following = _FOLLOWING[output_format].format(shlex.quote(str(written)))
    click.echo(f"Next: exportkit {' '.join([following, *needed])}")
    return 0


def _print_repair(repair: Repair) -> None:
    if not repair.arguments:
        click.echo("Verified: the compiled code is right without a repair.")
        return
    click.echo("Repaired:")
    for line in [*map(str, repair.attempts), *repair.places]:
        click.echo(printable_lines(line, "  | "))
    click.echo(f"  with {repair.arguments}")
    if repair.cost:
        click.echo(f"  it takes {repair.cost}")


def _print_manifest(output: Path, manifest: Manifest) -> None:
    from exportkit.inspect.rows import dimension_text, input_rows, output_rows, state_rows, target_rows

    files = [method_path(output, manifest.methods, each.method) for each in manifest.onnx] or [output]
    for file in files:
        click.echo(f"{file}  {bytes_text(file.stat().st_size)}")
    for method in manifest.methods:
        if len(manifest.methods) > 1 or method.state:
            click.echo(f"method {method.name}" + ("" if method.state else ", without state"))
        print_table([("takes", *row) for row in input_rows(method.call)])
        if ranges := dimension_text(method.call):
            click.echo(f"  where {ranges}")
        print_table([("returns", *row) for row in output_rows(method, manifest.cases)])
    print_table([("state", *row) for row in state_rows(manifest)])
    print_table([("target", *row) for row in target_rows(manifest)])
    if operators := [operator.name for operator in manifest.operators]:
        click.echo(f"  calls {', '.join(operators)}")


def print_draft(draft: Draft, as_json: bool) -> int:
    """Prints a draft and returns the exit code: 0 if nothing keeps the model from being exported."""
    if as_json:
        findings = [asdict(finding) for finding in draft.findings]
        print_json({"findings": findings, "changes": [asdict(change) for change in draft.changes]})
    else:
        _print_findings(draft)
    return ExportError.exit_code if draft.findings else 0


def _print_findings(draft: Draft) -> None:
    if not draft.findings:
        click.echo("Nothing keeps the model from being exported.")
    for number, finding in enumerate(draft.findings, 1):
        first, *others = finding.message.split("\n")
        click.echo(f"{number}. {printable(first)}")
        for line in others:
            click.echo(printable_lines(line.strip(), "     "))
        for name, description in finding.variables.items():
            click.echo(f"     {printable(name)}: {printable(description)}")
        if finding.occurrences > 1:
            click.echo(f"     {finding.occurrences} times")
        if finding.hint:
            click.echo(printable_lines(finding.hint, "   "))

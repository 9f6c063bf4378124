"""What a user asks of `exportkit export`, and how it is done."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress
from exportkit.errors import ExportError
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.export.models.model_names import check_model_name
from exportkit.export.models.option_parsing import check_texts
from exportkit.onnx.files import method_path, sidecar_path
from exportkit.onnx.onnx_options import OnnxOptions
from exportkit.package.atomic import check_writable
from exportkit.package.trust import Trust
from exportkit.progress import Progress, bytes_text
from exportkit.reference_model import ReferenceModel

if TYPE_CHECKING:
    from exportkit.cli.repair import Repair
    from exportkit.export.models.resolved import ResolvedModel
    from exportkit.export.sizes.size_changes import SizeChange
    from exportkit.export.trace.draft import Draft
    from exportkit.package.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The arguments of `exportkit export`, and they as they were written.

    Those that concern tracing are in `trace`, and those of one format in `compiling` and in `onnx`, which lacks the
    decompositions: torch is needed to look them up.
    """

    model: str
    output: Path | None
    output_format: str
    op_libraries: tuple[Path | str, ...]
    model_kwargs: dict[str, Any]
    weights: Path | None
    inputs: tuple[str, ...]
    trust: Trust
    trusted: bool
    repair: bool
    words: tuple[str, ...]
    decompositions: dict[str, str]
    draft: bool
    apply_suggested_fixes: bool
    allow_narrowing: bool
    trace: TraceOptions
    compiling: CompileOptions
    onnx: OnnxOptions

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ExportRequest:
        """Returns the request that has these arguments."""
        left = {**given, "cache": not given["no_cache"], "version": given["model_version"]}

        def taken(kind: type[Any]) -> dict[str, Any]:
            return {each.name: left.pop(each.name) for each in fields(kind) if each.name in left}

        own = taken(cls)
        compiling, onnx = CompileOptions(**taken(CompileOptions)), OnnxOptions(**taken(OnnxOptions))
        return cls(trace=TraceOptions(**taken(TraceOptions)), compiling=compiling, onnx=onnx, **own)

    def check(self) -> None:
        """Refuses what cannot be done together, or is spelled wrongly, before torch is imported.

        Raises:
            click.UsageError: Arguments do not go together.
            ExportkitError: A name, a size or the output's folder is wrong.
        """
        if self.draft == (self.output is not None):
            raise click.UsageError("Give --output FILE, or --draft, which writes no file.")
        if self.draft and self.apply_suggested_fixes:
            raise click.UsageError(
                "--draft reports sizes that work, --apply-suggested-fixes takes them: give one of them."
            )
        if self.allow_narrowing and not self.apply_suggested_fixes:
            raise click.UsageError("--allow-narrowing is for --apply-suggested-fixes.")
        if self.output_format != "onnx" and (self.onnx != OnnxOptions() or self.decompositions):
            raise click.UsageError("--opset, --onnx-inline and --decomposition are for --format onnx.")
        self._check_compiling()
        check_model_name(self.model)
        check_texts(self.trace.dynamic, self.trace.ranges, self.inputs, self.trace.dtype)
        if self.output is not None:
            check_writable(self.output, read=[self.model.partition(":")[0], self.weights, *self.op_libraries])

    def _check_compiling(self) -> None:
        compiled = self.output_format == "aoti"
        if not compiled and self.compiling != CompileOptions():
            raise click.UsageError(
                "--cpu-isa, --cuda-arch, --inductor-config, --eager-kernel, --embed-weights and --no-cache are for "
                "--format aoti: other formats are not compiled."
            )
        other, makes = (".pt2", "aoti or program") if self.output_format == "onnx" else (".onnx", "onnx")
        if self.output is not None and self.output.suffix == other:
            raise click.UsageError(
                f"--format {self.output_format} writes no {other}: give --format {makes}, or another name with -o."
            )
        if self.repair and (not compiled or self.draft or self.apply_suggested_fixes):
            raise click.UsageError("--repair is for --format aoti, without --draft and --apply-suggested-fixes.")

    def run(self, as_json: bool) -> int:
        """Exports, repairs or drafts, prints the result, and returns the exit code."""
        if self.output is None:
            return self._draft(as_json)
        return self._repaired(self.output, as_json) if self.repair else self._export(self.output, as_json)

    def _resolved(self, step: Progress) -> ResolvedModel:
        step(f"importing torch and {self.model}")
        from exportkit.export.models.resolve import resolve

        return resolve(
            self.model,
            model_kwargs=self.model_kwargs,
            inputs=self.inputs,
            weights=self.weights,
            op_libraries=self.op_libraries,
            seed=self.trace.seed,
            trust=self.trust,
            trusted=self.trusted,
        )

    def _draft(self, as_json: bool) -> int:
        with progress() as step:
            resolved = self._resolved(step)
            from exportkit.export.trace.draft import draft_of

            step("looking for all that keeps the model from being exported")
            report = draft_of(resolved, self.trace)
        return print_draft(report, as_json)

    def _repaired(self, output: Path, as_json: bool) -> int:
        from exportkit.cli.repair import Repair

        words = [word for word in self.words if word not in ("--repair", "--json")]
        eager = ReferenceModel(self.model, self.weights, self.op_libraries)
        with progress() as step:
            repair = Repair(words, eager, self.trace.seed, step)
            manifest = repair.run(output)
        return print_written(
            output, "aoti", manifest, as_json, {"repair": repair.document()}, self.op_libraries, repair
        )

    def _export(self, output: Path, as_json: bool) -> int:
        if self.output_format == "aoti":
            from exportkit.export.compile.usable_compiler import look_for_compiler

            look_for_compiler()  # while torch is imported, which takes one core
        with progress() as step:
            resolved = self._resolved(step)
            trace, changes = self._sizes(resolved, step)
            manifest = self._write(resolved, output, trace, step)
        more = {"changes": [asdict(change) for change in changes]} if self.apply_suggested_fixes else {}
        libraries = list(dict.fromkeys([*self.op_libraries, *getattr(resolved.spec, "operator_libraries", ())]))
        return print_written(output, self.output_format, manifest, as_json, more, libraries)

    def _sizes(self, resolved: ResolvedModel, step: Progress) -> tuple[TraceOptions, Sequence[SizeChange]]:
        """Returns how to trace, with the suggested sizes if they are asked for, and what they changed."""
        if not self.apply_suggested_fixes:
            return self.trace, ()
        from exportkit.export.trace.draft import suggested_changes, with_changes

        step("looking for sizes that the model takes")
        changes = suggested_changes(resolved, self.trace, allow_narrowing=self.allow_narrowing)
        for change in changes:
            step(f"changed {change.place} from {change.before} to {change.after}: {change.meaning}")
        return with_changes(self.trace, changes), changes

    def _write(self, resolved: ResolvedModel, output: Path, trace: TraceOptions, step: Progress) -> Manifest:
        from exportkit.export.artifact import export_aoti, export_program

        if self.output_format == "program":
            return export_program(resolved, output, trace, progress=step)
        if self.output_format == "aoti":
            return export_aoti(resolved, output, trace, self.compiling, progress=step)
        from exportkit.export.models.resolve import resolve_decompositions
        from exportkit.onnx.export_onnx import export_onnx

        options = replace(self.onnx, decompositions=resolve_decompositions(self.decompositions))
        return export_onnx(resolved, output, trace, options, progress=step)


# --- what is printed --------------------------------------------------------------------------------------------------


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
    """Prints what was written, and the next command."""
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
        if finding.hint:
            click.echo(printable_lines(finding.hint, "   "))

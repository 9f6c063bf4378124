"""`exportkit export`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.draft_report import print_draft
from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress
from exportkit.cli.replaced_file import ReplacedFile
from exportkit.cli.shared_options import (
    assignments,
    device_option,
    json_object,
    op_library_option,
    output_option,
    public_key_options,
    trusted_option,
    weights_option,
)
from exportkit.export.cpu_isas import CpuIsa
from exportkit.export.export_options import CompileOptions, CudaArch, TraceOptions
from exportkit.export.model_names import check_model_name
from exportkit.export.spelling import check_texts
from exportkit.onnx.files import companion_path, method_path
from exportkit.onnx.onnx_options import OnnxOptions
from exportkit.package.atomic import check_writable
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from exportkit.export.size_changes import SizeChange
    from exportkit.package.manifest import Manifest
    from exportkit.repair.attempts import Repaired

_TRACE = TraceOptions()
_FOLLOWING = {"aoti": "package {} -o OUT.pt2", "program": "export {} -o OUT.pt2", "onnx": "verify {}"}


def _decompositions(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Parses "ns::op=package.module:function"."""
    found: dict[str, str] = {}
    for text in texts:
        operator, equals, function = text.partition("=")
        if not equals or "::" not in operator or ":" not in function:
            raise click.BadParameter(f"{text!r} is not NS::OP=MODULE:FUNCTION, such as myops::scale=mymodel:scale_aten")
        if operator in found:
            raise click.BadParameter(f"{operator} is given twice: {found[operator]} and {function}")
        found[operator] = function
    return found


@exportkit_command("export", short_help="Trace and compile a model, and record cases.")
@click.argument("model")
@output_option(required=False)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["aoti", "program", "onnx"]),
    default="aoti",
    show_default=True,
    help="aoti: compiled for the device of this machine. program: the ExportedProgram, to be compiled elsewhere. onnx: "
    "for ONNX Runtime and others, with a function for each custom operator.",
)
@device_option("Where the model runs.", default=_TRACE.device)
@click.option("--dtype", metavar="DTYPE", help="Cast floating parameters, buffers and inputs: float16, bfloat16, ...")
@click.option(
    "--dynamic",
    multiple=True,
    metavar="PARAM:DIM=SIZE",
    help="A size that varies, such as image:0=batch[1:64], or image:2=16*gh[8:96] for multiples; image:0=4 fixes it. "
    "Repeatable.",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="NAME=MIN:MAX",
    help="The range of a size by its name, such as length=1:4096, in place of the one that was declared. Repeatable.",
)
@click.option(
    "--draft",
    is_flag=True,
    help="Write nothing, and report everything that keeps the model from being exported, with sizes that work.",
)
@click.option(
    "--apply-suggested-fixes",
    is_flag=True,
    help="Where the model does not take every size, change --dynamic to sizes that work, in at most five tries.",
)
@click.option(
    "--allow-narrowing", is_flag=True, help="Let --apply-suggested-fixes fix a size or take away an end of its range."
)
@click.option(
    "--state",
    multiple=True,
    metavar="PATTERN",
    help="Buffers that the model writes and that outlive a call, by name, such as 'cache.*'. Each session has its own. "
    "Repeatable.",
)
@click.option(
    "--writes",
    multiple=True,
    metavar="INPUT",
    help="An input that the model writes in place, such as cache or cache.0. Repeatable.",
)
@click.option("--static", is_flag=True, help="Fix every size, even if the model's spec makes it vary.")
@op_library_option(
    "An operator library that the model calls, or a Python module that loads some. Repeatable. Omit exportkit's own "
    "libraries.",
)
@click.option(
    "--model-kwargs", metavar="JSON", callback=json_object, help="Keyword arguments of the callable that MODEL names."
)
@weights_option("A file with every parameter and buffer of the model.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=DTYPE[SIZES]", help="An example input. Repeatable.")
@click.option(
    "--cases", type=click.IntRange(min=0), default=_TRACE.cases, show_default=True, help="Number of cases to record."
)
@click.option(
    "--trouble/--no-trouble",
    default=_TRACE.trouble,
    show_default=True,
    help="Record cases with troublesome values, too: of one sign, with ties, NaN, the ends of the dtype.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=_TRACE.seed, show_default=True, help="Seed of the weights and cases."
)
@click.option(
    "--cpu-isa",
    "cpu_isas",
    type=click.Choice(get_args(CpuIsa)),
    multiple=True,
    help="Instruction set of the CPU code. Repeatable: each makes one target. Default: x86-64-v3, on Arm armv8-a.",
)
@click.option(
    "--cuda-arch",
    "cuda_archs",
    multiple=True,
    metavar="ARCH",
    help="native: only this GPU's architecture; native+ptx, the default: newer ones too. Or compute capabilities, such "
    "as 8.0 or 8.0+ptx, of GPUs that need not be here: repeatable, each makes one target.",
)
@click.option(
    "--inductor-config",
    multiple=True,
    metavar="KEY=VALUE",
    callback=assignments,
    help="An option of torch._inductor.config. Repeatable.",
)
@click.option(
    "--eager-kernel",
    "eager_kernels",
    multiple=True,
    metavar="OPERATOR",
    help="An operator of torch that the code leaves to eager's kernel, such as aten.amin; aten: all of them. "
    "Repeatable.",
)
@click.option(
    "--embed-weights",
    is_flag=True,
    help="Keep the weights inside the compiled code, for torch's own loaders. They cannot be swapped then.",
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Compile, even if this program was compiled before, and keep nothing of it in the cache.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Verify the compiled code. If it is wrong or does not compile, try options of the compiler, and take the "
    "first with which it is right.",
)
@click.option(
    "--repair-minutes",
    type=click.FloatRange(min=1),
    metavar="N",
    help="With --repair: begin no further try after N minutes. Default: 20.",
)
@click.option(
    "--opset",
    type=int,
    default=OnnxOptions().opset,
    show_default=True,
    help="The version of ONNX's operators, 18 to 23. For --format onnx.",
)
@click.option(
    "--onnx-inline",
    "inline",
    is_flag=True,
    help="Write no functions: put the operators of each where it is called, for runtimes that take no functions.",
)
@click.option(
    "--decomposition",
    "decompositions",
    multiple=True,
    metavar="NS::OP=MODULE:FUNCTION",
    callback=_decompositions,
    help="A function that computes a custom operator with torch's operators, for --format onnx. Repeatable.",
)
@click.option(
    "--allow-nondeterministic",
    is_flag=True,
    help="Export a model that answers the same inputs differently. Only dtypes and shapes are verified then.",
)
@click.option(
    "--tf32",
    is_flag=True,
    help="Let eager round the factors of float32 products and convolutions to TF32 where cases are recorded. verify "
    "then lets the package do so too.",
)
@public_key_options("MODEL (an exported program)")
@trusted_option("MODEL")
@click.option("--name", help="The package's name. Default: the model's name.")
@click.option("--model-version", default=_TRACE.version, show_default=True, help="The model's version.")
def command(
    model: str,
    output: Path | None,
    output_format: str,
    op_libraries: tuple[Path | str, ...],
    model_kwargs: dict[str, Any],
    weights: Path | None,
    inputs: tuple[str, ...],
    trust: Trust,
    trusted: bool,
    seed: int,
    cpu_isas: tuple[Any, ...],
    cuda_archs: tuple[str, ...],
    inductor_config: dict[str, Any],
    eager_kernels: tuple[str, ...],
    embed_weights: bool,
    no_cache: bool,
    repair: bool,
    repair_minutes: float | None,
    opset: int,
    inline: bool,
    decompositions: dict[str, str],
    model_version: str,
    draft: bool,
    apply_suggested_fixes: bool,
    allow_narrowing: bool,
    as_json: bool,
    **trace: Any,
) -> int:
    """Trace MODEL with torch.export, compile it with AOTInductor, record cases, and write the artifact.

    MODEL is a built-in name (arr-coc), package.module:attr, path/file.py:attr, or an ExportedProgram .pt2. The
    attribute is an exportkit.ExportSpec, a callable that returns one, or an nn.Module (then --input gives the inputs).
    A file of torch.export.save is read without unpickling and without evaluating its text, or refused: see --trust.

    \b
    exportkit export arr-coc -o artifacts/arr_coc_aoti.pt2
    exportkit export models/net.py:Net --input x=float32[4,3,64,64] --dynamic 'x:0=batch[1:32]' -o net.pt2
    exportkit export models/net.py:Net --input x=float32[4,3,64,64] --dynamic 'x:0=batch[1:32]' --draft
    exportkit export arr-coc --format onnx -o arr_coc.onnx
    exportkit export models/net.py:spec --repair -o net.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    if draft == (output is not None):
        raise click.UsageError("Give --output FILE, or --draft, which writes no file.")
    if draft and apply_suggested_fixes:
        raise click.UsageError("--draft reports sizes that work, --apply-suggested-fixes takes them: give one of them.")
    if allow_narrowing and not apply_suggested_fixes:
        raise click.UsageError("--allow-narrowing is for --apply-suggested-fixes.")
    if output_format != "aoti" and (cpu_isas or inductor_config or eager_kernels or embed_weights or no_cache):
        raise click.UsageError(
            "--cpu-isa, --inductor-config, --eager-kernel, --embed-weights and --no-cache are for --format aoti: other "
            "formats are not compiled."
        )
    if repair and (output_format != "aoti" or draft or apply_suggested_fixes):
        raise click.UsageError("--repair is for --format aoti, without --draft and --apply-suggested-fixes.")
    if repair_minutes is not None and not repair:
        raise click.UsageError("--repair-minutes is for --repair.")
    if output_format != "onnx" and (opset != OnnxOptions().opset or inline or decompositions):
        raise click.UsageError("--opset, --onnx-inline and --decomposition are for --format onnx.")
    check_model_name(model)
    check_texts(trace["dynamic"], trace["ranges"], inputs, trace["dtype"])
    if output is not None:
        check_writable(output)
    onnx_options = OnnxOptions(opset, inline)
    changes: Sequence[SizeChange] = ()
    options = TraceOptions(seed=seed, version=model_version, **trace)
    cuda_arch, gpus = _architectures(cuda_archs)
    if gpus and (output_format != "aoti" or repair or draft):
        raise click.UsageError("--cuda-arch for a GPU that is not here is for --format aoti, without --repair.")
    compile_options = CompileOptions(
        cpu_isas, cuda_arch, inductor_config, embed_weights, eager_kernels, gpus, not no_cache
    )
    making: dict[str, Any] = {
        "model_kwargs": model_kwargs,
        "inputs": inputs,
        "weights": weights,
        "op_libraries": op_libraries,
        "seed": seed,
        "trust": trust,
        "trusted": trusted,
    }
    if repair and output is not None:
        from exportkit.repair.repair_commands import TraceModel
        from exportkit.repair.repairing import DEFAULT_MINUTES, export_repaired

        task = TraceModel.of(model, output, options, compile_options, **making)
        with progress() as step:
            repaired = export_repaired(task, output, minutes=repair_minutes or DEFAULT_MINUTES, progress=step)
        document = {"repair": repaired.document()}
        return _print_written(output, "aoti", repaired.manifest, as_json, document, op_libraries, repaired)
    others = ReplacedFile(output)
    with progress() as shown:
        step = others.watched(shown)
        step(f"importing torch and {model}")
        from exportkit.export.artifact import export_aoti, export_program
        from exportkit.export.call_signature import left_out
        from exportkit.export.draft import draft_of, suggested_changes, with_changes
        from exportkit.export.resolve import resolve, resolve_decompositions
        from exportkit.onnx.export_onnx import export_onnx

        resolved = resolve(model, **making)
        for parameter in left_out(resolved.spec.model):
            step(f"leaving out {parameter.partition(':')[0]} of forward, which has no names for a package to describe")
        if apply_suggested_fixes:
            step("looking for sizes that the model takes")
            changes = suggested_changes(resolved, options, allow_narrowing=allow_narrowing)
            options = with_changes(options, changes)
            for change in changes:
                step(f"changed {change.place} from {change.before} to {change.after}: {change.meaning}")
        if output is None:
            step("looking for all that keeps the model from being exported")
            report = draft_of(resolved, options)
        elif output_format == "onnx":
            onnx_options = replace(onnx_options, decompositions=resolve_decompositions(decompositions))
            manifest = export_onnx(resolved, output, options, onnx_options, progress=step)
        elif output_format == "program":
            manifest = export_program(resolved, output, options, progress=step)
        else:
            manifest = export_aoti(resolved, output, options, compile_options, progress=step)
    if output is None:
        return print_draft(report, as_json)
    if others.notice:
        click.echo(f"note: {printable(others.notice)}", err=True)
    more = {"changes": [asdict(change) for change in changes]} if apply_suggested_fixes else {}
    libraries = dict.fromkeys([*op_libraries, *getattr(resolved.spec, "operator_libraries", ())])
    return _print_written(output, output_format, manifest, as_json, more, list(libraries))


def _architectures(given: Sequence[str]) -> tuple[CudaArch, Sequence[str]]:
    """Returns what is compiled for the GPU here, and the GPUs to compile for in its place."""
    native = [arch for arch in get_args(CudaArch) if arch in given]
    if native and len(given) > 1:
        raise click.UsageError(f"--cuda-arch {native[0]} is this machine's GPU: give it alone, or capabilities alone.")
    return (native[0], ()) if native else (CompileOptions().cuda_arch, given)


def _print_written(
    output: Path,
    output_format: str,
    manifest: Manifest,
    as_json: bool,
    more: dict[str, Any],
    libraries: Sequence[Path | str],
    repaired: Repaired | None = None,
) -> int:
    """Prints what was written, `more` of it in JSON, and what comes next, with the libraries that it needs."""
    # ONNX models of several methods are files beside one companion, which stands for them.
    written = output if len(manifest.onnx) < 2 else companion_path(output)
    if as_json:
        import msgspec

        file = {"path": str(written), "size": written.stat().st_size}
        print_json({"file": file, "manifest": msgspec.to_builtins(manifest), **more})
        return 0
    _print_manifest(output, manifest)
    if repaired is not None:
        _print_repair(repaired)
    needed = () if output_format == "onnx" else [f"--op-library {shlex.quote(str(each))}" for each in libraries]
    following = _FOLLOWING[output_format].format(shlex.quote(str(written)))
    click.echo(f"Next: exportkit {' '.join([following, *needed])}")
    return 0


def _print_repair(repaired: Repaired) -> None:
    if repaired.costs is None and not repaired.attempts:
        click.echo("Verified: the compiled code is right without a repair.")
        return
    from exportkit.repair.attempts import tried_lines

    click.echo("Repaired:")
    for line in [*repaired.problem.splitlines(), *tried_lines(repaired.attempts)]:
        click.echo(printable_lines(line, "  | "))
    click.echo(f"  with {repaired.given.arguments}")
    if repaired.costs is not None:
        click.echo(f"  costs {repaired.costs}")


def _print_manifest(output: Path, manifest: Manifest) -> None:
    from exportkit.cli.describe import dimension_text, input_rows, output_rows, state_rows, target_text

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
    print_table([("target", target.name, target_text(target)) for target in manifest.targets])
    if operators := [operator.name for operator in manifest.operators]:
        click.echo(f"  calls {', '.join(operators)}")

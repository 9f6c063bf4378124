"""`exportkit export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import click

from exportkit.cli.app import Command
from exportkit.cli.app import command as exportkit_command
from exportkit.cli.export_request import ExportRequest
from exportkit.cli.shared_options import (
    assignments,
    device_option,
    flag,
    json_object,
    op_library_option,
    output_option,
    public_key_options,
    repeatable,
    seed_option,
    trusted_option,
    weights_option,
)
from exportkit.export.cpu_isas import CpuIsa
from exportkit.export.export_options import CompileOptions, CudaArch, TraceOptions
from exportkit.onnx.onnx_options import OnnxOptions

_TRACE = TraceOptions()


class _Export(Command):
    """Keeps the arguments as they were written: --repair gives them again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses them."""
        ctx.obj = tuple(args)
        return super().parse_args(ctx, args)


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


@exportkit_command(
    "export",
    cls=_Export,
    common=(
        "output",
        "output_format",
        "device",
        "dtype",
        "inputs",
        "dynamic",
        "weights",
        "model_kwargs",
        "op_libraries",
        "state",
        "draft",
        "name",
    ),
)
@click.argument("model")
@output_option(required=False)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["aoti", "program", "onnx"]),
    default="aoti",
    help="aoti: compiled for the device of this machine. program: the ExportedProgram, to be compiled elsewhere. onnx: "
    "for ONNX Runtime and others, with a function for each custom operator.",
)
@device_option("Where the model runs.", default=_TRACE.device)
@click.option("--dtype", metavar="DTYPE", help="Cast floating parameters, buffers and inputs: float16, bfloat16, ...")
@repeatable(
    "--dynamic",
    "PARAM:DIM=SIZE",
    "A size that varies, such as image:0=batch[1:64], or image:2=16*gh[8:96] for multiples; image:0=4 fixes it.",
)
@repeatable(
    "--range",
    "NAME=MIN:MAX",
    "The range of a size by its name, such as length=1:4096, in place of the one that was declared.",
    to="ranges",
)
@flag("--draft", "Write nothing, and report everything that keeps the model from being exported, with sizes that work.")
@flag(
    "--apply-suggested-fixes",
    "Where the model does not take every size, change --dynamic to sizes that work, in at most five tries.",
)
@flag("--allow-narrowing", "Let --apply-suggested-fixes make a size constant or shrink its range.")
@repeatable(
    "--state",
    "PATTERN",
    "Buffers that the model writes and that outlive a call, by name, such as 'cache.*'. Each session has its own.",
)
@repeatable("--writes", "INPUT", "An input that the model writes in place, such as cache or cache.0.")
@flag("--static", "Fix every size, even if the model's spec makes it vary.")
@op_library_option(
    "An operator library that the model calls, or a Python module that loads some. Repeatable. Omit exportkit's own "
    "libraries.",
)
@click.option(
    "--model-kwargs", metavar="JSON", callback=json_object, help="Keyword arguments of the callable that MODEL names."
)
@weights_option("A file with every parameter and buffer of the model.")
@repeatable(
    "--input",
    "NAME=DTYPE[SIZES]",
    "An example input, such as image=float32[2,3,64,64]; batch.mask is batch['mask'], past.0 is past[0].",
    to="inputs",
)
@click.option("--cases", type=click.IntRange(min=0), default=_TRACE.cases, help="Number of cases to record.")
@click.option(
    "--edge-cases/--no-edge-cases",
    default=_TRACE.edge_cases,
    help="Record cases with edge values, too: of one sign, with ties, NaN, the ends of the dtype.",
)
@seed_option("Seed of the weights and cases.")
@click.option(
    "--cpu-isa",
    "cpu_isas",
    type=click.Choice(get_args(CpuIsa)),
    multiple=True,
    help="Instruction set of the CPU code. Repeatable: each makes one target. Default: x86-64-v3, on Arm armv8-a.",
)
@click.option(
    "--cuda-arch",
    type=click.Choice(get_args(CudaArch)),
    default=CompileOptions().cuda_arch,
    help="native: code for this GPU's architecture alone; native+ptx: for newer ones, too.",
)
@repeatable("--inductor-config", "KEY=VALUE", "An option of torch._inductor.config.", callback=assignments)
@repeatable(
    "--eager-kernel",
    "OPERATOR",
    "An operator of torch that the code leaves to eager's kernel, such as aten.amin; aten.amin.default@amin_2: only"
    " its node amin_2; aten: all of them.",
    to="eager_kernels",
)
@flag(
    "--embed-weights",
    "Keep the weights inside the compiled code, for torch's own loaders. They cannot be swapped then.",
)
@flag("--no-cache", "Compile, even if this program was compiled before, and keep nothing of it in the cache.")
@flag(
    "--repair",
    "Verify the compiled code. If it is wrong, leave the nodes at which it goes wrong to eager's kernels, or try "
    "options of the compiler, and take what makes it right.",
)
@click.option(
    "--opset",
    type=int,
    default=OnnxOptions().opset,
    help="The version of ONNX's operators, 18 to 23. For --format onnx.",
)
@flag(
    "--onnx-inline",
    "Write no functions: put the operators of each where it is called, for runtimes that take no functions.",
    to="inline",
)
@repeatable(
    "--decomposition",
    "NS::OP=MODULE:FUNCTION",
    "A function that computes a custom operator with torch's operators, for --format onnx.",
    to="decompositions",
    callback=_decompositions,
)
@flag(
    "--allow-nondeterministic",
    "Export a model that answers the same inputs differently. Only dtypes and shapes are verified then.",
)
@flag(
    "--tf32",
    "Record the cases with TF32 in float32 products and convolutions. verify then accepts TF32's error.",
)
@public_key_options("MODEL (an exported program)")
@trusted_option("MODEL")
@click.option("--name", help="The package's name. Default: the model's name.")
@click.option("--model-version", default=_TRACE.version, help="The model's version.")
@click.pass_obj
def command(words: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Trace MODEL with torch.export, compile it with AOTInductor, record cases, and write the artifact.

    MODEL is a built-in name (arr-coc), package.module:attr, path/file.py:attr, or an ExportedProgram .pt2. The
    attribute is an exportkit.ExportSpec, a callable that returns one, or an nn.Module (then --input gives the inputs).
    Loading, verifying or exporting from a program runs what its author wrote, as loading a package does.

    \b
    exportkit export arr-coc -o artifacts/arr_coc_aoti.pt2
    exportkit export models/net.py:Net --input x=float32[4,3,64,64] --dynamic 'x:0=batch[1:32]' -o net.pt2
    exportkit export models/net.py:Net --input x=float32[4,3,64,64] --dynamic 'x:0=batch[1:32]' --draft
    exportkit export arr-coc --format onnx -o arr_coc.onnx
    exportkit export models/net.py:spec --repair -o net.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    request = ExportRequest.of({**given, "words": words})
    request.check()
    return request.run(as_json)

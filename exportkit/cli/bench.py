"""`exportkit bench`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import printable, progress
from exportkit.cli.shared_options import (
    EXISTING_FILE,
    OUTPUT_FILE,
    device_option,
    eager_options,
    flag,
    public_key_options,
    repeatable,
    seed_option,
)
from exportkit.package.atomic import check_writable, write_whole

if TYPE_CHECKING:
    from exportkit.bench.results import Results

_OPERATORS = "ops"
_DTYPES = ["float32", "float64", "float16", "bfloat16"]


@exportkit_command("bench", common=("against", "sizes", "device", "cuda_graphs", "model", "seconds", "output"))
@click.argument("what", nargs=-1, required=True)
@click.option(
    "--against",
    type=click.Choice(["eager", "compile", "library", "max-autotune", "reduce-overhead", "freezing"]),
    multiple=True,
    help="Time only this alternative; `compile` takes seconds per size. Repeatable. Default: eager, compile, library. "
    "For packages also torch.compile with max-autotune, with reduce-overhead (CUDA graphs), or with freezing, which "
    "takes the weights for constants.",
)
@click.option(
    "--direction",
    type=click.Choice(["forward", "backward", "both"]),
    default="both",
    help="For operators: time the call, its gradient, or both.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="For operators: the dtype. Default: each operator's own.")
@repeatable(
    "--size",
    "SIZE",
    "For a package: a size such as batch=8,gh=28,gw=28. Default: the sizes of its recorded calls. For operators: "
    "time only sizes that contain this text.",
    to="sizes",
)
@click.option("--method", metavar="NAME", help="For packages: the method to time. Default: `forward`, or the only one.")
@device_option("Where to run; auto: CUDA if there is a device, else the CPU.", default="auto")
@flag("--cuda-graphs", "For packages on CUDA: time CUDA graphs too, and torch.compile's reduce-overhead.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads torch uses on the CPU. Default: torch's choice.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=600),
    default=1.0,
    help="Seconds to spend on each alternative at each size.",
)
@seed_option("Seed of the inputs.")
@eager_options("the package")
@click.option(
    "--onnx",
    type=EXISTING_FILE,
    metavar="MODEL.onnx",
    help="For packages: time ONNX Runtime with this model too, on the CPU with the same number of threads.",
)
@click.option(
    "--candidate",
    metavar="LIBRARY",
    help="For `ops`: time the kernels of this library, which a program wrote, with a --reference and --calls for each.",
)
@repeatable(
    "--reference", "NS::OP=FILE.py:FUNCTION", "For --candidate: what the kernel is timed beside.", to="references"
)
@repeatable("--calls", "NS::OP=FILE.py:FUNCTION", "For --candidate: yields the calls to time as (args, kwargs).")
@click.option("--plot", type=OUTPUT_FILE, metavar="FILE.svg", help="Draw the times.")
@public_key_options("each package")
@click.option("-o", "--output", type=OUTPUT_FILE, help="Write the results as JSON, after each row.")
def command(
    what: tuple[str, ...],
    device: str,
    candidate: str | None,
    references: tuple[str, ...],
    calls: tuple[str, ...],
    threads: int | None,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time WHAT beside its alternatives, on the same inputs in one run.

    WHAT is `ops` for every operator, names of operators, or packages (.pt2). Operators are timed beside their ATen
    reference, torch.compile of the reference, and the fastest library with the same function. Packages are timed beside
    the eager model, with operators and with their references, and beside torch.compile; other packages are compared
    with the first. All results are compared before anything is timed; a different result is an error. The eager
    model is made if --model names it, or if an installed package has registered the name that the package recorded.

    Of a method with state, the last call in each recorded sequence is timed. Before each call, the session gets the
    state that it had there, which is not timed.

    The alternatives take turns. Inputs rotate, so that caches do not hold them. On CUDA an operator has two times: of
    a call with its launches, and of the kernels alone, replayed from a CUDA graph. The table shows the kernels' time
    where there is one. The limit is the time to move the necessary bytes at the rate of a large copy, measured in the
    same run.

    Kernels of --candidate and their references run in two processes, on new values in each round, which no cache holds.
    Each answer is compared. The device's clock is noted.

    \b
    exportkit bench ops --device cpu --threads 2 -o cpu.json
    exportkit bench fused_texture top_k_patches --direction forward --against eager
    exportkit bench arr_coc.pt2 --size batch=8,gh=28,gw=28
    exportkit bench arr_coc.pt2 --onnx arr_coc.onnx --device cpu --threads 2
    exportkit bench llama.pt2 --method decode --model llama.py:spec
    exportkit bench ops --candidate scale.so --reference my::scale=reference.py:scale --calls my::scale=sizes.py:calls
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    for file in filter(None, (output, plot)):
        check_writable(file, read=[*what, candidate, options["onnx"]])
    packages = [Path(name) for name in what if name.endswith(".pt2")]
    if models := [name for name in what if name.endswith(".onnx")]:
        raise click.UsageError(f"{models[0]} is timed beside a package: exportkit bench PACKAGE.pt2 --onnx {models[0]}")
    if packages and len(packages) < len(what):
        raise click.UsageError("operators and packages cannot be timed together; run bench once for each.")
    if candidate is None and (references or calls):
        raise click.UsageError("--reference and --calls are for --candidate.")
    if _OPERATORS in what and len(what) > 1:
        raise click.UsageError(f"`{_OPERATORS}` stands for every operator: give it alone, or the names without it.")
    if candidate is not None and what != (_OPERATORS,):
        raise click.UsageError("--candidate is timed by `exportkit bench ops --candidate LIBRARY`.")
    # torch's profiler, which counts memory, prints a line to stderr when it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    results: Results | None = None
    try:
        with progress() as step:
            step("importing torch and the operators")
            from exportkit.bench.results import encode
            from exportkit.bench.runs import run
            from exportkit.cli.bench_candidate import candidate_rows
            from exportkit.cli.bench_plot import bench_plot

            text = shlex.join(["exportkit", *sys.argv[1:]])
            if candidate is not None:
                rows = candidate_rows(candidate, references, calls, step, threads=threads, **options)
            else:
                rows = _of_packages(packages, step, **options) if packages else _of_operators(what, step, **options)
            for results in run(rows, device=device, command=text, threads=threads, progress=step):
                if output is not None:
                    write_whole(output, encode(results))
                if plot is not None:
                    write_whole(plot, bench_plot(results).encode())
    except BaseException:
        if results is not None and not as_json:
            _print(results)  # what took minutes, before the error
        raise
    assert results is not None  # nothing to time is an error
    if as_json:
        click.echo(encode(results), nl=False)
    else:
        _print(results)


def _of_operators(what: tuple[str, ...], step: Any, **options: Any) -> Any:
    import torch

    from exportkit.bench.operator_options import ALTERNATIVES, OperatorOptions
    from exportkit.installed import declared

    benches = declared("exportkit.bench")
    if not benches:
        raise click.UsageError(
            f"{what[0]} is no package (.pt2), and no installed package brings operators to time (entry point group "
            "exportkit.bench)."
        )
    if of_compilers := [name for name in options["against"] if name not in ALTERNATIVES]:
        raise click.UsageError(f"--against {of_compilers[0]} is for packages; {', '.join(what)} names operators.")
    eager, trust = options["eager"], options["trust"]
    of_packages = {
        "--model": eager.model,
        "--weights": eager.weights,
        "--op-library": eager.op_libraries,
        "--public-key": trust.keys,
        "--signature": trust.signature,
        **{f"--{name.replace('_', '-')}": options[name] for name in ("onnx", "method", "cuda_graphs")},
    }
    for option, value in of_packages.items():
        if value:
            raise click.UsageError(f"{option} is for packages; {', '.join(what)} names operators.")
    dtype, direction = options["dtype"], options["direction"]
    chosen = OperatorOptions(
        names=[] if _OPERATORS in what else what,
        directions=("forward", "backward") if direction == "both" else (direction,),
        dtype=getattr(torch, dtype) if dtype else None,
        against=options["against"] or ALTERNATIVES,
        **{name: options[name] for name in ("sizes", "seconds", "seed")},
    )
    modules = [entry.load() for entry in benches.values()]
    has = [module for module in modules if not chosen.names or {*chosen.names} & {*module.operator_names()}]
    return lambda device, rate: (
        row for module in has or modules for row in module.bench_operators(device, rate, chosen, step)
    )


def _of_packages(packages: list[Path], step: Any, **options: Any) -> Any:
    from exportkit.bench.packages import PackageOptions, bench_packages

    if "library" in options["against"]:
        raise click.UsageError("--against library is for operators; give other packages as arguments.")
    if options["dtype"] or options["direction"] == "backward":
        raise click.UsageError(
            "--dtype and --direction are for operators; a package's dtype is fixed, and it has no gradient."
        )
    if options["trust"].signature and len(packages) > 1:
        raise click.UsageError("--signature works with one package only; put each signature beside its package.")
    others = {name: value for name, value in options.items() if name not in ("against", "dtype", "direction")}
    chosen = PackageOptions(against=options["against"] or None, **others)
    return lambda device, rate: bench_packages(packages, device, chosen, step)


def _print(results: Results) -> None:
    from exportkit.bench import tables

    click.echo(tables.heading(results) + "\n")
    for direction, title in (("forward", "Calls"), ("backward", "Gradients")):
        rows = [row for row in results.rows if row.direction == direction]
        if rows:
            click.echo(f"{title}:\n\n{tables.table(rows)}")
    for note in (*tables.libraries(results.rows), *tables.notes(results.rows)):
        click.echo(f"  {printable(note)}")

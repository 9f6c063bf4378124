"""`exportkit serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from exportkit.cli.app import INTERRUPTED_EXIT_CODE
from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, printable
from exportkit.cli.shared_options import EXISTING_FILE, PACKAGE, byte_size, flag

if TYPE_CHECKING:
    from exportkit.serve.serve_options import ServeOptions

T = TypeVar("T")

_PORT = click.IntRange(min=0, max=65535)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@exportkit_command(
    "serve",
    common=(
        "repository",
        "host",
        "port",
        "devices",
        "max_rows",
        "cuda_graphs",
        "isolate",
        "public_keys",
        "api_keys",
        "certificate",
        "private_key",
    ),
)
@click.argument("packages", nargs=-1, type=PACKAGE, metavar="[PACKAGE]...")
@click.option(
    "--model-repository",
    "repository",
    type=_FOLDER,
    metavar="DIR",
    help="Serve the packages of this folder too: FILE.pt2, or NAME/VERSION/model.pt2. Clients may load and unload.",
)
@click.option("--host", default="127.0.0.1", help="The address to listen on. 0.0.0.0: all.")
@click.option("--port", type=_PORT, default=8000, help="The HTTP port. 0: any free port.")
@click.option("--grpc-port", type=_PORT, help="The gRPC port. 0: any free port. Default: 8001.")
@flag("--no-grpc", "Do not listen for gRPC.")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="Load a copy of each model on this device. Repeatable. Default: auto, which is one CUDA device or the CPU.",
)
@click.option(
    "--runners",
    type=click.IntRange(min=1, max=1024),
    help="Batches of a model that run at the same time on each device. Default: 1 on a CPU, 2 on a GPU.",
)
@click.option(
    "--max-batch", "max_rows", type=click.IntRange(min=1), help="The most rows of a batch. Default: the model's limit."
)
@click.option(
    "--max-delay",
    type=click.FloatRange(min=0, max=60_000),
    callback=lambda context, parameter, milliseconds: milliseconds / 1e3,
    default=0.0,
    metavar="MILLISECONDS",
    help="How long a request may wait for others while a runner is free.",
)
@click.option(
    "--max-queue-rows",
    "max_queued_rows",
    type=click.IntRange(min=1),
    default=1024,
    help="The most rows that wait for each model. More are refused with status 429.",
)
@click.option(
    "--max-queue-bytes",
    "max_queued_bytes",
    callback=byte_size,
    metavar="SIZE",
    help="The most bytes of inputs that wait for each model, such as 500MB. Default: 1 GiB.",
)
@click.option(
    "--max-sequences",
    "most",
    type=click.IntRange(min=0, max=1_000_000),
    default=1024,
    help="The most sequences of each package with state. More are refused with status 429. 0: its state is not served.",
)
@click.option(
    "--max-sequence-bytes",
    "most_bytes",
    callback=byte_size,
    metavar="SIZE",
    help="The most bytes of their state. Default: 1 GiB.",
)
@click.option(
    "--sequence-idle",
    "idle_seconds",
    type=click.FloatRange(min=0, max=86_400, min_open=True),
    default=60.0,
    metavar="SECONDS",
    help="How long a sequence may be without a request before it ends.",
)
@click.option(
    "--sequence-finish",
    "finish_seconds",
    type=click.FloatRange(min=0, max=86_400),
    default=10.0,
    metavar="SECONDS",
    help="How long sequences go on after their model was replaced, or after SIGTERM: half of --drain-timeout at most.",
)
@click.option(
    "--adapters",
    type=_FOLDER,
    metavar="FOLDER",
    help="Adapters that a sequence may begin with, by the name of their folder in this one, as PEFT saves them.",
)
@flag(
    "--cuda-graphs",
    "Run calls on a GPU as CUDA graphs: one launch each. The first call with each number of rows takes longer.",
)
@flag("--isolate", "Run each model in a worker process. If it dies, a new one starts.")
@flag("--no-warm-up", "Do not run the recorded cases before a model is ready.")
@click.option(
    "--public-key",
    "public_keys",
    type=EXISTING_FILE,
    multiple=True,
    metavar="KEY.pem",
    help="Require that this key signed each package. Repeatable: one of the keys is enough.",
)
@click.option(
    "--tls-certificate", "certificate", type=EXISTING_FILE, metavar="CERT.pem", help="Serve TLS with this chain."
)
@click.option("--tls-key", "private_key", type=EXISTING_FILE, metavar="KEY.pem", help="The key of --tls-certificate.")
@click.option(
    "--client-ca",
    "client_authorities",
    type=EXISTING_FILE,
    metavar="CA.pem",
    help="Require a client certificate that this authority signed.",
)
@click.option(
    "--api-keys",
    type=EXISTING_FILE,
    metavar="FILE",
    help="Require `Authorization: Bearer KEY`, with a key of this file: one on each line. SIGHUP reads it again.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1, max=1_000_000),
    default=1024,
    help="The most open connections of HTTP, and as many of gRPC.",
)
@click.option(
    "--drain-timeout",
    "drain_seconds",
    type=click.FloatRange(min=0, max=86_400),
    default=30.0,
    metavar="SECONDS",
    help="How long accepted requests may take after SIGTERM or Ctrl-C.",
)
@click.option(
    "--access-log/--no-access-log",
    default=True,
    help="Write a line of JSON for each request to stderr.",
)
@flag("--ray", "Serve with Ray Serve: on the cluster of RAY_ADDRESS, or on this machine (extra `ray`). Only HTTP.")
@click.option("--traces", metavar="URL", help="Send OpenTelemetry traces to this OTLP endpoint (extra `traces`).")
def command(as_json: bool, **options: Any) -> None:
    """Serve each PACKAGE by the Open Inference Protocol, version 2, over HTTP and gRPC.

    Clients of Triton and KServe work unchanged. Requests that can run together do. The URL / has a page for browsers,
    and /metrics has the metrics for Prometheus.

    Packages are checked, and their signatures, before anything listens. The server is live while it loads them, and
    ready when every model has answered its recorded cases. SIGTERM and Ctrl-C end it: it turns unready, refuses what is
    new, answers what it accepted, and exits with 0, or with 1 if that took longer than --drain-timeout. A second Ctrl-C
    ends it at once.

    A PACKAGE is served under its own name, that of `exportkit package --name`. It may be a folder: an OCI layout of
    `exportkit oci`, or one with a single .pt2, such as a mounted image.

    With --json, the document has the URLs and models, and is printed when the server is ready.

    \b
    exportkit serve model.pt2
    exportkit serve model.pt2 --device cuda --cuda-graphs
    exportkit serve --model-repository models/ --device cuda:0 --device cuda:1
    exportkit serve model.pt2 --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem --api-keys keys.txt
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    if not options["packages"] and options["repository"] is None:
        raise click.UsageError("nothing to serve: give a PACKAGE or --model-repository.")
    from exportkit.serve.process_settings import check_installed

    check_installed(traces=options["traces"] is not None)
    asked = _options(**options)
    if options["ray"]:
        _serve_on_ray(asked, as_json)
        return
    from exportkit.serve.server import DeviceLostError, NotAnsweredError, Started, run  # imports torch

    def started(server: Started) -> None:
        if as_json:
            print_json(dataclasses.asdict(server))

    try:
        ended = run(asked, started=started, report=_report)
    except KeyboardInterrupt:
        _exit(INTERRUPTED_EXIT_CODE, "interrupted")
    except (DeviceLostError, NotAnsweredError) as error:
        _exit(error.exit_code, f"error: {error.message}. {error.hint}")
    if not ended:
        _exit(0, "ended before the models were loaded")


def _serve_on_ray(asked: ServeOptions, as_json: bool) -> None:
    from exportkit.deployment.ray_run import run_on_ray

    def started(url: str) -> None:
        _report(f"ready: HTTP on {url}")
        if as_json:
            print_json({"http": url})

    run_on_ray(asked, started=started)


def _options(**given: Any) -> ServeOptions:
    from exportkit.serve.batching.pending import BatchLimits
    from exportkit.serve.sequences.table import SequenceLimits
    from exportkit.serve.serve_options import ListenOptions, LoadOptions, ServeOptions

    def of(kind: type[T], **more: Any) -> T:
        """Makes it of the options that have its fields' names. None, which nobody gave, leaves the default."""
        named = {field.name: given.get(field.name) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T may be any class
        return kind(**{name: value for name, value in named.items() if value not in (None, ())}, **more)

    if given["no_grpc"] and given["grpc_port"] is not None:
        raise click.UsageError("--grpc-port and --no-grpc exclude each other.")
    listen = of(ListenOptions)
    if given["no_grpc"]:
        listen = dataclasses.replace(listen, grpc_port=None)
    if listen.port and listen.port == listen.grpc_port:
        raise click.UsageError(f"HTTP and gRPC cannot share port {listen.port}; give another --port or --grpc-port.")
    if given["max_queued_bytes"] == 0:
        raise click.UsageError("--max-queue-bytes 0 would refuse every request.")
    load = of(LoadOptions, warm_up=not given["no_warm_up"])
    return of(ServeOptions, load=load, batch=of(BatchLimits), sequences=of(SequenceLimits), listen=listen)


def _exit(code: int, line: str) -> NoReturn:
    """Ends the process while threads still run. Python would wait for them: for a model that takes long."""
    _report(line)
    os._exit(code)


def _report(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        click.echo(printable(line), err=True)

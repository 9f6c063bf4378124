"""The options of `exportkit serve`, which travel as they are from the command line to where they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.sequences.table import SequenceLimits


@dataclass(frozen=True)
class LoadOptions:
    """How packages are loaded. See `exportkit.load` for the meaning of each.

    Attributes:
        devices: A copy of each model is loaded on each. `auto` is one CUDA device, or the CPU.
        runners: The number of batches that run at the same time on each device. None: one on a CPU, and two on a GPU,
            where the copies of one batch overlap the computation of another.
        public_keys: One of these keys must have signed each package. Empty: as the policies of this machine say.
        isolate: Whether each model runs in a worker process, which is started again if it dies.
        warm_up: Whether the recorded cases run before a model is ready.
        cuda_graphs: Whether calls run as CUDA graphs. A model that would run on the CPU is refused then.
    """

    devices: tuple[str, ...] = ("auto",)
    runners: int | None = None
    public_keys: tuple[Path, ...] = ()
    isolate: bool = False
    warm_up: bool = True
    cuda_graphs: bool = False


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and to whom.

    Attributes:
        host: The address. Only loopback unless the user says otherwise.
        port: The HTTP port. 0: the system chooses one, and the log says which.
        grpc_port: The gRPC port, likewise. None: no gRPC.
        certificate: The TLS certificate chain (PEM). None: no TLS.
        private_key: The certificate's key (PEM), not encrypted.
        client_authorities: Clients must show a certificate that one of these authorities (PEM) signed.
        api_keys: A file with one API key a line. None: no key is asked for.
        max_connections: The most connections of HTTP that are open at the same time, and as many of gRPC.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    certificate: Path | None = None
    private_key: Path | None = None
    client_authorities: Path | None = None
    api_keys: Path | None = None
    max_connections: int = 1024


@dataclass(frozen=True)
class ServeOptions:
    """Everything that `exportkit serve` is asked for.

    Attributes:
        packages: The packages to serve.
        repository: A folder of packages: `<name>.pt2`, or `<name>/<version>/model.pt2`.
        load: How they are loaded.
        batch: What may wait and what may run together, for each model.
        sequences: How many sequences each package may have, and for how long.
        adapters: A folder of adapters that sequences may begin with: `<name>/adapter_model.safetensors`, as PEFT saves.
        listen: Where and to whom.
        drain_seconds: Seconds that accepted requests may take after SIGTERM.
        access_log: Whether each request is logged as a line of JSON.
        traces: The OTLP endpoint that gets OpenTelemetry traces. None: no traces.
    """

    packages: tuple[Path, ...] = ()
    repository: Path | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    batch: BatchLimits = field(default_factory=BatchLimits)
    sequences: SequenceLimits = field(default_factory=SequenceLimits)
    adapters: Path | None = None
    listen: ListenOptions = field(default_factory=ListenOptions)
    drain_seconds: float = 30.0
    access_log: bool = True
    traces: str | None = None

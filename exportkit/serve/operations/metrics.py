"""Prometheus metrics, in seconds and bytes.

The five stages are Triton's: request, queue, compute_input, compute_infer and compute_output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import REQUEST_SECONDS, Spent, Statistics
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import ServeError

_MODEL = ("model", "version")
_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
_BATCH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of a server.

    Attributes:
        registry: Where they are registered.
        in_flight: The requests over HTTP that are not over.
        log_lines_lost: The lines of the access log that could not be written.
    """

    def __init__(self, repository: Repository) -> None:
        """Registers everything."""
        self.registry = CollectorRegistry()
        self.registry.register(_ModelCollector(repository))
        self.registry.register(_GpuCollector())
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        requests = Counter(
            "exportkit_requests",
            "Requests of every kind that are over, by HTTP status. gRPC's have the status that HTTP would give.",
            ["protocol", "status"],
            registry=self.registry,
        )
        self._requests = functools.lru_cache(requests.labels)
        self.in_flight = Gauge(
            "exportkit_requests_in_flight", "Requests over HTTP that are not over.", registry=self.registry
        )
        self._refused = Counter(
            "exportkit_rejected",
            "Requests that were refused, by reason. Without a model: none was known yet.",
            [*_MODEL, "reason"],
            registry=self.registry,
        )
        self._failed = Counter(
            "exportkit_request_failure", "Valid requests that failed.", _MODEL, registry=self.registry
        )
        self.log_lines_lost = Counter(
            "exportkit_access_log_lines_lost",
            "Lines of the access log that could not be written in time.",
            registry=self.registry,
        )

    def route(self) -> Route:
        """Returns the route of `/metrics`, in the text form or in that of OpenMetrics."""

        async def metrics(request: Request) -> Response:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            return Response(encode(self.registry), headers={"content-type": content_type})

        return Route("/metrics", metrics)

    def __call__(self, record: RequestRecord) -> None:
        """Counts a request. A probe that hears "not ready" got its answer, and is not refused."""
        self._requests(record.protocol, record.status).inc()
        if record.error is None or record.path.startswith("/v2/health/"):
            return
        if record.error.reason == ServeError.reason:
            self._failed.labels(record.model, record.version).inc()
        else:
            self._refused.labels(record.model, record.version, record.error.reason).inc()


class _ModelCollector(Collector):
    """Reads the counters of every model when it is asked."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def describe(self) -> Iterable[Metric]:
        """Nothing is registered twice; without this, the registry would call `collect` to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of all models."""
        counted = [([name, version], counted) for (name, version), counted in self._repository.counted().items()]
        yield from _requests(counted)
        yield from _batches(counted)
        models = self._repository.models()
        yield from _now([([served.name, served.version], served, served.counted) for served in models])
        yield from _sequences(self._repository.sequences())


def _requests(models: Sequence[tuple[list[str], Statistics]]) -> Iterator[Metric]:
    answered = CounterMetricFamily("exportkit_request_success", "Answered requests.", labels=_MODEL)
    seconds = HistogramMetricFamily(
        "exportkit_request_duration_seconds", "Time from acceptance to the answer, of answered requests.", labels=_MODEL
    )
    for labels, counted in models:
        answered.add_metric(labels, counted.success.count)
        buckets = _buckets(REQUEST_SECONDS, counted.request_seconds)
        seconds.add_metric(labels, buckets, sum_value=counted.success.seconds)
    yield answered
    yield seconds
    for stage in _STAGES:
        text = f"Time of answered requests in the stage {stage}. Each request counts the whole time of its batch."
        summary = SummaryMetricFamily(f"exportkit_{stage}_duration_seconds", text, labels=_MODEL)
        for labels, counted in models:
            spent: Spent = getattr(counted.stages, stage)
            summary.add_metric(labels, count_value=spent.count, sum_value=spent.seconds)
        yield summary


def _batches(models: Sequence[tuple[list[str], Statistics]]) -> Iterator[Metric]:
    rows = CounterMetricFamily("exportkit_inference", "Rows of all batches that ran.", labels=_MODEL)
    batches = CounterMetricFamily("exportkit_execution", "Batches that ran.", labels=_MODEL)
    sizes = HistogramMetricFamily("exportkit_batch_rows", "Rows of a batch.", labels=_MODEL)
    for labels, counted in models:
        rows.add_metric(labels, counted.rows)
        batches.add_metric(labels, counted.executions)
        counts = [0] * (len(_BATCH_ROWS) + 1)
        for size, stages in list(counted.batches.items()):
            index = next((i for i, bound in enumerate(_BATCH_ROWS) if size <= bound), len(_BATCH_ROWS))
            counts[index] += stages.compute_infer.count
        sizes.add_metric(labels, _buckets(_BATCH_ROWS, counts), sum_value=counted.rows)
    yield from (rows, batches, sizes)


def _now(models: Sequence[tuple[list[str], ServedModel, Statistics]]) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"exportkit_{name}", text, labels=_MODEL)

    pending = gauge("pending_requests", "Requests that wait for a runner.")
    queue_rows = gauge("queue_rows", "Rows that wait for a runner.")
    queue_bytes = gauge("queue_bytes", "Bytes of inputs that wait for a runner.")
    busy = gauge("runner_busy", "Runners that compute now.")
    runners = gauge("runners", "Batches that can run at the same time.")
    ready = gauge("model_ready", "1 if the model answers, else 0.")
    load = gauge("model_load_seconds", "Time of the last load, warm-up included.")
    replicas = GaugeMetricFamily(
        "exportkit_replica_ready",
        "1 if the replica of a model on a device answers, else 0.",
        labels=[*_MODEL, "replica", "device"],
    )
    for labels, served, counted in models:
        pending.add_metric(labels, counted.pending)
        queue_rows.add_metric(labels, counted.queued_rows)
        queue_bytes.add_metric(labels, counted.queued_bytes)
        busy.add_metric(labels, counted.busy_runners)
        runners.add_metric(labels, counted.runners)
        ready.add_metric(labels, int(served.ready))
        load.add_metric(labels, counted.load_seconds)
        for place, (device, alive) in enumerate(served.replica_states()):
            replicas.add_metric([*labels, f"{place}", device], int(alive))
    yield from (pending, queue_rows, queue_bytes, busy, runners, ready, load, replicas)


def _sequences(packages: Mapping[str, ServedSequences]) -> Iterator[Metric]:
    """Yields the metrics of sequences. They are of a package, because its methods and versions share them."""
    there = GaugeMetricFamily("exportkit_sequences", "Sequences that have not ended.", labels=["model"])
    state = GaugeMetricFamily("exportkit_sequence_state_bytes", "Bytes of their state.", labels=["model"])
    oldest = GaugeMetricFamily("exportkit_sequence_oldest_seconds", "Age of the oldest of them.", labels=["model"])
    ended = CounterMetricFamily("exportkit_sequences_ended", "Sequences that ended.", labels=["model", "reason"])
    for name, sequences in packages.items():
        there.add_metric([name], sequences.count)
        state.add_metric([name], sequences.state_bytes)
        oldest.add_metric([name], sequences.oldest)
        for reason, count in sequences.ended.items():
            ended.add_metric([name, reason], count)
    yield from (there, state, oldest, ended)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns Prometheus' cumulative buckets. `counts` has one element more than `bounds`."""
    return list(zip([*(f"{float(bound)}" for bound in bounds), "+Inf"], accumulate(counts)))


class _GpuCollector(Collector):
    """The memory of the GPUs that this process uses."""

    def describe(self) -> Iterable[Metric]:
        """No metric of this collector is registered twice."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields nothing where CUDA was never used: to ask would take memory of the device."""
        import torch

        if not torch.cuda.is_initialized():
            return
        used = GaugeMetricFamily("exportkit_gpu_memory_used_bytes", "Memory in use, by all.", labels=["device"])
        total = GaugeMetricFamily("exportkit_gpu_memory_total_bytes", "Memory of the device.", labels=["device"])
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                free, size = torch.cuda.mem_get_info(index)
                used.add_metric([f"cuda:{index}"], size - free)
                total.add_metric([f"cuda:{index}"], size)
        yield from (used, total)

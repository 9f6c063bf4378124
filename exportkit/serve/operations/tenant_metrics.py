"""What each client with a labelled API key has used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exportkit.serve.tenants.tenants import Tenants

_CLIENT = ("client",)


class TenantCollector(Collector):
    """Reads what was counted when it is asked. There are as many labels as the file of keys has now."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def describe(self) -> Iterable[Metric]:
        """No metric of this collector is registered twice."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of all labels."""
        requests = CounterMetricFamily("exportkit_client_requests", "Requests that were let in.", labels=_CLIENT)
        refused = CounterMetricFamily(
            "exportkit_client_rejected", "Requests beyond a limit of the API key.", labels=[*_CLIENT, "limit"]
        )
        rows = CounterMetricFamily("exportkit_client_inference", "Rows of inferences that were let in.", labels=_CLIENT)
        answered = SummaryMetricFamily(
            "exportkit_client_request_duration_seconds",
            "Time from the whole request to the answer, of answered inferences.",
            labels=_CLIENT,
        )
        running = GaugeMetricFamily(
            "exportkit_client_requests_in_flight", "Requests that are not over.", labels=_CLIENT
        )
        for tenant in self._tenants.labelled():
            labels = [tenant.rules.label]
            requests.add_metric(labels, tenant.requests)
            for limit, count in tenant.refused.items():
                refused.add_metric([*labels, limit], count)
            rows.add_metric(labels, tenant.rows)
            answered.add_metric(labels, count_value=tenant.answered, sum_value=tenant.seconds)
            running.add_metric(labels, tenant.in_flight)
        yield from (requests, refused, rows, answered, running)

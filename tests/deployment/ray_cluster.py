"""A Ray cluster of two nodes on this machine, and what `serve deploy` does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from exportkit.deployment.ray_app import NAME
from tests.deployment.observed_replica import JOURNAL

ROOT = Path(__file__).parents[2]
SETTINGS = {"autoscaling_config": None, "num_replicas": 2, "max_replicas_per_node": 1}


@contextmanager
def two_nodes(folder: Path, port: int) -> Iterator[Any]:
    """A head that has the proxy, and two nodes with room for a replica on each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv(JOURNAL, str(folder / "journal"))
        memory = 100 * 2**20
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": memory}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                made.add_node(num_cpus=2, object_store_memory=memory)
            ray.init(address=made.address, log_to_driver=False)
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def deploy(folder: Path, args: dict[str, Any] | None = None, **settings: Any) -> None:
    """Does what `serve deploy` does, with two replicas, and waits until all is as the configuration says."""
    application = {
        "name": NAME,
        "route_prefix": "/",
        "import_path": "tests.deployment.observed_replica:app",
        "args": {"repository": str(folder)} | (args or {}),
        "deployments": [{"name": NAME, **SETTINGS, **settings}],
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    end = time.monotonic() + 120
    while (status := serve.status().applications.get(NAME)) is None or status.status != "RUNNING":
        assert time.monotonic() < end, status
        time.sleep(0.2)

"""The server on a Ray cluster of two nodes on this machine, which lose replicas and one of themselves."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import urllib3
from urllib3.util import Retry

ray = pytest.importorskip("ray", reason="Ray is not installed")
os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"  # read when ray.serve is imported
pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from ray.serve.schema import ServeDeploySchema  # noqa: E402 (after importorskip)

from exportkit.deployment import ray_app  # noqa: E402 (after importorskip)
from exportkit.deployment.ray_app import NAME, check_options, options_of  # noqa: E402 (after importorskip)
from exportkit.errors import UsageError  # noqa: E402 (after importorskip)
from exportkit.package.archive import PackageReader, StoredRecord, write_package  # noqa: E402 (after importorskip)
from exportkit.serve.serve_options import ServeOptions  # noqa: E402 (after importorskip)
from tests.deployment.observed_replica import Journal  # noqa: E402 (after importorskip)
from tests.deployment.ray_cluster import ROOT, deploy, two_nodes  # noqa: E402 (after importorskip)
from tests.package import samples, stateful_samples  # noqa: E402 (after importorskip)
from tests.serve.operations.asking_tiny import arrays, expected, triton_inputs  # noqa: E402 (after importorskip)

PORT = 18700
URL = f"http://127.0.0.1:{PORT}"
THREADS = 8


@pytest.fixture(scope="module")
def folder(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository that every node has."""
    path = tmp_path_factory.mktemp("ray")
    shutil.copy(tiny_package, path / "tiny.pt2")
    (path / "journal").touch()
    return path


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    with two_nodes(folder, PORT) as made:
        deploy(folder)
        yield made


# --- load -------------------------------------------------------------------------------------------------------------


INPUTS = arrays(batch=2)
RIGHT = expected(INPUTS)


@dataclass
class Load:
    """Threads that send requests one after another until `stop`."""

    send: Callable[[str], np.ndarray]
    sent: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()
        self.wait_for(10 * THREADS)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Waits until so many further requests were answered."""
        goal, end = self.sent + more, time.monotonic() + 60
        while self.sent < goal:
            assert time.monotonic() < end, f"{self.sent} were answered, and lost: {self.lost}"
            time.sleep(0.01)

    def _run(self, thread: int) -> None:
        number = 0
        while not self._ended.is_set():
            request = f"{id(self)}-{thread}-{number}"
            number += 1
            try:
                np.testing.assert_allclose(self.send(request), RIGHT, rtol=1e-5)
            except Exception as error:
                with self._lock:
                    self.lost[request] = repr(error)[:300]
            with self._lock:
                self.sent += 1


def sending(again: Retry | bool = False) -> Callable[[str], np.ndarray]:
    """Sends a request: once, so that it is written down, or again as docs/scale.md repeats what was lost."""
    http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    pool = urllib3.PoolManager(maxsize=THREADS, retries=again)
    body, length = http.InferenceServerClient.generate_request_body(triton_inputs(http, INPUTS))
    headers = {"Inference-Header-Content-Length": str(length)}

    def send(request: str) -> np.ndarray:
        named = headers if again else {**headers, "x-test-request": request}
        answer = pool.request("POST", f"{URL}/v2/models/tiny/infer", body=body, headers=named, timeout=60)
        assert answer.status == 200, f"{answer.status} {answer.data[:200]!r}"
        start = int(answer.headers["Inference-Header-Content-Length"])
        found = http.InferenceServerClient.parse_response_body(answer.data, header_length=start)
        return found.as_numpy("regions.mean")

    return send


AGAIN = Retry(60, status_forcelist=(429, 500, 502, 503), allowed_methods=None, backoff_factor=0.1, backoff_max=2)


def two_replicas(load: Load, journal: Journal) -> set[int]:
    """The processes of both replicas, when both answer."""
    end = time.monotonic() + 90
    while len(found := journal.living()) < 2:
        assert time.monotonic() < end, f"only {found} answer"
        load.wait_for(THREADS)
    return found


def assert_lost_there(load: Load, journal: Journal, dead: int) -> None:
    """Asserts that all is lost that a dead process had begun and not answered, and nothing that another one began.

    A request that was sent there and had not begun is lost as well, until HAProxy and Ray notice.
    """
    in_flight = journal.in_flight(dead) - {"-"}  # of clients that do not repeat
    assert in_flight
    assert in_flight <= set(load.lost)
    assert {process for _, process, request in journal.lines() if request in load.lost} == {dead}


# --- tests, in this order: the last one loses a node ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "nothing to serve"),
        ({"package": ["a"]}, "unknown key 'package'"),
        ({"packages": ["a"], "batch": {"rows": 1}}, "args.batch has the unknown key 'rows'"),
        ({"packages": "a"}, "cannot be read"),
        ({"packages": ["a"], "load": {"runners": "many"}}, "cannot be read"),
        ({"packages": ["a"], "listen": {"port": 8000, "api_keys": "keys"}}, "on Ray, listen cannot be set"),
        ({"packages": ["a"], "sequences": {"most": 9}}, "on Ray, sequences cannot be set"),
        ({"packages": ["a"], "traces": "http://localhost"}, "on Ray, traces cannot be set"),
    ],
)
def test_what_a_replica_cannot_do_is_refused(args: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        check_options(options_of(args))


def test_the_configuration_in_deploy_is_one_of_ray_s():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text()))
    (application,) = config.applications
    module, _, builder = application.import_path.partition(":")
    assert (module, getattr(ray_app, builder)) == (ray_app.__name__, ray_app.app)
    check_options(options_of(application.args))
    assert [deployment.name for deployment in application.deployments] == [NAME]


def test_tritonclient_is_answered(cluster: Any):
    http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    with http.InferenceServerClient(f"127.0.0.1:{PORT}") as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("tiny")["platform"] == "torch_aoti"
        answer = client.infer("tiny", triton_inputs(http, INPUTS)).as_numpy("regions.mean")
        np.testing.assert_allclose(answer, RIGHT, rtol=1e-5)
        with pytest.raises(Exception, match="cannot load or unload models on Ray"):
            client.load_model("tiny")


def test_a_client_that_repeats_loses_nothing_with_a_killed_replica(cluster: Any, folder: Path):
    """And one that does not loses what was in flight there."""
    journal = Journal(folder / "journal")
    with Load(sending()) as load, Load(sending(AGAIN)) as patient:
        victim = two_replicas(load, journal).pop()
        os.kill(victim, signal.SIGKILL)
        load.wait_for(20 * THREADS)
        patient.wait_for(20 * THREADS)
    assert patient.lost == {}
    assert_lost_there(load, journal, victim)


def test_a_new_version_loses_no_request(cluster: Any, folder: Path):
    with Load(sending()) as load:
        tiny_again(folder, version="2")
        deploy(folder, {"batch": {"max_rows": 2}})
        wait_for_version("2")
        load.wait_for(10 * THREADS)
    assert load.lost == {}


@pytest.mark.slow
def test_a_lost_node_loses_what_was_in_flight_there(cluster: Any, folder: Path):
    """And nothing, with a client that repeats."""
    journal = Journal(folder / "journal")
    with Load(sending()) as load, Load(sending(AGAIN)) as patient:
        two_replicas(load, journal)
        node = cluster.worker_nodes.copy().pop()
        cluster.remove_node(node, allow_graceful=False)
        load.wait_for(20 * THREADS)
        patient.wait_for(20 * THREADS)
    assert patient.lost == {}
    (dead,) = {process for _, process, _ in journal.lines()} - journal.living()
    assert_lost_there(load, journal, dead)


def tiny_again(folder: Path, version: str) -> None:
    """Replaces the package by the same model as another version."""
    with PackageReader(folder / "tiny.pt2") as reader:
        records: dict[str, Any] = {name: StoredRecord(reader, name) for name in reader.names}
        write_package(folder / "tiny.pt2", msgspec.structs.replace(reader.manifest, version=version), records)


def wait_for_version(version: str) -> None:
    """Waits until only this version answers."""
    pool, same, end = urllib3.PoolManager(retries=False), 0, time.monotonic() + 90
    while same < 20:
        found = pool.request("GET", f"{URL}/v2/models/tiny").json()["versions"]
        same = same + 1 if found == [version] else 0
        assert time.monotonic() < end, f"versions {found}"
        time.sleep(0.05)


def test_a_package_whose_methods_all_have_state_is_refused(tmp_path: Path):
    whole = stateful_samples.manifest(cases=())
    target = samples.target(constants={"decode": {}})
    kept = ("data/aotinductor/decode", "exportkit/ops", "exportkit/state")
    records = {name: data for name, data in stateful_samples.RECORDS.items() if name.startswith(kept)}
    manifest = msgspec.structs.replace(whole, methods=(whole.method("decode"),), targets=(target,), weights=())
    write_package(tmp_path / "llm.pt2", manifest, records)
    with pytest.raises(UsageError, match="toy cannot be served: decode has state"):
        ray_app.application(ServeOptions(packages=(tmp_path / "llm.pt2",)))

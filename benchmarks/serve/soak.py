"""`exportkit serve` for a long time among clients that behave and clients that do not, with faults.

    python -m benchmarks.serve.soak model.pt2 --minutes 30 --sizes batch=1,gh=4,gw=4 batch=3,gh=4,gw=4 batch=1,gh=6,gw=2

Clients that behave send requests of all sizes, some with priorities and timeouts, and compare every answer with the
one that the idle server gave. Others vanish in the middle, send slowly, or send bodies that break the protocol.
Meanwhile the model is loaded again and again, and its worker process (`--isolate`) is killed. In the end the server
gets SIGTERM while requests run.

It fails (exit code 1) if an answer is missing or wrong, if a broken body gets anything but an error in JSON, if a load
fails, if the server is not live at some moment or does not end with 0, if it counted fewer answers than clients got or
more than were asked for, if more requests failed than killed workers can explain, or if memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.serve.broken_requests import BROKEN
from benchmarks.serve.load_client import Connection
from benchmarks.serve.running import Server, free_port, running, serve_command
from benchmarks.serve.soaking import Soaking, Work
from benchmarks.serve.workload import Workload, http_post, workload

MAX_BATCH = 8
RELOAD_SECONDS, KILL_SECONDS = 7.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--sizes", nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6, help="that behave")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    port = free_port()
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    print(f"the server's log: {log}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copy(options.package, folder))  # which is replaced again and again
        command = serve_command(package, port, "--isolate", "--max-batch", str(MAX_BATCH))
        with running(command, port, cores=os.sched_getaffinity(0), log=log) as server:
            soak = Soak(
                server, [workload(package, sizes, seed) for seed, sizes in enumerate(options.sizes)], options.seed
            )
            soak.run(60 * options.minutes, options.clients)
            problems = soak.end()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if problems else 0)


class Soak(Soaking):
    """The clients and the faults, and what they saw."""

    def __init__(self, server: Server, workloads: Sequence[Workload], seed: int) -> None:
        """Asks the idle server for the answers that the clients compare with."""
        super().__init__(server, seed)
        self._model = workloads[0].model
        self._package = workloads[0].package
        self._wait_until_ready()
        self._asked: list[tuple[Workload, bytes]] = [(one, self._expected(one)) for one in workloads]

    def run(self, seconds: float, clients: int) -> None:
        """Lets everything loose, then sends SIGTERM."""
        works: list[Work] = [self._behave] * clients
        works += [self._vanish, self._send_slowly, self._break_the_protocol, self._reload, self._kill]
        self.let_loose(works, seconds, last=self._look_at_the_successes)

    def _look_at_the_successes(self) -> None:
        self._counted = self._successes()

    def end(self) -> list[str]:
        """Waits for the server's end. Returns what was not as promised."""
        problems, seen = self.problems(), self.seen
        print(f"at the end, {self.memory[-1] / 1e6:.0f} MB, {self.counted()}")
        most = seen["answered"] + seen["vanished"]
        if not seen["answered before SIGTERM"] <= self._counted <= most:
            problems.append(
                f"the server counted {self._counted} answers; clients had {seen['answered']}, at most {most}"
            )
        if seen["failed"] > seen["killed workers"] * MAX_BATCH:  # a worker takes at most its batch with it
            problems.append(f"{seen['failed']} requests failed, and {seen['killed workers']} workers were killed")
        before, after = self.quarters()
        print(f"memory: {before / 1e6:.1f} MB in the second quarter, {after / 1e6:.1f} MB in the last")
        return problems

    # --- clients ------------------------------------------------------------------------------------------------------

    def _behave(self, chance: random.Random) -> None:
        """Sends requests on one connection and compares the answers."""
        connection = Connection(self.server.port)
        for _ in range(chance.randrange(1, 50)):
            if self.stopping.is_set():
                break
            asked, expected = chance.choice(self._asked)
            parameters = chance.choice([{}, {}, {}, {"priority": chance.randrange(1, 4)}, {"timeout": 20_000_000}])
            before = not self.draining.is_set()
            status, body = connection.request(asked.infer_request(**parameters))
            self._judge(status, body, expected)
            if status == 200 and before and not self.draining.is_set():
                self.count("answered before SIGTERM")
        connection.close()

    def _vanish(self, chance: random.Random) -> None:
        """Sends a part of a request, or all of it, and goes away."""
        request = chance.choice(self._asked)[0].infer_request()
        connection = Connection(self.server.port)
        connection.send(request[: chance.choice([10, len(request) // 2, len(request) - 1, len(request)])])
        time.sleep(chance.choice([0.0, 0.001, 0.02]))
        connection.close()
        self.count("vanished")

    def _send_slowly(self, chance: random.Random) -> None:
        """Sends a request in pieces over some seconds, then reads the answer late."""
        asked, expected = chance.choice(self._asked)
        request = asked.infer_request()
        connection, pieces = Connection(self.server.port), chance.randrange(2, 20)
        for start in range(0, len(request), size := -(-len(request) // pieces)):
            connection.send(request[start : start + size])
            time.sleep(0.1)
        time.sleep(chance.random())
        self._judge(*connection.answer(), expected)
        connection.close()

    def _break_the_protocol(self, chance: random.Random) -> None:
        """Sends a request that breaks the protocol. The answer must be an error, and say so in JSON."""
        name, broken = chance.choice(list(BROKEN.items()))
        connection = Connection(self.server.port, timeout=20)
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has read everything
            connection.send(broken(self._asked[0][0], chance))
        status, body = connection.answer()
        connection.close()
        self.count("broken bodies")
        try:
            explained = isinstance(json.loads(body)["error"], str)
        except (ValueError, KeyError, TypeError):
            explained = False
        refused = 400 <= status < 500 or status in (501, 503)  # 503 while the worker starts again, or in the end
        if not (refused and explained):
            self.count(f"WRONG: {name} got status {status} and {body[:200]!r}")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _reload(self, chance: random.Random) -> None:
        """Replaces the package's file and loads the model again. What did not change would not be loaded again."""
        if self.stopping.wait(RELOAD_SECONDS):
            return
        new = self._package.with_suffix(".new")
        shutil.copy(self._package, new)
        os.replace(new, self._package)
        connection = Connection(self.server.port, timeout=120)
        status, body = connection.request(http_post(f"/v2/repository/models/{self._model}/load", b"{}", {}))
        self.count("loads")
        if status != 200 and not self.draining.is_set():
            # A worker that is killed while it answers the recorded cases cannot be loaded.
            self.count("loads that failed" if b"worker" in body else f"WRONG: load: {status} {body[:200]!r}")
        connection.close()

    def _kill(self, chance: random.Random) -> None:
        """Kills a worker process: a child of a child, as workers are forked from a forkserver. It alone has torch."""
        if self.stopping.wait(KILL_SECONDS):
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.server.process.pid).children()
            workers = [worker for child in children for worker in child.children() if _has_torch(worker)]
            if workers:
                chance.choice(workers).kill()
                self.count("killed workers")

    # --- watching -----------------------------------------------------------------------------------------------------

    def _judge(self, status: int, body: bytes, expected: bytes) -> None:
        if status == 200:
            self.count("answered")
            if _tensors(body) != expected:
                self.count("WRONG: an answer differs")
        elif status in (429, 503):
            self.count(f"refused with {status}")
        elif status == 500 and b"worker" in body:
            self.count("failed")
        else:
            self.count(f"WRONG: status {status} and {body[:200]!r}")

    def watch(self) -> None:
        """The server is live all the time."""
        try:
            status, _ = self._get("/v2/health/live")
        except OSError as error:
            self.count(f"WRONG: not live: {error!r}")
            return
        if status != 200:
            self.count(f"WRONG: live has status {status}")

    def _wait_until_ready(self) -> None:
        while self._get("/v2/health/ready")[0] != 200:
            time.sleep(0.2)

    def _expected(self, asked: Workload) -> bytes:
        status, body = Connection(self.server.port).request(asked.infer_request())
        if status != 200:
            raise RuntimeError(f"the idle server answers with {status}: {body[:300]!r}")
        return _tensors(body)

    def _successes(self) -> int:
        """Returns how many requests the server says that it answered, without those of `_expected`."""
        model = json.loads(self._get(f"/v2/models/{self._model}/stats")[1])["model_stats"][0]
        return int(model["inference_stats"]["success"]["count"]) - len(self._asked)

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = Connection(self.server.port)
        try:
            return connection.request(http_post(path, b"", {}).replace(b"POST", b"GET", 1))
        finally:
            connection.close()


def _has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in process.memory_maps())


def _tensors(body: bytes) -> bytes:
    """Returns the bytes after the JSON of an answer."""
    _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    return body[end:]


if __name__ == "__main__":
    main()

"""A package under load: behind `exportkit serve`, behind other engines, and called without any.

    python -m benchmarks.serve.load model.pt2 --one batch=1,gh=32,gw=32 --many batch=1,gh=8,gw=8 --max-batch 16

- One request at a time (`--one`, such as an image of 3 MB): how much longer an answer takes than the model's call,
  beside an ASGI application that only reads the same body (`echo`).
- Saturation (`--many`): rows a second, against the model's calls with the same numbers of rows.
- Half load (`--many`): requests at random moments, half as many as direct calls of one request can answer.

The server has the first cores, the client the last (`--server-cores`). Engines take turns; the median round is given.
With `--model-cores N`, the model has N threads, direct calls have N cores, and server and client share all cores: the
rest of them receives and sends. With `--server-cores N+1` as well, model, event loop and clients have cores of their
own. `--clients` processes send at saturation. `--measure saturation` leaves out the rest.
`--peers-python` is an interpreter with litserve, kserve, ray[serve] and what exportkit needs; without it, only
exportkit and `echo` are measured. Prints Markdown tables; `-o` writes every round as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, SEARCH_PATH
from benchmarks.serve.load_client import Connection, Load, closed_loop, closed_loop_of_processes, open_loop
from benchmarks.serve.load_tables import Figures, Round, print_many, print_one
from benchmarks.serve.running import Server, free_port, running, serve_command
from benchmarks.serve.workload import Workload, http_post, workload
from tools.generated import in_lines

MEASUREMENTS = ("one", "saturation", "half-load")
PEERS = {"litserve": "litserve_app", "kserve": "kserve_app", "ray": "ray_plain"}


@dataclass(frozen=True)
class Plan:
    """What is measured, and where."""

    package: Path
    measure: set[str]
    one: str
    many: str
    max_batch: int
    connections: int
    seconds: float
    direct_seconds: float
    device: str
    server_cores: set[int]
    model_cores: set[int]
    clients: int
    cuda_graphs: bool
    peers_python: Path | None
    log: Path


@dataclass(frozen=True)
class Counted:
    """What exportkit has run: batches by their rows, and the seconds inside of the model."""

    batches: Mapping[int, int]
    seconds: float

    def __sub__(self, earlier: Counted) -> Counted:
        batches = {rows: count - earlier.batches.get(rows, 0) for rows, count in self.batches.items()}
        return Counted(batches, self.seconds - earlier.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--one", help="sizes of the request that one client repeats. Default: those of --many")
    parser.add_argument("--many", required=True, help="the sizes of each of many requests; batch=1 in most models")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--connections", type=int, help="at saturation. Default: four batches")
    parser.add_argument(
        "--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS, metavar="WHAT", help="default: all"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--direct-seconds", type=float, default=2.0, help="of direct calls with each number of rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--server-cores", type=int, help="default: half of them")
    parser.add_argument("--model-cores", type=int, help="default: the server's")
    parser.add_argument("--clients", type=int, default=1, help="processes that send at saturation")
    parser.add_argument("--cuda-graphs", action="store_true", help="for exportkit, and for direct calls")
    parser.add_argument("--engines", nargs="+", default=["echo", "exportkit", *PEERS])
    parser.add_argument("--peers-python", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    shared = len(cores) if options.model_cores else max(1, len(cores) // 2)
    server_cores = set(cores[: options.server_cores or shared])
    os.sched_setaffinity(0, set(cores) - server_cores or server_cores)
    log = Path(tempfile.mkdtemp(prefix="load-"))
    print(f"logs of the servers: {log}", file=sys.stderr)
    plan = Plan(
        package=options.package.resolve(),
        measure=set(options.measure),
        one=options.one or options.many,
        many=options.many,
        max_batch=options.max_batch,
        connections=options.connections or 4 * options.max_batch,
        seconds=options.seconds,
        direct_seconds=options.direct_seconds,
        device=options.device,
        server_cores=server_cores,
        model_cores=set(cores[: options.model_cores or len(server_cores)]),
        clients=options.clients,
        cuda_graphs=options.cuda_graphs,
        peers_python=options.peers_python,
        log=log,
    )
    engines = [engine for engine in options.engines if engine not in PEERS or plan.peers_python]
    rounds = [_round(plan, engines) for _ in range(options.rounds)]
    if options.output:
        options.output.write_text(f"{in_lines(rounds)}\n")
    one, many = (f"{workload(plan.package, sizes).size / 1e6:.2f} MB ({sizes})" for sizes in (plan.one, plan.many))
    if "one" in plan.measure:
        print(f"One request at a time, {one}:\n")
        print_one(engines, rounds)
    if plan.measure != {"one"}:
        print(f"\nMany requests, {many}, at most {plan.max_batch} rows a batch, {plan.connections} connections:\n")
        print_many(engines, rounds)


# --- measuring --------------------------------------------------------------------------------------------------------


def _round(plan: Plan, engines: Sequence[str]) -> Round:
    """Measures every engine once. Direct calls come first and last; their mean counts."""
    before = _direct_parts(plan)
    found: Round = {}
    for engine in engines:
        try:
            found[engine] = _engine(plan, engine, before["many"])
        except (OSError, RuntimeError) as error:
            print(f"{engine} was not measured: {error}", file=sys.stderr)
    after = _direct_parts(plan)
    direct = {part: {rows: (before[part][rows] + after[part][rows]) / 2 for rows in before[part]} for part in before}
    found["direct"] = {part: {str(rows): seconds for rows, seconds in times.items()} for part, times in direct.items()}
    return found


def _direct_parts(plan: Plan) -> dict[str, dict[int, float]]:
    one = {"one": _direct(plan, plan.one, 1)} if "one" in plan.measure else {}
    return {**one, "many": _direct(plan, plan.many, plan.max_batch)}


def _direct(plan: Plan, sizes: str, most_rows: int) -> dict[int, float]:
    """Returns seconds of a call by rows, without an engine."""
    command = [sys.executable, "-m", "benchmarks.serve.peers.called", str(plan.package), "--sizes", sizes]
    command += ["--max-batch", str(most_rows), "--device", plan.device, "--seconds", str(plan.direct_seconds)]
    command += ["--cuda-graphs"] if plan.cuda_graphs else []
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=SEARCH_PATH),
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, plan.model_cores),
    )
    return {int(rows): seconds for rows, seconds in json.loads(ran.stdout).items()}


def _engine(plan: Plan, engine: str, direct: Mapping[int, float]) -> dict[str, Figures]:
    """Measures one engine."""
    found = {}
    if "one" in plan.measure:
        found["one"] = _served(plan, engine, plan.one, 1, lambda port, body: closed_loop(port, body, 1, plan.seconds))
    if engine != "echo" and "saturation" in plan.measure:
        found["saturation"] = _served(
            plan,
            engine,
            plan.many,
            plan.max_batch,
            lambda port, body: closed_loop_of_processes(port, body, plan.connections, plan.seconds, plan.clients),
        )
    if engine != "echo" and "half-load" in plan.measure:
        rate = 0.5 / next(iter(direct.values()))
        found["half load"] = _served(
            plan, engine, plan.many, plan.max_batch, lambda port, body: open_loop(port, body, rate, plan.seconds)
        )
    return found


def _served(plan: Plan, engine: str, sizes: str, max_batch: int, load: Callable[[int, bytes], Load]) -> Figures:
    """Starts an engine, loads it for a fifth of the time to warm it up, then measures."""
    asked, port = workload(plan.package, sizes), free_port()
    request = _request(engine, asked)
    log = plan.log / f"{engine}.log"
    command = _command(plan, engine, sizes, max_batch, port)
    threads = {"OMP_NUM_THREADS": str(len(plan.model_cores))}
    with running(command, port, cores=plan.server_cores, log=log, environment=threads) as server:
        _wait_until_it_answers(server, request)
        closed_loop(port, request, 4, plan.seconds / 5)
        before = _counted(port, asked) if engine == "exportkit" else None
        cpu = server.cpu_seconds()
        seen = load(port, request)
        cpu = server.cpu_seconds() - cpu
        ran = _counted(port, asked) - before if before is not None else None
    if not seen.seconds:
        raise RuntimeError(f"no request was answered: {seen.failed}; see {log}")
    answers = len(seen.seconds)
    figures = {
        "p50": seen.percentile(0.5),
        "p99": seen.percentile(0.99),
        "rows_per_second": answers * asked.rows / seen.elapsed,
        "cpu": cpu / answers,
        "failed": float(sum(seen.failed.values())),
        "elapsed": seen.elapsed,
    }
    if ran is None:
        return figures
    figures["in the model"] = ran.seconds / seen.elapsed
    return figures | {f"batches of {rows}": float(count) for rows, count in ran.batches.items() if count}


def _request(engine: str, asked: Workload) -> bytes:
    if engine == "echo":
        return asked.plain_request("/")
    return asked.infer_request() if engine in ("exportkit", "kserve") else asked.plain_request("/predict")


def _command(plan: Plan, engine: str, sizes: str, max_batch: int, port: int) -> list[str]:
    if engine == "echo":
        script = ROOT / "benchmarks" / "serve" / "server_choice.py"
        return [sys.executable, str(script), "--serve", "uvicorn", "--port", str(port)]
    if engine == "exportkit":
        options = ["--cuda-graphs"] if plan.cuda_graphs else []
        return serve_command(plan.package, port, "--max-batch", str(max_batch), "--device", plan.device, *options)
    command = [str(plan.peers_python), "-m", f"benchmarks.serve.peers.{PEERS[engine]}", str(plan.package)]
    command += ["--sizes", sizes, "--port", str(port), "--device", plan.device]
    return [*command, "--max-batch", str(max_batch)]


def _wait_until_it_answers(server: Server, request: bytes) -> None:
    """Ray's and exportkit's ports answer before their models do."""
    deadline = time.monotonic() + 180
    status, body = 0, b""
    while time.monotonic() < deadline:
        try:
            status, body = Connection(server.port).request(request)
        except OSError as error:
            status, body = 0, str(error).encode()
        if status == 200:
            return
        time.sleep(0.3)
    raise RuntimeError(f"the server answers with {status}: {body[:300]!r}")


def _counted(port: int, asked: Workload) -> Counted:
    """Returns what exportkit has run."""
    post = http_post(f"/v2/models/{asked.model}/stats", b"", {}).replace(b"POST", b"GET", 1)
    status, body = Connection(port).request(post)
    if status != 200:
        raise RuntimeError(f"the statistics' status is {status}: {body[:300]!r}")
    model: Any = json.loads(body)["model_stats"][0]
    ran = {int(batch["batch_size"]): batch["compute_infer"] for batch in model["batch_stats"]}
    seconds = sum(int(infer["ns"]) for infer in ran.values()) / 1e9
    return Counted({rows: int(infer["count"]) for rows, infer in ran.items()}, seconds)


if __name__ == "__main__":
    main()

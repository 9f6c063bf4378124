"""Processes that hold one copy of a model's weights on a GPU, by CUDA IPC, beside as many with a copy each.

    python -m benchmarks.shared_gpu_weights [-o benchmarks/shared_weights_results/nvidia-h200.json]

This is an experiment: `exportkit.load` has no such option. The script makes a package with random bfloat16 weights. It
replaces the function that brings weights to the GPU: the owner copies them and sends a handle, a reader opens the
handle. Then a reader writes, readers break and are killed, the owner is killed, or lets go of the weights.

"mib" is the GPU memory in use, minus what was in use before the first process. Rates are microseconds for one call of
many: "in_turns" for processes that wait for one another, "at_once" for four that do not. All bits of an answer are
compared with those of the first process. A step that fails has an "error". `--device cpu` takes the same steps with
shared memory of the host, and measures nothing of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing

import exportkit
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.runtime import runner
from exportkit.runtime.loader import make_forks_safe
from exportkit.runtime.native import use_native

_FORKS = multiprocessing.get_context("fork")  # before any uses the GPU: torch is imported once
_SECONDS = 60.0  # for an answer of a process
_NAMES = ["meter", "maker", "first", "s0", "s1", "s2", "s3", "owner", "r1", "r2", "r3", "late", "owner2", "r4", "r5"]

Shared = tuple[bytes, dict[str, tuple[Any, ...]]]  # a handle, and each weight's dtype, shape, strides and place


class Layers(torch.nn.Module):
    """Layers whose weights are nearly all of the model."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x


class Worker:
    """What a process does when it is asked to."""

    def __init__(self, options: argparse.Namespace, package: Path) -> None:
        self.options, self.package, self.device = options, package, torch.device(options.device)
        self.weights: dict[str, torch.Tensor] = {}

    def begin(self) -> dict[str, float]:
        """Makes the process's context on the device."""
        begin = time.perf_counter()
        torch.zeros(1, device=self.device)
        self._finish()
        return {"seconds": time.perf_counter() - begin}

    def used(self) -> int:
        """Returns the memory of the device that is in use, once it stays as it is."""
        found = [-1, 0]
        while found[-1] != found[-2]:
            if self.device.type == "cuda":
                free, size = torch.cuda.mem_get_info(self.device)
                found.append(size - free)
                time.sleep(0.3)
            else:
                found.append(0)
        return found[-1]

    def make(self) -> dict[str, Any]:
        """Makes the package."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Layers(self.options.layers, self.options.width).to(torch.bfloat16).eval()
            example = torch.randn(self.options.batch, self.options.width).to(torch.bfloat16)
        begin = time.perf_counter()
        spec = exportkit.ExportSpec(model=model, example_inputs=(example,), name="layers")
        export_aoti(spec, self.package, TraceOptions(device=self.options.device, cases=0))
        size = sum(each.nbytes for each in model.parameters())
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {"device": device, "weights_bytes": size, "export_seconds": time.perf_counter() - begin}

    def load(self, shared: Shared | None = None) -> dict[str, Any]:
        """Loads the package with a copy of its own, or over another process's, and calls it."""
        copied, seconds = runner.on_device, 0.0

        def placed(target: Any, given: runner.Weights, device: torch.device) -> dict[str, torch.Tensor]:
            nonlocal seconds
            begin = time.perf_counter()
            if shared is not None:
                self.weights = _opened(shared)
            else:
                self.weights = copied(target, given, device)
                if device.type == "cpu":  # these are the package's
                    together = torch.ops.exportkit.copied_together.default(list(self.weights.values()), device)
                    self.weights = dict(zip(self.weights, together, strict=True))
                    next(iter(self.weights.values())).untyped_storage().share_memory_()  # moves them
            self._finish()
            seconds = time.perf_counter() - begin
            return self.weights

        begin = time.perf_counter()
        with patch.object(runner, "on_device", placed):
            self.model = exportkit.load(self.package, self.device)
        loaded = time.perf_counter() - begin
        drawn = torch.randn(self.options.batch, self.options.width, generator=torch.Generator().manual_seed(1))
        self.x = drawn.to(self.device, torch.bfloat16)
        begin = time.perf_counter()
        answer = self.answer()
        self.expected = self.model(self.x).clone()
        call = time.perf_counter() - begin
        return {"seconds": loaded, "of_that_weights": seconds, "first_calls_seconds": call, "answer": answer}

    def share(self) -> Shared:
        """Returns what another process opens the weights with. Each needs its own: torch counts them."""
        first = next(iter(self.weights.values()))
        memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(first.untyped_storage())
        layout = {}
        for name, each in self.weights.items():
            assert each.untyped_storage().data_ptr() == memory.data_ptr()
            layout[name] = (each.dtype, tuple(each.shape), each.stride(), each.storage_offset())
        return bytes(ForkingPickler.dumps(memory)), layout

    def answer(self) -> str:
        """Returns a digest of the model's answer."""
        content = self.model(self.x).view(torch.uint8).cpu().numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def calls(self, count: int) -> float:
        """Returns the microseconds of a call that follows another."""
        self.model(self.x)
        self._finish()
        begin = time.perf_counter()
        for _ in range(count):
            self.model(self.x)
        self._finish()
        return (time.perf_counter() - begin) / count * 1e6

    def spin(self, connection: Connection) -> dict[str, Any]:
        """Calls until the next message, and counts the answers that differ from the first."""
        made = different = 0
        while not connection.poll():
            different += not torch.equal(self.model(self.x), self.expected)
            made += 1
        connection.recv()
        return {"calls": made, "different": different}

    def scribble(self) -> None:
        """Writes into the first weight."""
        first = next(iter(self.weights.values()))
        self.saved = first.clone()
        first.zero_()
        self._finish()

    def restore(self) -> None:
        """Takes `scribble` back."""
        next(iter(self.weights.values())).copy_(self.saved)
        self._finish()

    def break_device(self) -> None:
        """Reads beyond a tensor, after which CUDA fails in this process."""
        torch.zeros(1, device=self.device)[torch.tensor([7], device=self.device)]
        self._finish()

    def drop(self) -> None:
        """Lets go of the model and its weights."""
        self.model.close()
        self.weights = {}
        del self.model
        self.collect()

    def collect(self) -> None:
        """Gives memory back that nobody holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _opened(shared: Shared) -> dict[str, torch.Tensor]:
    content, layout = shared
    # torch packs a handle of CUDA IPC with pickle alone. The owner, which this script started, made these bytes.
    memory: torch.Tensor = pickle.loads(content)  # noqa: S301
    return {
        name: torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, shape, strides)
        for name, (dtype, shape, strides, offset) in layout.items()
    }


def _serve(worker: Worker, connection: Connection, parent: int) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")  # of the CPU: a handle is bytes, as of CUDA
    if worker.device.type == "cpu":
        torch.set_num_threads(1)
    while True:
        while not connection.poll(2):
            if os.getppid() != parent:
                return
        name, arguments = connection.recv()
        if name == "end":
            return
        try:
            given = (connection,) if name == "spin" else arguments
            connection.send(getattr(worker, name)(*given))
        except Exception as error:  # what a step's failure is, is the result
            connection.send({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


class Process:
    """A process with a worker."""

    def __init__(self, options: argparse.Namespace, package: Path) -> None:
        self._here, there = _FORKS.Pipe()
        self.process = _FORKS.Process(target=_serve, args=(Worker(options, package), there, os.getpid()))
        self.process.start()
        there.close()

    def send(self, name: str, *arguments: Any) -> None:
        self._here.send((name, arguments))

    def receive(self) -> Any:
        ready = wait([self._here, self.process.sentinel], _SECONDS)
        if not ready:
            self.kill()
            return {"error": f"no answer in {_SECONDS:.0f} seconds"}
        try:
            return self._here.recv()
        except EOFError:
            self.process.join()
            return {"error": f"the process ended with {self.process.exitcode}"}

    def ask(self, name: str, *arguments: Any) -> Any:
        with contextlib.suppress(OSError):  # it has ended, as `receive` says
            self.send(name, *arguments)
        return self.receive()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.send("end")
        self.process.join(_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Experiment:
    """The steps, over processes by name."""

    def __init__(self, options: argparse.Namespace, processes: dict[str, Process]) -> None:
        self.count, self.of = options.calls, processes
        self.base, self.answer = 0, ""

    def mib(self) -> float:
        return round((self.of["meter"].ask("used") - self.base) / 2**20, 1)

    def same(self, *names: str) -> bool | list[Any]:
        """Returns True if these processes answer as the first did, or else their answers."""
        found = [self.of[name].ask("answer") for name in names]
        return True if all(each == self.answer for each in found) else found

    def run(self) -> dict[str, Any]:
        self.of["meter"].ask("begin")
        results: dict[str, Any] = {"made": self.of["maker"].ask("make")}
        self.of["maker"].end()
        self.base = self.of["meter"].ask("used")
        self.of["first"].ask("begin")
        results["first_load"] = self.of["first"].ask("load")
        self.answer = results["first_load"].get("answer", "")
        self.of["first"].end()
        for step in (self.separate, self.shared, self.rates, self.written, self.broken, self.killed, self.let_go):
            print(f"{time.strftime('%X')} {step.__name__}", file=sys.stderr, flush=True)
            try:
                results[step.__name__] = step()
            except Exception as error:
                results[step.__name__] = {"error": repr(error)}
        return results

    def joined(self, name: str, shared: Shared | None) -> dict[str, Any]:
        """Lets a process load. Returns what each step took; memory is that of all processes so far."""
        context = self.of[name].ask("begin")
        begun = self.mib()
        found = {"process": name, "context": context, "mib_with_context": begun, **self.of[name].ask("load", shared)}
        return {**found, "mib": self.mib(), "same": found.get("answer") == self.answer}

    def separate(self) -> list[dict[str, Any]]:
        return [self.joined(f"s{number}", None) for number in range(4)]

    def shared(self) -> list[dict[str, Any]]:
        found = [{"mib_before": self.mib()}, self.joined("owner", None)]
        return found + [self.joined(name, self.of["owner"].ask("share")) for name in ("r1", "r2", "r3")]

    def rates(self) -> dict[str, Any]:
        rounds: dict[str, list[float]] = {"s0": [], "owner": [], "r1": []}
        for _ in range(9):
            for name, found in rounds.items():
                found.append(self.of[name].ask("calls", self.count))
        once: dict[str, list[float]] = {"separate": [], "shared": []}
        for _ in range(5):
            for kind, names in (("separate", ("s0", "s1", "s2", "s3")), ("shared", ("owner", "r1", "r2", "r3"))):
                for name in names:
                    self.of[name].send("calls", self.count)
                once[kind].append(max(self.of[name].receive() for name in names))
        for number in range(4):
            self.of[f"s{number}"].end()
        return {
            "in_turns": {name: _spread(found) for name, found in rounds.items()},
            "at_once": {kind: _spread(found) for kind, found in once.items()},
        }

    def written(self) -> dict[str, Any]:
        """A reader writes into the first weight."""
        failed = self.of["r3"].ask("scribble")
        others = self.same("owner", "r1", "r2")
        self.of["r3"].ask("restore")
        return {"reader": failed, "others_same": others, "same_when_restored": self.same("owner", "r1", "r2", "r3")}

    def broken(self) -> dict[str, Any]:
        """A reader breaks CUDA for itself, while another calls."""
        self.of["r1"].send("spin", None)
        time.sleep(0.5)
        reader = self.of["r3"].ask("break_device")
        time.sleep(0.5)
        calls = self.of["r1"].ask("stop")
        after = self.of["r3"].ask("answer")
        self.of["r3"].kill()
        return {"reader": reader, "its_next_call": after, "another": calls, "others_same": self.same("owner", "r1")}

    def killed(self) -> dict[str, Any]:
        """A reader is killed in a call, then the owner, while one reader goes on."""
        late = self.of["owner"].ask("share")
        found: dict[str, Any] = {"mib_before": self.mib(), "passed_on_by_a_reader": _error(self.of["r1"].ask("share"))}
        self.of["r2"].send("spin", None)
        time.sleep(0.5)
        self.of["r2"].kill()
        found["reader_killed"] = {"mib": self.mib(), "others_same": self.same("owner", "r1")}
        self.of["r1"].send("spin", None)
        self.of["owner"].send("spin", None)
        time.sleep(0.5)
        self.of["owner"].kill()
        time.sleep(1)
        calls = self.of["r1"].ask("stop")
        found["owner_killed"] = {"mib": self.mib(), "reader": calls, "same": self.same("r1")}
        self.of["late"].ask("begin")
        found["late_reader"] = self.of["late"].ask("load", late)
        self.of["late"].end()
        found["reader_lets_go"] = {"failed": self.of["r1"].ask("drop"), "mib": self.mib()}
        self.of["r1"].end()
        found["all_ended"] = {"mib": self.mib()}
        return found

    def let_go(self) -> dict[str, Any]:
        """The owner closes its model while readers have it; one lets go, one is killed."""
        owner = self.of["owner2"]
        loads = [self.joined("owner2", None)]
        loads += [self.joined(name, owner.ask("share")) for name in ("r4", "r5")]
        found: dict[str, Any] = {"loads": loads}
        found["owner_lets_go"] = {"failed": owner.ask("drop"), "mib": self.mib(), "readers_same": self.same("r4", "r5")}
        found["a_reader_lets_go"] = {"failed": self.of["r4"].ask("drop"), "mib": self.mib()}
        self.of["r4"].end()
        self.of["r5"].kill()
        found["the_other_is_killed"] = {"failed": owner.ask("collect"), "mib": self.mib()}
        owner.end()
        found["owner_ended"] = {"mib": self.mib()}
        return found


def _error(found: Any) -> str:
    return found["error"] if isinstance(found, dict) else "it can"


def _spread(found: list[Any]) -> dict[str, float] | list[Any]:
    if not all(isinstance(each, float) for each in found):
        return found
    return {"median": round(statistics.median(found), 1), "min": round(min(found), 1), "max": round(max(found), 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the package, takes each step, and prints the findings as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--calls", type=int, default=100, help="of a round")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    make_forks_safe()
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        os.environ["EXPORTKIT_CACHE"] = f"{folder}/cache"
        package = Path(folder, "layers.pt2")
        processes = {name: Process(options, package) for name in _NAMES}
        try:
            found = Experiment(options, processes).run()
        finally:
            for each in processes.values():
                each.kill()
    versions = {"torch": torch.__version__, "runtime": "C++" if use_native() else "torch's binding"}
    found = {**versions, **vars(options), "out": None, **found, "seconds": time.perf_counter() - begin}
    text = json.dumps({name: value for name, value in found.items() if name != "out"}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

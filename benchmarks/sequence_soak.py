"""Sequences for a long time, among clients that behave and clients that do not, with faults.

    python -m benchmarks.sequence_soak speech.pt2 --minutes 30 -o benchmarks/sequences_results/soak.json
    python -m benchmarks.sequence_soak speech.pt2 --minutes 30 --isolate

Clients send sequences by tritonclient over HTTP, gRPC and gRPC's streams. Each has a session of its own in this
process, which says what a right answer is. In the middle of a sequence they begin it again, leave, let a timeout pass,
or are silent for too long; and several begin sequences of the same id at the same time. Meanwhile the model is loaded
again and again, and with `--isolate` its worker process is killed. In the end the server gets SIGTERM while sequences
run.

It fails (exit code 1) if an answer is another than that of its session, if a step is refused without one of these
reasons or answered in spite of one, if a kind of end never happened, if the server does not end with 0, or if memory
grew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch

import exportkit
from benchmarks.sequence_ways import WAYS, Refused, Way
from benchmarks.serve.running import Server, free_port, running
from benchmarks.serve.soaking import WATCH_SECONDS, Soaking, Work

IDLE_SECONDS, FINISH_SECONDS = 2.0, 1.0
RELOAD_SECONDS, KILL_SECONDS = 5.0, 11.0
# What may happen to every sequence while models are loaded and workers killed.
FAULTS = re.compile(
    r"version of the model was unloaded|process with its state died|[Ww]orker|not ready|begins any more|"
    r"ended before its step ran"
)
GIVEN_UP = re.compile(r"given up|timeout")
IDLE = re.compile(r"no step came for too long")
ENDS = ("end", "restarted", "idle", "unanswered", "unloaded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.01, help="mean seconds between the steps of a client")
    parser.add_argument("--isolate", action="store_true", help="and kill the worker process")
    parser.add_argument("--zero", nargs="*", default=[], help="inputs that are 0; others are random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ports = (free_port(), free_port())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        with exportkit.load(options.package) as model:
            package = Path(shutil.copy(options.package, folder / "models" / f"{model.manifest.name}.pt2"))
            command, log = _command(folder, ports, options), folder / "server.log"
            with running(command, ports[1], cores=set(os.sched_getaffinity(0)), log=log) as server:
                soak = Soak(server, model, package, ports, options)
                soak.run()
                problems = soak.end()
        for problem in problems:
            print(f"PROBLEM: {problem}")
        if problems:
            print((folder / "server.log").read_text()[-3000:])
    if options.output is not None:
        options.output.write_text(json.dumps({**soak.summary(), "problems": problems}, indent=1) + "\n")
    sys.exit(1 if problems else 0)


def _command(folder: Path, ports: tuple[int, int], options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "exportkit", "serve", "--model-repository", str(folder / "models")]
    command += ["--port", f"{ports[0]}", "--grpc-port", f"{ports[1]}", "--no-access-log"]
    command += ["--sequence-idle", f"{IDLE_SECONDS}", "--sequence-finish", f"{FINISH_SECONDS}"]
    return [*command, *(["--isolate"] if options.isolate else [])]


class Soak(Soaking):
    """The clients and the faults, and what they saw."""

    def __init__(
        self, server: Server, model: exportkit.Model, package: Path, ports: tuple[int, int], options: argparse.Namespace
    ) -> None:
        """Waits until the server is ready."""
        super().__init__(server, options.seed)
        self._model, self._package, self._ports, self._options = model, package, ports, options
        self._number = 0
        self._clock = threading.local()  # when this client sent the last step that was answered
        self._ended: dict[str, float] = {}
        method = model.manifest.method()
        (self._dimension,) = {
            size.dimension for each in model.manifest.state for size in each.shape if not isinstance(size, int)
        }
        self._inputs = method.call.inputs
        while _get(ports[0], "/v2/health/ready")[0] != 200:
            time.sleep(0.1)

    def run(self) -> None:
        """Lets everything loose, then sends SIGTERM."""
        works: list[Work] = [self._play] * self._options.clients
        works += [self._double, self._double, self._reload, *([self._kill] if self._options.isolate else [])]
        self.let_loose(works, 60 * self._options.minutes, last=self._look_at_the_ends)

    def _look_at_the_ends(self) -> None:
        self._ended = _ends(_get(self._ports[0], "/metrics")[1])

    def end(self) -> list[str]:
        """Waits for the server's end. Returns what was not as promised."""
        problems = self.problems()
        expected = [*ENDS, *(["lost"] if self._options.isolate else [])]
        missing = [reason for reason in expected if not self._ended.get(reason)]
        if missing and self._options.minutes >= 1:
            problems.append(f"no sequence ended by {', '.join(missing)}")
        print(json.dumps(self.summary(), indent=1))
        return problems

    def summary(self) -> dict[str, Any]:
        """Returns what happened."""
        before, after = self.quarters()
        return {
            "package": self._model.manifest.name,
            "isolate": self._options.isolate,
            "minutes": round(self.minutes, 1),
            "seen": dict(sorted(self.seen.items())),
            "ended": self._ended,
            "memory_mb": {"second_quarter": round(before / 1e6, 1), "last_quarter": round(after / 1e6, 1)},
            "memory_mb_each_minute": [round(each / 1e6, 1) for each in self.memory[:: int(60 / WATCH_SECONDS)]],
        }

    # --- clients ------------------------------------------------------------------------------------------------------

    def _play(self, chance: random.Random) -> None:
        """Plays sequences on one connection."""
        way = chance.choice(WAYS)(self._model.manifest.name, self._ports)
        try:
            for _ in range(chance.randrange(1, 8)):
                if self.stopping.is_set():
                    return
                self._sequence(way, chance)
        finally:
            way.close()

    def _sequence(self, way: Way, chance: random.Random) -> None:
        """Plays one sequence, until it ends in whatever way."""
        self._clock.sent = time.monotonic()
        with self._lock:
            self._number += 1
            sequence = chance.choice([self._number, f"text {self._number}"])
        sizes = {self._dimension: chance.choice([1, 1, 1, 2, 3])}
        steps = chance.randrange(1, 25)
        with self._model.session(**sizes) as session:
            for step in range(steps):
                self.stopping.wait(chance.expovariate(1 / self._options.pause))
                deed = chance.choices(
                    [self._step, self._restart, self._late, self._idle, self._leave], [100, 2, 2, 0.3, 1]
                )[0]
                last = step == steps - 1 and chance.random() < 0.7
                inputs = self._drawn(chance, sizes)
                deed = self._step if step == 0 or last else deed
                if not deed(way, session, sequence, inputs, chance, start=step == 0, end=last):
                    return

    def _step(self, way: Way, session: Any, sequence: Any, inputs: Any, chance: random.Random, **flags: Any) -> bool:
        """Sends a step as it should be. Returns whether the sequence goes on."""
        began = time.monotonic()
        try:
            answer = way.ask(inputs, sequence, **flags)
        except Refused as error:
            self._judge_refusal(error, FAULTS)
            return False
        self._clock.sent = began
        self._compare("answered", answer, session(*inputs.values()))
        return True

    def _restart(self, way: Way, session: Any, sequence: Any, inputs: Any, chance: random.Random, **flags: Any) -> bool:
        """Begins the sequence again."""
        session.reset()
        self.count("restarted")
        return self._step(way, session, sequence, inputs, chance, start=True, end=False)

    def _late(self, way: Way, session: Any, sequence: Any, inputs: Any, chance: random.Random, **flags: Any) -> bool:
        """Asks for an answer within a time that may pass. If it did, the sequence has ended."""
        began = time.monotonic()
        try:
            answer = way.ask(inputs, sequence, timeout=chance.choice([1, 300, 3000]), **flags)
        except Refused as error:
            self._judge_refusal(error, GIVEN_UP, FAULTS)
            self._has_ended(way, sequence, chance)
            return False
        self._clock.sent = began
        self._compare("answered in time", answer, session(*inputs.values()))
        return True

    def _idle(self, way: Way, session: Any, sequence: Any, inputs: Any, chance: random.Random, **flags: Any) -> bool:
        """Is silent for too long. A server that is behind may not have seen it yet."""
        if self.stopping.wait(IDLE_SECONDS + 1.5):
            return False
        try:
            answer = way.ask(inputs, sequence)
        except Refused as error:
            self._judge_refusal(error, IDLE, FAULTS)
        else:
            self._compare("answered late", answer, session(*inputs.values()))
        return False

    def _leave(self, way: Way, session: Any, sequence: Any, inputs: Any, chance: random.Random, **flags: Any) -> bool:
        """Sends a step and leaves. Who goes on finds the state before the step or after it, or an ended sequence."""
        way.send_and_leave(inputs, sequence)
        self.count("left")
        self.stopping.wait(0.2)
        following = self._drawn(chance, dict(session.sizes))
        try:
            answer = way.ask(following, sequence)
        except Refused as error:
            self._judge_refusal(error, GIVEN_UP, FAULTS)
            return False
        with session.fork() as unchanged:
            session(*inputs.values())
            either = (session(*following.values()), unchanged(*following.values()))
        self._compare("answered after leaving", answer, *either)
        return False

    def _double(self, chance: random.Random) -> None:
        """Begins sequences of an id that others begin at the same time: each begins with a state of its own."""
        way = chance.choice(WAYS)(self._model.manifest.name, self._ports)
        sizes = {self._dimension: 1}
        try:
            for _ in range(30):
                inputs = self._drawn(chance, sizes)
                with self._model.session(**sizes) as session:
                    self._step(way, session, 1 << 40, inputs, chance, start=True, end=chance.random() < 0.3)
                self.stopping.wait(chance.expovariate(1 / self._options.pause))
        finally:
            way.close()

    def _drawn(self, chance: random.Random, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(chance.getrandbits(60))
        found = {}
        for each in self._inputs:
            shape = [size if isinstance(size, int) else sizes[size.dimension] for size in each.shape]
            found[each.name] = (
                torch.zeros(shape) if each.name in self._options.zero else torch.rand(shape, generator=generator)
            )
        return found

    # --- judging ------------------------------------------------------------------------------------------------------

    def _compare(self, what: str, answer: torch.Tensor, *allowed: torch.Tensor) -> None:
        right = any(torch.allclose(answer, each, rtol=1e-4, atol=1e-5) for each in allowed)
        self.count(what if right else f"WRONG: {what}, with another state")

    def _judge_refusal(self, error: Refused, *allowed: re.Pattern[str]) -> None:
        if self.draining.is_set():
            self.count("refused while draining")
        elif IDLE.search(error.text) and time.monotonic() - self._clock.sent > IDLE_SECONDS:
            self.count("refused: no step came for too long")  # this machine has other work than this client
        elif any(each.search(error.text) for each in allowed):
            why = next(found for each in allowed if (found := each.search(error.text)))
            self.count(f"refused: {why.group()}")
        else:
            self.count(f"WRONG: refused: {error.text[:160]}")

    def _has_ended(self, way: Way, sequence: Any, chance: random.Random) -> None:
        """Asks for a step of a sequence one of whose steps was given up: it must have ended."""
        try:
            way.ask(self._drawn(chance, {self._dimension: 1}), sequence)
        except Refused as error:
            self._judge_refusal(error, GIVEN_UP, FAULTS)
        else:
            self.count("WRONG: a sequence is answered though a step was given up")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _reload(self, chance: random.Random) -> None:
        """Replaces the package's file and loads the model again."""
        if self.stopping.wait(RELOAD_SECONDS):
            return
        new = self._package.with_suffix(".new")
        shutil.copy(self._package, new)
        os.replace(new, self._package)
        status, body = _get(self._ports[0], f"/v2/repository/models/{self._model.manifest.name}/load", b"{}")
        failed = "loads that failed" if "worker" in body or self.draining.is_set() else f"WRONG: {body[:100]}"
        self.count("loads" if status == 200 else failed)

    def _kill(self, chance: random.Random) -> None:
        """Kills a worker process: a child of a child, as workers are forked from a forkserver."""
        if self.stopping.wait(KILL_SECONDS):
            return
        children = psutil.Process(self.server.process.pid).children()
        workers = [worker for child in children for worker in child.children()]
        if workers:
            chance.choice(workers).kill()
            self.count("killed workers")


def _ends(metrics: str) -> dict[str, float]:
    """Returns how many sequences ended, by reason."""
    found = re.findall(r'^exportkit_sequences_ended_total\{.*reason="(\w+)".*\} (\S+)', metrics, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


def _get(port: int, path: str, body: bytes | None = None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


if __name__ == "__main__":
    main()

"""Starts servers: as a user does, and many cheaply, forked from a process that has imported torch."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]

_TEMPLATE = """
import json, os, signal, sys
import exportkit.serve.server
from exportkit.cli import main

children = []
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        pid, status = os.waitpid(job["wait"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        for descriptor, name in enumerate((os.devnull, job["out"], job["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
        break
    children.append(pid)
    print(pid, flush=True)
else:
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    sys.exit()
exec(job["before"])
sys.exit(main(job["arguments"]))
"""


class ServerProcess:
    """A process of `exportkit serve`.

    Attributes:
        pid: Its process id.
        started: What it printed when it was ready.
    """

    def __init__(self, pid: int, poll: Callable[[], int | None], out: Path, err: Path) -> None:
        self.pid = pid
        self._poll = poll
        self._out, self._err = out, err
        self.started: dict[str, Any] = {}

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._err.read_text()

    @property
    def report(self) -> list[str]:
        """The lines on stderr that are not of the access log."""
        return [line for line in self.errors.splitlines() if not line.startswith("{")]

    @property
    def access_log(self) -> list[dict[str, Any]]:
        """The access log."""
        return [json.loads(line) for line in self.errors.splitlines() if line.startswith("{")]

    def until(self, happened: Callable[[], Any]) -> Any:
        """Waits for something, and returns it. Fails if the process ends before."""
        while not (found := happened()):
            code = self._poll()
            assert code is None, f"exit code {code}\n{self._out.read_text()}{self.errors}"
            time.sleep(0.02)
        return found

    def wait_until_ready(self) -> ServerProcess:
        """Waits until it has printed where it listens."""

        def printed() -> Any:
            try:
                return json.loads(self._out.read_text())
            except ValueError:
                return None

        self.started = self.until(printed)
        return self

    def signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits for the end, and returns the exit code."""
        while (code := self._poll()) is None:
            time.sleep(0.02)
        return code

    def stop(self) -> int:
        """Ends it as an operator does."""
        if self._poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def descendants(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.pid).children(recursive=True)

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of HTTP."""
        url = self.started["http"] if self.started else self.report[0].removeprefix("listening on ").partition(";")[0]
        host, _, port = url.partition("://")[2].rpartition(":")
        return host, int(port)

    def connect(self, context: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
        """Returns a connection."""
        if context is not None:
            return http.client.HTTPSConnection(*self.address, context=context, timeout=600)
        return http.client.HTTPConnection(*self.address, timeout=600)

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Returns the status, headers and body of an answer. With a body, the request is a POST."""
        connection = self.connect(context)
        try:
            connection.request("GET" if body is None else "POST", path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()


class Launcher:
    """Starts servers. Its process imports torch once, for all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._template = subprocess.Popen(
            [sys.executable, "-c", _TEMPLATE],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._template.stdin.write(json.dumps(job) + "\n")
        self._template.stdin.flush()
        return json.loads(self._template.stdout.readline())

    def start(self, *arguments: Any, before: str = "") -> ServerProcess:
        """Starts `exportkit serve` on free ports, after the statements `before`."""
        out, err = self._files()
        words = ["serve", *map(str, arguments), "--json"]
        if "--port" not in words:
            words += ["--port", "0"]
        if "--no-grpc" not in words and "--grpc-port" not in words:
            words += ["--grpc-port", "0"]
        job = {"arguments": words, "out": str(out), "err": str(err), "before": before}
        pid = self._ask(job)
        ended: list[int] = []

        def poll() -> int | None:
            if not ended and (code := self._ask({"wait": pid})) is not None:
                ended.append(code)
            return ended[0] if ended else None

        return ServerProcess(pid, poll, out, err)

    def start_as_a_user(self, *arguments: Any) -> ServerProcess:
        """Starts it with an interpreter of its own, as a user does."""
        out, err = self._files()
        command = [sys.executable, "-m", "exportkit", "serve", *map(str, arguments)]
        command += ["--port", "0", "--grpc-port", "0"]
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen([*command, "--json"], cwd=ROOT, stdout=stdout, stderr=stderr)
        return ServerProcess(process.pid, process.poll, out, err)

    def _files(self) -> tuple[Path, Path]:
        self._count += 1
        out, err = (self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        out.touch()
        err.touch()
        return out, err

    def close(self) -> None:
        """Kills what is left."""
        assert self._template.stdin is not None
        self._template.stdin.close()
        self._template.wait()

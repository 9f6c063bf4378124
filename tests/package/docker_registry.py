"""Debian's docker-registry, run on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = shutil.which("docker-registry")
WHY_NOT = "no docker-registry here (Debian: apt-get install docker-registry)"

_CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


@contextmanager
def docker_registry(folder: Path) -> Iterator[str]:
    """Runs it, and yields its host."""
    assert PROGRAM is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "config.yml"
    config.write_text(_CONFIG.format(folder=folder, port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(config)], stdout=log, stderr=log)
    try:
        _wait_for(port, process)
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("docker-registry did not start")

"""Processes without a network, in which code is tried that a verification found wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.subprocesses import run_python


@pytest.mark.process
def test_what_is_offline_opens_no_socket_and_neither_do_its_children(tmp_path: Path) -> None:
    script = """
import socket, subprocess, sys
from exportkit.child.offline import go_offline
go_offline()
refused = []
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(family)
    except PermissionError:
        refused.append(family)
assert len(refused) == 2, refused
socket.socketpair()
child = "import socket\\ntry:\\n    socket.socket()\\nexcept PermissionError:\\n    raise SystemExit(7)"
assert subprocess.run([sys.executable, "-c", child]).returncode == 7
"""
    run_python(script, cwd=tmp_path)

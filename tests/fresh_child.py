"""What a forked child of tests/fresh.py runs: some code, as `python -c` would in an interpreter that has torch."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
import types


def main(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as received:
        request = json.load(received)
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # from the environment again
    sys.path[:] = request["path"]
    sys.argv[:] = ["-c", *request["arguments"]]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("exportkit", "tests")]:
        del sys.modules[name]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(request["code"], "<string>", "exec"), vars(module))
    except Exception:  # what the code raises ends an interpreter in this way
        traceback.print_exc()
        sys.exit(1)

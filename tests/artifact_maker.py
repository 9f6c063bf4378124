"""Makes artifacts, each in a fork of a process that has imported the exporter and nothing of a model's.

`python -m tests.artifact_maker` reads one task a line, as JSON, and answers each with a line: what went wrong, or "".
Importing torch's compiler takes four seconds, and a fork has it at once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch._inductor.compile_fx  # noqa: F401 (for the forks)

from exportkit.export.artifact import export_aoti, export_program
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.export.resolve import resolve


def make(task: dict[str, Any]) -> None:
    """Exports what the task says, as `exportkit export` does."""
    os.environ.clear()
    os.environ.update(task["environment"])
    tempfile.tempdir = None  # from the environment again
    libraries = [Path(library) for library in task["libraries"]]
    resolved = resolve(task["model"], inputs=task["inputs"], op_libraries=libraries, model_kwargs=task["model_kwargs"])
    out, options = Path(task["out"]), TraceOptions(dynamic=task["dynamic"], **task["trace"])
    if task["program"]:
        export_program(resolved, out, options)
    else:
        export_aoti(resolved, out, options, CompileOptions(**task["compile"]))


def made_in_a_fork(task: dict[str, Any]) -> str:
    """What the fork said if it failed."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                make(task)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return "" if status == 0 else f"status {os.waitstatus_to_exitcode(status)}\n{said.read()[-4000:]}"


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(made_in_a_fork(json.loads(line))), flush=True)

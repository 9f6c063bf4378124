"""Programs and libraries of parts of the C++ runtime, with what stands in for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.fixtures.compiled import compile_once

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "csrc" / "runtime"
TORCH = Path(torch.__file__).parent
INCLUDES = [f"-I{ROOT / 'csrc'}", f"-I{RUNTIME / 'include'}", "-isystem", TORCH / "include"]
INCLUDES += ["-isystem", TORCH / "include/torch/csrc/api/include", "-DAT_PER_OPERATOR_HEADERS"]


def build(path: Path, *sources: Path, flags: Sequence[str | Path] = ("-O1",)) -> Path:
    """Compiles a program, or with `-shared` a library."""
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", *INCLUDES, *sources, f"-L{TORCH / 'lib'}", *flags]
    command += ["-lc10", "-ldl", "-pthread", f"-Wl,-rpath,{TORCH / 'lib'}", "-Wl,--allow-shlib-undefined"]
    return compile_once(path, command)

"""The model of graphs_on_cpu.cpp, with graphs over a recorder without a GPU."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from exportkit.libraries import load_library
from tests.fixtures.compiled import compile_once
from tests.runtime import tiny

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "csrc" / "runtime"
TORCH = Path(torch.__file__).parent
INCLUDES = [f"-I{ROOT / 'csrc'}", f"-I{RUNTIME / 'include'}", "-isystem", TORCH / "include"]
INCLUDES += ["-isystem", TORCH / "include/torch/csrc/api/include", "-DAT_PER_OPERATOR_HEADERS"]


def program(path: Path, *sources: Path, flags: Sequence[str | Path] = ("-O1",)) -> Path:
    """Compiles a program of the runtime's parts."""
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", *INCLUDES, *sources, f"-L{TORCH / 'lib'}", *flags]
    command += ["-lc10", "-ldl", "-pthread", f"-Wl,-rpath,{TORCH / 'lib'}", "-Wl,--allow-shlib-undefined"]
    return compile_once(path, command)


@functools.cache
def operators() -> Any:
    """Compiles and loads it."""
    sources = [Path(__file__).with_name("graphs_on_cpu.cpp"), RUNTIME / "graphs.cpp"]
    sources.append(ROOT / "csrc/package/text.cpp")
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *INCLUDES, *sources]
    command += [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-Wl,--as-needed"]
    headers = [RUNTIME / f"{name}.h" for name in ("graphs", "recorder")]
    content = [repr((torch.__version__, command)).encode(), *(file.read_bytes() for file in [*sources, *headers])]
    key = hashlib.sha256(b"".join(content)).hexdigest()[:16]
    load_library(compile_once(tiny.CACHE / f"graphs-{key}" / "libgraphs_on_cpu.so", command))
    return torch.ops.graphs_on_cpu


class Model:
    """The model with graphs. `inputs(n)` are some of n rows."""

    def __init__(self, fault: str = "", *, on_first_use: bool = True, with_state: bool = False) -> None:
        self._operators = operators()
        self._handle = self._operators.open(fault, on_first_use, with_state)

    def __call__(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        return self._operators.run(self._handle, list(arguments))

    def again(self, arguments: Sequence[torch.Tensor], last: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the model, with the outputs of a call that nobody uses any more."""
        return self._operators.run_again(self._handle, list(arguments), list(last))

    def check(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        """Calls the model without state."""
        x, ids = inputs(rows, seed)
        y, n = answer = self(x, ids)
        assert torch.equal(y, x * 2 + 1)
        assert torch.equal(n, ids + 1)
        return answer

    def capture(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        return self._operators.capture(self._handle, list(arguments))

    def capture_as(self, other: Model) -> None:
        self._operators.capture_as(self._handle, other._handle)

    def set_fault(self, fault: str) -> None:
        self._operators.set_fault(self._handle, fault)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self._operators.report(self._handle))

    @property
    def rows(self) -> set[int]:
        return {graph["shapes"][0][0] for graph in self.report["graphs"]}

    @property
    def counted(self) -> tuple[int, int, int]:
        calls, launches, recordings = self._operators.counted(self._handle)
        return calls, launches, recordings

    def close(self) -> None:
        self._operators.forget(self._handle)


@contextmanager
def models() -> Iterator[Any]:
    """Gives `Model`, and closes what it made."""
    made: list[Model] = []

    def make(*given: Any, **named: Any) -> Model:
        made.append(Model(*given, **named))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rows)
    return torch.randn(rows, 4, generator=draw), torch.randint(-9, 9, (rows,), generator=draw)

"""What compiled code refused, where torch's own binding runs it: see csrc/runtime/refused_values.h."""

from __future__ import annotations

import _ctypes
import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from exportkit.package.compiled_with import REFUSED, REFUSED_LENGTH, REFUSED_PLACES


class RefusedValues:
    """The memory in which the calls of a code write what they refused."""

    def __init__(self, library: Path, device: torch.device) -> None:
        """Reads what the code of a library refuses, which torch has loaded."""
        self._device = device
        self._free: list[torch.Tensor] = []
        lines = _lines(library)
        self._expected = bool(lines)
        self._places = [line.partition("\t")[::2] for line in lines[1:]]

    def wrapped(self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
        """Returns a function that gives each call its memory, and raises RuntimeError if it refused a value.

        A call on a GPU is waited for: this binding has no other time to look.
        """
        if not self._expected:
            return run

        def looking(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            memory = (
                self._free.pop() if self._free else torch.zeros(REFUSED_LENGTH, dtype=torch.int64, device=self._device)
            )
            try:
                return run([*inputs, memory])
            finally:
                try:
                    self._look(memory)  # raises in place of what the code raised: it says more
                finally:
                    self._free.append(memory)

        return looking

    def _look(self, memory: torch.Tensor) -> None:
        if not memory[0]:
            return
        said = memory.tolist()
        memory.zero_()
        raise RuntimeError(f"{REFUSED}{self._message(said)}")

    def _message(self, said: list[int]) -> str:
        for place, (kind, operators) in enumerate(self._places):
            value, size = said[1 + 2 * place : 3 + 2 * place]
            if size == 0:
                continue
            at = f"{operators}: " if operators else ""
            if kind == "division":
                return f"{at}an integer is divided by zero"
            if not kind:  # one of many that share a place
                break
            if not kind.startswith("index"):
                return f"{at}{kind}"
            length, wraps = abs(size) - 1, kind != "index"  # negative ones had the length added
            given = "an index" if size < 0 else f"index {value - length if wraps and value < 0 else value}"
            return f"{at}{given} is out of range: from {-length if wraps else 0} to {length - 1} are allowed"
        return "the code refused a value"


def _lines(library: Path) -> list[str]:
    opened = ctypes.CDLL(str(library))
    try:
        places = getattr(opened, REFUSED_PLACES, None)
        if places is None:
            return []
        places.restype = ctypes.c_char_p
        text: bytes = places()
        return text.decode(errors="replace").split("\n")
    finally:
        _ctypes.dlclose(opened._handle)

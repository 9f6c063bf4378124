"""Finds the code of a program in the cache, or puts it there once it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportkit.export.compiling.compile_key import compile_key
from exportkit.export.compiling.compiled_cache import Code, find_code, keep_code
from exportkit.export.compiling.program_text import UnknownPartError
from exportkit.export.compiling.program_weights import ProgramWeights


class KnownCode:
    """The cache's code of one program. Until `look_up` was called, there is none, and none is kept.

    Attributes:
        key: The digest of all that the code depends on, if it has one.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, weights: ProgramWeights | None, device: torch.device
    ) -> None:
        """Takes the program, its weights if they are outside of the code, and its device."""
        self.key: str | None = None
        self._program, self._weights, self._device = program, weights, device
        self._found, self._reason = False, ""

    def look_up(self, options: Mapping[str, Any], **more: Any) -> None:
        """Makes the key, in the contexts that the code would be compiled in.

        Args:
            options: The options of Inductor that exportkit sets or was given.
            more: What else decides, by name.
        """
        outside = self._weights is not None
        try:
            self.key = compile_key(self._program, self._device, options, weights_outside=outside, **more)
        except UnknownPartError as error:
            self._reason = f"it depends on {error}"

    def find(self, folder: Path) -> Code | None:
        """Copies the code into a folder, if the cache has it."""
        code = self.key and find_code(self.key, folder, self._program, self._weights, self._device)
        self._found = bool(code)
        return code or None

    def keep(self, code: Code) -> str:
        """Keeps code that was compiled. Returns why it could not, or nothing."""
        if self.key is None or self._found:
            return self._reason
        return keep_code(self.key, code, self._program, self._weights)

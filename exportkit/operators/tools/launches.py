"""Waits for what a call launched on a GPU: errors of a kernel come to whoever asks next."""

from __future__ import annotations

import torch


class Launches:
    """Asks the GPU after each call."""

    def __init__(self) -> None:
        self._canary: torch.Tensor | None = None

    def error(self) -> str | None:
        """Waits for the GPU. Returns what went wrong since the last time, in CUDA's words, or None."""
        if not torch.cuda.is_initialized():
            return None
        try:
            with torch.no_grad():
                if self._canary is None:
                    self._canary = torch.zeros(1, device="cuda")
                self._canary.add_(1)  # a launch finds the error of one that nobody has looked at
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).strip().partition("\n")[0].removeprefix("CUDA error: ")
        return None

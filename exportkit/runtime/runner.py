"""What runs a target's compiled code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Protocol

import torch

from exportkit.errors import ModelLoadError
from exportkit.package.archive import PackageReader
from exportkit.runtime.native import NativeRunner, use_native
from exportkit.runtime.targets import Choice


class Runner(Protocol):
    """Compiled code with its weights, for any number of threads."""

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows."""


def construct(reader: PackageReader, choice: Choice, runners: int) -> Runner:
    """The runners of the one target that was chosen: the C++ runtime's where it fits this torch, else torch's own.

    Not through aoti_load_package, which builds every target's runner, compiles instruction set probes with g++ for
    seconds (pytorch#191715), and hides why an operator is missing.
    """
    # The file that was checked, even if the path leads to another one by now.
    path, name = f"/proc/self/fd/{reader.fileno()}", choice.target.name
    native = use_native()
    try:
        if native:
            return NativeRunner(path, name, torch.device(choice.device), runners)
        _promote_libstdcxx()
        return torch._C._aoti.AOTIModelPackageLoader(path, name, False, runners, choice.device_index)
    except RuntimeError as error:
        raise ModelLoadError(
            f"torch {torch.__version__} cannot load target {choice.target.name} of {reader.path.name}: "
            f"{str(error).partition(chr(10))[0]}",
            hint="It unpacks the code into a temporary directory (TMPDIR), which must have room and may not be noexec.",
        ) from error


@functools.lru_cache(maxsize=1)
def _promote_libstdcxx() -> None:
    """Makes the process's libstdc++ visible to all libraries.

    torch's loader crashes in std::regex where a model's library brings parts of its own libstdc++ along (linked
    statically by the compiler it was built with), unless the real one is found first.
    """
    with contextlib.suppress(OSError):  # no such library: then torch itself was built with another one
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

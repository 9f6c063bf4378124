"""What runs a target's compiled code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from pathlib import Path
from typing import Protocol

import torch

from exportkit.errors import ModelLoadError
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache.entries import target_contents, unpack
from exportkit.runtime.fork import survive_forks
from exportkit.runtime.targets import Choice


class Runner(Protocol):
    """Compiled code with its weights, for any number of threads."""

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows."""


def construct(reader: PackageReader, choice: Choice, runners: int, *, again: bool) -> Runner:
    """The runners of the one target that was chosen, over its library in the cache.

    Not through aoti_load_package, which builds every target's runner, compiles instruction set probes with g++ for
    seconds (pytorch#191715), and hides why an operator is missing; nor through AOTIModelPackageLoader, which unpacks
    the library into a temporary directory each time. A library that was mapped stays so, since the dynamic linker never
    unloads one with symbols that are unique in the process, as some of libstdc++'s are: each load would leave a copy.

    Args:
        reader: The package.
        choice: The target.
        runners: How many calls can run at a time.
        again: Whether to hash unpacked files that count as verified.
    """
    _promote_libstdcxx()
    survive_forks()
    contents = target_contents(reader, choice.target)
    entry = unpack(reader, contents, again=again)
    library = entry.folder / max(name for name in contents.records if name.endswith(".so"))
    try:
        runner = _container(library, choice, runners)
    except RuntimeError as error:
        entry.close()
        raise ModelLoadError(
            f"torch {torch.__version__} cannot load target {choice.target.name} of {reader.path.name}: "
            f"{str(error).partition(chr(10))[0]}",
            hint="Where the cache is mounted noexec, set EXPORTKIT_CACHE to a directory that may hold code.",
        ) from error
    # In use as long as the runner is: CUDA kernels beside the library are opened when they are first called.
    weakref.finalize(runner, entry.close)
    return runner


def _container(library: Path, choice: Choice, runners: int) -> Runner:
    """Makes the runners. torch finds the calls of custom operators in a `.json` beside the library."""
    if choice.target.device == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), runners)
    return torch._C._aoti.AOTIModelContainerRunnerCuda(str(library), runners, choice.device, str(library.parent))


@functools.lru_cache(maxsize=1)
def _promote_libstdcxx() -> None:
    """Makes the process's libstdc++ visible to all libraries.

    torch's loader crashes in std::regex where a model's library brings parts of its own libstdc++ along (linked
    statically by the compiler it was built with), unless the real one is found first.
    """
    with contextlib.suppress(OSError):  # no such library: then torch itself was built with another one
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

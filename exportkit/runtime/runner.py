"""What runs a target's compiled code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from exportkit.errors import ModelLoadError
from exportkit.runtime.cache import Entry
from exportkit.runtime.native import NativeRunner, use_native
from exportkit.runtime.targets import Choice
from exportkit.runtime.weights import Weights, borrowed, constants_of


class Runner(Protocol):
    """Compiled code with its weights, for any number of threads."""

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows."""


class ContainerRunner:
    """Compiled code that is run through torch's own binding, which holds the GIL (pytorch#197516)."""

    def __init__(self, entry: Entry, choice: Choice, runners: int, constants: Mapping[str, torch.Tensor]) -> None:
        """Loads a target's library; arguments and errors are those of NativeRunner."""
        library, folder = str(entry.library), str(entry.library.parent)
        if choice.target.device == "cpu":
            container: Any = torch._C._aoti.AOTIModelContainerRunnerCpu(library, runners)
        else:
            container = torch._C._aoti.AOTIModelContainerRunnerCuda(library, runners, choice.device, folder)
        if constants:
            _set_constants(container, constants, torch.device(choice.device))
        self._constants = constants if choice.target.device == "cpu" else {}  # the code reads these very tensors
        self._entry = entry
        self.run = container.run


RunnerClass = type[NativeRunner] | type[ContainerRunner]


def runner_class() -> RunnerClass:
    """The C++ runtime's where it was built for this torch; errors are those of `use_native`."""
    return NativeRunner if use_native() else ContainerRunner


def construct(
    kind: RunnerClass, entry: Entry, choice: Choice, runners: int, package: str, weights: Weights
) -> NativeRunner | ContainerRunner:
    """The runners of the one target that was chosen, over its library in the cache.

    Not through aoti_load_package, which builds every target's runner, compiles instruction set probes with g++ for
    seconds (pytorch#191715), and hides why an operator is missing; nor through AOTIModelPackageLoader, which unpacks
    the library into a temporary directory each time. A library that was mapped stays so, since the dynamic linker never
    unloads one with symbols that are unique in the process, as some of libstdc++'s are: each load would leave a copy.

    Code for the CPU works on the very tensors of `weights`, which may be more than it takes. `package` is the name that
    a ModelLoadError has, where torch's loader refused the code.
    """
    _promote_libstdcxx()
    try:
        return kind(entry, choice, runners, constants_of(choice.target, weights))
    except RuntimeError as error:
        raise ModelLoadError(
            f"torch {torch.__version__} cannot load target {choice.target.name} of {package}: "
            f"{str(error).partition(chr(10))[0]}",
            hint="Where the cache is mounted noexec, set EXPORTKIT_CACHE to a directory that may hold code.",
        ) from error


def _set_constants(container: Any, constants: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """As the C++ runtime does it (csrc/runtime/session.cpp has the reasons), but for what torch leaks: the handles."""
    # AOTInductor has another name, made from it, within the code.
    names = {constant: name for name, constant in container.get_constant_names_to_original_fqns().items()}
    if names.keys() != constants.keys():
        odd = ", ".join(sorted(names.keys() ^ constants.keys()))
        raise RuntimeError(f"the code takes other constants than the manifest says: {odd}")
    if device.type == "cpu":
        # Borrowed, since the code never gives back its references: nothing that is large may hang on them.
        tensors = {names[constant]: borrowed(tensor) for constant, tensor in constants.items()}
        container.update_constant_buffer(tensors, False, True, True)
        return
    with torch.cuda.device(device):  # where the code allocates
        for constant, tensor in constants.items():
            container.update_constant_buffer({names[constant]: tensor.to(device, copy=True)}, False, False)
            torch.cuda.synchronize(device)


@functools.lru_cache(maxsize=1)
def _promote_libstdcxx() -> None:
    """Makes the process's libstdc++ visible to all libraries.

    torch's loader crashes in std::regex where a model's library brings parts of its own libstdc++ along (linked
    statically by the compiler it was built with), unless the real one is found first.
    """
    with contextlib.suppress(OSError):  # no such library: then torch itself was built with another one
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

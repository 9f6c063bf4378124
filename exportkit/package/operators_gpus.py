"""Compares the GPUs that operator libraries have code for with those that a package's targets were compiled for."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from exportkit.package.consistency import libraries_for, may_serve
from exportkit.package.cuda_code import Degree, DeviceCode, degree, device_code
from exportkit.package.manifest import Library, Manifest, Target

_ARCHITECTURE = re.compile(r"sm_\d+[af]?")
_NONE = DeviceCode()


@dataclass(frozen=True)
class OperatorsFit:
    """How the operators of a namespace run on a target's GPU.

    Attributes:
        target: The target.
        namespace: The namespace.
        degree: How they run there.
        code: What their libraries have.
        libraries: These libraries, those with code for GPUs.
    """

    target: Target
    namespace: str
    degree: Degree
    code: DeviceCode
    libraries: tuple[Library, ...]


def operators_fits(manifest: Manifest, read: Callable[[str], bytes]) -> Iterator[OperatorsFit]:
    """Yields how operators run on the GPU of each target, for the namespaces whose libraries have code for GPUs.

    The libraries of a namespace count together, with those that they need: an operator's kernels may lie in any.

    Args:
        manifest: The package's manifest.
        read: Reads a library, by the name of its record.
    """
    read = functools.cache(read)
    code_of = functools.cache(lambda record: device_code(read(record)))
    for target in manifest.targets:
        if target.cuda_architecture is None or not _ARCHITECTURE.fullmatch(target.cuda_architecture):
            continue
        for namespace in namespaces(manifest):
            having = [lib for lib in _with_needed(manifest, target, namespace) if code_of(lib.record) != _NONE]
            code = DeviceCode(
                frozenset().union(*(code_of(lib.record).machine for lib in having)),
                frozenset().union(*(code_of(lib.record).ptx for lib in having)),
            )
            if having:
                fit = degree(code, target.cuda_architecture)
                yield OperatorsFit(target, namespace, fit, code, tuple(having))


def namespaces(manifest: Manifest) -> list[str]:
    """Returns the namespaces of the graph's operators."""
    return sorted({operator.name.partition("::")[0] for operator in manifest.operators})


def _with_needed(manifest: Manifest, target: Target, namespace: str) -> list[Library]:
    """Returns the libraries of a namespace, and those in the package that they need."""
    by_name = {PurePosixPath(library.record).name: library for library in libraries_for(manifest, target)}
    found, waiting = list[Library](), [library for library in by_name.values() if may_serve(library, namespace)]
    while waiting:
        library = waiting.pop()
        if library not in found:
            found.append(library)
            waiting += [by_name[name] for name in library.needs if name in by_name]
    return found

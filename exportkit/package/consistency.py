"""Relates the parts of a manifest: targets to libraries, these to operators, and weights to what replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from exportkit.package import core
from exportkit.package.manifest import Library, Manifest, Operator, StateTensor, Target, Weight

AOTINDUCTOR_DIR = "data/aotinductor"
OPERATORS_DIR = "exportkit/ops"
CASES_DIR = "exportkit/cases"
STATE_DIR = "exportkit/state"
STATE_OWNER = "exportkit.model"  # the metadata of a session's file: whose state it is
WEIGHTS_DIR = "data/weights"

_NAMES = msgspec.json.Decoder(dict[str, list[str]])  # made at import: exportkit.package.manifest says why


def operators_of(library: Library) -> frozenset[str]:
    """Returns the names of the operators that a library defines or is known to add kernels to."""
    return frozenset({operator.name for operator in library.defines} | set(library.adds_to or ()))


def may_serve(library: Library, namespace: str) -> bool:
    """Whether a library has operators of a namespace, or kernels for some, as far as that is known."""
    unknown = library.adds_to is msgspec.UNSET and not library.defines and bool(library.kernels)
    return unknown or any(name.startswith(f"{namespace}::") for name in operators_of(library))


def missing_operators(manifest: Manifest, target: Target) -> tuple[Operator, ...]:
    """Returns the graph's operators that no library of the package has for a target.

    An artifact from `export` has no libraries yet, so all its operators are missing. In a package, none is: a library
    defines it, or adds kernels to it, and a loader defines what nobody has defined.
    """
    brought = {name for library in libraries_for(manifest, target) for name in operators_of(library)}
    return tuple(operator for operator in manifest.operators if operator.name not in brought)


def is_complete(manifest: Manifest) -> bool:
    """Whether the package can be loaded: it has a target, and its libraries define every operator for each target."""
    return bool(manifest.targets) and not any(missing_operators(manifest, target) for target in manifest.targets)


def libraries_for(manifest: Manifest, target: Target) -> tuple[Library, ...]:
    """Returns a target's libraries in loading order. CPU libraries come first, because they define the operators."""
    usable = [
        lib for lib in manifest.libraries if lib.platform == target.platform and lib.device in ("cpu", target.device)
    ]
    return tuple(sorted(usable, key=lambda library: library.device != "cpu"))  # keeps their order


def loading_order(libraries: Iterable[Library]) -> tuple[Library, ...]:
    """Sorts libraries as the manifest lists them: by record, but each after the libraries that it needs."""
    waiting = {library.record: library for library in sorted(libraries, key=lambda library: library.record)}
    ordered: list[Library] = []

    def take(library: Library) -> None:
        if waiting.pop(library.record, None) is None:
            return
        folder = PurePosixPath(library.record).parent
        for name in library.needs:
            if needed := waiting.get(str(folder / name)):
                take(needed)
        ordered.append(library)

    for library in list(waiting.values()):
        take(library)
    return tuple(ordered)


def match_state(
    weights: Sequence[Weight],
    given: Mapping[str, tuple[str, Sequence[int]]],
    state: Sequence[StateTensor] = (),
) -> dict[str, list[str]]:
    """Finds each weight of the state_dict among the tensors of another fine-tune.

    Args:
        weights: The manifest's weights.
        given: The dtype and shape of each tensor, by name. A tied weight may have any of its names.
        state: The manifest's state, which sessions have. Its tensors may be among those given, and are left out.

    Returns:
        For each weight, its names among the given tensors; at least one.

    Raises:
        WeightsError: Tensors are missing, unknown, or have the wrong dtype or shape. The message lists all of them.
    """
    tensors = [{"name": name, "dtype": dtype, "shape": tuple(shape)} for name, (dtype, shape) in given.items()]
    answer = core.text("ek_match_state", *map(msgspec.json.encode, (weights, state, tensors)))
    return _NAMES.decode(answer)

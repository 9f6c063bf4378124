"""Relates the targets of a manifest to the libraries they load and the operators these define."""

from __future__ import annotations

from exportkit.package.manifest import Library, Manifest, Operator, Target

AOTINDUCTOR_DIR = "data/aotinductor"
OPERATORS_DIR = "exportkit/ops"
CASES_DIR = "exportkit/cases"


def missing_operators(manifest: Manifest, target: Target) -> tuple[Operator, ...]:
    """Returns the graph's operators that no library of the package defines for a target.

    An artifact from `export` has no libraries yet, so all its operators are missing. In a package, all are defined.
    """
    defined = {operator.name for library in libraries_for(manifest, target) for operator in library.defines}
    return tuple(operator for operator in manifest.operators if operator.name not in defined)


def is_complete(manifest: Manifest) -> bool:
    """Whether the package can be loaded: it has a target, and its libraries define every operator for each target."""
    return bool(manifest.targets) and not any(missing_operators(manifest, target) for target in manifest.targets)


def libraries_for(manifest: Manifest, target: Target) -> tuple[Library, ...]:
    """Returns a target's libraries in loading order. CPU libraries come first, because they define the operators."""
    usable = [
        lib for lib in manifest.libraries if lib.platform == target.platform and lib.device in ("cpu", target.device)
    ]
    return tuple(sorted(usable, key=lambda library: (library.device != "cpu", library.record)))

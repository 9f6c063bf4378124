"""What of a manifest goes together: targets, the libraries they load, and the operators that those define."""

from __future__ import annotations

from exportkit.package.manifest import Library, Manifest, Operator, Target

AOTINDUCTOR_DIR = "data/aotinductor"
OPERATORS_DIR = "exportkit/ops"
CASES_DIR = "exportkit/cases"


def missing_operators(manifest: Manifest, target: Target) -> tuple[Operator, ...]:
    """The graph's operators that no library of the package defines on a target's platform.

    An artifact that `export` wrote has no libraries yet, and so lacks them all; a package may lack none.
    """
    defined = {operator.name for library in libraries_for(manifest, target) for operator in library.defines}
    return tuple(operator for operator in manifest.operators if operator.name not in defined)


def is_complete(manifest: Manifest) -> bool:
    """Whether it can be loaded as it is: there is a target, and libraries define every operator for each."""
    return bool(manifest.targets) and not any(missing_operators(manifest, target) for target in manifest.targets)


def libraries_for(manifest: Manifest, target: Target) -> tuple[Library, ...]:
    """The libraries a target needs, in the order to load them: those for the CPU, which define operators, first."""
    usable = [
        lib for lib in manifest.libraries if lib.platform == target.platform and lib.device in ("cpu", target.device)
    ]
    return tuple(sorted(usable, key=lambda library: (library.device != "cpu", library.record)))

"""Which methods of a package a server can answer, under which names, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.serve.engine.folder import single_package


@dataclass(frozen=True)
class Servable:
    """What a server makes of a package.

    Attributes:
        names: By method, the name by which it is served.
        left_out: By method, why it is not served.
    """

    names: Mapping[str, str]
    left_out: Mapping[str, str]


def servable(name: str, manifest: Manifest, *, sequences: bool) -> Servable:
    """Finds the methods that requests can call.

    The default method has the package's name; the name of another one comes after a dot.

    Args:
        name: The name by which the package is served.
        manifest: Its manifest.
        sequences: Whether methods with state are served, to sequences of requests.

    Raises:
        UsageError: There is none.
    """
    reasons = {method.name: why_not(manifest, method, sequences=sequences) for method in manifest.methods}
    left_out = {method: reason for method, reason in reasons.items() if reason is not None}
    if len(left_out) == len(reasons):
        raise UsageError(
            f"{name} cannot be served: " + "; ".join(f"{method} {reason}" for method, reason in left_out.items()),
            hint="In a process, `model.session()` calls them.",
        )
    default = manifest.default
    own = default.name if default is not None else None
    names = {method: name if method == own else f"{name}.{method}" for method in reasons if method not in left_out}
    return Servable(names, left_out)


def check_packages(packages: Sequence[Path], public_keys: Sequence[Path], *, sequences: bool) -> None:
    """Refuses packages that cannot be served, before anything is loaded. The arguments are `servable`'s.

    Raises:
        UsageError: No method of a package can be served.
        PackageError: A package is bad, or lacks the signature that the keys or this machine's policy demand.
    """
    for path in packages:
        with PackageReader(path, demand=Trust(public_keys).demand()) as reader:
            servable(single_package(path, public_keys).name, reader.manifest, sequences=sequences)


def why_not(manifest: Manifest, method: PackagedMethod, *, sequences: bool) -> str | None:
    """Returns why requests cannot call a method, as what follows its name; None if they can."""
    if method.state and not sequences:
        names = [manifest.state[use.index].name for use in method.state]
        shown = [*names[:3], "..."] if len(names) > 3 else names
        return f"has state ({', '.join(shown)}), which belongs to a session"
    if written := [tensor.name for tensor in method.call.inputs if tensor.written is not None]:
        return f"writes into its input {written[0]}, which a request does not get back"
    return None

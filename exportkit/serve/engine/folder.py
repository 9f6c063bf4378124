"""Where packages and their weights lie, and what a request to load one may ask for.

Names of requests are compared with what is there; none becomes a path.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from exportkit.errors import ExportkitError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.trust import Trust
from exportkit.serve.statuses import BadRequestError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_SUFFIX, _VERSIONED, _WEIGHTS = ".pt2", "model.pt2", ".safetensors"


@dataclass(frozen=True)
class PackageFile:
    """A package that can be served.

    Attributes:
        name: The name by which it is served.
        version: Its version; None: the manifest's.
        path: The file.
        weights: Files of weights that may replace the package's, by name.
    """

    name: str
    version: str | None
    path: Path
    weights: Mapping[str, Path]

    def identity(self) -> tuple[int, ...] | None:
        """Returns what changes when the file is replaced; None if it is not there."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def single_package(path: Path, public_keys: Sequence[Path] = ()) -> PackageFile:
    """Returns a package that was given by its path. It is served by its own name."""
    return PackageFile(_own_name(path, public_keys), None, path, {})


def packages_in(folder: Path, public_keys: Sequence[Path] = ()) -> list[PackageFile]:
    """Returns the packages of a model repository: `<file>.pt2` by their own names, and `<name>/<version>/model.pt2`.

    Other files, and those whose names cannot be part of a URL, are left alone.

    Raises:
        UsageError: The folder cannot be read.
    """
    try:
        return [package for entry in sorted(folder.iterdir()) for package in _packages_at(entry, public_keys)]
    except OSError as error:
        raise UsageError(f"cannot read the model repository {folder}: {error}") from error


def check_names(packages: Sequence[PackageFile]) -> None:
    """Checks that each name and version stands for one package.

    Raises:
        UsageError: Two packages would have the same name, or a model has packages with and without a version.
    """
    first: dict[str, PackageFile] = {}
    for package in packages:
        other = first.setdefault(package.name, package)
        if other is not package and None in (other.version, package.version):
            raise UsageError(
                f"{other.path} and {package.path} would both be served as {package.name}",
                hint="Give one of them another name: exportkit package --name NAME.",
            )


def _own_name(path: Path, public_keys: Sequence[Path]) -> str:
    """Returns the name that a package says; that of the file where it cannot be read, which loading it explains."""
    try:
        with PackageReader(path, demand=Trust(public_keys).demand()) as reader:
            return reader.manifest.name
    except ExportkitError:
        return path.name.removesuffix(_SUFFIX)


def _packages_at(entry: Path, public_keys: Sequence[Path]) -> Iterator[PackageFile]:
    if not _NAME.fullmatch(entry.name.removesuffix(_SUFFIX)):
        return
    if entry.name.endswith(_SUFFIX) and entry.is_file():
        yield PackageFile(_own_name(entry, public_keys), None, entry, _weights_in(entry.parent))
    elif entry.is_dir():
        for version in sorted(entry.iterdir()):
            if _NAME.fullmatch(version.name) and (version / _VERSIONED).is_file():
                weights = {**_weights_in(entry), **_weights_in(version)}
                yield PackageFile(entry.name, version.name, version / _VERSIONED, weights)


def _weights_in(folder: Path) -> dict[str, Path]:
    """Returns the files of weights in a folder. Links that lead out of it are left out."""
    inside = folder.resolve()
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.name.endswith(_WEIGHTS) and path.is_file() and path.resolve().is_relative_to(inside)
    }


@functools.lru_cache(maxsize=1024)
def newest_last(version: str) -> tuple[tuple[int, int, str], ...]:
    """Returns the key that sorts versions: 2 before 10, 1.9 before 1.10. A manifest's version may be any text."""
    numbers_and_text = re.findall(r"0*([0-9]+)|([^0-9]+)", version)
    return tuple((1, 0, text) if text else (0, len(number), number) for number, text in numbers_and_text)


# The part of Triton's ModelConfig that can be given.
_Text = dict[Literal["string_value"], str]
_CONFIG = msgspec.json.Decoder(dict[Literal["parameters"], dict[Literal["weights"], _Text]])


def weights_of(parameters: Mapping[str, Any]) -> str | None:
    """Returns the name of the weights that a request asks for; None for the package's.

    Triton's clients can give no other parameter than `config`, so the name may be there, too: as text of a ModelConfig
    with `{"parameters": {"weights": {"string_value": "tuned.safetensors"}}}`.

    Raises:
        BadRequestError: Something else is asked for.
    """
    for name in parameters:
        if name.startswith("file:"):
            raise BadRequestError(
                "a model is not loaded from a request: it would be code of a stranger",
                hint="Put the package into the model repository.",
            )
        if name not in ("weights", "config"):
            raise BadRequestError(f"`{name}` is not a parameter of loading", hint="`weights` is.")
    if len(parameters) > 1:
        raise BadRequestError("`weights` and `config` were both given", hint="Give one of them.")
    weights = parameters.get("weights")
    if "config" in parameters:
        weights = _configured_weights(parameters["config"])
    if weights is not None and not isinstance(weights, str):
        raise BadRequestError(f"`weights` must be the name of a file, got {weights!r}")
    return weights


def _configured_weights(config: Any) -> str:
    try:
        found = _CONFIG.decode(config if isinstance(config, (str, bytes)) else b"null")
        return found["parameters"]["weights"]["string_value"]
    except (msgspec.DecodeError, UnicodeError, KeyError) as error:
        raise BadRequestError(
            f"the configuration of a model comes from its package, but for the weights: {error}",
            hint='It may be {"parameters": {"weights": {"string_value": "<file>.safetensors"}}}.',
        ) from error

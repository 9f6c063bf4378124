"""Finds the operator libraries that Python code loads. Another process imports the code."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence, Set
from pathlib import Path

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed, Message
from exportkit.child.process import describe_end
from exportkit.errors import (
    ExportError,
    LibraryLoadError,
    MissingLibraryError,
    ModelNotFoundError,
    NotAnOperatorLibraryError,
)
from exportkit.installed import declared_module, installed_libraries, operator_namespaces
from exportkit.package.consistency import operators_of
from exportkit.package.describe_library import describe_with_needed
from exportkit.package.manifest import Library
from exportkit.progress import Progress
from exportkit.reference_model import ReferenceModel


class Import(Message, frozen=True):
    """Asks the child to import a module, or the file of one. The answer is Loaded."""

    code: str


class Loaded(Message, frozen=True):
    """The files that the process then has, which could register operators."""

    libraries: tuple[str, ...]


def describe_libraries(
    given: Iterable[Path | str], operators: Collection[str], devices: Collection[str], progress: Progress
) -> list[tuple[Path, Library]]:
    """Describes the libraries of operators: those that are given, and what installed packages declare for the others.

    Returns:
        The files with their descriptions, in loading order. No library may define some of the operators.

    Raises:
        The same errors as `library_files` and `describe_with_needed`.
    """
    declared = {namespace for namespace in operator_namespaces() if any(_is_in(namespace, name) for name in operators)}
    described: list[tuple[Path, Library]] = []

    def describe(libraries: Iterable[Path]) -> None:
        for library in dict.fromkeys(path.resolve() for path in libraries):
            progress(f"inspecting {library.name}")
            described.extend(describe_with_needed(library))

    describe(library_files(given, sorted(operators), progress))
    brought = {name for _, library in described for name in operators_of(library)}
    for namespace in sorted(declared):
        own = [name for name in operators if _is_in(namespace, name)]
        missing = [name for name in own if name not in brought]
        named = installed_libraries(own, devices)
        others = [path for path in named if path.resolve() not in {known for known, _ in described}]
        if missing and not named:
            describe(library_files([declared_module(namespace)], missing, progress))
        elif missing or len(others) < len(named):  # a module that was given may have loaded those of one device only
            describe(others)
    return described


def _is_in(namespace: str, operator: str) -> bool:
    return operator.startswith(f"{namespace}::")


def library_files(given: Iterable[Path | str], operators: Sequence[str], progress: Progress) -> list[Path]:
    """Returns operator libraries: files as they are given, and for modules those that they load.

    A module is imported in another process, and must load a library of one of the operators.
    """
    libraries = []
    for each in given:
        if isinstance(each, Path):
            libraries.append(each)
            continue
        if not operators:
            progress(f"leaving out {each}: the graph calls no custom operator")
            continue
        progress(f"importing {each} to find its operator libraries")
        if not (found := find_libraries(each, operators)):
            raise MissingLibraryError(
                f"{each} loads no library that registers {' or '.join(operators)}",
                hint="Give the library itself: --op-library <path>.",
            )
        libraries += found
    return libraries


def find_libraries(code: str, operators: Iterable[str]) -> list[Path]:
    """Returns the libraries that a module loads and that have some of the operators, or kernels for them.

    Another process executes the code, `package.module` or a path.
    """
    with ChildClient("exportkit.export.models.find_libraries_worker", search_path="caller") as child:
        try:
            answer = child.ask(Import(code), Loaded)
        except ChildEndedError as error:
            raise LibraryLoadError(
                f"a process that imports {code} {describe_end(error.status)}:\n{child.printed()}"
            ) from error
    if isinstance(answer, Failed):
        raise answer.exception()
    return [path for path in map(Path, answer.libraries) if _has_some(path, set(operators))]


def _has_some(path: Path, operators: Set[str]) -> bool:
    """Whether a library has some of the operators. One that cannot be loaded alone cannot be packaged either."""
    try:
        _, library = describe_with_needed(path)[-1]
    except (LibraryLoadError, NotAnOperatorLibraryError):
        return False
    return not operators_of(library) or bool(operators & operators_of(library))


def named_libraries(eager: ReferenceModel, missing: Set[str], progress: Progress) -> Sequence[Path | str]:
    """Returns the libraries that were named, or else those that the module of the MODEL that was named loads."""
    source = (eager.model or "").rpartition(":")[0]
    wanted = sorted(name for name in missing if name.partition("::")[0] not in operator_namespaces())
    if eager.op_libraries or not source or not wanted:
        return eager.op_libraries
    progress(f"importing {source} to find the library of {', '.join(wanted)}")
    libraries: list[Path] = []
    with contextlib.suppress(ModelNotFoundError, ExportError, LibraryLoadError):  # then none is found
        libraries = find_libraries(source, wanted)
    for path in libraries:
        progress(f"taking {path}, which {source} loads")
    return libraries

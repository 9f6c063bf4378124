"""Lists the operators of a library. Another process loads it; symbols are read from its file."""

from __future__ import annotations

from pathlib import Path

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Message
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.operators.contract.findings import Finding
from exportkit.operators.tools.source import OperatorSource
from exportkit.package.elf import is_stable, oldest_torch, read_elf, stable_abi
from exportkit.progress import Progress


class ListSource(Message, frozen=True):
    """Asks the child to load operators and to describe them. The answer is Listed."""

    source: OperatorSource


class ListedOperator(Message, frozen=True):
    """An operator: its devices, or `any`, and what computes its shapes without data and its gradient.

    `autocast` has the devices for which torch.autocast has a rule; `objections`, what in the schema the stable ABI,
    torch.export or AOTInductor cannot take.
    """

    name: str
    schema: str
    devices: tuple[str, ...]
    in_python: bool
    fake: str | None
    gradient: str | None
    autocast: tuple[str, ...]
    objections: tuple[Finding, ...]


class Listed(Message, frozen=True):
    """What the child found: the operators, and the files mapped into the process that register some."""

    operators: tuple[ListedOperator, ...]
    files: tuple[str, ...]


class ListedFile(Message, frozen=True):
    """A shared library, as its file says.

    `needs_torch` is the oldest torch that has all that it needs, if that is known. `beyond` are the symbols that it
    needs beyond the stable ABI of torch 2.11. `cpp`: whether some are torch's C++, which binds it to one minor version
    of torch. `needs` is what it needs of the host besides.
    """

    path: str
    needs_torch: str | None
    beyond: tuple[str, ...]
    cpp: bool
    needs: tuple[str, ...]


class Listing(Message, frozen=True):
    """The operators of a library, and its files."""

    source: str
    files: tuple[ListedFile, ...]
    operators: tuple[ListedOperator, ...]


def list_operators(source: OperatorSource, progress: Progress) -> Listing:
    """Lists the operators that a library or a Python package registers.

    Raises:
        UsageError: The library cannot be found, or it is not one.
        LibraryLoadError: It cannot be loaded, or ends the process that loads it.
        ExportError: Importing it raised an error.
        HostError: No child process can be started.
    """
    files = [describe_file(Path(source.text))] if source.kind == "file" else []
    progress(f"loading {source.name}")
    with ChildClient("exportkit.operators.tools.list_worker", search_path="caller") as child:
        try:
            answer = child.result(ListSource(source), Listed)
        except ChildEndedError as error:
            raise child.load_error(source.name, error) from error
    if not answer.operators:
        raise NotAnOperatorLibraryError(
            f"{source.text} registers no operators", hint="Give the library or the Python package that does."
        )
    known = {file.path for file in files}
    files += [describe_file(Path(path)) for path in answer.files if path not in known]
    return Listing(source.text, tuple(files), answer.operators)


def describe_file(path: Path) -> ListedFile:
    """Reads what a shared library needs, without loading it. Raises NotAnOperatorLibraryError if it is none."""
    elf = read_elf(path)
    symbols, stable = elf.torch_symbols, is_stable(elf.torch_symbols)
    return ListedFile(
        path=str(path),
        needs_torch=oldest_torch(symbols) if stable else None,
        beyond=tuple(sorted(symbols - stable_abi())),
        cpp=not stable,
        needs=elf.host_needs,
    )

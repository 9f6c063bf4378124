"""Reads exported programs: files of torch.export.save, which torch.export.load alone would execute.

torch unpickles parts of a program and evaluates its text. Here each part is checked first, through the same reader of
archives, so that torch meets data only. Whoever trusts the author of a file can have it read as code.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader, _package

from exportkit.errors import PackageError
from exportkit.package.program_grammar import GrammarError, check_program

_MODEL, _SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
_RECORDS = re.compile(
    # Others are compiled code, which torch would load, and objects, which it would unpickle.
    r"archive_format|archive_version|byteorder|version|\.data/(?:version|serialization_id)|models/model\.json"
    r"|data/sample_inputs/model\.pt|data/weights/(?:model_weights_config\.json|weight_\d+)"
    r"|data/constants/(?:model_constants_config\.json|tensor_\d+)|extra/.*"
)
_TENSOR = re.compile(r"(?:weight|tensor)_\d+")


def read_program(path: Path, *, trusted: bool = False) -> ExportedProgram:
    """Reads a file of torch.export.save.

    Args:
        path: The file.
        trusted: Gives it to torch.export.load as it is, which may execute code from it.

    Raises:
        PackageError: torch would execute a part of it, or could.
        Exception: torch cannot read it. It raises many classes: zip, JSON, schema and operator errors.
    """
    with path.open("rb") as file, _silent_torch():
        if trusted:
            return torch.export.load(file)
        check_saved(file, path.name)
        file.seek(0)
        # Not torch.export.load, which would read the file in an older form, by another reader, if this one failed.
        return _package.load_pt2(file).exported_programs["model"]


def check_saved(file: BinaryIO, name: str) -> None:
    """Checks that nothing of a file of torch.export.save would be executed when it is read.

    Args:
        file: The file.
        name: Its name, for the message.

    Raises:
        PackageError: Something would, or could.
    """
    reader = PT2ArchiveReader(file)
    try:
        _check_records(reader)
    except GrammarError as error:
        raise PackageError(
            f"{name} was not read, because torch could execute a part of it: {error}",
            hint="Read so, a file is a program of whoever made it. If you trust the author of a file of "
            "torch.export.save, `exportkit export --trust` reads it all the same.",
        ) from error


def _check_records(reader: PT2ArchiveReader) -> None:
    names = reader.get_file_names()
    if len(set(names)) != len(names):
        raise GrammarError("two of its records have the same name")
    if other := next((name for name in names if not _RECORDS.fullmatch(name)), None):
        raise GrammarError(f"its record {other[:120]!r} is neither text nor tensors")
    check_program(_record(reader, _MODEL))
    pickled = [_SAMPLES]
    for config in _CONFIGS:
        pickled += [f"{config.rpartition('/')[0]}/{each}" for each in _pickled(_record(reader, config))]
    for name in pickled:
        if content := _record(reader, name):
            _check_pickle(name, content)


def _record(reader: PT2ArchiveReader, name: str) -> bytes:
    try:
        return reader.read_bytes(name)
    except RuntimeError as error:
        raise GrammarError(f"it has no record {name}, as torch writes it since version 2.8") from error


def _pickled(config: bytes) -> list[str]:
    """Returns the tensors of a configuration that are pickled, because they are of a class of their own."""
    try:
        tensors = [(each["path_name"], each["use_pickle"]) for each in json.loads(config)["config"].values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise GrammarError(f"a list of its tensors cannot be read: {error}") from error
    for name, _ in tensors:
        if not isinstance(name, str) or not _TENSOR.fullmatch(name):
            raise GrammarError(f"it has objects that torch unpickles: {str(name)[:80]}")
    return [name for name, is_pickled in tensors if is_pickled]


def _check_pickle(name: str, content: bytes) -> None:
    """Unpickles what needs no code. torch reads it again, and would go on with code if that failed."""
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GrammarError(f"{name} is a pickle of more than tensors: {reason}") from error


@contextmanager
def _silent_torch() -> Iterator[Any]:
    """Torch logs errors that it handles, one of them with a traceback of logging itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)

"""The cache of compiled targets: the files that AOTInductor writes, by the digest of what they are compiled from.

    <cache>/compiled/<digest>/code.zip    a method's code (exportkit.runtime.cache has the cache and its rules)

The archive has AOTInductor's files, the elements of constants that are no weights, and what the code reads from
outside. It gets its name when it is complete, so that writers and readers need no lock. Only the user and root may be
able to change it, or a folder above it. One that is damaged, or that others could have written, counts as none: the
code is compiled, and the entry replaced.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from exportkit.errors import ExportkitError
from exportkit.export.compile.program_weights import ProgramWeights
from exportkit.export.record.host_copies import elements
from exportkit.package.atomic import write_whole
from exportkit.package.compiled_entries import compiled_entry, limit_compiled

MOST_BYTES = 1_000_000_000
"""All entries together take at most so much. The least recently used go first."""

MOST_OF_ONE = 256_000_000
"""A larger entry is not kept."""

_ARCHIVE = "code.zip"
_RECORD = "~record.json"


class _Constant(msgspec.Struct, frozen=True):
    """A tensor that the code reads from outside, and whose elements are kept."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Record(msgspec.Struct, frozen=True):
    """What an archive holds."""

    files: tuple[str, ...]
    weights: tuple[str, ...]
    constants: dict[str, _Constant]


@dataclass(frozen=True)
class Code:
    """What AOTInductor made of a program: files, and the tensors that they read from outside."""

    files: Sequence[Path]
    constants: Mapping[str, torch.Tensor]


def find_code(key: str, folder: Path, program: torch.export.ExportedProgram, device: torch.device) -> Code | None:
    """Copies a program's code from the cache to a folder; None if the cache does not have it."""
    try:
        with compiled_entry(key) as entry, zipfile.ZipFile(io.BytesIO(_read(entry / _ARCHIVE))) as archive:
            record = msgspec.json.decode(archive.read(_RECORD), type=_Record)
            # By its own name: a program has its weights by every name.
            constants = {name: program.state_dict[name].detach() for name in record.weights}
            for name, constant in record.constants.items():
                constants[name] = _tensor(constant, archive.read(f"~{name}")).to(device)
            for name in record.files:
                (folder / name).write_bytes(archive.read(name))
            return Code([folder / name for name in record.files], constants)
    except (OSError, ExportkitError, msgspec.MsgspecError, zipfile.BadZipFile):
        return None


def keep_code(key: str, code: Code, weights: ProgramWeights | None) -> str:
    """Puts a program's code into the cache, in place of what is there. Returns why it was not kept, or nothing."""
    outside = tuple(name for name in code.constants if weights and weights.first_name(name))
    kept = {name: tensor for name, tensor in code.constants.items() if name not in outside}
    described = {
        name: _Constant(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
        for name, tensor in kept.items()
    }
    record = _Record(tuple(path.name for path in code.files), outside, described)
    content = io.BytesIO()
    try:
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(_RECORD, msgspec.json.encode(record))
            for name, tensor in kept.items():
                archive.writestr(f"~{name}", bytes(elements(tensor)))
            for path in code.files:
                # The source is left out, as in a package: it is large and may be confidential.
                archive.writestr(path.name, b"" if path.name.endswith(".cpp") else path.read_bytes())
        if content.tell() > MOST_OF_ONE:
            return "it is too large"
        with compiled_entry(key) as entry:
            write_whole(entry / _ARCHIVE, content.getvalue())
            (entry / _ARCHIVE).chmod(0o600)  # whatever the umask says
            limit_compiled(MOST_BYTES)
    except (OSError, ExportkitError) as error:
        return str(error)
    return ""


def _tensor(constant: _Constant, content: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)[: len(content)]
    return flat.view(getattr(torch, constant.dtype)).as_strided(constant.shape, constant.strides)


def _read(path: Path) -> bytes:
    """Reads a file that only this user can have written.

    Raises:
        OSError: There is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_size > MOST_OF_ONE:
            raise OSError(f"{path} could have been written by others")
        return file.read()

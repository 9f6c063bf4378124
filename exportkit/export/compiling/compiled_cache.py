"""The cache of compiled targets: the files that AOTInductor writes, by the digest of what they are compiled from.

    <cache>/compiled/<digest>/    the entry of a method's code (exportkit.runtime.cache has the cache and its rules)
      <name>                      a file of AOTInductor's, or the elements of a constant
      ~record.json                the digests of the files, and what the code reads from outside
      ~lock                       held by the writer

**Trust.** Only the user and root may be able to change an entry, or a folder above it. Each use hashes all files as it
copies them: no time and no size of a file is believed. An entry with another digest, another owner, a link or another
version of this format counts as none: the code is compiled, and the entry replaced.

**Weights.** Where they are outside of the code, equal programs with other weights share an entry. If a program reads a
weight that the code does not read, the compiler has computed with it: then its value must be the same, too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from exportkit.errors import ExportkitError
from exportkit.export.compiling.program_weights import ProgramWeights
from exportkit.export.eager_calls.host_copies import elements
from exportkit.package.atomic import write_whole
from exportkit.package.compiled_entries import compiled_entry, limit_compiled
from exportkit.package.dtypes import DTYPES

MOST_BYTES = 1_000_000_000
"""All entries together take at most so much. The least recently used go first."""

MOST_OF_ONE = 256_000_000
"""A larger entry is not kept."""

_FORMAT = 1
_RECORD = "~record.json"
_LOCK = "~lock"


class _Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the code reads from outside: one of the program's weights, or the elements in a file."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    weight: str | None
    file: str | None


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry holds. `values` has the digests of the weights that the compiler computed with."""

    format: int
    key: str
    files: tuple[str, ...]
    digests: dict[str, str]
    constants: dict[str, _Constant]
    values: dict[str, str]


@dataclass(frozen=True)
class Code:
    """What AOTInductor made of a program: files, and the tensors that they read from outside."""

    files: Sequence[Path]
    constants: Mapping[str, torch.Tensor]


def find_code(
    key: str,
    folder: Path,
    program: torch.export.ExportedProgram,
    weights: ProgramWeights | None,
    device: torch.device,
) -> Code | None:
    """Copies the code of a program from the cache.

    Args:
        key: The digest of all that the code depends on.
        folder: Where the files are put.
        program: The program, whose weights the code reads.
        weights: Those weights. None: they are in the code, and the key covers their values.
        device: Where the tensors are that the code reads.

    Returns:
        The code, or None if the cache does not have it, whole and for these values.
    """
    try:
        with compiled_entry(key) as entry:
            record = msgspec.json.decode(_read(entry / _RECORD), type=_Record)
            if (record.format, record.key) != (_FORMAT, key) or not set(record.files) <= record.digests.keys():
                return None
            values = weights.digests if weights else {}
            if any(values.get(name) != digest for name, digest in record.values.items()):
                return None
            contents = {name: _checked(entry, name, digest) for name, digest in record.digests.items()}
            constants = {
                name: _tensor(constant, program, contents).to(device) for name, constant in record.constants.items()
            }
            for name in record.files:
                (folder / name).write_bytes(contents[name])
            return Code([folder / name for name in record.files], constants)
    except (OSError, ExportkitError, msgspec.MsgspecError, _Unusable):
        return None


def keep_code(key: str, code: Code, program: torch.export.ExportedProgram, weights: ProgramWeights | None) -> str:
    """Puts the code of a program into the cache, in place of what is there. Arguments are as for `find_code`.

    Returns:
        Why it was not kept, or nothing.
    """
    try:
        contents, record = _packed(key, code, program, weights)
        if sum(map(len, contents.values())) > MOST_OF_ONE:
            return "it is too large"
        with compiled_entry(key) as entry, _alone(entry):
            (entry / _RECORD).unlink(missing_ok=True)
            for name in set(os.listdir(entry)) - set(contents) - {_LOCK}:
                (entry / name).unlink()
            for name, content in contents.items():
                _write(entry / name, content)
            _write(entry / _RECORD, msgspec.json.encode(record))
            limit_compiled(MOST_BYTES)
    except (OSError, ExportkitError, _Unusable) as error:
        with suppress(OSError, ExportkitError), compiled_entry(key) as entry:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                for name in os.listdir(entry):  # a part of it is of no use
                    (entry / name).unlink(missing_ok=True)
        return str(error)
    return ""


class _Unusable(Exception):
    """An entry, or code, is not what the cache holds. The message says why."""


def _packed(
    key: str, code: Code, program: torch.export.ExportedProgram, weights: ProgramWeights | None
) -> tuple[dict[str, bytes], _Record]:
    contents: dict[str, bytes] = {}
    for path in code.files:
        if path.name in contents or path.name.startswith("~"):
            raise _Unusable(f"two files have the name {path.name}")
        # The source is left out, as in a package: it is large and may be confidential.
        contents[path.name] = b"" if path.name.endswith(".cpp") else path.read_bytes()
    files = tuple(contents)
    # Values of the program's other constants are in the key.
    known = {_content(tensor) for tensor in program.constants.values() if isinstance(tensor, torch.Tensor)}
    constants: dict[str, _Constant] = {}
    computed, read = False, set[str | None]()
    for number, (name, tensor) in enumerate(sorted(code.constants.items())):
        weight = weights.first_name(name) if weights else None
        file = None if weight else f"constant-{number}"
        if file:
            computed |= _content(tensor) not in known
            contents[file] = bytes(elements(tensor))
        else:
            read.add(weight)
        dtype = str(tensor.dtype).removeprefix("torch.")
        # By its own name: a program has its weights by every name.
        constants[name] = _Constant(dtype, tuple(tensor.shape), tuple(tensor.stride()), name if weight else None, file)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    values = weights.digests if weights else {}
    # A constant that is nobody's may have been computed from any weight.
    kept = {name: digest for name, digest in values.items() if computed or name not in read}
    return contents, _Record(_FORMAT, key, files, digests, constants, kept)


def _content(tensor: torch.Tensor) -> tuple[object, ...]:
    plain = tensor.detach().contiguous()
    return plain.dtype, plain.shape, hashlib.sha256(elements(plain)).digest()


def _tensor(constant: _Constant, program: torch.export.ExportedProgram, contents: Mapping[str, bytes]) -> torch.Tensor:
    if constant.weight is not None:
        found = program.state_dict.get(constant.weight)
        wanted = (constant.dtype, constant.shape, constant.strides)
        if found is None or wanted != (str(found.dtype).removeprefix("torch."), tuple(found.shape), found.stride()):
            raise _Unusable(f"{constant.weight} is another one")
        return found.detach()
    if constant.dtype not in DTYPES or constant.file is None or constant.file not in contents:
        raise _Unusable("a constant is missing")
    content = contents[constant.file]
    flat = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)[: len(content)]
    flat = flat.view(getattr(torch, constant.dtype))
    try:
        return flat.as_strided(constant.shape, constant.strides)
    except RuntimeError as error:
        raise _Unusable("a constant is too short") from error


@contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Waits until no other process writes the entry."""
    descriptor = os.open(entry / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: a mixture of two writers has wrong digests
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, content)
    path.chmod(0o600)  # whatever the umask says


def _checked(entry: Path, name: str, sha256: str) -> bytes:
    if "/" in name or name in (".", "..", _RECORD, _LOCK):
        raise _Unusable(f"no file of an entry has the name {name!r}")
    content = _read(entry / name)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise _Unusable(f"{name} was changed")
    return content


def _read(path: Path) -> bytes:
    """Reads a file that only this user can have written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_size > MOST_OF_ONE:
            raise _Unusable(f"{path} could have been written by others")
        return file.read()

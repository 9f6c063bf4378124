"""What holds for any bytes: each function takes some and raises only where a promise of the package format is broken.

Without torch and pytest, so that a fuzzer starts quickly and instruments little.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from exportkit.cli.describe import dimension_text, input_rows, library_text, output_rows, target_text
from exportkit.errors import PackageError, SignatureError
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import ROOT, PackageReader
from exportkit.package.consistency import check_consistency, is_complete
from exportkit.package.container import Entry, directory, local_header
from exportkit.package.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from exportkit.package.structure import builder


def manifest(data: bytes) -> bool:
    """A manifest is refused as a PackageError, or means one thing: written again it reads as the same.

    Returns:
        Whether it was taken.
    """
    try:
        decoded = decode_manifest(data)
        check_consistency(decoded)
    except PackageError:
        return False
    assert decode_manifest(encode_manifest(decoded)) == decoded
    _use(decoded)
    return True


def _use(decoded: Manifest) -> None:
    """What `inspect` and the loader do with a manifest that holds, before any of its records is looked at."""
    is_complete(decoded)
    call = decoded.call
    texts = [*input_rows(call), *output_rows(call), (dimension_text(call),)]
    texts += [(target_text(target),) for target in decoded.targets]
    texts += [(library_text(library),) for library in decoded.libraries]
    for row in texts:
        for text in row:
            text.encode()
    builder(call.result)(range(len(call.outputs)))
    leaves = range(len(call.inputs))
    for parameter in call.parameters:
        builder(parameter.value)(leaves)


def archive(data: bytes) -> bool:
    """An archive is refused as a PackageError, or has the one layout that its records give it, seen by zipfile as well.

    Returns:
        Whether it was taken.
    """
    with file_of(data) as path:
        try:
            with PackageReader(path) as reader:
                reader.verify()
                names = [MANIFEST_NAME, *reader.names]
                offsets = {name: reader.data_offset(name) for name in reader.names}
                contents = {name: reader.read(name) for name in reader.names}
        except PackageError:
            return False
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == [f"{ROOT}/{name}" for name in names]
        assert archive.testzip() is None
        blocks: list[bytes] = []
        entries: list[Entry] = []
        for info in archive.infolist():
            content = archive.read(info)
            name = info.filename.removeprefix(f"{ROOT}/")
            entry = Entry(info.filename, len(content), info.CRC, entries[-1].end if entries else 0)
            if name != MANIFEST_NAME:
                assert contents[name] == content == data[offsets[name] : offsets[name] + len(content)]
            entries.append(entry)
            blocks += [local_header(entry), content]
    assert b"".join([*blocks, directory(entries)]) == data
    return True


def signature(data: bytes) -> bool:
    """A signature file is refused as a SignatureError, or means one thing; that it holds for a key is another matter.

    Returns:
        Whether it was taken.
    """
    try:
        decoded = own.decode_signatures(data, "it")
    except SignatureError:
        return False
    assert own.decode_signatures(own.encode_signatures(decoded), "it") == decoded
    with suppress(SignatureError):
        own.signer(decoded, decoded.manifest_sha256, (_ANYBODY,), "it")
    return True


def bundle(data: bytes) -> bool:
    """A bundle of model signing is refused as a SignatureError, or is the key's over this very file.

    Returns:
        Whether it was taken.
    """
    try:
        return openssf.signer(data, lambda: FILE_SHA256, (_ANYBODY,), "it") is not None
    except SignatureError:
        return False


KEY_ID = "0" * 64
FILE_SHA256 = "1" * 64


class _Anybody:
    """A key that takes every signature, so that what comes after the signature is reached."""

    id = KEY_ID
    source = "nobody"
    is_ed25519 = True

    def verifies(self, signature: bytes, message: bytes) -> bool:
        return True


_ANYBODY: Any = _Anybody()


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    """These bytes as a file that no disk holds."""
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)

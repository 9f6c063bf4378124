"""Packages as images, for volumes that Kubernetes makes of images: the file and its signatures lie in /models.

An image's layer is an archive (tar). It is not written anywhere: its parts are sent from where they are.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from exportkit.package.archive import PackageReader
from exportkit.registry.blob_upload import Source, bytes_source, descriptor_source
from exportkit.registry.oci_artifact import MANIFEST, Descriptor, ImageManifest, describe, known_annotations

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_ARCHITECTURES = {"linux-x86_64": "amd64", "linux-aarch64": "arm64"}
_FOLDER = "models"
_HASHED = 1 << 20  # bytes at once


class Image(NamedTuple):
    """An image before it is sent."""

    manifest: ImageManifest
    config: bytes
    layer: Source


class _Part(NamedTuple):
    begin: int
    size: int
    source: Source


def make_image(reader: PackageReader, name: str, signatures: Sequence[tuple[str, bytes]]) -> Image:
    """Makes the image of a package. The same package and signatures give the same bytes.

    Args:
        reader: The package, whose file is read.
        name: The file's name in /models.
        signatures: The suffix and the content of each signature file.
    """
    files = [(name, reader.size, descriptor_source(reader.fileno()))]
    files += [(name + suffix, len(content), bytes_source(content)) for suffix, content in signatures]
    layer, size = _archive(files)
    digest = hashlib.sha256()
    for offset in range(0, size, _HASHED):
        digest.update(layer(offset, _HASHED))
    described = Descriptor(media_type=_LAYER, digest=f"sha256:{digest.hexdigest()}", size=size)
    annotations = known_annotations(reader.manifest, reader.sha256)
    config = msgspec.json.encode(
        {
            "architecture": _architecture(reader),
            "os": "linux",
            "config": {"Labels": annotations},
            "rootfs": {"type": "layers", "diff_ids": [described.digest]},
        }
    )
    manifest = ImageManifest(
        schema_version=2,
        media_type=MANIFEST,
        config=describe(config, _CONFIG),
        layers=[described],
        annotations=annotations,
    )
    return Image(manifest, config, layer)


def _architecture(reader: PackageReader) -> str:
    """Returns what the image says it is for; that of the first target, where there are several."""
    platforms = [target.platform for target in reader.manifest.targets]
    return _ARCHITECTURES.get(platforms[0] if platforms else "", "amd64")


def _archive(files: Sequence[tuple[str, int, Source]]) -> tuple[Source, int]:
    """Returns an archive of files in one folder, and its size. Nothing in it depends on who makes it, or when."""
    folder = tarfile.TarInfo(_FOLDER)
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    parts: list[_Part] = []
    end = 0

    def add(size: int, source: Source) -> None:
        nonlocal end
        parts.append(_Part(end, size, source))
        end += size

    def add_bytes(content: bytes) -> None:
        add(len(content), bytes_source(content))

    add_bytes(folder.tobuf(tarfile.PAX_FORMAT))
    for name, size, source in files:
        entry = tarfile.TarInfo(f"{_FOLDER}/{name}")
        entry.size, entry.mode = size, 0o644
        add_bytes(entry.tobuf(tarfile.PAX_FORMAT))
        add(size, source)
        add_bytes(bytes(-size % tarfile.BLOCKSIZE))
    add_bytes(bytes(2 * tarfile.BLOCKSIZE))

    def read(offset: int, size: int) -> bytes:
        found = b""
        for part in parts:
            begin, stop = max(offset, part.begin), min(offset + size, part.begin + part.size)
            if begin < stop:
                found += part.source(begin - part.begin, stop - begin)
        return found

    return read, end

"""Writes a package as an OCI image layout, which `skopeo` and `oras` put into a registry of containers.

The artifact is of the CNCF's ModelPack specification (github.com/modelpack/model-spec). The package is one layer,
byte for byte, so that the layer's digest is the file's. The specification has no type for a file that is model,
weights and code in one. It is a weights layer here, because every tool of the specification delivers those; and the
signatures are documents, beside it and by the names that they must have. csrc/package/opened_file.cpp reads it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from exportkit.errors import SignatureError, UsageError
from exportkit.package import openssf
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.manifest import Manifest
from exportkit.package.signature import SUFFIX, read_signatures
from exportkit.package.trust import demand, signature_info

_IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_MODEL = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG = "application/vnd.cncf.model.config.v1+json"
_PACKAGE_LAYER = "application/vnd.cncf.model.weight.v1.raw"
_SIGNATURE_LAYER = "application/vnd.cncf.model.doc.v1.raw"
# A layer's file, for tools of ModelPack and for oras.
_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")


class OciLayout(NamedTuple):
    """An OCI image layout.

    Attributes:
        digest: The digest of its manifest, which names the package and its signatures in every registry.
        sha256: The digest of the package's file.
        size: Its bytes.
        signatures: The names of the signature files.
    """

    digest: str
    sha256: str
    size: int
    signatures: tuple[str, ...]


def write_layout(package: Path, output: Path) -> OciLayout:
    """Writes a package and the signature files beside it. The same files give the same bytes.

    Args:
        package: The package. Every digest is checked, and what this machine's policies demand.
        output: The folder, which appears when it is complete.

    Raises:
        UsageError: `output` exists, or cannot be written.
        PackageError: The package breaks a rule of the format, or a signature file is not its own.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists", hint="Name a new folder: a layout holds one package.")
    with PackageReader(package, demand=demand()) as reader:
        check_writable(output, reader.size)
        reader.verify()
        with temporary_folder(output.parent, f".{output.name[:200]}") as folder:
            written = _write(reader, package.name, _signatures(reader), folder / "layout")
            reader.check_unchanged()
            (folder / "layout").rename(output)
    return written


def _signatures(reader: PackageReader) -> dict[str, bytes]:
    """The signature files, by their suffix."""
    found = {}
    for info in signature_info(reader):
        if info.problem is not None:
            raise SignatureError(info.problem)
        suffix = SUFFIX if info.path.name.endswith(SUFFIX) else openssf.SUFFIX
        own = read_signatures(info.path) if suffix == SUFFIX else None
        if own is not None and own.manifest_sha256 != reader.manifest_sha256:
            raise SignatureError(f"{info.path} signs another package", hint="Sign this one, or remove the file.")
        found[suffix] = info.path.read_bytes()
    return found


def _write(reader: PackageReader, name: str, signatures: dict[str, bytes], folder: Path) -> OciLayout:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes, media_type: str) -> dict[str, Any]:
        sha256 = hashlib.sha256(content).hexdigest()
        (blobs / sha256).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{sha256}", "size": len(content)}

    with open(reader.fileno(), "rb", closefd=False) as file:
        _copy(file, blobs / reader.sha256)
    layer: dict[str, Any] = {"mediaType": _PACKAGE_LAYER, "digest": f"sha256:{reader.sha256}", "size": reader.size}
    layers = [layer | _named(name)]
    layers += [add(content, _SIGNATURE_LAYER) | _named(name + suffix) for suffix, content in signatures.items()]
    manifest = {
        "schemaVersion": 2,
        "mediaType": _IMAGE_MANIFEST,
        "artifactType": _MODEL,
        "config": add(_json(_config(reader.manifest, [each["digest"] for each in layers])), _CONFIG),
        "layers": layers,
        "annotations": _annotations(reader.manifest),
    }
    described = add(_json(manifest), _IMAGE_MANIFEST) | {"artifactType": _MODEL}
    (folder / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return OciLayout(described["digest"], reader.sha256, reader.size, tuple(name + suffix for suffix in signatures))


def _copy(file: BinaryIO, path: Path) -> None:
    """Copies a file. A link would change with the package, if that is written to, and have another digest then."""
    with path.open("xb") as blob:
        file.seek(0)
        shutil.copyfileobj(file, blob, 1 << 20)


def _named(name: str) -> dict[str, Any]:
    return {"annotations": dict.fromkeys(_NAMES, name)}


def _config(manifest: Manifest, layers: list[str]) -> dict[str, Any]:
    """What ModelPack tells of a model, as far as a package knows it."""
    described = {"name": manifest.name, "version": manifest.version, "revision": manifest.provenance.commit}
    dtypes = sorted({weight.dtype for weight in manifest.weights if weight.state})
    return {
        "descriptor": {key: value for key, value in described.items() if value},
        "config": {"format": "pt2"} | ({"precision": ",".join(dtypes)} if dtypes else {}),
        "modelfs": {"type": "layers", "diffIds": layers},
    }


def _annotations(manifest: Manifest) -> dict[str, str]:
    """What `skopeo inspect --raw` shows of a package. Nothing here reads it."""
    known = {
        "org.opencontainers.image.title": manifest.name,
        "org.opencontainers.image.version": manifest.version,
        "io.github.exportkit.torch": manifest.provenance.torch,
        "io.github.exportkit.targets": " ".join(target.name for target in manifest.targets),
    }
    return {key: value for key, value in known.items() if value}


def _json(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document, order="sorted")

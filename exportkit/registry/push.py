"""Puts a package and its signatures into a registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import SignatureError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.signature import SUFFIX, read_signatures
from exportkit.package.trust import signature_info
from exportkit.progress import Progress, bytes_text, silent
from exportkit.registry.blob_upload import bytes_source, descriptor_source, upload
from exportkit.registry.image import make_image
from exportkit.registry.oci_artifact import MANIFEST, SIGNATURE_LAYERS, Descriptor, describe, encode, package_manifest
from exportkit.registry.oci_reference import RegistryReference
from exportkit.registry.referrers import push_signature, put_manifest
from exportkit.registry.registry_client import RegistryClient, RegistryOptions


@dataclass(frozen=True)
class Pushed:
    """What `push` did.

    Attributes:
        reference: The package in the registry, by its digest.
        sha256: The digest of its file.
        size: Its size.
        sent: Whether the file was sent: False if the registry had it.
        signatures: The files of signatures that went with it.
    """

    reference: RegistryReference
    sha256: str
    size: int
    sent: bool
    signatures: tuple[Path, ...]


def push(
    package: Path,
    reference: RegistryReference,
    options: RegistryOptions | None = None,
    *,
    image: bool = False,
    step: Progress = silent,
) -> Pushed:
    """Checks every digest of a package, and sends it with the signatures beside it. The tag is set last.

    Args:
        package: The `.pt2`.
        reference: The name and the tag.
        options: How the registry is reached.
        image: Make an image with the files in /models, for what mounts images. `pull` does not take it.
        step: Called with each step.

    Raises:
        UsageError: The reference has no tag or has a digest, or the file is the sidecar of an ONNX model.
        PackageError: The package is bad, or a signature file beside it belongs to another package.
        RegistryError: The registry cannot be reached, or refuses.
    """
    if reference.tag is None or reference.digest is not None:
        raise UsageError(
            f"{reference}: give a name and a tag to push to", hint="The digest is what the package gets there."
        )
    with PackageReader(package) as reader:
        if reader.manifest.onnx:
            raise UsageError(f"{package.name} describes an ONNX model, whose files `push` does not send")
        step(f"checking {package.name}")
        reader.verify()
        signatures = _signatures(reader)
        client = RegistryClient(reference, "pull,push", options or RegistryOptions())
        step(f"sending {bytes_text(reader.size)} to {reference.host}")
        if image:
            described, sent = _send_image(client, reader, signatures)
        else:
            described, sent = _send_package(client, reader, signatures)
        files = tuple(path for path, _, _ in signatures)
        return Pushed(reference.at(described.digest), reader.sha256, reader.size, sent, files)


_Signatures = Sequence[tuple[Path, str, bytes]]  # path, suffix and content


def _send_package(client: RegistryClient, reader: PackageReader, signatures: _Signatures) -> tuple[Descriptor, bool]:
    reference, content = client.reference, reader.manifest_bytes
    manifest = package_manifest(reader.manifest, content, reader.sha256, reader.size, reference.file_name)
    sent = upload(client, manifest.layers[0], descriptor_source(reader.fileno()))
    upload(client, manifest.config, bytes_source(content))
    encoded = encode(manifest)
    described = describe(encoded, MANIFEST)
    put_manifest(client, described.digest, encoded, MANIFEST)
    for _, suffix, signature in signatures:
        push_signature(client, described, suffix, signature, reference.file_name + suffix)
    _set_tag(client, encoded)  # whoever sees the tag finds the signatures, too
    return described, sent


def _send_image(client: RegistryClient, reader: PackageReader, signatures: _Signatures) -> tuple[Descriptor, bool]:
    files = [(suffix, content) for _, suffix, content in signatures]
    image = make_image(reader, client.reference.file_name, files)
    sent = upload(client, image.manifest.layers[0], image.layer)
    upload(client, image.manifest.config, bytes_source(image.config))
    encoded = encode(image.manifest)
    _set_tag(client, encoded)
    return describe(encoded, MANIFEST), sent


def _set_tag(client: RegistryClient, encoded: bytes) -> None:
    assert client.reference.tag is not None
    put_manifest(client, client.reference.tag, encoded, MANIFEST)


def _signatures(reader: PackageReader) -> _Signatures:
    """Reads the signature files beside a package: path, suffix and content."""
    found = []
    for info in signature_info(reader):
        if info.problem is not None:
            raise SignatureError(info.problem, hint="Sign the package again, or remove the file.")
        suffix = next(suffix for suffix in SIGNATURE_LAYERS if info.path.name.endswith(suffix))
        read = read_signatures(info.path) if suffix == SUFFIX else None
        if read is not None and read.manifest_sha256 != reader.manifest_sha256:
            raise SignatureError(
                f"{info.path} belongs to another package than {reader.path.name}",
                hint="Sign the package again, or remove the file.",
            )
        found.append((info.path, suffix, info.path.read_bytes()))
    return found

"""The manifests of artifacts, by the OCI image specification 1.1, and what a package's must have.

A package is one layer, so its digest is the file's. The artifact's config is the package's manifest: it is read without
the package, and its digest is the one that signatures and the cache know. A signature is an artifact of its own whose
`subject` is the package's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from exportkit.errors import ArtifactError, UsageError
from exportkit.package.manifest import Manifest
from exportkit.registry.oci_reference import DIGEST, RegistryReference
from exportkit.registry.registry_client import RegistryClient

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"

PACKAGE = "application/vnd.exportkit.package.v1"
_PACKAGE_LAYER = "application/vnd.exportkit.package.v1+zip"
_PACKAGE_CONFIG = "application/vnd.exportkit.manifest.v1+json"
SIGNATURE = "application/vnd.exportkit.signature.v1"
SIGNATURE_LAYERS = {  # by the suffix of the file
    ".sig": "application/vnd.exportkit.signature.v1+json",
    ".sigstore.json": "application/vnd.dev.sigstore.bundle.v0.3+json",
}

TITLE = "org.opencontainers.image.title"  # the file's name for clients such as ORAS; nothing here reads it
_VERSION = "org.opencontainers.image.version"
_OWN = "io.github.exportkit."
_MAX_CONFIG = 16 << 20  # what the format allows a manifest, FORMAT.md, rule 6

Digest = Annotated[str, Meta(pattern=rf"\A{DIGEST}\Z")]
Size = Annotated[int, Meta(ge=0, le=2**60)]


class Descriptor(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """Names content by its digest, its size and its media type."""

    media_type: str
    digest: Digest
    size: Size
    artifact_type: str | UnsetType = UNSET
    annotations: dict[str, str] | UnsetType = UNSET


class ImageManifest(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """An artifact's manifest."""

    schema_version: Literal[2]
    media_type: str | UnsetType = UNSET
    artifact_type: str | UnsetType = UNSET
    config: Descriptor
    layers: list[Descriptor]
    subject: Descriptor | UnsetType = UNSET
    annotations: dict[str, str] | UnsetType = UNSET


class ImageIndex(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """A list of manifests; here of those that refer to another one."""

    schema_version: Literal[2]
    media_type: str | UnsetType = UNSET
    manifests: list[Descriptor]
    annotations: dict[str, str] | UnsetType = UNSET


class _AnyManifest(Struct, rename="camel"):
    media_type: str = ""
    artifact_type: str = ""


class PackageArtifact(Struct, frozen=True):
    """The artifact of a package in a registry.

    Attributes:
        digest: The digest of its manifest.
        size: The bytes of its manifest.
        layer: The package's file.
        config: The package's manifest, whose digest is `manifest_sha256`.
        annotations: What whoever pushed it says about it; nothing relies on it.
        content: The manifest itself.
    """

    digest: str
    size: int
    layer: Descriptor
    config: Descriptor
    annotations: dict[str, str]
    content: bytes

    @property
    def descriptor(self) -> Descriptor:
        """What a signature's `subject` is."""
        return Descriptor(media_type=MANIFEST, digest=self.digest, size=self.size)


EMPTY_CONTENT = b"{}"
EMPTY = Descriptor(media_type=_EMPTY, digest=f"sha256:{hashlib.sha256(EMPTY_CONTENT).hexdigest()}", size=2)


def digest_of(content: bytes) -> str:
    """Returns the digest of a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def describe(content: bytes, media_type: str) -> Descriptor:
    """Returns the descriptor of a small content."""
    return Descriptor(media_type=media_type, digest=digest_of(content), size=len(content))


def encode(manifest: ImageManifest | ImageIndex) -> bytes:
    """Encodes a manifest. The same one gives the same bytes."""
    return msgspec.json.encode(manifest, order="deterministic")


def known_annotations(manifest: Manifest, sha256: str) -> dict[str, str]:
    """Returns what is said of a package without looking into it. Nothing here reads it."""
    known = {
        TITLE: manifest.name,
        _VERSION: manifest.version,
        f"{_OWN}sha256": sha256,
        f"{_OWN}torch": manifest.provenance.torch,
        f"{_OWN}targets": " ".join(target.name for target in manifest.targets),
    }
    return {key: value for key, value in known.items() if value}


def package_manifest(manifest: Manifest, encoded: bytes, sha256: str, size: int, title: str) -> ImageManifest:
    """Makes the manifest of a package's artifact.

    Args:
        manifest: The package's manifest.
        encoded: As it stands in the package.
        sha256: The digest of the package's file.
        size: Its size.
        title: The file's name.
    """
    return ImageManifest(
        schema_version=2,
        media_type=MANIFEST,
        artifact_type=PACKAGE,
        config=describe(encoded, _PACKAGE_CONFIG),
        layers=[
            Descriptor(media_type=_PACKAGE_LAYER, digest=f"sha256:{sha256}", size=size, annotations={TITLE: title})
        ],
        annotations=known_annotations(manifest, sha256),
    )


def signature_manifest(content: bytes, suffix: str, subject: Descriptor, title: str) -> ImageManifest:
    """Makes the manifest of a signature's artifact."""
    layer = describe(content, SIGNATURE_LAYERS[suffix])
    return ImageManifest(
        schema_version=2,
        media_type=MANIFEST,
        artifact_type=SIGNATURE,
        config=EMPTY,
        layers=[msgspec.structs.replace(layer, annotations={TITLE: title})],
        subject=subject,
    )


def decode_package(content: bytes, reference: RegistryReference) -> PackageArtifact:
    """Decodes and checks the manifest of a package's artifact.

    Raises:
        ArtifactError: It has another digest than the reference, or is not a package's.
    """
    digest = digest_of(content)
    if reference.digest not in (None, digest):
        raise ArtifactError(f"{reference}: the registry sent a manifest of another digest, {digest}")
    try:
        kind = msgspec.json.decode(content, type=_AnyManifest)
        if kind.media_type not in (MANIFEST, "") or kind.artifact_type != PACKAGE:
            what = kind.artifact_type or kind.media_type or "an unknown type"
            raise ArtifactError(
                f"{reference} is no package: its type is {what!r}, and a package's is {PACKAGE}",
                hint="`exportkit push` writes packages, and with --image what others mount; `oras pull` gets others.",
            )
        manifest = msgspec.json.decode(content, type=ImageManifest)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{reference}: its manifest does not follow the specification: {error}") from error
    layer = manifest.layers[0] if len(manifest.layers) == 1 else None
    if layer is None or layer.media_type != _PACKAGE_LAYER or manifest.config.media_type != _PACKAGE_CONFIG:
        raise ArtifactError(f"{reference} is no package of this version: it needs one layer of type {_PACKAGE_LAYER}")
    if manifest.config.size > _MAX_CONFIG:
        raise ArtifactError(f"{reference}: its package's manifest is larger than the format allows")
    return PackageArtifact(digest, len(content), layer, manifest.config, manifest.annotations or {}, content)


def fetch_package(client: RegistryClient, reference: RegistryReference) -> PackageArtifact:
    """Gets and checks the manifest of a package's artifact.

    Raises:
        UsageError: There is none.
        ArtifactError: It is not a package's.
        RegistryError: The registry cannot be reached, or refuses.
    """
    path = f"manifests/{reference.place}"
    answer = client.ask("GET", path, headers={"Accept": f"{MANIFEST}, {INDEX}"})
    if answer.status == 404:
        raise UsageError(f"there is no {reference}", hint="Check the name and the tag.")
    if answer.status != 200:
        raise client.refusal(answer, "GET", path)
    return decode_package(answer.content, reference)

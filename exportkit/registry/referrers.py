"""The signatures of a package in a registry: artifacts whose `subject` is the package's.

A registry that knows the referrers API lists them. For others, clients keep the list under a tag that the digest gives
(OCI distribution specification 1.1, "Referrers Tag Schema").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec

from exportkit.errors import ArtifactError, RegistryError
from exportkit.registry.blob_download import fetch_small
from exportkit.registry.blob_upload import bytes_source, upload
from exportkit.registry.oci_artifact import (
    EMPTY,
    EMPTY_CONTENT,
    INDEX,
    MANIFEST,
    SIGNATURE,
    SIGNATURE_LAYERS,
    Descriptor,
    ImageIndex,
    ImageManifest,
    describe,
    digest_of,
    encode,
    signature_manifest,
)
from exportkit.registry.registry_client import RegistryClient

_Kind = TypeVar("_Kind")
_MOST = 16  # signatures of a package that are looked at: whoever may push may add some
_MAX_BYTES = 64 << 10  # of a signature, FORMAT.md


@dataclass(frozen=True)
class FoundSignature:
    """A signature in a registry, which nobody has checked.

    Attributes:
        suffix: What its file is called behind the package's name.
        content: Its file.
        digest: The digest of its artifact's manifest.
    """

    suffix: str
    content: bytes
    digest: str


def push_signature(client: RegistryClient, subject: Descriptor, suffix: str, content: bytes, title: str) -> str:
    """Adds a signature to an artifact, and returns the digest of the signature's artifact.

    Raises:
        RegistryError: The registry cannot be reached, or refuses.
    """
    manifest = signature_manifest(content, suffix, subject, title)
    upload(client, EMPTY, bytes_source(EMPTY_CONTENT))
    upload(client, manifest.layers[0], bytes_source(content))
    encoded = encode(manifest)
    described = describe(encoded, MANIFEST)
    if not put_manifest(client, described.digest, encoded, MANIFEST):
        _add_to_tag(client, subject, msgspec.structs.replace(described, artifact_type=SIGNATURE))
    return described.digest


def put_manifest(client: RegistryClient, place: str, content: bytes, media_type: str) -> bool:
    """Writes a manifest under a tag or its digest. Returns whether the registry lists it under its `subject` itself.

    Raises:
        RegistryError: The registry cannot be reached, or refuses.
    """
    path = f"manifests/{place}"
    answer = client.ask("PUT", path, headers={"Content-Type": media_type}, content=content)
    if answer.status != 201:
        raise client.refusal(answer, "PUT", path)
    given = answer.headers.get("docker-content-digest", digest_of(content))
    if given != digest_of(content):
        raise RegistryError(f"{client.reference.host} stored the manifest as {given}, and it is {digest_of(content)}")
    return "oci-subject" in answer.headers


def fetch_signatures(client: RegistryClient, subject: str) -> list[FoundSignature]:
    """Gets the signatures of an artifact. What is no signature of this artifact is left out.

    Args:
        client: The repository.
        subject: The digest of the artifact's manifest.

    Raises:
        ArtifactError: A list or a manifest does not follow the specification.
        DigestMismatchError: A signature is not what its digest says.
        RegistryError: The registry cannot be reached, or refuses.
    """
    listed = [one for one in _list(client, subject) if one.artifact_type == SIGNATURE and one.size <= _MAX_BYTES]
    found = (_fetch(client, one, subject) for one in {one.digest: one for one in listed[:_MOST]}.values())
    return [signature for signature in found if signature is not None]


def _fetch(client: RegistryClient, described: Descriptor, subject: str) -> FoundSignature | None:
    path = f"manifests/{described.digest}"
    answer = client.ask("GET", path, headers={"Accept": MANIFEST}, most=_MAX_BYTES)
    if answer.status == 404:
        return None  # removed, and still listed
    if answer.status != 200:
        raise client.refusal(answer, "GET", path)
    if digest_of(answer.content) != described.digest:
        raise ArtifactError(f"{client.reference.host} sent a signature's manifest that has not the digest in the list")
    manifest = _decoded(answer.content, ImageManifest, path)
    suffixes = {kind: suffix for suffix, kind in SIGNATURE_LAYERS.items()}
    layer = manifest.layers[0] if len(manifest.layers) == 1 else None
    if not manifest.subject or manifest.subject.digest != subject or layer is None:
        return None
    if (suffix := suffixes.get(layer.media_type)) is None or layer.size > _MAX_BYTES:
        return None
    return FoundSignature(suffix, fetch_small(client, layer), described.digest)


def _list(client: RegistryClient, subject: str) -> list[Descriptor]:
    path = f"referrers/{subject}?artifactType={quote(SIGNATURE, safe='')}"
    answer = client.ask("GET", path, headers={"Accept": INDEX})
    if answer.status == 200:
        return _decoded(answer.content, ImageIndex, path).manifests
    if answer.status not in (400, 404, 405, 501):
        raise client.refusal(answer, "GET", path)
    index = _tagged(client, subject)
    return [] if index is None else index.manifests


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


def _tagged(client: RegistryClient, subject: str) -> ImageIndex | None:
    path = f"manifests/{_tag(subject)}"
    answer = client.ask("GET", path, headers={"Accept": INDEX})
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise client.refusal(answer, "GET", path)
    return _decoded(answer.content, ImageIndex, path)


def _add_to_tag(client: RegistryClient, subject: Descriptor, added: Descriptor) -> None:
    """Adds to the list under the tag. Of two clients that do so at once, one loses; the specification has no lock."""
    index = _tagged(client, subject.digest) or ImageIndex(schema_version=2, media_type=INDEX, manifests=[])
    if all(one.digest != added.digest for one in index.manifests):
        index.manifests.append(added)
        put_manifest(client, _tag(subject.digest), encode(index), INDEX)


def _decoded(content: bytes, kind: type[_Kind], path: str) -> _Kind:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"what the registry has under {path} does not follow the specification: {error}") from error

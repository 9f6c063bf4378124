"""Gets blobs: hashed while they come, never more than was announced, and on from where a connection was cut."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import urllib3

from exportkit.errors import ArtifactError, DigestMismatchError, RegistryError
from exportkit.registry.oci_artifact import Descriptor, digest_of
from exportkit.registry.registry_client import Answer, Attempts, RegistryClient, TransportError

_PIECE = 1 << 20  # bytes between two looks at the size, and what counts as progress


def fetch_small(client: RegistryClient, blob: Descriptor) -> bytes:
    """Gets a blob into memory. The caller has checked that its size is small.

    Raises:
        ArtifactError: It is not there, or has another size.
        DigestMismatchError: It has another digest.
        RegistryError: The registry cannot be reached, or refuses.
    """
    path = f"blobs/{blob.digest}"
    answer = client.ask("GET", path, most=blob.size)
    if answer.status == 404:
        raise _missing(client, blob)
    if answer.status != 200:
        raise client.refusal(answer, "GET", path)
    if digest_of(answer.content) != blob.digest:
        raise _other_content(client, blob)
    return answer.content


def download(client: RegistryClient, blob: Descriptor, part: Path) -> None:
    """Gets a blob into a file, which may have the first part of it from an earlier attempt.

    The file stays if the work is cut, so that the next attempt goes on. What it has is hashed again.

    Args:
        client: The repository.
        blob: What to get.
        part: The file, in a folder that only this process writes to.

    Raises:
        DigestMismatchError: The registry has other bytes under this digest. The file is empty then.
        ArtifactError: The blob is not there, or the registry sends more than the blob's size.
        RegistryError: The registry cannot be reached, or refuses.
        OSError: The file cannot be written.
    """
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        while True:
            earlier = os.fstat(file).st_size
            digest = _Download(client, blob, file).run()
            if digest == blob.digest:
                os.fsync(file)
                return
            os.ftruncate(file, 0)
            if earlier == 0:
                raise _other_content(client, blob)
    finally:
        os.close(file)


class _Download:
    """One run from what the file has to the end of the blob."""

    def __init__(self, client: RegistryClient, blob: Descriptor, file: int) -> None:
        self._client, self._blob, self._file = client, blob, file
        self._begin_anew()
        if os.fstat(file).st_size <= blob.size:
            self._hash_what_is_there()

    def run(self) -> str:
        """Returns the digest of the whole file."""
        os.ftruncate(self._file, self._have)
        attempts = Attempts(self._client.options, f"getting {self._blob.digest} from {self._client.reference.host}")
        while self._have < self._blob.size:
            before = self._have
            reason, headers = self._receive()
            if self._have - before >= _PIECE:
                attempts.progressed()
            if reason is not None:
                attempts.failed(reason, headers)
        return f"sha256:{self._hash.hexdigest()}"

    def _begin_anew(self) -> None:
        self._have, self._hash = 0, hashlib.sha256()

    def _hash_what_is_there(self) -> None:
        while piece := os.pread(self._file, _PIECE, self._have):
            self._hash.update(piece)
            self._have += len(piece)

    def _receive(self) -> tuple[Exception | None, dict[str, str] | None]:
        """Receives until the end or a cut. Returns why it was cut, and what the registry said about it."""
        path = f"blobs/{self._blob.digest}"
        asked = {"Range": f"bytes={self._have}-"} if self._have else {}
        try:
            with self._client.send("GET", path, headers=asked) as response:
                if response.status not in (200, 206):
                    return self._refused(response, path), dict(response.headers)
                self._place(response)
                while piece := response.read(_PIECE):
                    self._take(piece)
        except TransportError as error:
            return error, None
        if self._have < self._blob.size:
            return RegistryError(
                f"{self._client.reference.host} ended after {self._have} of {self._blob.size} bytes"
            ), None
        return None, None

    def _refused(self, response: urllib3.BaseHTTPResponse, path: str) -> Exception:
        if response.status == 404:
            raise _missing(self._client, self._blob)
        refusal = self._client.refusal(Answer(response.status, {}, b""), "GET", path)
        if response.status == 416:
            self._begin_anew()
        elif response.status < 500 and response.status not in (408, 429):
            raise refusal
        return refusal

    def _place(self, response: urllib3.BaseHTTPResponse) -> None:
        """Checks where the answer's bytes belong: behind what is there, or, where all come again, at the beginning."""
        size = self._blob.size
        if response.status == 206:
            given = response.headers.get("content-range", "")
            match = re.fullmatch(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)", given)
            if match is None or int(match[1]) != self._have or match[2] not in ("*", str(size)):
                raise ArtifactError(
                    f"{self._client.reference.host} was asked for bytes from {self._have} on and sends {given!r}"
                )
        elif self._have:
            self._begin_anew()
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > size - self._have:
            raise self._too_much()

    def _take(self, piece: bytes) -> None:
        if len(piece) > self._blob.size - self._have:
            raise self._too_much()
        self._hash.update(piece)
        written = memoryview(piece)
        while written:
            count = os.pwrite(self._file, written, self._have)
            self._have += count
            written = written[count:]

    def _too_much(self) -> ArtifactError:
        return ArtifactError(
            f"{self._client.reference.host} sends more than the {self._blob.size} bytes that the manifest names"
        )


def _missing(client: RegistryClient, blob: Descriptor) -> ArtifactError:
    return ArtifactError(f"{client.reference.host} has the manifest of {client.reference}, but not its {blob.digest}")


def _other_content(client: RegistryClient, blob: Descriptor) -> DigestMismatchError:
    return DigestMismatchError(
        f"{client.reference.host} sends under {blob.digest} what has another digest",
        hint="It was changed in the registry or on the way. Nothing of it was kept.",
    )

"""Sends blobs by pieces, and on from where a connection was cut."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import quote, urljoin

from exportkit.errors import RegistryError
from exportkit.registry.oci_artifact import Descriptor
from exportkit.registry.registry_client import Answer, Attempts, RegistryClient, TransportError

Source = Callable[[int, int], bytes]
"""Returns at most so many bytes from an offset on."""

_PIECE = 256 << 20  # bytes of a request: proxies hold whole requests back, and after a cut one is sent again in part
_SMALLEST_PIECE = 1 << 20
_STREAM = {"Content-Type": "application/octet-stream"}


class _Slice:
    """A part of a source, as what a request sends."""

    def __init__(self, source: Source, begin: int, end: int) -> None:
        self._source, self._at, self._end = source, begin, end

    def read(self, size: int = -1) -> bytes:
        left = self._end - self._at
        content = self._source(self._at, left if size < 0 else min(size, left)) if left else b""
        self._at += len(content)
        return content


def descriptor_source(file: int) -> Source:
    """Returns the source of an open file, whose position stays where it is."""
    return lambda offset, size: os.pread(file, size, offset)


def bytes_source(content: bytes) -> Source:
    """Returns the source of what is in memory."""
    return lambda offset, size: content[offset : offset + size]


def upload(client: RegistryClient, blob: Descriptor, source: Source, *, piece: int = _PIECE) -> bool:
    """Sends a blob, unless the registry has it.

    Args:
        client: The repository.
        blob: What is sent. The registry compares the digest.
        source: Its content.
        piece: The bytes of one request. Fewer, if the registry says that these are too many.

    Returns:
        Whether it was sent.

    Raises:
        RegistryError: The registry cannot be reached, refuses, or got other bytes.
    """
    return _Upload(client, blob, source, piece).run()


class _Upload:
    def __init__(self, client: RegistryClient, blob: Descriptor, source: Source, piece: int) -> None:
        self._client, self._blob, self._source, self._piece = client, blob, source, piece
        self._location, self._sent = "", 0
        what = f"sending {blob.digest} to {client.reference.host}"
        self._attempts, self._anew = Attempts(client.options, what), Attempts(client.options, what)

    def run(self) -> bool:
        if self._is_there():
            return False
        self._begin()
        while True:
            while self._sent < self._blob.size:
                self._send_piece()
            if self._finish():
                return True

    def _is_there(self) -> bool:
        return self._client.ask("HEAD", f"blobs/{self._blob.digest}").status == 200

    def _begin(self) -> None:
        answer = self._client.ask("POST", "blobs/uploads/")
        if answer.status != 202:
            raise self._client.refusal(answer, "POST", "blobs/uploads/")
        self._sent, self._location = 0, ""
        self._location = self._located(answer)
        least = answer.headers.get("oci-chunk-min-length", "")
        if least.isascii() and least.isdigit():
            self._piece = max(self._piece, int(least[:12]))

    def _located(self, answer: Answer) -> str:
        location = answer.headers.get("location") or self._location
        if not location:
            raise RegistryError(f"{self._client.reference.host} does not say where to send a blob")
        return urljoin(self._location or self._client.url("blobs/uploads/"), location)

    def _send_piece(self) -> None:
        begin, end = self._sent, min(self._sent + self._piece, self._blob.size)
        headers = {**_STREAM, "Content-Length": str(end - begin), "Content-Range": f"{begin}-{end - 1}"}
        try:
            with self._client.send(
                "PATCH", self._location, headers=headers, body=lambda: _Slice(self._source, begin, end)
            ) as response:
                answer = Answer(response.status, response.headers, response.read(64 << 10))
        except TransportError as error:
            self._attempts.failed(error)
            self._ask_how_far()
            return
        if answer.status == 413 and self._piece > _SMALLEST_PIECE:
            self._piece = max(self._piece // 4, _SMALLEST_PIECE)
            self._ask_how_far()
        elif answer.status == 202:
            self._location = self._located(answer)
            self._sent = end
            self._attempts.progressed()
        else:
            refusal = self._client.refusal(answer, "PATCH", "blobs/uploads/")
            if answer.status < 500 and answer.status not in (404, 408, 416, 429):
                raise refusal
            self._attempts.failed(refusal, answer.headers)
            self._ask_how_far()

    def _ask_how_far(self) -> None:
        """Goes on behind what the registry has; from the beginning where it does not say, or has lost it."""
        answer = self._client.ask("GET", self._location)
        has = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,19})", answer.headers.get("range", ""))
        # Some say 0-0 both of one byte and of none.
        if answer.status != 204 or has is None or not 0 < int(has[1]) < self._blob.size:
            self._anew.failed(self._client.refusal(answer, "GET", "blobs/uploads/"))
            self._begin()
            return
        self._sent, self._location = int(has[1]) + 1, self._located(answer)

    def _finish(self) -> bool:
        """Says that this was all. False: something was lost on the way, and it begins again."""
        url = self._location + ("&" if "?" in self._location else "?") + f"digest={quote(self._blob.digest)}"
        try:
            with self._client.send("PUT", url, headers={**_STREAM, "Content-Length": "0"}) as response:
                answer = Answer(response.status, response.headers, response.read(64 << 10))
        except TransportError as error:
            self._anew.failed(error)
            if self._is_there():
                return True
            self._begin()
            return False
        if answer.status == 201:
            return True
        refusal = self._client.refusal(answer, "PUT", "blobs/uploads/")
        if answer.status < 500 and answer.status not in (404, 416):
            raise refusal
        self._anew.failed(refusal, answer.headers)
        self._begin()
        return False

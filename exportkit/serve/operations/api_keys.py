"""API keys: a file with one key a line.

A client sends `Authorization: Bearer KEY`, over gRPC as metadata. Probes need no key, and neither do the files of the
page, which asks for one.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.errors import UsageError
from exportkit.serve.request_record import identity_of, key_of
from exportkit.serve.statuses import UnauthorizedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MIN_LENGTH = 16
_MAX_BYTES = 1 << 20  # of a file of keys

_KEY = re.compile(rb"[!-~]+")
_MAKE = "Make a key with `openssl rand -hex 32`."


class ApiKeys:
    """The keys of a file. Only their hashes are kept."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            UsageError: The file cannot be read, other users may read it, it has no key, or a key is too short.
        """
        self.path = path
        self._hashes = _read(path)

    def reload(self) -> None:
        """Reads the file again. If it is refused, the keys stay as they were.

        Raises:
            UsageError: As at first.
        """
        self._hashes = _read(self.path)

    def allow(self, authorization: bytes | None) -> bool:
        """Whether the value of a header `Authorization` has one of the keys."""
        given = sha256(key_of(authorization or b"")).digest()
        # Every key is compared, and each in constant time: the time tells nothing about any of them.
        return sum([hmac.compare_digest(given, known) for known in self._hashes]) > 0


class RequireKey:
    """An ASGI middleware that refuses requests without a key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request pass.

        Raises:
            UnauthorizedError: It has no key and needs one.
        """
        given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if scope["path"] not in self._open_paths and not self._keys.allow(given):
            raise UnauthorizedError(
                "the request has no valid API key",
                hint="Send the header `Authorization: Bearer KEY` with one of the server's keys.",
            )
        if given is not None:
            scope["exportkit"].client = identity_of(given)
        await self._app(scope, receive, send)


def _read(path: Path) -> tuple[bytes, ...]:
    kind = "the file of API keys"
    keys = []
    for number, line in enumerate(read_secret(path, kind).splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not _KEY.fullmatch(key):
            raise UsageError(
                f"line {number} of {kind} {path} has a character that a key cannot have",
                hint=f"A key consists of visible ASCII characters, without spaces. {_MAKE}",
            )
        if len(key) < MIN_LENGTH:
            raise UsageError(
                f"the key in line {number} of {path} has {len(key)} characters, and needs at least {MIN_LENGTH}",
                hint=_MAKE,
            )
        keys.append(sha256(key).digest())
    if not keys:
        raise UsageError(f"{kind} {path} has no key", hint=f"Put one key on each line. {_MAKE}")
    return tuple(keys)


def read_secret(path: Path, kind: str) -> bytes:
    """Reads a file that other users cannot read.

    Args:
        path: The file.
        kind: What it is, for messages, such as "the file of API keys".

    Raises:
        UsageError: It cannot be read, is no regular file, is larger than 1 MiB, or other users may read or change it.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UsageError(f"{kind} {path} cannot be read: {error.strerror}") from error
    if content is None:
        raise UsageError(f"{kind} {path} is not a regular file")
    if status.st_mode & stat.S_IRWXO:
        raise UsageError(
            f"{kind} {path} is open to every user of this machine (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"Run `chmod o-rwx {path}`. In Kubernetes, give the secret's volume `defaultMode: 0440`.",
        )
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{kind} {path} is larger than 1 MiB")
    return content

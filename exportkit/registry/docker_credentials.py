"""Reads a registry's credentials from docker's configuration, which `docker login` and `oras login` write."""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exportkit.errors import UsageError

_HUB = "https://index.docker.io/v1/"  # docker's name for the credentials of Docker Hub
_MAX_CONFIG_BYTES = 1 << 20
_HELPER_SECONDS = 60
_NOT_FOUND = "credentials not found"  # how a helper says so, by docker-credential-helpers' protocol
_TOKEN_USER = "<token>"  # a helper's name for an identity token


@dataclass(frozen=True)
class Credentials:
    """What a registry is told to know the user.

    Attributes:
        user: The name; empty for an identity token.
        secret: The password or the identity token. It is in no message and no log.
    """

    user: str
    secret: str = field(repr=False)


class _Auth(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _Config(msgspec.Struct):
    auths: dict[str, _Auth] = {}
    credential_helpers: dict[str, str] = msgspec.field(name="credHelpers", default={})
    store: str = msgspec.field(name="credsStore", default="")


class _Answer(msgspec.Struct, rename="pascal"):
    username: str
    secret: str


def find_credentials(host: str) -> Credentials | None:
    """Finds the credentials of a registry: of its helper, else of the store, else in the file itself.

    Args:
        host: The registry, with its port if it has one.

    Returns:
        None if there are none for this host. Those of other hosts are never taken.

    Raises:
        UsageError: The configuration cannot be read, or a helper does not work.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    config = _read(path)
    if config is None:
        return None
    for name in _names_of(host):
        if helper := config.credential_helpers.get(name) or config.store:
            found = _from_helper(helper, name, path)
        else:
            found = _from_file(config.auths.get(name), name, path)
        if found is not None:
            return found
    return None


def _names_of(host: str) -> list[str]:
    """Returns the names under which docker and others file a host's credentials."""
    if host == "docker.io":
        return [_HUB, host]
    return [host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/"]


def _read(path: Path) -> _Config | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read docker's configuration {path}: {error.strerror}") from error
    try:
        if len(content) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
        return msgspec.json.decode(content, type=_Config)
    except ValueError as error:  # msgspec's errors are such, and quote no content
        raise UsageError(
            f"docker's configuration {path} cannot be used: {error}", hint="`docker login` writes a new one."
        ) from error


def _from_file(entry: _Auth | None, name: str, path: Path) -> Credentials | None:
    if entry is None:
        return None
    if entry.identitytoken:
        return Credentials("", entry.identitytoken)
    if entry.auth:
        try:
            user, colon, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise UsageError(f"the entry of {name} in {path} is not base64 of `user:password`")
        return Credentials(user, password.rstrip("\0"))
    return Credentials(entry.username, entry.password) if entry.username else None


def _from_helper(helper: str, name: str, path: Path) -> Credentials | None:
    """Asks a program docker-credential-<helper>, which the user's configuration names."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise UsageError(f"{path} names a credential helper {helper!r}, which cannot be a program's name")
    program = f"docker-credential-{helper}"
    try:
        ended = subprocess.run(
            [program, "get"], input=name.encode(), capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{program}, which {path} names for {name}, does not work: {error}") from error
    if ended.returncode != 0:
        said = (ended.stdout + ended.stderr)[:500].decode(errors="replace").strip()  # a failed one has no secret to say
        if _NOT_FOUND in said:
            return None
        raise UsageError(f"{program}, which {path} names for {name}, failed: {said}")
    try:
        answer = msgspec.json.decode(ended.stdout, type=_Answer)
    except msgspec.DecodeError as error:
        raise UsageError(f"{program} answered for {name} what is not its protocol: {error}") from error
    return Credentials("" if answer.username == _TOKEN_USER else answer.username, answer.secret)

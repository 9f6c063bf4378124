"""References to artifacts in a registry: oci://host[:port]/name[:tag][@sha256:digest]."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from exportkit.errors import UsageError

SCHEME = "oci://"
DIGEST = r"sha256:[0-9a-f]{64}"

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"oci://"
    r"(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?)"
    rf"/(?P<name>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    rf"(?:@(?P<digest>{DIGEST}))?"
)
_MAX_NAME = 255  # of a host and a name together, as clients of registries have it


@dataclass(frozen=True)
class RegistryReference:
    """Names an artifact. The rules of names are those of the OCI distribution specification, 1.1.

    Attributes:
        host: The registry, with its port if it has one.
        name: The repository in it.
        tag: A name that may be moved to another artifact.
        digest: `sha256:` and the digest of the manifest, which names one artifact for ever. It goes before a tag.
    """

    host: str
    name: str
    tag: str | None = None
    digest: str | None = None

    @property
    def file_name(self) -> str:
        """The last part of the name, with `.pt2`: it has no `/` and does not begin with a dot."""
        return self.name.rpartition("/")[2] + ".pt2"

    @property
    def place(self) -> str:
        """The digest or the tag, as it stands in a URL."""
        place = self.digest or self.tag
        assert place is not None
        return place

    def at(self, digest: str) -> RegistryReference:
        """Returns the reference that names this digest, and no tag."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        return f"{SCHEME}{self.host}/{self.name}{tag}" + ("" if self.digest is None else f"@{self.digest}")


def parse_reference(text: str) -> RegistryReference:
    """Parses a reference.

    Raises:
        UsageError: It is not one, or has neither a tag nor a digest.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or len(match["host"]) + len(match["name"]) > _MAX_NAME:
        raise UsageError(
            f"{text!r} is not a reference such as oci://registry.example/models/net:1",
            hint="After the host comes a name in small letters, then `:` and a tag, or `@sha256:` and a digest.",
        )
    if match["tag"] is None and match["digest"] is None:
        raise UsageError(f"{text} has no tag and no digest", hint=f"Give one, such as {text}:1.")
    return RegistryReference(match["host"], match["name"], match["tag"], match["digest"])


def is_loopback(host: str) -> bool:
    """Returns whether a host, with or without a port, is this machine by its name alone."""
    bare = re.sub(r":[0-9]+$", "", host).strip("[]").lower()
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"

"""Revocation lists: which keys and packages a policy no longer accepts. FORMAT.md, "Revocation", has the exact form.

A list only grows, and its sequence number rises with each change. csrc/package reads lists and obeys them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.package import core
from exportkit.package.atomic import write_whole
from exportkit.package.manifest import Strict


class RevokedKey(Strict, frozen=True):
    """A key whose signatures no longer count."""

    key_id: str
    reason: str


class RevokedPackage(Strict, frozen=True):
    """A package that is no longer opened."""

    manifest_sha256: str
    reason: str


class RevocationList(Strict, frozen=True):
    """The content of a list."""

    version: Literal[1]
    sequence: int
    keys: tuple[RevokedKey, ...]
    packages: tuple[RevokedPackage, ...]


@dataclass(frozen=True)
class NamedRevocations:
    """A list that a policy of this machine names, with the numbers of its entries."""

    path: str
    sequence: int
    keys: int
    packages: int


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(RevocationList)
_NAMED = msgspec.json.Decoder(tuple[NamedRevocations, ...])


def revocations_here() -> tuple[NamedRevocations, ...]:
    """Returns the lists that this machine's policies name.

    Raises:
        PolicyError: A policy or a list cannot be read or trusted.
    """
    return _NAMED.decode(core.text("ek_revocations"))


def read_revocations(path: Path) -> RevocationList | None:
    """Reads a list. Returns None if there is no file.

    Raises:
        UsageError: The file is not a list, or cannot be read.
    """
    content = core.text("ek_revocation_list", core.encoded(path))
    return _DECODER.decode(content) if content else None


def revoke(
    path: Path, keys: Mapping[str, str], packages: Mapping[str, str], others: Sequence[RevocationList] = ()
) -> RevocationList:
    """Adds to a list, which is made if there is none. Nothing leaves a list, so that an older one takes nothing back.

    Args:
        path: The list. It is replaced atomically.
        keys: Reasons by key id.
        packages: Reasons by the sha256 of the manifest.
        others: Lists whose entries are added too.

    Returns:
        The list as it was written. Its sequence is above those of all lists that have less.

    Raises:
        UsageError: The file at `path` is not a list, or cannot be read.
        OSError: The list cannot be written.
    """
    earlier = read_revocations(path)
    lists = [*([earlier] if earlier is not None else []), *others]
    # The first reason stays.
    all_keys = dict(keys) | {each.key_id: each.reason for found in reversed(lists) for each in found.keys}
    all_packages = dict(packages) | {
        each.manifest_sha256: each.reason for found in reversed(lists) for each in found.packages
    }
    newest = max(lists, key=lambda found: found.sequence, default=None)
    made = RevocationList(
        version=1,
        sequence=1 if newest is None else newest.sequence,
        keys=tuple(RevokedKey(key_id=key, reason=why) for key, why in sorted(all_keys.items())),
        packages=tuple(RevokedPackage(manifest_sha256=each, reason=why) for each, why in sorted(all_packages.items())),
    )
    if made == earlier:
        return made
    if newest is not None and made != newest:
        made = msgspec.structs.replace(made, sequence=newest.sequence + 1)
    write_whole(path, msgspec.json.format(msgspec.json.encode(made, order="deterministic"), indent=1) + b"\n")
    return made

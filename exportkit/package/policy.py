"""Policies: files that make signatures mandatory on a machine. FORMAT.md, "Policies", has their keys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.errors import PolicyError, UsageError
from exportkit.package import strict_json
from exportkit.package.keys import PublicKey, read_public_key
from exportkit.package.manifest import Strict
from exportkit.package.small_files import read_small

SYSTEM_POLICY = Path("/etc/exportkit/policy.json")

_MAX_DEPTH = 4  # of brackets


class Policy(Strict, frozen=True):
    """A policy file."""

    version: Literal[1]
    require_signature: bool
    public_keys: tuple[str, ...]


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(Policy)


@dataclass(frozen=True)
class Demand:
    """Somebody asks for a signature by any of these keys.

    Attributes:
        keys: Any of them will do.
        by: Who asks, for messages: "the policy /etc/exportkit/policy.json".
    """

    keys: tuple[PublicKey, ...]
    by: str


def policy_demands() -> tuple[Demand, ...]:
    """What this machine's policies ask of every package, those that ask for nothing left out.

    There are at most two, and each is asked for: the system's, and $EXPORTKIT_POLICY or else the user's own. So what
    a user sets can add to what the system demands, and take nothing from it.

    Raises:
        PolicyError: A policy is there and cannot be read, means nothing, or could be changed by other users.
    """
    demands = []
    named = os.environ.get("EXPORTKIT_POLICY")
    for path in (SYSTEM_POLICY, Path(named) if named else _user_policy()):
        policy = _read(path, must_exist=bool(named) and path != SYSTEM_POLICY)
        if policy is not None and policy.require_signature:
            demands.append(Demand(_keys(policy, path), f"the policy {path}"))
    return tuple(demands)


def _user_policy() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path in it is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))) / "exportkit" / "policy.json"


def _read(path: Path, *, must_exist: bool) -> Policy | None:
    try:
        data = read_small(path, guarded=True)
        strict_json.parse(data, max_depth=_MAX_DEPTH)
        policy = _DECODER.decode(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not must_exist:
            return None
        raise _refusal(path, "is not there", "EXPORTKIT_POLICY names it.") from error
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise _refusal(path, f"is not of the shape FORMAT.md gives: {error}") from error
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    if policy.require_signature and not policy.public_keys:
        raise _refusal(path, "requires signatures, and names no public key to check them with")
    return policy


def _keys(policy: Policy, path: Path) -> tuple[PublicKey, ...]:
    try:
        return tuple(
            read_public_key(source if "-----BEGIN" in source else path.parent / source, guarded=True)
            for source in policy.public_keys
        )
    except UsageError as error:
        raise _refusal(path, f"names a key that cannot be used: {error.message}") from error


def _refusal(path: Path, reason: str, hint: str = "") -> PolicyError:
    return PolicyError(f"the policy {path} {reason}", hint=f"{hint} As long as this is so, nothing is loaded.".strip())

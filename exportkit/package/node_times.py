"""The times of a program's nodes, as `exportkit bench --profile` writes them and `exportkit inspect` reads them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from exportkit.errors import UsageError

FORMAT_VERSION = 1
_MAX_BYTES = 64 << 20


class NodeTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The milliseconds of one node: median, first and third quartile."""

    median: float
    q1: float
    q3: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of all nodes of a program, run one after another without compilation.

    Attributes:
        format_version: 1.
        graph_sha256: The digest of the program's JSON, ProgramGraph.sha256.
        device: The device's name.
        threads: The threads torch used on the CPU.
        torch: The version of torch.
        sizes: The sizes of the call, such as `batch=2, gh=8`.
        runs: How often the program ran.
        nodes: The times, in the order of the graph's nodes.
    """

    format_version: int
    graph_sha256: str
    device: str
    threads: int
    torch: str
    sizes: str
    runs: int
    nodes: tuple[NodeTime, ...]

    @property
    def total(self) -> float:
        """The sum of the medians, in milliseconds."""
        return sum(node.median for node in self.nodes)


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(Profile)


def encode_profile(profile: Profile) -> bytes:
    """Encodes as JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def read_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        UsageError: The file cannot be read, or it is not a profile.
    """
    hint = "`exportkit bench PROGRAM.pt2 --profile FILE.json` writes one."
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is no profile: it has more than {_MAX_BYTES >> 20} MiB", hint=hint)
        profile = _DECODER.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a profile: {error}", hint=hint) from error
    if profile.format_version != FORMAT_VERSION:
        raise UsageError(f"{path} is a profile of version {profile.format_version}; this exportkit reads 1", hint=hint)
    return profile

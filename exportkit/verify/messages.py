"""What a verification and its child processes say to each other: one JSON line each way, decoded strictly.

A command asks for one thing, and the answer is of the class that its docstring names, or Failed. Tensors travel in
files. Nothing here imports what the replay process must not have.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from exportkit.errors import ExportkitError
from exportkit.package.manifest import Call as ModelCall
from exportkit.package.manifest import Source


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A command or an answer."""


class Load(Message):
    """To the replay process: load an artifact. The answer is Loaded.

    Attributes:
        artifact: Its absolute path, of a link the link's own: its signature may be beside that.
        target: Of its targets, the one to run; None for its exported program.
        device: Where it runs, as exportkit.load takes it.
        tf32: Whether its cases were recorded with TF32.
        libraries: Operator libraries to load first, each with the namespaces it defines.
        blocked: Top-level packages that it must do without, the exporter and our operators aside.
        public_keys: PEM files, of which any must have signed it; None asks for no signature.
        signature: The signature file, where it is not beside the artifact.
        unsigned: The sha256 of the manifest that is loaded without a signature, whoever asks for one, and no other: a
            package is verified before it is signed. None permits nothing.
    """

    artifact: str
    target: str | None
    device: str
    tf32: bool
    libraries: tuple[tuple[str, tuple[str, ...]], ...]
    blocked: tuple[str, ...]
    public_keys: tuple[str, ...] | None
    signature: str | None
    unsigned: str | None


class Loaded(Message):
    """Where the artifact runs, with which torch, and how long loading took."""

    device: str
    torch: str
    seconds: float


class Call(Message):
    """To the replay process: call the model with `input.<i>` of one file, write `output.<i>` to another. Called."""

    inputs: str
    outputs: str


class Called(Message):
    """What the call took, and the structure of its result: a Node of the manifest, as JSON."""

    seconds: float
    structure: str


class Resolve(Message):
    """To the eager process: make MODEL as it was made for the export. The answer is Resolved.

    Attributes:
        model: MODEL.
        source: Of the artifact.
        call: Likewise.
        tf32: Whether its cases were recorded with TF32.
        weights: A safetensors file.
        libraries: Operator libraries.
        device: Where it runs.
    """

    model: str
    source: Source
    call: ModelCall
    tf32: bool
    weights: str | None
    libraries: tuple[str, ...]
    device: str


class Resolved(Message):
    """The digest of the model's parameters and buffers."""

    state_sha256: str


class Draw(Message):
    """To the eager process: draw inputs of these sizes, write them and what the model answers. The answer is Drawn."""

    sizes: dict[str, int]
    seed: int
    inputs: str
    outputs: str


class Drawn(Message):
    """The structure of the model's result, as JSON."""

    structure: str


class Failed(Message):
    """The answer where an error was raised: whatever a model raises is a finding for the parent to judge.

    Attributes:
        error: The name of its class.
        detail: What it says.
        exit_code: That of an error of exportkit.
    """

    error: str
    detail: str
    exit_code: int | None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Of any error."""
        # torch appends its own C++ stack to some messages; the first part is the message.
        detail = str(error).strip().split("\nException raised from ", 1)[0] or "(no message)"
        return cls(type(error).__name__, detail, error.exit_code if isinstance(error, ExportkitError) else None)


def encode(message: Message) -> bytes:
    """A line. JSON's own escapes carry what is no UTF-8, which the name of a file may well be."""
    return json.dumps(msgspec.to_builtins(message)).encode() + b"\n"


def decode(line: bytes, types: Any) -> Any:
    """The message of a line: of this class, or of one of this union of classes.

    Raises:
        msgspec.ValidationError: It is of none of them, lacks something or has something else.
    """
    return msgspec.convert(json.loads(line), types)

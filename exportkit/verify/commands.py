"""What a verification asks its child processes, and what they answer. Tensors travel in files.

The docstring of a command names the class of its answer. Nothing here imports torch, the exporter or a model.
"""

from __future__ import annotations

from exportkit.child.messages import Message
from exportkit.package.manifest import Call, Source


class LoadArtifact(Message, frozen=True):
    """To the replay process: load an artifact. The answer is ArtifactLoaded.

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


class ArtifactLoaded(Message, frozen=True):
    """Where the artifact runs, with which torch, and how long loading took."""

    device: str
    torch: str
    seconds: float


class CallModel(Message, frozen=True):
    """To the replay process: call the model with `input.<i>` of one file, write `output.<i>` to another.

    The answer is ModelCalled.
    """

    inputs: str
    outputs: str


class ModelCalled(Message, frozen=True):
    """What the call took, and the structure of its result: a Node of the manifest, as JSON."""

    seconds: float
    structure: str


class MakeEager(Message, frozen=True):
    """To the eager process: make MODEL as it was made for the export. The answer is EagerMade.

    Attributes:
        model: MODEL.
        source: The artifact's source.
        call: The artifact's call.
        tf32: Whether its cases were recorded with TF32.
        weights: A safetensors file.
        libraries: Operator libraries.
        device: Where it runs.
    """

    model: str
    source: Source
    call: Call
    tf32: bool
    weights: str | None
    libraries: tuple[str, ...]
    device: str


class EagerMade(Message, frozen=True):
    """The digest of the model's parameters and buffers."""

    state_sha256: str


class DrawInputs(Message, frozen=True):
    """To the eager process: draw inputs of these sizes, and write them and the model's outputs to files.

    The answer is InputsDrawn.
    """

    sizes: dict[str, int]
    seed: int
    inputs: str
    outputs: str


class InputsDrawn(Message, frozen=True):
    """The structure of the model's result, as JSON."""

    structure: str

"""The messages between a verification and its child processes. Tensors travel in files.

Each command's docstring names the class of its answer. Nothing here imports torch, the exporter or a model.
"""

from __future__ import annotations

from exportkit.child.messages import Message
from exportkit.eager_source import EagerFiles
from exportkit.package.manifest import Call, Onnx, Source


class LoadArtifact(Message, frozen=True):
    """Tells the replay process to load an artifact. The answer is ArtifactLoaded.

    Attributes:
        artifact: The absolute path. A link is not resolved, because the signature may be beside the link.
        target: The name of the target to run; None for the exported program.
        device: The device, as for exportkit.load.
        tf32: Whether the cases were recorded with TF32.
        libraries: Operator libraries to load first, each with the namespaces it defines.
        blocked: Packages that cannot be imported, besides the exporter.
        public_keys: PEM files. One of these keys must have signed the artifact. None are: no signature is required.
        signature: The signature file, if it is not beside the artifact.
        unsigned: The sha256 of the only manifest that may be loaded without a required signature, because a package is
            verified before it is signed. None allows no exception.
    """

    artifact: str
    target: str | None
    device: str
    tf32: bool
    libraries: tuple[tuple[str, tuple[str, ...]], ...]
    blocked: tuple[str, ...]
    public_keys: tuple[str, ...]
    signature: str | None
    unsigned: str | None


class LoadOnnx(Message, frozen=True):
    """Tells the process of ONNX Runtime to load a model. The answer is ArtifactLoaded.

    Attributes:
        model: The absolute path. A link is not resolved, because the data may be beside the link.
        onnx: What the verified companion says of the model. The process loads nothing that has another digest.
        call: The model's call.
        blocked: Packages that cannot be imported, besides torch and the exporter.
    """

    model: str
    onnx: Onnx
    call: Call
    blocked: tuple[str, ...]


class ArtifactLoaded(Message, frozen=True):
    """The device, the version of torch or of ONNX Runtime, and the seconds that loading took."""

    device: str
    version: str
    seconds: float


class CallModel(Message, frozen=True):
    """Tells the replay process to call the model with `input.<i>` of one file and write `output.<i>` to another.

    The answer is ModelCalled.
    """

    inputs: str
    outputs: str


class ModelCalled(Message, frozen=True):
    """The seconds of the call, and the structure of its result: a Node of the manifest, as JSON."""

    seconds: float
    structure: str


class MakeEager(Message, frozen=True):
    """Tells the eager process to make MODEL as it was made for the export. The answer is EagerMade.

    Attributes:
        eager: MODEL, with its weights and libraries.
        source: The artifact's source.
        call: The artifact's call.
        tf32: Whether the cases were recorded with TF32.
        device: The model's device.
    """

    eager: EagerFiles
    source: Source
    call: Call
    tf32: bool
    device: str


class EagerMade(Message, frozen=True):
    """The digest of the model's parameters and buffers."""

    state_sha256: str


class DrawInputs(Message, frozen=True):
    """Tells the eager process to draw inputs of these sizes and write them and the model's outputs to files.

    The answer is InputsDrawn.
    """

    sizes: dict[str, int]
    seed: int
    inputs: str
    outputs: str


class InputsDrawn(Message, frozen=True):
    """The structure of the model's result, as JSON."""

    structure: str

"""The messages between a verification and its child processes. Tensors travel in files.

Each command's docstring names the class of its answer. Nothing here imports torch, the exporter or a model.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from exportkit.child.messages import Message
from exportkit.package.manifest import Case, PackagedMethod, Source, StateTensor
from exportkit.reference_model import ReferenceModelFiles
from exportkit.verify.comparisons import GradientFinding
from exportkit.verify.filled_memory import Content


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
    """Tells the process of ONNX Runtime to load the models of all methods. The answer is ArtifactLoaded.

    Attributes:
        sidecar: The absolute path of the sidecar, which describes the models.
        manifest_sha256: The digest of its manifest, which was verified. The process loads nothing that has another.
        models: By method, the absolute path. A link is not resolved, because the data may be beside the link.
        blocked: Packages that cannot be imported, besides torch and the exporter.
    """

    sidecar: str
    manifest_sha256: str
    models: dict[str, str]
    blocked: tuple[str, ...]


class ArtifactLoaded(Message, frozen=True):
    """The device, the version of torch or of ONNX Runtime, and the seconds that loading took."""

    device: str
    version: str
    seconds: float


class CallModel(Message, frozen=True):
    """Tells the replay process to call the model. The answer is ModelCalled.

    Attributes:
        inputs: A safetensors file with the call's inputs.
        outputs: The file to write: the call's outputs, and what it wrote into inputs.
        number: The call's number in the files' names of tensors (exportkit/package/case_files.py).
        method: The method's name; None for the default one.
        session: The number of an open session; None for a method without state.
        layouts: The layout of each input in memory (exportkit/verify/layouts.py); contiguous if there are none.
        memory: What memory is filled with before the call.
    """

    inputs: str
    outputs: str
    number: int = 0
    method: str | None = None
    session: int | None = None
    layouts: tuple[str, ...] = ()
    memory: Content = ""


class ModelCalled(Message, frozen=True):
    """The seconds of the call, and the structure of its result: a Node of the manifest, as JSON."""

    seconds: float
    structure: str


class UseSession(Message, frozen=True):
    """Tells the replay process what to do with a session. The answer is SessionReady.

    Attributes:
        do: What. `spoil` changes every element of the state, and `read` writes the state as a case names it.
        session: The session's number.
        copy: The number of the session that `fork` makes.
        sizes: The sizes of the state, for `open`.
        file: The file that `save` and `read` write, or `load` reads.
    """

    do: Literal["open", "fork", "reset", "spoil", "save", "load", "read", "close"]
    session: int
    copy: int = 0
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    file: str = ""


class SessionReady(Message, frozen=True):
    """A session did what it was told."""


class MakeEager(Message, frozen=True):
    """Tells the eager process to make MODEL as it was made for the export. The answer is EagerMade.

    Attributes:
        eager: MODEL, with its weights and libraries.
        source: The artifact's source.
        methods: The artifact's methods.
        state: The artifact's state.
        tf32: Whether the cases were recorded with TF32.
        device: The model's device.
    """

    eager: ReferenceModelFiles
    source: Source
    methods: tuple[PackagedMethod, ...]
    state: tuple[StateTensor, ...]
    tf32: bool
    device: str


class EagerMade(Message, frozen=True):
    """The digest of the model's parameters and buffers."""

    state_sha256: str


class DrawCalls(Message, frozen=True):
    """Tells the eager process to draw calls, to make them, and to write a file like a recorded case's.

    The answer is CallsDrawn.

    Attributes:
        method: The only method to call, which has no state; None for a sequence of calls in one session.
        sizes: The sizes of all calls, by dimension.
        seed: The seed of the values.
        file: The file to write.
        kinds: By input of the only method, how its values are out of range (`OUT_OF_RANGE` in case_files.py).
    """

    method: str | None
    sizes: dict[str, int]
    seed: int
    file: str
    kinds: dict[str, str]


class CallsDrawn(Message, frozen=True):
    """The calls that were made.

    Attributes:
        case: A case without a record.
        structures: For each call the structure of its result, as JSON.
        refused: Whether eager refuses values out of range. The file has the inputs then; otherwise none is written.
    """

    case: Case
    structures: tuple[str, ...]
    refused: bool = False


class CompareGradients(Message, frozen=True):
    """Tells the eager process to compare gradients with differences, in float64 where it can.

    The answer is GradientsCompared.

    Attributes:
        method: The method to call, which has no state.
        sizes: The sizes of the call, by dimension.
        seed: The seed of the values and of the directions.
    """

    method: str
    sizes: dict[str, int]
    seed: int


class GradientsCompared(Message, frozen=True):
    """What was found of each gradient; nothing if the model computes in the widest dtype only."""

    findings: tuple[GradientFinding, ...]

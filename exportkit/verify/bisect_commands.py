"""The messages between a bisection and the process that cuts the graph. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

import msgspec

from exportkit.child.messages import Message
from exportkit.reference_model import ReferenceModelFiles


class ReadGraph(Message, frozen=True):
    """Tells the process to trace MODEL again, or to read the program of the artifact. The answer is GraphRead.

    Attributes:
        eager: MODEL, made as the manifest's source says, with its weights; or the program's libraries without MODEL.
        program: The file of the method's exported program; None to trace MODEL.
        method: The method's name.
        manifest: The artifact's manifest, as JSON.
        device: The device of what differs.
        compiled: Whether that is compiled code; the program itself is not compiled.
        cpu_isa: The instruction set of the code.
        embed_weights: Whether the weights are inside of the code.
    """

    eager: ReferenceModelFiles
    program: str | None
    method: str
    manifest: str
    device: str
    compiled: bool
    cpu_isa: str | None
    embed_weights: bool


class CutPoint(Message, frozen=True):
    """A node after which the graph can be cut.

    Attributes:
        name: Its name.
        operator: Its operator.
        where: The line of the model's code, or "".
        values: The names of the values that its result consists of.
    """

    name: str
    operator: str
    where: str
    values: tuple[str, ...]


class GraphRead(Message, frozen=True):
    """The nodes after which the graph can be cut, in its order."""

    points: tuple[CutPoint, ...]


class CallInputs(Message, frozen=True):
    """The inputs of a call.

    Attributes:
        number: The number of the call in its case.
        sizes: The sizes of the call.
        inputs: A safetensors file with the inputs of the call; None to draw them.
        seed: The seed of the inputs that are drawn.
        before: The methods of the calls before it in its session, if it has state and they are in the file.
        session_sizes: The sizes of the session's state.
    """

    number: int
    sizes: dict[str, int]
    inputs: str | None
    seed: int
    before: tuple[str, ...] = ()
    session_sizes: dict[str, int] = msgspec.field(default_factory=dict)


class CutGraph(Message, frozen=True):
    """Tells the process to cut the graph, to compile what is left, and to record one case. The answer is GraphCut.

    Attributes:
        point: The index of the node after which to cut.
        call: The inputs of the case.
        inductor_config: Options of torch._inductor.config, to compile with.
        eager_kernels: Operators that the code leaves to eager's kernels.
        output: The artifact to write.
    """

    point: int
    call: CallInputs
    inductor_config: dict[str, Any]
    eager_kernels: tuple[str, ...]
    output: str


class GraphCut(Message, frozen=True):
    """The bytes of the case's inputs."""

    input_bytes: int


class WriteReproduction(Message, frozen=True):
    """Tells the process to write a part of the graph as a Python file. The answer is ReproductionWritten.

    Attributes:
        point: The index of the node that differs.
        results: The values that differ; none: those of the node.
        call: The inputs of the graph.
        depth: How many nodes back the file begins; None for the whole graph.
        inductor_config: Options that the file sets.
        output: The file.
    """

    point: int
    results: tuple[str, ...]
    call: CallInputs
    depth: int | None
    inductor_config: dict[str, Any]
    output: str


class ReproductionWritten(Message, frozen=True):
    """How many nodes the file has, and whether it draws its inputs."""

    nodes: int
    drawn: bool


class RunReproduction(Message, frozen=True):
    """Tells the process to run a file of WriteReproduction. The answer is ReproductionRan."""

    file: str


class ReproductionRan(Message, frozen=True):
    """Whether torch.compile and eager differ, and what the file printed."""

    differs: bool
    printed: str


class NameCause(Message, frozen=True):
    """Tells the process to search Inductor for the cause with torch's own bisector. The answer is CauseNamed."""

    file: str


class CauseNamed(Message, frozen=True):
    """What torch's bisector found, in words."""

    cause: str

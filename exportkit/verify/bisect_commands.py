"""The messages between a bisection and the process that cuts the graph. Nothing here imports torch."""

from __future__ import annotations

from exportkit.child.messages import Message
from exportkit.package.compiled_with import GivenOptions
from exportkit.reference_model import ReferenceModelFiles


class FailedCall(Message, frozen=True):
    """The call that fails.

    Attributes:
        method: Its method.
        number: Its number in its case or session.
        sizes: Its sizes.
        session_sizes: The sizes of the session's state.
        inputs: A safetensors file with the inputs of its case; None to draw them.
        before: The methods of the calls before it in its case.
        seed: The seed of inputs that are drawn.
    """

    method: str
    number: int
    sizes: dict[str, int]
    session_sizes: dict[str, int]
    inputs: str | None
    before: tuple[str, ...]
    seed: int


class ReadGraph(Message, frozen=True):
    """Tells the process to trace MODEL again, or to read the program of the artifact. The answer is GraphRead.

    Attributes:
        call: The call that fails. Its method's graph is cut.
        target: The name of the target that differs; "program" for the program itself, which is not compiled.
        manifest: The artifact's manifest, as JSON.
        given: The options to compile with.
        eager: MODEL, made as the manifest's source says, with its weights; or the program's libraries without MODEL.
        program: The file of the method's exported program; None to trace MODEL.
    """

    call: FailedCall
    target: str
    manifest: str
    given: GivenOptions
    eager: ReferenceModelFiles
    program: str | None = None


class CutPoint(Message, frozen=True):
    """A node after which the graph can be cut.

    Attributes:
        name: Its name.
        operator: Its operator.
        where: The line of the model's code, or "".
        values: The names of the values that its result consists of.
        place: What leaves it to eager's kernel, as `--eager-kernel` takes it; "" if there is none.
    """

    name: str
    operator: str
    where: str
    values: tuple[str, ...]
    place: str


class GraphRead(Message, frozen=True):
    """The nodes after which the graph can be cut, in its order."""

    points: tuple[CutPoint, ...]


class CutGraph(Message, frozen=True):
    """Tells the process to cut the graph, to compile what is left, and to record one case. The answer is GraphCut.

    Attributes:
        point: The index of the node after which to cut.
        output: The artifact to write.
    """

    point: int
    output: str


class GraphCut(Message, frozen=True):
    """The artifact was written."""

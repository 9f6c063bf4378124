"""The inputs and outputs of the ONNX model of a method, which has no memory of its own. Does not import torch.

State goes in as `past_<name>` after the inputs of the call, and what the call makes of it comes out as
`present_<name>` after its results. What the call writes into an input comes out as `written.<input>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exportkit.package.case_files import results_of
from exportkit.package.manifest import PackagedMethod, StateTensor, TensorInput, TensorOutput


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model, in order, by the names that they have in it.

    Inputs are those of the call, `given`, then the state. Outputs are those of the call and what it writes into inputs,
    `results`, then the state that it writes.
    """

    inputs: tuple[tuple[str, TensorInput | StateTensor], ...]
    outputs: tuple[tuple[str, TensorOutput | StateTensor], ...]
    given: int
    results: int

    @classmethod
    def of(cls, method: PackagedMethod, state: Sequence[StateTensor]) -> Interface:
        """Returns the interface of a method. `state` is the whole model's."""
        call = method.call
        names = _Names()
        used = [(state[use.index], use.written) for use in method.state]
        inputs: list[tuple[str, TensorInput | StateTensor]] = [(names.free(each.name), each) for each in call.inputs]
        inputs += [(names.free(f"past_{each.name}", "state."), each) for each, _ in used]
        results = results_of(call)
        outputs: list[tuple[str, TensorOutput | StateTensor]] = [(names.free(each.name), each) for each in results]
        outputs += [(names.free(f"present_{each.name}", "state."), each) for each, written in used if written]
        return cls(tuple(inputs), tuple(outputs), len(call.inputs), len(results))


class _Names:
    """Gives each name once, as ONNX demands: an output that is called like an input gets a prefix."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def free(self, name: str, prefix: str = "output.") -> str:
        while name in self._taken:
            name = f"{prefix}{name}"
        self._taken.add(name)
        return name

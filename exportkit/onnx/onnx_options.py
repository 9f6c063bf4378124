"""Options for the export to ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exportkit.errors import UsageError
from exportkit.onnx.files import DATA_THRESHOLD

OPSETS = range(18, 24)
"""The versions of ONNX's operators that torch.onnx writes."""


@dataclass(frozen=True)
class OnnxOptions:
    """How to write a traced model as ONNX.

    Attributes:
        opset: The version of ONNX's operators.
        inline: Puts the operators of each function where it is called, for runtimes that take no functions.
        decompositions: For custom operators, by `namespace::name` or `namespace::name.overload`: functions with the
            operator's parameters that compute the same with torch's operators. They replace the spec's.
        data_threshold: The bytes of weights from which on they are written to a file beside the model.

    Raises:
        UsageError: ONNX or torch does not know the opset.
    """

    opset: int = 20
    inline: bool = False
    decompositions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    data_threshold: int = DATA_THRESHOLD

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise UsageError(
                f"opset {self.opset} is not supported: it must be {OPSETS[0]} to {OPSETS[-1]}",
                hint="Leave out --opset, unless the runtime that will run the model asks for an older one.",
            )

"""What to export: a model, inputs to trace it with, and what may vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from eager's.

    Attributes:
        rtol: Relative tolerance; with `atol`, as torch.testing.assert_close uses them.
        atol: Absolute tolerance.
        ranking_of: For an output of indices [B, K] that rank another output [B, N]: its name. An index may differ from
            eager's where the values it points at are equal within that output's tolerance; indices may not repeat.
        rows_of: For an output [B, K, ...] gathered by such indices: the name of the index output. Rows are compared
            where the two indices agree.
    """

    rtol: float
    atol: float
    ranking_of: str | None = None
    rows_of: str | None = None

    def __post_init__(self) -> None:
        """Refuses what is no tolerance.

        Raises:
            UsageError: A part is negative, infinite or not a number.
        """
        if not all(0 <= part < math.inf for part in (self.rtol, self.atol)):
            raise UsageError(f"a tolerance of rtol {self.rtol}, atol {self.atol}: both must be finite and not negative")


@dataclass(frozen=True)
class ExportSpec:
    """A model with everything `exportkit export` needs to know about it.

    Attributes:
        model: The module.
        example_inputs: Positional inputs it is traced with. Sizes that vary should be at least 2 here, and differ from
            one another: torch.export specialises 0 and 1, and takes equal sizes for one.
        example_kwargs: Keyword inputs.
        dynamic_shapes: Parameter name -> dimension -> expression, as on the command line: "batch[1:64]",
            "16*gh[8:96]" (a size that is 16 times `gh`, where gh is 8 to 96). One name is one number everywhere.
        tolerances: Output name -> Tolerance, where the dtype's default does not hold. Outputs are named by their place
            in the model's output: the key of a dict or field of a named tuple, else "0", "1", ...; nested ones are
            joined by a dot. They are for the model as it is: where --dtype casts it, an output of that dtype is allowed
            the dtype's default at least, and an integer one that is allowed any difference its relative part.
        operator_libraries: Shared libraries that define operators the model calls. Our own need not be named.
        name: Of the package; the model's class by default.
        draw_inputs: (sizes by dimension name, generator) -> (args, kwargs), for cases and verification. By default
            values are drawn from those of the example inputs, which keeps images images and token ids legal.
    """

    model: torch.nn.Module
    example_inputs: tuple[Any, ...]
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    operator_libraries: Sequence[str | Path] = ()
    name: str | None = None
    draw_inputs: Callable[[Mapping[str, int], torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def __post_init__(self) -> None:
        """Refuses fields of another type, which would be found out only where the reason is hard to see.

        Raises:
            UsageError: With the field, what it is and what it should be.
        """
        import torch

        shapes = self.dynamic_shapes
        checks = (
            ("model", isinstance(self.model, torch.nn.Module), "an nn.Module"),
            ("example_inputs", isinstance(self.example_inputs, (tuple, list)), "a tuple of forward's arguments"),
            ("example_kwargs", isinstance(self.example_kwargs, Mapping), "a dict"),
            ("dynamic_shapes", _are_shapes(shapes), 'such as {"image": {0: "batch[1:64]", 2: "16*gh[8:96]"}}'),
            ("operator_libraries", not isinstance(self.operator_libraries, (str, Path)), "a list of paths"),
        )
        for name, right, wanted in checks:
            if not right:
                value = getattr(self, name)
                raise UsageError(f"ExportSpec.{name} is {_short(value)}; it must be {wanted}")


def _are_shapes(shapes: object) -> bool:
    return isinstance(shapes, Mapping) and all(
        isinstance(dims, Mapping) and all(isinstance(d, int) and isinstance(e, str) for d, e in dims.items())
        for dims in shapes.values()
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"

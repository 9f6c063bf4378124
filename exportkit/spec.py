"""What to export: a model, inputs to trace it with, and what may vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
            joined by a dot.
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

"""Specifies an export: a model, its example inputs and its dynamic sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from exportkit.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """How an output is compared with eager's.

    Without numbers, a floating output must be as accurate as eager (FORMAT.md, "Verdicts"). With them, it may differ
    from eager's by `atol + rtol * |eager|`.

    Attributes:
        rtol: Relative tolerance, as in torch.testing.assert_close.
        atol: Absolute tolerance, as in torch.testing.assert_close.
        ranking_of: For an output of indices of one dimension of another output, such as those of `topk` or `argmax`:
            the name of that output. An index may differ if the two values are equal within that output's error or
            tolerance. Indices may not repeat along that dimension.
        dim: The dimension of the ranked output that the indices count along, as in `torch.topk` and `torch.argmax`.
            The indices have the shape of that output but for this dimension, which may have gone.
        rows_of: For an output [B, K, ...] gathered by such indices: the name of the index output. Only rows whose
            indices agree are compared.
        gradient_of: For an output that is `scale` times the gradient of another with respect to an input: the names of
            that output, which is summed, and of the input, such as ("energy", "positions"). `verify` holds the package
            and eager to it by differences of that output.
        scale: The factor of `gradient_of`, such as -1 for forces.
    """

    rtol: float | None = None
    atol: float | None = None
    ranking_of: str | None = None
    dim: int = -1
    rows_of: str | None = None
    gradient_of: tuple[str, str] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks the tolerances.

        Raises:
            UsageError: Only one of `rtol` and `atol` is given, or one is negative, infinite or NaN; or `gradient_of`
                is no pair of names, or `scale` is 0, infinite or NaN.
        """
        if (self.rtol is None) != (self.atol is None):
            raise UsageError(
                f"rtol {self.rtol}, atol {self.atol}: only one of them is given", hint="Give both numbers, or neither."
            )
        if not all(part is None or 0 <= part < math.inf for part in (self.rtol, self.atol)):
            raise UsageError(f"rtol {self.rtol}, atol {self.atol}: both tolerances must be finite and not negative")
        pair = self.gradient_of
        if pair is not None and not (isinstance(pair, (tuple, list)) and [type(name) for name in pair] == [str, str]):
            said = f"gradient_of is {pair!r}"
            raise UsageError(said, hint='Name an output and an input, such as gradient_of=("energy", "positions").')
        if not (math.isfinite(self.scale) and self.scale):
            raise UsageError(f"scale {self.scale}: the factor of a gradient must be finite and not 0")


# Sizes by dimension name, and a generator: the arguments of one call.
DrawInputs = Callable[[Mapping[str, int], "torch.Generator"], tuple[tuple[Any, ...], dict[str, Any]]]
# The same, for the calls of one session in order: the method's name and its arguments.
DrawSequence = Callable[
    [Mapping[str, int], "torch.Generator"], Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any]]]
]

# By tensor and dimension, such as {"image": {0: "batch[1:64]"}}; or what torch.export takes: by parameter or in their
# order, nested as the arguments are, with Dim in place of texts; or one of its classes.
DynamicShapes: TypeAlias = Any
_SHAPES = ("ShapesCollection", "AdditionalInputs")

# The method that a call without a name means.
FORWARD = "forward"


@dataclass(frozen=True)
class Method:
    """One method of a model that has several. The fields of ExportSpec with the same names say what each is.

    Attributes:
        example_inputs: Positional inputs for tracing.
        example_kwargs: Keyword inputs for tracing.
        dynamic_shapes: The sizes that vary. A name has the same value everywhere in one call.
        tolerances: By output name.
        draw_inputs: Draws the arguments of one call.
        writes: Inputs that the method writes in place, by their place in the call, such as "cache" or "cache.0".
        attribute: The attribute of the module that is called. Default: the method's name.
    """

    example_inputs: tuple[Any, ...] = ()
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: DynamicShapes = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    draw_inputs: DrawInputs | None = None
    writes: Sequence[str] = ()
    attribute: str | None = None

    def __post_init__(self) -> None:
        """Checks the fields' types.

        Raises:
            UsageError: A field has the wrong type. The message names the field, its value and the right type.
        """
        _check_fields(self, "Method", _method_checks(self))


@dataclass(frozen=True)
class ExportSpec:
    """A model with everything `exportkit export` needs to know about it.

    Attributes:
        model: The module. The one inside is taken of what torch.compile or DataParallel returns.
        example_inputs: Positional inputs for tracing. Dynamic sizes should be at least 2 and differ from one another,
            because torch.export specialises 0 and 1, and treats equal sizes as the same size.
        example_kwargs: Keyword inputs for tracing.
        dynamic_shapes: Maps parameter names to dimensions to expressions, as on the command line: "batch[1:64]", or
            "16*gh[8:96]" for a size of 16 times `gh`, with gh from 8 to 96; "4" for a fixed size. A name has the same
            value everywhere. What torch.export takes is taken too: nested, with Dim, or a ShapesCollection.
        tolerances: Maps output names to tolerances. An output without one must be as accurate as eager, or equal if it
            is an integer. An output's name is its key in a dict, its field in a named tuple, or else "0", "1", ...; a
            dot joins nested names. If --dtype casts the model, the numbers of an output of that dtype are at least the
            dtype's default. An integer output that is allowed any difference gets at least the default's relative
            part.
        operator_libraries: Shared libraries that define operators the model calls. exportkit's own may be omitted.
        name: The package's name. Default: the model's class.
        draw_inputs: A function (sizes by dimension name, generator) -> (args, kwargs), for cases and verification. By
            default, values are drawn from the example inputs, which keeps token ids valid.
        allow_nondeterministic: The model's answers to the same inputs may differ. Only their dtypes and shapes are
            verified then.
        decompositions: For custom operators, by `namespace::name`: functions with the operator's parameters that
            compute the same with torch's operators. ONNX models are made of them; other formats ignore them.
        writes: Inputs that the model writes in place, by their place in the call, such as "cache" or "cache.0".
        methods: The model's methods by name, in place of the fields of one. By default there is one, `forward`.
        state: Name patterns (fnmatch) of the buffers and parameters that methods write and that outlive a call. A dict
            maps patterns to the name of the dimension that is their first axis, so that a session of any such size can
            be made; None leaves their exported shape.
        draw_sequence: A function (sizes by dimension name, generator) -> [(method, args, kwargs), ...]: the calls of
            one session, for cases and verification. By default, each method with state is called once in order, and
            the last one three times more.
    """

    model: torch.nn.Module
    example_inputs: tuple[Any, ...] = ()
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: DynamicShapes = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    operator_libraries: Sequence[str | Path] = ()
    name: str | None = None
    draw_inputs: DrawInputs | None = None
    allow_nondeterministic: bool = False
    decompositions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    writes: Sequence[str] = ()
    methods: Mapping[str, Method] = field(default_factory=dict)
    state: Sequence[str] | Mapping[str, str | None] = ()
    draw_sequence: DrawSequence | None = None

    def __post_init__(self) -> None:
        """Checks the fields' types, because a wrong one would fail later with an obscure error.

        Raises:
            UsageError: A field has the wrong type, or `methods` and fields of one method are given. The message names
                the field, its value and the right type.
        """
        import torch

        checks = (
            ("model", isinstance(self.model, torch.nn.Module), "an nn.Module"),
            *_method_checks(self),
            ("decompositions", _are_functions(self.decompositions), 'a dict such as {"myops::scale": scale_in_aten}'),
            ("operator_libraries", not isinstance(self.operator_libraries, (str, Path)), "a list of paths"),
            ("methods", _are_methods(self.methods), 'a dict such as {"decode": exportkit.Method(example_inputs=...)}'),
            ("state", _are_patterns(self.state), 'such as ("cache.*",) or {"cache.*": "batch"}'),
        )
        _check_fields(self, "ExportSpec", checks)
        if self.methods and (extra := [name for name in METHOD_FIELDS if getattr(self, name)]):
            said = f"ExportSpec has `methods` and {extra[0]}"
            raise UsageError(said, hint=f"Give {extra[0]} to the method that it belongs to.")
        object.__setattr__(self, "model", _inside(self.model))

    @property
    def entries(self) -> Mapping[str, Method]:
        """The methods by name: those that were given, or `forward` with this spec's own fields."""
        if self.methods:
            return self.methods
        return {FORWARD: Method(**{name: getattr(self, name) for name in METHOD_FIELDS})}

    @property
    def state_dimensions(self) -> Mapping[str, str | None]:
        """The patterns of `state`, each with the dimension of its buffers' first axis."""
        return self.state if isinstance(self.state, Mapping) else dict.fromkeys(self.state)


METHOD_FIELDS = ("example_inputs", "example_kwargs", "dynamic_shapes", "tolerances", "draw_inputs", "writes")


def _method_checks(method: Method | ExportSpec) -> tuple[tuple[str, bool, str], ...]:
    shapes, inputs = method.dynamic_shapes, method.example_inputs
    return (
        ("example_inputs", isinstance(inputs, (tuple, list)), "a tuple of forward's arguments"),
        ("example_kwargs", isinstance(method.example_kwargs, Mapping), "a dict"),
        (
            "dynamic_shapes",
            _are_shapes(shapes),
            'such as {"image": {0: "batch[1:64]", 2: "16*gh[8:96]"}}, or what torch.export takes',
        ),
        ("writes", not isinstance(method.writes, str), 'a list of inputs such as ("cache",)'),
    )


def _check_fields(owner: object, kind: str, checks: Iterable[tuple[str, bool, str]]) -> None:
    for name, right, wanted in checks:
        if not right:
            raise UsageError(f"{kind}.{name} is {_short(getattr(owner, name))}; it must be {wanted}")


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside of the wrappers that torch.compile, DataParallel and DistributedDataParallel make."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return _inside(model.module)
    if type(model).__name__ == "OptimizedModule":  # importing its class would import Dynamo
        return _inside(model.get_submodule("_orig_mod"))
    return model


def _are_shapes(shapes: object) -> bool:
    """Returns whether a value can be dynamic shapes. exportkit.export.sizes reads what is inside."""
    if isinstance(shapes, Mapping):
        return all(isinstance(dims, (Mapping, tuple, list, type(None))) for dims in shapes.values())
    return isinstance(shapes, (tuple, list)) or type(shapes).__name__ in _SHAPES


def _are_functions(functions: object) -> bool:
    return isinstance(functions, Mapping) and all(
        isinstance(name, str) and callable(function) for name, function in functions.items()
    )


def _are_methods(methods: object) -> bool:
    return isinstance(methods, Mapping) and all(
        isinstance(name, str) and name.isidentifier() and isinstance(method, Method) for name, method in methods.items()
    )


def _are_patterns(state: object) -> bool:
    if isinstance(state, Mapping):
        return all(isinstance(name, str) and isinstance(axis, (str, type(None))) for name, axis in state.items())
    return not isinstance(state, str) and isinstance(state, Sequence) and all(isinstance(name, str) for name in state)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"

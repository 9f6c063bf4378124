"""Translates `dynamic_shapes` as torch.export takes it to sizes such as "batch[1:64]"."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.export.models.call_signature import DYNAMIC_SPEC, bind_call, describe_call, is_tensor, spread
from exportkit.export.models.method_specs import method_specs
from exportkit.export.sizes.shapes import MAX_SIZE, Shapes
from exportkit.package.structure import fields_of, parts_of
from exportkit.spec import ExportSpec

INFERRED = "?"
"""What stands for a size that torch infers, `Dim.AUTO`, in place of an expression. It may have a range: "?[2:64]"."""

VARYING = "!"
"""The same of a size that must vary, `Dim.DYNAMIC`."""

_FORM = (
    "For each tensor give None, a dict by dimension, or a tuple with an entry for each dimension. An entry is a Dim or "
    "what follows from one (2*batch + 1), Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, None, a number, or a text such as "
    '"batch[1:64]".'
)


def with_plain_shapes(spec: ExportSpec) -> ExportSpec:
    """Returns a spec whose sizes are expressions. It needs the tensors that a ShapesCollection was made for."""
    if not spec.methods:
        return replace(spec, dynamic_shapes=plain_shapes(spec))
    specs = method_specs(spec)
    return replace(
        spec,
        methods={n: replace(m, dynamic_shapes=plain_shapes(specs[n])) for n, m in spec.methods.items()},
    )


def plain_shapes(spec: ExportSpec) -> Shapes:
    """Returns the sizes of one method of a model, by the tensors' names.

    The spec names tensors as on the command line, or gives what torch.export takes: by parameter or in their order,
    nested as the arguments are, a ShapesCollection or AdditionalInputs.
    """
    if not (shapes := spec.dynamic_shapes):
        if hasattr(spec.model.forward, DYNAMIC_SPEC):
            raise UsageError("the sizes of @dynamic_spec are not read", hint="Give them as dynamic_shapes, with Dim.")
        return {}
    arguments = bind_call(spec.model, tuple(spec.example_inputs), spec.example_kwargs)
    names = describe_call(spec.model, tuple(spec.example_inputs), spec.example_kwargs).names
    if not isinstance(shapes, (Mapping, Sequence)):
        try:
            shapes = shapes.dynamic_shapes(spec.model, tuple(spec.example_inputs), dict(spec.example_kwargs))
        except (ValueError, AssertionError) as error:
            raise UsageError(f"the {type(shapes).__name__} does not fit the example inputs: {error}") from error
    if not isinstance(shapes, Mapping):
        given = inspect.signature(spec.model.forward).bind(*spec.example_inputs, **spec.example_kwargs).arguments
        if len(shapes) != len(given):
            raise UsageError(
                f"dynamic_shapes has {len(shapes)} entries; the example inputs are {len(given)}: {', '.join(given)}",
                hint="Give an entry for each, or a dict by their names. None fixes every size.",
            )
        shapes = dict(zip(given, shapes))
    places: dict[str, dict[int, Any]] = {}
    for name, shape in spread(spec.model, shapes).items():
        if name not in arguments and name not in names and isinstance(shape, Mapping):
            places[name] = dict(shape)  # a name that no tensor has, which is refused with those that there are
            continue
        for path, dim, entry in _entries(arguments.get(name), shape, name):
            places.setdefault(path, {})[dim] = entry
    return _texts(places)


def _entries(value: Any, shape: Any, path: str) -> Iterator[tuple[str, int, Any]]:
    """Yields the tensor, the dimension and what is given there, of an argument, of a part of one, or of a named tensor.

    Such a tensor is not at hand: its value is None.
    """
    if shape is None or (type(shape) is int and shape == value):
        return
    if value is None or is_tensor(value):
        rank = None if value is None else value.ndim
        if isinstance(shape, (tuple, list)) and rank in (None, len(shape)):
            shape = dict(enumerate(shape))
        if not isinstance(shape, Mapping) or not all(isinstance(dim, int) for dim in shape):
            sizes = "" if rank is None else f", a tensor of {rank} dimensions,"
            raise UsageError(f"dynamic_shapes gives {path}{sizes} {_short(shape)}", hint=_FORM)
        yield from ((path, dim, entry) for dim, entry in shape.items() if entry is not None)
        return
    parts = _parts(value)
    if isinstance(shape, (tuple, list)) and len(shape) == len(parts):
        shape = dict(zip(parts, shape))
    if not isinstance(shape, Mapping) or not all(name in parts for name in shape):
        raise UsageError(
            f"dynamic_shapes gives {path} {_short(shape)}; it holds {', '.join(parts) or 'no tensor'}",
            hint=f"Give it the same structure as the argument, or name its tensors: {path}.{next(iter(parts), 0)}.",
        )
    for name, entry in shape.items():
        yield from _entries(parts[name], entry, f"{path}.{name}")


def _parts(value: Any) -> dict[str, Any]:
    """Returns the parts of a container by name; none of anything else."""
    if fields := fields_of(value):
        return dict(zip(fields, parts_of(value)))
    if isinstance(value, Mapping):
        return dict(value)
    return {str(i): part for i, part in enumerate(value)} if isinstance(value, (tuple, list)) else {}


def _texts(places: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, str]]:
    """Returns what is given at each place as an expression."""
    lows: dict[str, int] = {}
    highs: dict[str, int] = {}
    dims = [entry for entries in places.values() for entry in entries.values() if _is_dim(entry)]
    for entry in dims:
        root, scale, offset = _parts_of_dim(entry)
        # A Dim without ends begins at 0 and has none above. Code for empty tensors does not exist.
        least = root.min if root.min > 0 else -((offset - 1) // scale)
        lows[root.__name__] = max(lows.get(root.__name__, 0), int(least))
        has_end = isinstance(root.max, int) or getattr(root.max, "is_Integer", False)
        most = int(root.max) if has_end else (MAX_SIZE - offset) // scale
        highs[root.__name__] = min(highs.get(root.__name__, MAX_SIZE), most)
    texts: dict[str, dict[int, str]] = {}
    for path, entries in places.items():
        for dim, entry in entries.items():
            if (text := _text(f"{path}:{dim}", entry, lows, highs)) is not None:
                texts.setdefault(path, {})[dim] = text
    return texts


def _text(place: str, entry: Any, lows: Mapping[str, int], highs: Mapping[str, int]) -> str | None:
    """Returns the expression of an entry; None if it fixes the size."""
    if isinstance(entry, str):
        return entry
    if type(entry) is int:
        return str(entry)
    if _is_dim(entry):
        root, scale, offset = _parts_of_dim(entry)
        size = f"{scale}*" * (scale != 1) + root.__name__ + (f"{offset:+d}" if offset else "")
        return f"{size}[{lows[root.__name__]}:{highs[root.__name__]}]"
    kind = getattr(getattr(entry, "type", None), "name", None)
    if kind == "STATIC":
        return None
    if kind not in ("AUTO", "DYNAMIC"):
        raise UsageError(f"dynamic_shapes gives {place} {_short(entry)}", hint=_FORM)
    sign = INFERRED if kind == "AUTO" else VARYING
    if entry.min is None and entry.max is None:
        return sign
    return f"{sign}[{1 if entry.min is None else entry.min}:{MAX_SIZE if entry.max is None else entry.max}]"


def _parts_of_dim(dim: Any) -> tuple[Any, int, int]:
    """Returns the Dim that another follows from, with the factor and the offset."""
    if not hasattr(dim, "root"):
        return dim, 1, 0
    return dim.root, int(dim.fn(1) - dim.fn(0)), int(dim.fn(0))


def _is_dim(entry: Any) -> bool:
    return isinstance(entry, torch.export.Dim)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"

"""Translates `dynamic_shapes` as torch.export takes it to sizes such as "batch[1:64]"."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    found = _Found()
    for name, shape in spread(spec.model, shapes).items():
        if name in arguments:
            found.read(arguments[name], shape, name)
        elif name in names or not isinstance(shape, Mapping):
            found.read_tensor(None, shape, name)
        else:
            found.places[name] = dict(shape)  # a name that no tensor has, which is refused with those that there are
    return found.texts()


@dataclass
class _Found:
    """The entries that were found, by tensor and dimension."""

    places: dict[str, dict[int, Any]] = field(default_factory=dict)

    def read(self, value: Any, shape: Any, path: str) -> None:
        """Reads the entries of an argument or of a part of one."""
        if shape is None or (type(shape) is int and shape == value):
            return
        if is_tensor(value):
            self.read_tensor(value.ndim, shape, path)
            return
        for name, part, entry in self._parts(value, shape, path):
            self.read(part, entry, f"{path}.{name}")

    def read_tensor(self, rank: int | None, shape: Any, path: str) -> None:
        """Reads the entries of one tensor."""
        if isinstance(shape, (tuple, list)) and rank in (None, len(shape)):
            shape = dict(enumerate(shape))
        if not isinstance(shape, Mapping) or not all(isinstance(dim, int) for dim in shape):
            sizes = "" if rank is None else f", a tensor of {rank} dimensions,"
            raise UsageError(f"dynamic_shapes gives {path}{sizes} {_short(shape)}", hint=_FORM)
        for dim, entry in shape.items():
            if entry is not None:
                self.places.setdefault(path, {})[dim] = entry

    def _parts(self, value: Any, shape: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
        """Yields the name, the value and the entry of each part of a container."""
        if fields := fields_of(value):
            parts = dict(zip(fields, parts_of(value)))
        elif isinstance(value, Mapping):
            parts = dict(value)
        elif isinstance(value, (tuple, list)):
            parts = {str(i): part for i, part in enumerate(value)}
        else:
            raise UsageError(
                f"dynamic_shapes gives {path}, which is no tensor, {_short(shape)}",
                hint="A number is fixed at its value in the example. Pass it as a tensor if it varies.",
            )
        if isinstance(shape, (tuple, list)) and len(shape) == len(parts):
            shape = dict(zip(parts, shape))
        if isinstance(shape, Mapping) and (unknown := [str(name) for name in shape if str(name) not in parts]):
            close = difflib.get_close_matches(unknown[0], parts, 1)
            raise UsageError(
                f"dynamic_shapes gives {path}.{unknown[0]}; {path} holds {', '.join(parts) or 'nothing'}",
                hint=f"Did you mean {path}.{close[0]}?" if close else f"A size of it is {path}.{next(iter(parts), 0)}.",
            )
        if not isinstance(shape, Mapping) or not all(name in parts for name in shape):
            raise UsageError(
                f"dynamic_shapes gives {path} {_short(shape)}; it holds {', '.join(parts) or 'nothing'}",
                hint=f"Give it the same structure as the argument, or name its tensors: {path}.{next(iter(parts), 0)}.",
            )
        for name, entry in shape.items():
            yield str(name), parts[name], entry

    def texts(self) -> dict[str, dict[int, str]]:
        """Returns the entries as expressions."""
        lows: dict[str, int] = {}
        highs: dict[str, int] = {}
        dims = [entry for entries in self.places.values() for entry in entries.values() if _is_dim(entry)]
        for entry in dims:
            root, scale, offset = _parts_of_dim(entry)
            # A Dim without ends begins at 0 and has none above. Code for empty tensors does not exist.
            least = root.min if root.min > 0 else -((offset - 1) // scale)
            lows[root.__name__] = max(lows.get(root.__name__, 0), int(least))
            has_end = isinstance(root.max, int) or getattr(root.max, "is_Integer", False)
            most = int(root.max) if has_end else (MAX_SIZE - offset) // scale
            highs[root.__name__] = min(highs.get(root.__name__, MAX_SIZE), most)
        texts: dict[str, dict[int, str]] = {}
        for path, entries in self.places.items():
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

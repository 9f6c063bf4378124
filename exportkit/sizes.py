"""Plans the sizes of calls: the ends of every range and some between, within a limit of bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from exportkit.errors import UsageError
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Call, Case, Dimension, Manifest, Size, StateTensor, TensorInput, TensorOutput
from exportkit.progress import bytes_text
from exportkit.spec import FORWARD

WORK = 500_000  # sizes to evaluate per planned call; all of them take a quarter of a second


@dataclass(frozen=True)
class SizePlan:
    """The planned sizes, one mapping from dimension names per call, and messages on skipped sizes."""

    sizes: tuple[dict[str, int], ...]
    skipped: tuple[str, ...]


def plan_sizes(call: Call, count: int, *, seed: int, max_bytes: int) -> SizePlan:
    """Draws `count` different calls from the dimensions' ranges, or fewer if these hold fewer.

    The first call has every dimension at its minimum. Then each dimension is at its maximum while the others are at
    their minimum; then all are at their maximum. The rest is random, with small sizes as likely as large ones
    (log-uniform), and half of the time with values at which conditions of the trace were tried. An end whose inputs
    take more than `max_bytes` is replaced by the largest size that fits, and `skipped` reports it.

    The work is proportional to `count`: for a manifest of a hundred thousand dimensions there are fewer sizes, and
    `skipped` reports that.
    """
    dimensions = call.dimensions
    least = {dimension.name: dimension.min for dimension in dimensions}
    if not dimensions:
        return SizePlan(({},), ())
    budget = _Budget(call, max_bytes, WORK * count)
    if (needed := budget.bytes_of(least)) > max_bytes:
        return SizePlan((), (f"all sizes: even at the smallest, the {_too_large(needed, max_bytes)}",))
    chosen = {tuple(least.values()): least}
    skipped: list[str] = []
    for varied in _ends(dimensions):
        if len(chosen) >= count or budget.spent:
            break
        end = {**least, **{dimension.name: dimension.max for dimension in varied}}
        if (needed := budget.bytes_of(end)) > max_bytes:
            skipped.append(f"{label_of(end)}: its {_too_large(needed, max_bytes)}")
            if len(varied) > 1:
                continue
            end[varied[0].name] = budget.largest(least, varied[0])
        chosen[tuple(end.values())] = end
    generator = random.Random(seed)
    # Every draw fits, but small ranges repeat the same draws, so the number of tries is limited.
    for _ in range(8 * count):
        if len(chosen) >= count or budget.spent:
            break
        drawn = _draw(dimensions, least, generator, budget)
        chosen[tuple(drawn.values())] = drawn
    if budget.spent and len(chosen) < count:
        missing = f"{count - len(chosen)} of {count} sizes"
        skipped.append(f"{missing}: {len(dimensions)} dimensions are too many to draw more")
    return SizePlan(tuple(chosen.values()), tuple(skipped))


def _ends(dimensions: Sequence[Dimension]) -> Iterator[Sequence[Dimension]]:
    """Yields the dimensions to set to their maximum: each alone, then all."""
    for dimension in dimensions:
        yield (dimension,)
    if len(dimensions) > 1:
        yield dimensions


class _Budget:
    """The limit on bytes, and the work left to compute them."""

    def __init__(self, call: Call, max_bytes: int, work: int) -> None:
        """`work` is the number of sizes to evaluate. Each question evaluates all sizes of the call."""
        self._call = call
        self._max_bytes = max_bytes
        self._work = work
        self._cost = max(1, sum(len(tensor.shape) for tensor in call.inputs))

    @property
    def spent(self) -> bool:
        """Whether the work is used up."""
        return self._work < self._cost

    def bytes_of(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of the inputs of a call with these sizes."""
        self._work -= self._cost
        return input_bytes(self._call, sizes)

    def largest(self, sizes: Mapping[str, int], dimension: Dimension) -> int:
        """Returns the greatest value of a dimension that fits, or a smaller one if the work is used up.

        Its minimum must fit.
        """
        changed = dict(sizes)
        low, high = dimension.min, dimension.max
        while low < high and not self.spent:
            changed[dimension.name] = middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_of(changed) <= self._max_bytes else (low, middle - 1)
        return low


def label_of(sizes: Mapping[str, int]) -> str:
    """Returns such as `batch=2, gh=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the exported sizes"


def case_sizes(case: Case) -> dict[str, int]:
    """Returns the sizes of all calls of a case by dimension; of a dimension that changes, the last."""
    return {name: size for call in case.calls for name, size in call.sizes.items()}


def case_label(case: Case, edge_case: str = "") -> str:
    """Returns such as "batch=2", and for a sequence "prefill, 3 times decode; batch=2"; an edge case comes last."""
    return "; ".join(filter(None, (_calls_label(case), edge_case)))


def _calls_label(case: Case) -> str:
    runs: list[tuple[str, int]] = []
    for call in case.calls:
        if runs and runs[-1][0] == call.method:
            runs[-1] = call.method, runs[-1][1] + 1
        else:
            runs.append((call.method, 1))
    if runs == [(FORWARD, 1)]:
        return label_of(case_sizes(case))
    texts = [method if count == 1 else f"{count} times {method}" for method, count in runs]
    if len(texts) > 4:
        texts = [*texts[:3], f"... {len(case.calls)} calls"]
    return f"{', '.join(texts)}; {label_of(case_sizes(case))}"


def has_state(manifest: Manifest, case: Case) -> bool:
    """Returns whether a case needs a session."""
    return any(manifest.method(call.method).state for call in case.calls)


def state_sizes(manifest: Manifest, case: Case) -> dict[str, int]:
    """Returns the sizes of the state in a case, by dimension."""
    dimensions = state_dimensions(manifest)
    return {name: size for name, size in case_sizes(case).items() if name in dimensions}


def state_dimensions(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Returns the least and greatest number of each dimension of the state."""
    names = {size.dimension for each in manifest.state for size in each.shape if isinstance(size, Size)}
    found = {each.name: (each.min, each.max) for method in manifest.methods for each in method.call.dimensions}
    return {name: limits for name, limits in found.items() if name in names}


def state_bytes(manifest: Manifest, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a session's state."""
    return sum(math.prod(shape_at(each, sizes)) * ITEM_BYTES[each.dtype] for each in manifest.state)


def checked_sizes(whose: str, ranges: Mapping[str, tuple[int, int]], given: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of each dimension, in the order of the ranges from least to greatest. `whose` is for messages.

    UsageError: a number is missing, unknown, or out of its range.
    """
    wanted = ", ".join(f"{name} (from {low} to {high})" for name, (low, high) in ranges.items())
    hint = f"Give {wanted or 'no sizes'}."
    for name, (low, high) in ranges.items():
        number = given.get(name)
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            got = repr(number) if name in given else "nothing"
            raise UsageError(f"{name} must be from {low} to {high}, got {got}", hint=hint)
    if unknown := [name for name in given if name not in ranges]:
        raise UsageError(f"{whose} has no dimension {unknown[0]}", hint=hint)
    return {name: given[name] for name in ranges}


def input_bytes(call: Call, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of all inputs of a call with these sizes."""
    total = 0
    for tensor in call.inputs:
        total += math.prod(shape_at(tensor, sizes)) * ITEM_BYTES[tensor.dtype]
    return total


def state_row_bytes(state: StateTensor) -> int:
    """Returns the bytes of a state tensor, counting one row where its size varies."""
    return math.prod(size if isinstance(size, int) else 1 for size in state.shape) * ITEM_BYTES[state.dtype]


@overload
def shape_at(tensor: TensorInput | StateTensor, sizes: Mapping[str, int]) -> list[int]: ...
@overload
def shape_at(tensor: TensorInput | StateTensor | TensorOutput, sizes: Mapping[str, int]) -> list[int | None]: ...
def shape_at(tensor: TensorInput | StateTensor | TensorOutput, sizes: Mapping[str, int]) -> Sequence[int | None]:
    """Returns the shape of a tensor at these sizes; None for a size that does not depend on one dimension."""
    return [size.at(sizes) if isinstance(size, Size) else size for size in tensor.shape]


def sizes_of(inputs: Sequence[TensorInput | StateTensor], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Returns the number of each dimension in inputs of these shapes, which the call allows."""
    return {
        size.dimension: number
        for tensor, shape in zip(inputs, shapes)
        for size, actual in zip(tensor.shape, shape)
        if isinstance(size, Size) and (number := size.number_of(actual)) is not None
    }


def contradicts(
    tensor: TensorInput | StateTensor | TensorOutput, shape: Sequence[int], sizes: Mapping[str, int]
) -> bool:
    """Returns whether the manifest does not allow this shape of a tensor at these sizes."""
    wanted = shape_at(tensor, sizes)
    return len(wanted) != len(shape) or any(size not in (None, given) for size, given in zip(wanted, shape))


def shape_text(shape: Sequence[int | Size | None]) -> str:
    """Returns such as `[batch, 3, 16*gh]`; `?` stands for a size that is not a multiple of one dimension."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def _draw(
    dimensions: Sequence[Dimension], least: Mapping[str, int], generator: random.Random, budget: _Budget
) -> dict[str, int]:
    """Draws each dimension, in random order, within the bytes that the earlier ones leave."""
    sizes = dict(least)
    order = list(dimensions)
    generator.shuffle(order)
    for dimension in order:
        if budget.spent:
            break
        limit = budget.largest(sizes, dimension)
        tried = [value for value in dimension.tried or () if value <= limit]
        if tried and generator.random() < 0.5:
            sizes[dimension.name] = generator.choice(tried)
            continue
        # Log-uniform over [min, limit], 0 included.
        low, high = math.log(dimension.min + 1), math.log(limit + 1)
        drawn = round(math.exp(generator.uniform(low, high)) - 1)
        sizes[dimension.name] = min(max(drawn, dimension.min), limit)
    return sizes


def _too_large(needed: int, max_bytes: int) -> str:
    return f"inputs take {bytes_text(needed)}, more than the limit of {bytes_text(max_bytes)}"

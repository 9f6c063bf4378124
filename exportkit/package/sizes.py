"""Which sizes to compare at: the ends of every range, and some between, within a budget of bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Call, Dimension, TensorInput


@dataclass(frozen=True)
class SizePlan:
    """Sizes by dimension name, one mapping a call; and what was left out of them, in words."""

    sizes: tuple[dict[str, int], ...]
    skipped: tuple[str, ...]


def plan_sizes(call: Call, count: int, *, seed: int, max_bytes: int) -> SizePlan:
    """Draws `count` different calls from the dimensions' ranges.

    First every dimension at its minimum; then each at its maximum while the others are at theirs; then all at their
    maximum; the rest at random, small sizes as likely as large ones (log-uniform). An end whose inputs would take more
    than `max_bytes` is replaced by the largest size that fits, and named in `skipped`.

    Args:
        call: The manifest's.
        count: How many; fewer come back where the ranges hold fewer.
        seed: Of the random ones.
        max_bytes: Of all inputs of one call together.
    """
    dimensions = call.dimensions
    least = {dimension.name: dimension.min for dimension in dimensions}
    if not dimensions:
        return SizePlan(({},), ())
    if input_bytes(call, least) > max_bytes:
        note = f"everything: even at the smallest sizes the inputs take {_bytes_text(input_bytes(call, least))}"
        return SizePlan((), (f"{note}, more than the limit of {_bytes_text(max_bytes)}",))
    chosen: list[dict[str, int]] = [least]
    skipped: list[str] = []
    for dimension in dimensions:
        end = {**least, dimension.name: dimension.max}
        if input_bytes(call, end) > max_bytes:
            skipped.append(_too_large(call, end, max_bytes))
            end[dimension.name] = _largest(call, least, dimension, max_bytes)
        chosen.append(end)
    if len(dimensions) > 1:
        greatest = {dimension.name: dimension.max for dimension in dimensions}
        if input_bytes(call, greatest) > max_bytes:
            skipped.append(_too_large(call, greatest, max_bytes))
        else:
            chosen.append(greatest)
    generator = random.Random(seed)
    # Every draw fits; ranges with few members give the same one again and again, so the tries are bounded.
    for _ in range(8 * count):
        if len(_unique(chosen)) >= count:
            break
        chosen.append(_draw(call, least, generator, max_bytes))
    return SizePlan(tuple(_unique(chosen)[:count]), tuple(skipped))


def label_of(sizes: Mapping[str, int]) -> str:
    """`batch=2, gh=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the exported sizes"


def input_bytes(call: Call, sizes: Mapping[str, int]) -> int:
    """Bytes of all inputs of a call of these sizes."""
    total = 0
    for tensor in call.inputs:
        total += math.prod(shape_at(tensor, sizes)) * ITEM_BYTES[tensor.dtype]
    return total


def shape_at(tensor: TensorInput, sizes: Mapping[str, int]) -> list[int]:
    """An input's shape where the dimensions have these sizes."""
    return [s if isinstance(s, int) else s.scale * sizes[s.dimension] + s.offset for s in tensor.shape]


def _largest(call: Call, least: Mapping[str, int], dimension: Dimension, max_bytes: int) -> int:
    low, high = dimension.min, dimension.max
    while low < high:
        middle = (low + high + 1) // 2
        if input_bytes(call, {**least, dimension.name: middle}) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _draw(call: Call, least: Mapping[str, int], generator: random.Random, max_bytes: int) -> dict[str, int]:
    """Each dimension in a random order, from what the ones before it leave of the budget."""
    sizes = dict(least)
    dimensions = list(call.dimensions)
    generator.shuffle(dimensions)
    for dimension in dimensions:
        limit = _largest(call, sizes, dimension, max_bytes)
        # Log-uniform over [min, limit], 0 included.
        low, high = math.log(dimension.min + 1), math.log(limit + 1)
        drawn = round(math.exp(generator.uniform(low, high)) - 1)
        sizes[dimension.name] = min(max(drawn, dimension.min), limit)
    return sizes


def _unique(sizes: list[dict[str, int]]) -> list[dict[str, int]]:
    return list({tuple(item.items()): item for item in sizes}.values())


def _too_large(call: Call, sizes: Mapping[str, int], max_bytes: int) -> str:
    needed = _bytes_text(input_bytes(call, sizes))
    return f"{label_of(sizes)}: its inputs take {needed}, more than the limit of {_bytes_text(max_bytes)}"


def _bytes_text(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count} bytes"

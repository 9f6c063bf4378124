"""Values that are apt to show a wrong kernel: of one sign, with ties, the ends of a dtype, infinities, NaN."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from exportkit.package.case_files import OUT_OF_RANGE

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
Place = TypeVar("Place", bound=Hashable)

GREAT = ("infinities", "the greatest values")
SPREADING = ("NaN", *GREAT, "subnormal values")

_SOME = 1 / 16  # of the elements become the values that a kind sprinkles in
SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16)


def kinds_of(tensor: torch.Tensor, *, keep_integers: bool) -> tuple[str, ...]:
    """Returns the kinds of edge values that an input can have, the most telling first.

    `keep_integers`: they may depend on one another, such as offsets, and stay as they are.
    """
    if not tensor.numel():
        return ()
    if tensor.dtype is torch.bool:
        return tuple(_MASKS)
    if tensor.is_complex():
        return ("ties", "zeros", "one value")
    if tensor.is_floating_point():
        return () if torch.finfo(tensor.dtype).bits < 16 else tuple(_FLOATS)
    if tensor.dtype in SMALL_INTEGERS and not keep_integers:
        return tuple(kind for kind in _SMALL if kind != "negative values" or tensor.dtype is not torch.uint8)
    if keep_integers or tensor.dtype not in (torch.int32, torch.int64):
        return ()
    # They may be indices or ids: only values of the example are known to be legal.
    signs = {"positive values": bool((tensor > 0).any()), "negative values": bool((tensor < 0).any())}
    mixed = not bool((tensor > 0).all() | (tensor < 0).all())
    return tuple(kind for kind in _INDICES if signs.get(kind, True) and (mixed or kind not in signs))


def kinds_of_rows(tensor: torch.Tensor, *, keep_integers: bool) -> tuple[str, ...]:
    """Returns the kinds by which an input leads operators to find nothing, one thing, two, or as many as there are."""
    if not tensor.numel() or not tensor.dim():
        return ()
    if tensor.dtype is torch.bool:
        return (*_MASKS, TWO_ROWS)
    if tensor.is_floating_point():
        return (*_ROWS, "negative values", "positive values", "zeros")
    return () if keep_integers or tensor.is_complex() else (EQUAL_ROWS, TWO_ROWS)


def planned(kinds: Mapping[Place, Sequence[str]], most: int) -> list[dict[Place, str]]:
    """Plans cases: by input, the kind of its edge values.

    Every input has every plain kind, each case pairs them otherwise. What spreads through a model, such as NaN, is in
    one input at a time, because it would hide what is wrong with the others. There are at most `most`.
    """
    plain = {place: [kind for kind in own if kind not in SPREADING] for place, own in kinds.items()}
    plain = {place: own for place, own in plain.items() if own}
    cases = [
        {place: own[(number + shift) % len(own)] for shift, (place, own) in enumerate(plain.items())}
        for number in range(max(map(len, plain.values()), default=0))
    ]
    spreading = [place for place, own in kinds.items() if set(SPREADING) <= set(own)]
    cases += [
        {spreading[(number + shift) % len(spreading)]: kind}
        for shift in range(len(spreading))
        for number, kind in enumerate(SPREADING)
    ]
    return cases[:most]


def with_edge_values(kind: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a drawn input of the CPU with edge values of a kind that `kinds_of` named."""
    if kind in _ROWS:
        change = _ROWS[kind]
    elif tensor.dtype is torch.bool:
        change = _MASKS[kind]
    elif tensor.is_floating_point() or tensor.is_complex():
        change = _FLOATS[kind]
    else:
        change = (_SMALL if tensor.dtype in SMALL_INTEGERS else {**_INDICES, **_BEYOND})[kind]
    return change(tensor.contiguous(), generator).to(tensor.dtype).reshape(tensor.shape)


def _magnitude(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    wide = tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)
    return torch.where(wide == 0, torch.ones_like(wide), wide.abs())


def _negative(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return -_magnitude(tensor, generator)


def _ties(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Leaves at most three values, each many times and in runs."""
    flat = tensor.reshape(-1)
    few = flat[torch.randint(len(flat), (3,), generator=generator)]
    chosen = few[torch.randint(3, (len(flat),), generator=generator)]
    return torch.where(torch.rand(len(flat), generator=generator) < 0.25, chosen.roll(1), chosen)


def _one_value(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[torch.randint(len(flat), (1,), generator=generator)].expand(len(flat))


def _zeros(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns zeros, and -0 at half of the places."""
    zeros = torch.zeros_like(tensor)
    if not tensor.is_floating_point():
        return zeros
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, zeros, -zeros)


def _sprinkled(*values: Callable[[torch.dtype], float]) -> Change:
    """Returns what puts these values at some places: at least at one, and each if there are so many."""

    def change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        flat = tensor.reshape(-1).clone()
        count = max(len(values), int(len(flat) * _SOME))
        places = torch.randperm(len(flat), generator=generator)[:count]
        given = torch.tensor([value(tensor.dtype) for value in values], dtype=torch.float64)
        if not tensor.is_floating_point():
            given = given.to(torch.int64)
        flat[places] = given.to(tensor.dtype)[torch.arange(len(places)) % len(values)]
        return flat

    return change


def _of_sign(sign: int) -> Change:
    """Returns what draws from the values of one sign."""

    def change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        known = tensor[tensor * sign > 0]
        return known[torch.randint(len(known), tensor.shape, generator=generator)]

    return change


def _ends(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    low, high = tensor.min(), tensor.max()
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, low, high)


def _of_rows(different: int | None) -> Change:
    """Returns what leaves so many different rows, far apart: all if it is None."""

    def change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        rows = torch.arange(len(tensor)) % (different or len(tensor))
        if not tensor.is_floating_point():
            return tensor[rows.clamp(max=len(tensor) - 1)]
        # In ascending order they are boxes with an area, and intervals.
        row = tensor[0].sort().values if tensor.dim() > 1 else tensor[0]
        apart = 4 * tensor.nan_to_num(0, 0, 0).abs().max() + 1
        return row + (rows * apart).reshape(-1, *[1] * (tensor.dim() - 1))

    return change


def _one_place(value: bool) -> Change:
    def change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        flat = torch.full((tensor.numel(),), not value)
        flat[torch.randint(len(flat), (1,), generator=generator)] = value
        return flat

    return change


_FLOATS: Mapping[str, Change] = {
    "negative values": _negative,
    "ties": _ties,
    "zeros": _zeros,
    "positive values": _magnitude,
    "NaN": _sprinkled(lambda _: float("nan")),
    "infinities": _sprinkled(lambda _: float("inf"), lambda _: float("-inf")),
    "one value": _one_value,
    "the greatest values": _sprinkled(lambda t: torch.finfo(t).max, lambda t: torch.finfo(t).min),
    "subnormal values": _sprinkled(
        lambda t: torch.finfo(t).smallest_normal / 2,
        lambda t: -torch.finfo(t).smallest_normal / 4,
        lambda t: torch.finfo(t).smallest_normal,
        lambda t: -0.0,
    ),
}

EQUAL_ROWS, TWO_ROWS = "equal rows", "rows of two kinds"
_ROWS: Mapping[str, Change] = {EQUAL_ROWS: _of_rows(1), TWO_ROWS: _of_rows(2), "rows far apart": _of_rows(None)}

_SMALL: Mapping[str, Change] = {
    "positive values": lambda t, g: _magnitude(t, g).clamp(max=torch.iinfo(t.dtype).max),
    "negative values": _negative,
    "the ends of the dtype": _sprinkled(lambda t: torch.iinfo(t).min, lambda t: torch.iinfo(t).max),
    "ties": _ties,
    "zeros": _zeros,
    "the lowest value": lambda t, _: torch.full_like(t, torch.iinfo(t.dtype).min),
    "one value": _one_value,
}

_INDICES: Mapping[str, Change] = {
    "the least value": lambda t, _: t.min().expand(t.shape),
    "the greatest value": lambda t, _: t.max().expand(t.shape),
    "both ends": _ends,
    "positive values": _of_sign(1),
    "negative values": _of_sign(-1),
    "ties": _ties,
}

_FAR = 1_000_000_007
_BEYOND: Mapping[str, Change] = dict(zip(OUT_OF_RANGE, (_sprinkled(lambda _: -_FAR), _sprinkled(lambda _: _FAR))))

_MASKS: Mapping[str, Change] = {
    "one place": _one_place(True),
    "nothing": lambda t, _: torch.zeros_like(t),
    "every place": lambda t, _: torch.ones_like(t),
    "all but one place": _one_place(False),
}

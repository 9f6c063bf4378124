"""Draws a directed graph as SVG: boxes in layers from top to bottom, each arrow from a box to one below it.

The method is that of Sugiyama, Tagawa and Toda (1981): layers by the longest path, an order within each layer by the
mean of the neighbours' places, then positions close to the neighbours'.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Edge = tuple[str, str]

_CHARACTER, _LINE, _PADDING = 7.3, 17, 9  # pixels, of a monospaced font of 12 pixels
_BETWEEN_BOXES, _BETWEEN_LAYERS, _BESIDE_LINES = 22, 38, 14
_WIDEST = 800  # pixels of the boxes of a layer, where results can move to the next one
_SWEEPS = 24


@dataclass(frozen=True)
class Box:
    """What an arrow starts or ends at.

    Attributes:
        kind: Its class in the style sheet.
        lines: Its text. The first line is the title.
    """

    kind: str
    lines: tuple[str, ...]

    @property
    def width(self) -> float:
        """Pixels."""
        return max(map(len, self.lines)) * _CHARACTER + 2 * _PADDING

    @property
    def height(self) -> float:
        """Pixels."""
        return len(self.lines) * _LINE + 2 * _PADDING - 4


@dataclass(frozen=True)
class Drawing:
    """A drawn graph: SVG elements from (0, 0) on, and their size in pixels."""

    elements: tuple[str, ...]
    width: float
    height: float


@dataclass
class _Places:
    """Boxes and bends of arrows, layer by layer, and the arrows between adjacent layers."""

    layers: list[list[str]]
    widths: dict[str, float]
    above: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    below: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    x: dict[str, float] = field(default_factory=dict)


def draw(boxes: Mapping[str, Box], edges: Iterable[Edge]) -> Drawing:
    """Draws a graph.

    Args:
        boxes: The boxes by name, each after those that lead to it.
        edges: Pairs of names, from and to.
    """
    arrows = list(dict.fromkeys(edges))
    rank = _ranks(boxes, arrows)
    bends = {arrow: [f"{arrow}{layer}" for layer in range(rank[arrow[0]] + 1, rank[arrow[1]])] for arrow in arrows}
    places = _places(boxes, rank, bends)
    _order(places)
    _position(places)
    tops, bottoms = _heights(boxes, places.layers)
    layer_of = {name: number for number, layer in enumerate(places.layers) for name in layer}
    elements = []
    for arrow, middle in bends.items():
        elements.append(_arrow([arrow[0], *middle, arrow[1]], places.x, boxes, layer_of, tops, bottoms))
    for name, box in boxes.items():
        elements.append(_box(box, places.x[name], (tops[layer_of[name]] + bottoms[layer_of[name]]) / 2))
    width = max(places.x[name] + width / 2 for name, width in places.widths.items())
    return Drawing(tuple(elements), width, bottoms[-1])


def _ranks(boxes: Mapping[str, Box], arrows: Sequence[Edge]) -> dict[str, int]:
    """Returns each box's layer: as high as its arrows allow, but what nothing leads to just above its first target."""
    sources: dict[str, list[str]] = defaultdict(list)
    targets: dict[str, list[str]] = defaultdict(list)
    for start, end in arrows:
        sources[end].append(start)
        targets[start].append(end)
    rank: dict[str, int] = {}
    for name in boxes:
        rank[name] = max((rank[source] + 1 for source in sources[name]), default=0)
    for name in boxes:
        if targets[name] and not sources[name]:
            rank[name] = min(rank[target] for target in targets[name]) - 1
    # What leads nowhere may stand lower.
    number = 0
    while layer := [name for name in boxes if rank[name] == number]:
        last = [name for name in layer if not targets[name]]
        while len(layer) > 1 and last and _row_width(boxes, layer) > _WIDEST:
            layer.remove(moved := last.pop())
            rank[moved] += 1
        number += 1
    return rank


def _row_width(boxes: Mapping[str, Box], names: Sequence[str]) -> float:
    return sum(boxes[name].width + _BETWEEN_BOXES for name in names)


def _places(boxes: Mapping[str, Box], rank: Mapping[str, int], bends: Mapping[Edge, list[str]]) -> _Places:
    places = _Places([[] for _ in range(max(rank.values()) + 1)], {name: box.width for name, box in boxes.items()})
    for name in boxes:
        places.layers[rank[name]].append(name)
    for (start, end), middle in bends.items():
        for number, bend in enumerate(middle, rank[start] + 1):
            places.layers[number].append(bend)
            places.widths[bend] = _BESIDE_LINES
        for upper, lower in itertools.pairwise([start, *middle, end]):
            places.below[upper].append(lower)
            places.above[lower].append(upper)
    return places


def _order(places: _Places) -> None:
    """Orders each layer so that few arrows cross."""
    best, fewest = [list(layer) for layer in places.layers], _crossings(places)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        layers = places.layers[1:] if down else places.layers[-2::-1]
        neighbours = places.above if down else places.below
        for layer in layers:
            at = {name: number for row in places.layers for number, name in enumerate(row)}
            mean = {
                n: sum(at[o] for o in neighbours[n]) / len(neighbours[n]) if neighbours[n] else at[n] for n in layer
            }
            layer.sort(key=lambda name: mean[name])
        if (crossings := _crossings(places)) < fewest:
            best, fewest = [list(layer) for layer in places.layers], crossings
    places.layers[:] = best


def _crossings(places: _Places) -> int:
    count = 0
    for upper, lower in itertools.pairwise(places.layers):
        at = {name: number for number, name in enumerate(lower)}
        ends = [[at[end] for end in places.below[name]] for name in upper]
        for left, right in itertools.combinations(ends, 2):
            count += sum(a > b for a in left for b in right)
    return count


def _position(places: _Places) -> None:
    """Puts everything as close to its neighbours as the order in its layer allows, from x = 0 on."""
    x, widths = places.x, places.widths
    for layer in places.layers:
        _spread(layer, dict.fromkeys(layer, 0.0), widths, x)
    for sweep in range(_SWEEPS):
        for layer in places.layers if sweep % 2 == 0 else reversed(places.layers):
            wanted = {}
            for name in layer:
                beside = [x[other] for other in (*places.above[name], *places.below[name])]
                wanted[name] = sum(beside) / len(beside) if beside else x[name]
            _spread(layer, wanted, widths, x)
    left = min(x[name] - width / 2 for name, width in widths.items())
    for name in x:
        x[name] -= left


def _spread(
    layer: Sequence[str], wanted: Mapping[str, float], widths: Mapping[str, float], x: dict[str, float]
) -> None:
    """Sets the positions nearest to the wanted ones (least squares) that keep the order and the distances.

    Neighbours that would overlap become one block, which goes to the mean of what its members want.
    """
    blocks: list[tuple[float, list[tuple[str, float]]]] = []  # the place of a block, and its members' offsets
    for name in layer:
        place, members = wanted[name], [(name, 0.0)]
        while blocks:
            before, others = blocks[-1]
            last, offset = others[-1]
            least = before + offset + (widths[last] + widths[members[0][0]]) / 2 + _BETWEEN_BOXES
            if place >= least:
                break
            blocks.pop()
            shift = least - before
            members = [*others, *((member, shift + at) for member, at in members)]
            place = sum(wanted[member] - at for member, at in members) / len(members)
        blocks.append((place, members))
    for place, members in blocks:
        for member, at in members:
            x[member] = place + at


def _heights(boxes: Mapping[str, Box], layers: Sequence[Sequence[str]]) -> tuple[list[float], list[float]]:
    """Returns the tops and the bottoms of the layers."""
    tops, bottoms, y = [], [], 0.0
    for layer in layers:
        height = max((boxes[name].height for name in layer if name in boxes), default=0.0)
        tops.append(y)
        bottoms.append(y + height)
        y += height + _BETWEEN_LAYERS
    return tops, bottoms


def _arrow(
    names: Sequence[str],
    x: Mapping[str, float],
    boxes: Mapping[str, Box],
    layer_of: Mapping[str, int],
    tops: Sequence[float],
    bottoms: Sequence[float],
) -> str:
    """Draws an arrow through its bends: vertical beside boxes, curved between layers."""

    def edge_of(name: str, side: int) -> float:
        """The lower (1) or upper (-1) edge of a box, or of its layer where the arrow only passes it."""
        layer = layer_of[name]
        if name not in boxes:
            return bottoms[layer] if side > 0 else tops[layer]
        return (tops[layer] + bottoms[layer] + side * boxes[name].height) / 2

    path = f"M{x[names[0]]:.0f},{edge_of(names[0], 1):.0f}"
    for upper, lower in itertools.pairwise(names):
        start, end = edge_of(upper, 1), edge_of(lower, -1)
        middle = (start + end) / 2
        path += f" C{x[upper]:.0f},{middle:.0f} {x[lower]:.0f},{middle:.0f} {x[lower]:.0f},{end:.0f}"
        if lower not in boxes:
            path += f" V{edge_of(lower, 1):.0f}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _box(box: Box, x: float, y: float) -> str:
    left, top = x - box.width / 2, y - box.height / 2
    text = "".join(
        f'<text class="{"title" if number == 0 else "detail"}" x="{x:.0f}" '
        f'y="{top + _PADDING + 10 + number * _LINE:.0f}">{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    )
    return (
        f'<g class="{box.kind}"><rect x="{left:.0f}" y="{top:.0f}" width="{box.width:.0f}" '
        f'height="{box.height:.0f}" rx="5"/>{text}</g>'
    )

"""Holds a gradient to differences of what it is the gradient of.

Along a path, the difference of an output at the two ends is the integral of its gradient: the work that a force does
is the energy that is lost. Unlike a difference over a tiny step, that of a long path is not lost in rounding. How much
each number may be off is measured: the rounding of the output and of the gradient where the input changes by rounding,
and the integral by a coarser rule over half of its points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from exportkit.verify.comparisons import PathFinding

# By input: the sum of the output, and what ought to be its gradient.
Evaluate = Callable[[Sequence[torch.Tensor]], Sequence[tuple[float, torch.Tensor]]]

_LENGTHS = tuple(0.1 * 5.0**-k for k in range(4))  # of half a path, in units of the input's spread
_PATHS = 3  # along the gradient, and in two random directions
_PROBES = 8
_BLIND = 0.1  # a path that sees only errors above this one
_SAFETY = 3.0
_STEPS = 8  # of the finer rule; the coarser one has half of them


def held_along_paths(evaluate: Evaluate, start: torch.Tensor, *, seed: int, precision: float) -> PathFinding:
    """Compares along paths through a point. `precision` is the epsilon of the least precise dtype in use."""
    generator = torch.Generator().manual_seed(seed)
    here = start.double()
    rounding = max(torch.finfo(start.dtype).eps, precision, 2.0**-23) * float(here.abs().max())
    places = [start] + [
        (here + rounding * torch.randn(here.shape, generator=generator, dtype=torch.float64)).to(start.dtype)
        for _ in range(_PROBES)
    ]
    (value, gradient), *probes = evaluate(places)
    if not math.isfinite(value) or not gradient.isfinite().all():
        return PathFinding(False, 0.0, math.inf, value, value)
    floor = max(torch.finfo(start.dtype).eps, precision) * abs(value)
    misfits = [
        abs(found - value - _work((slope.double() + gradient.double()) / 2, place.double() - here))
        for place, (found, slope) in zip(places[1:], probes)
    ]
    noise = max(floor, *misfits)
    least = min(max(1e-6, 1e4 * precision), 0.05)
    slopes = [slope.double() - gradient.double() for _, slope in probes]
    ways = [_one_size(gradient.double())]
    ways += [torch.randn(here.shape, generator=generator, dtype=torch.float64) for _ in range(_PATHS - 1)]
    spread, findings = _spread(here), []
    for way in ways:
        slope_noise = max(abs(_work(slope, way)) for slope in slopes)
        paths = [_path(evaluate, start, way, spread * length, noise, slope_noise, least) for length in _LENGTHS]
        findings.append(_verdict([path for path in paths if path is not None]))
    return min(findings, key=lambda finding: (not finding.wrong, finding.visible))


@dataclass(frozen=True)
class _Path:
    off: float
    visible: float
    change: float
    work: float
    size: float

    def sees(self, off: float) -> bool:
        """Whether a gradient that is off by so much everywhere would be seen."""
        return self.visible * self.size < off * abs(self.work) / 2


def _verdict(paths: Sequence[_Path]) -> PathFinding:
    """Judges the paths in one direction.

    A path on which the output jumps is no reason to blame the gradient: two must fail, and none that sees as much pass.
    What sees only large errors, as in bfloat16, judges nothing.
    """
    if not paths:
        return PathFinding(False, 0.0, math.inf, 0.0, 0.0)
    failing = sorted(
        (path for path in paths if path.off > path.visible and path.visible < _BLIND), key=lambda path: path.visible
    )
    seeing = [path for path in paths if path.off <= path.visible]
    if len(failing) >= 2 and not any(path.sees(failing[0].off) for path in seeing):
        worst = failing[0]
        return PathFinding(True, worst.off, worst.visible, worst.change, worst.work)
    best = min(seeing or paths, key=lambda path: path.visible)
    return PathFinding(False, min(best.off, best.visible), best.visible, best.change, best.work)


def _path(
    evaluate: Evaluate,
    start: torch.Tensor,
    way: torch.Tensor,
    half: float,
    noise: float,
    slope_noise: float,
    least: float,
) -> _Path | None:
    """Compares along one path, by Clenshaw and Curtis' rule. None where the output is not finite."""
    here = start.double()
    knots = [math.cos(math.pi * k / _STEPS) for k in range(_STEPS + 1)]
    ideal = [here + half * knot * way for knot in knots]
    places = [place.to(start.dtype) for place in ideal]
    answers = evaluate(places)
    slopes = [_work(gradient.double(), way) * half for _, gradient in answers]
    # The ends were rounded; the gradient there says what that changes.
    ends = [answers[k][0] - _work(answers[k][1].double(), places[k].double() - ideal[k]) for k in (0, _STEPS)]
    work = _sum(_weights(_STEPS), slopes)
    coarse = _sum(_weights(_STEPS // 2), slopes[::2])
    change = ends[0] - ends[1]
    if not all(map(math.isfinite, (change, work, coarse))):
        return None
    size = max(2 * sum(map(abs, slopes)) / len(slopes), abs(change))
    if not size:
        return None
    allowed = _SAFETY * (2 * noise + abs(work - coarse) + 2 * half * slope_noise)
    return _Path(abs(change - work) / size, allowed / size + least, change, work, size)


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values))


def _weights(steps: int) -> list[float]:
    """Returns the weights of Clenshaw and Curtis' rule on [-1, 1] at cos(pi k / steps), for an even number of steps."""
    found = []
    for k in range(steps + 1):
        total = 1.0
        for j in range(1, steps // 2 + 1):
            part = 1.0 if 2 * j == steps else 2.0
            total -= part * math.cos(2 * math.pi * j * k / steps) / (4 * j * j - 1)
        found.append(total * (1.0 if k in (0, steps) else 2.0) / steps)
    return found


def _work(gradient: torch.Tensor, way: torch.Tensor) -> float:
    return float((gradient * way).sum())


def _one_size(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the direction of a gradient, with a root mean square of 1."""
    size = float(gradient.square().mean().sqrt())
    return gradient / size if size else torch.zeros_like(gradient)


def _spread(point: torch.Tensor) -> float:
    """Returns how far the rows of an input lie apart; the size of its numbers if they do not."""
    rows = point.reshape(point.shape[0], -1) if point.dim() > 1 else point.reshape(-1, 1)
    apart = float((rows - rows.mean(0)).square().mean().sqrt())
    return apart or float(point.square().mean().sqrt()) or 1.0

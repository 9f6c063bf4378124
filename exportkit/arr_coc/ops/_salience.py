"""`compute_salience` and its gradient in ATen, with parts that other references use too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exportkit.arr_coc.ops._reference import NORM_FLOOR, accumulated, norm, unit

# The edge strength and the colour contrast with score one half; the term that keeps magnitudes smooth at zero.
EDGE_HALF, CONTRAST_HALF, EDGE_FLOOR = 0.1, 25.0, 1e-8

AROUND = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]
"""The directions to a patch's neighbours."""


def normalised(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def patch_means(planes: Tensor, patch_size: int) -> Tensor:
    """[B, C, H, W] -> [B, C, H / P, W / P]."""
    batch, channels, height, width = planes.shape
    blocks = (batch, channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return planes.reshape(blocks).mean((3, 5))


def over_patches(means: Tensor, patch_size: int) -> Tensor:
    """The adjoint of `patch_means`: [B, C, h, w] / P^2, repeated over each patch's pixels."""
    batch, channels, rows, columns = means.shape
    blocks = means[:, :, :, None, :, None].expand(-1, -1, -1, patch_size, -1, patch_size)
    return blocks.reshape(batch, channels, rows * patch_size, columns * patch_size) / patch_size**2


def shifted(planes: Tensor, dy: int, dx: int) -> Tensor:
    """planes[..., i + dy, j + dx], zero outside."""
    rows, columns = planes.shape[-2:]
    padded = torch.nn.functional.pad(planes, (1, 1, 1, 1))
    return padded[..., 1 + dy : rows + 1 + dy, 1 + dx : columns + 1 + dx]


def neighbour_distances(colours: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns distances [B, h, w] to each of the 8 neighbours (0 if missing), and the numbers of neighbours [h, w]."""
    exists = colours.new_ones(colours.shape[-2:])
    inside = [shifted(exists, dy, dx) for dy, dx in AROUND]
    distances = [
        torch.where(here > 0, torch.linalg.vector_norm(colours - shifted(colours, dy, dx), dim=1), 0)
        for here, (dy, dx) in zip(inside, AROUND)
    ]
    return distances, torch.stack(inside).sum(0)


def magnitudes(sobel_x: Tensor, sobel_y: Tensor) -> Tensor:
    return torch.sqrt(sobel_x**2 + sobel_y**2 + EDGE_FLOOR)


def compute_salience_forward_reference(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> tuple[Tensor, ...]:
    """Computes `compute_salience` and statistics that its gradient would otherwise compute again from all inputs.

    Returns:
        The salience, the mean of each sample's features divided by its norm, that norm (both 0 if N = 0), and for each
        patch the norm of its features, their cosine with the mean, the mean edge strength, the mean L, a and b, and the
        mean distance of that colour from the neighbours'.
    """
    x, pixels, gx, gy = (accumulated(t) for t in (features, lab, sobel_x, sobel_y))
    w_e, w_c, w_f = normalised(weights)
    edges = patch_means(magnitudes(gx, gy), patch_size)
    colours = patch_means(pixels, patch_size)
    distances, neighbours = neighbour_distances(colours)
    d = (sum(distances) / neighbours.clamp(min=1)).flatten(1)
    mean = x.sum(1, keepdim=True) / max(x.shape[1], 1)
    cosine = (unit(x) * unit(mean)).sum(-1)
    m = edges.flatten(1)
    salience = w_e * m / (m + EDGE_HALF) + w_c * d / (d + CONTRAST_HALF) + w_f * (1 - cosine) / 2
    patches = torch.cat([norm(x).mT, cosine.unsqueeze(1), edges.flatten(2), colours.flatten(2), d.unsqueeze(1)], 1)
    statistics = (unit(mean)[:, 0], norm(mean)[:, 0], patches)
    return salience.to(features.dtype), *(statistic.detach() for statistic in statistics)


def features_grad(slope: Tensor, x: Tensor, mean: Tensor, mean_norm: Tensor, norms: Tensor, cosines: Tensor) -> Tensor:
    """Computes the gradient of the features [B, N, D] from the gradient of the cosines [B, N].

    `mean` [B, 1, D] is a unit vector. `mean_norm` is [B, 1, 1], `norms` and `cosines` are [B, N, 1].
    """
    directions = x / norms.clamp(min=NORM_FLOOR)
    own = mean - torch.where(norms >= NORM_FLOOR, cosines * directions, 0)
    own = slope.unsqueeze(-1) * own / norms.clamp(min=NORM_FLOOR)
    of_unit = (slope.unsqueeze(-1) * directions).sum(1, keepdim=True)
    along = (of_unit * mean).sum(-1, keepdim=True) * mean
    of_mean = (of_unit - torch.where(mean_norm >= NORM_FLOOR, along, 0)) / mean_norm.clamp(min=NORM_FLOOR)
    return own + of_mean / max(x.shape[1], 1)


def colours_grad(upstream: Tensor, colours: Tensor, mean_distances: Tensor) -> Tensor:
    """Computes the gradient of the patches' mean colours [B, 3, h, w] from the gradient of C [B, h, w]."""
    distances, neighbours = neighbour_distances(colours)
    slope = upstream * CONTRAST_HALF / (mean_distances + CONTRAST_HALF) ** 2 / neighbours.clamp(min=1)
    exists = colours.new_ones(colours.shape[-2:])
    gradient = torch.zeros_like(colours)
    for distance, (dy, dx) in zip(distances, AROUND):
        both = (slope + shifted(slope, dy, dx)).unsqueeze(1)
        direction = (colours - shifted(colours, dy, dx)) / distance.unsqueeze(1)
        counts = (shifted(exists, dy, dx) > 0) & (distance.unsqueeze(1) != 0)
        gradient = gradient + torch.where(counts, both * direction, 0)
    return gradient


def compute_salience_grad_reference(
    grad: Tensor,
    features: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    mean_unit: Tensor,
    mean_norm: Tensor,
    patches: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, ...]:
    """Gradients of `compute_salience`, from statistics of `compute_salience_forward`."""
    g, x, gx, gy = (accumulated(t) for t in (grad, features, sobel_x, sobel_y))
    w_e, w_c, w_f = normalised(weights)
    grid = tuple(size // patch_size for size in sobel_x.shape[2:])
    norms, cosines = patches[:, 0].unsqueeze(-1), patches[:, 1].unsqueeze(-1)
    edges, colours, distances, g_patches = (
        patches[:, 2].unflatten(1, grid),
        patches[:, 3:6].unflatten(2, grid),
        patches[:, 6].unflatten(1, grid),
        g.unflatten(1, grid),
    )
    edge_slope = w_e * g_patches * EDGE_HALF / (edges + EDGE_HALF) ** 2
    per_pixel = over_patches(edge_slope.unsqueeze(1), patch_size) / magnitudes(gx, gy)
    mean = (mean_unit.unsqueeze(1), mean_norm.unsqueeze(1))
    gradients = (
        (need_features, lambda: features_grad(-w_f * g / 2, x, *mean, norms, cosines)),
        (need_lab, lambda: over_patches(colours_grad(w_c * g_patches, colours, distances), patch_size)),
        (need_sobel_x, lambda: per_pixel * gx),
        (need_sobel_y, lambda: per_pixel * gy),
    )
    return tuple(f().to(features.dtype) if need else features.new_empty(0) for need, f in gradients)

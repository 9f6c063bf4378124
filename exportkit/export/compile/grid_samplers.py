"""Samples of grids are those of eager's kernels, also where a grid or an image is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_aten = torch.ops.aten
_BILINEAR_OF_ZEROS = (0, 0)
_OF_CUDNN = (torch.float64, torch.float32, torch.float16)


def grid_samplers_of_eager(module: torch.fx.GraphModule, device: torch.device) -> Sequence[str]:
    """Replaces grid_sample in a program's module by operators that code can call, in place.

    Inductor takes a sample apart. It then multiplies the image's first element by 0 for each place outside, which is
    NaN if that element is, and writes 0 where the grid is NaN. On CUDA, eager takes cuDNN's operator at some sizes,
    which no code can call. Where the grid is NaN or infinite, its samples are NaN, and those of ATen's kernel are not.
    Returns the operators that are to be left to eager's kernels.
    """
    flat = []
    for node in list(module.graph.nodes):
        if node.target not in (_aten.grid_sampler.default, _aten.grid_sampler_2d.default):
            continue
        image, grid, mode, padding, corners = node.args
        if image.meta["val"].dim() > 4:
            node.target = _aten.grid_sampler_3d.default  # which Inductor does not take apart
            continue
        node.target = _aten.grid_sampler_2d.default
        flat.append(str(node.target))
        if device.type == "cuda" and (mode, padding) == _BILINEAR_OF_ZEROS and corners and _is_cudnns(image):
            _lose_samples(module.graph, node, grid)
    module.recompile()
    return flat[:1]


def _is_cudnns(image: torch.fx.Node) -> bool:
    """Asks what eager asks (cond_cudnn_grid_sampler in ATen/native/GridSamplerUtils.h)."""
    value = image.meta["val"]
    return value.dtype in _OF_CUDNN and value.shape[1] <= 1024


def _lose_samples(graph: torch.fx.Graph, node: torch.fx.Node, grid: torch.fx.Node) -> None:
    users = list(node.users)
    with graph.inserting_before(node):
        endless = graph.call_function(_aten.isinf.default, (grid,))
        lost = graph.call_function(
            _aten.logical_or.default, (endless, graph.call_function(_aten.isnan.default, (grid,)))
        )
        points = graph.call_function(_aten.any.dim, (lost, -1))
        everywhere = graph.call_function(_aten.unsqueeze.default, (points, 1))
    with graph.inserting_after(node):
        samples = graph.call_function(_aten.masked_fill.Scalar, (node, everywhere, math.nan))
    for user in users:
        user.replace_input_with(node, samples)

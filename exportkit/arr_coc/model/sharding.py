"""Shards the model's parameters among training processes with FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from exportkit.arr_coc.model.encoder import VisionTransformer
from exportkit.arr_coc.model.pipeline import ARRCOC


def shard(model: ARRCOC, mesh: DeviceMesh | None = None, *, dtype: torch.dtype | None = None) -> ARRCOC:
    """Shards a model in place, on the devices of a mesh, or all: each block of a transformer separately, then the rest.

    A process holds its part of every parameter, gradient and optimiser state, and gathers a block's parameters only
    while it computes the block. `torch.distributed.checkpoint.state_dict.get_model_state_dict` returns whole tensors.
    The model must be the same in every process. The dtype is the encoder's; parameters, sums of gradients over
    processes, and features are float32, so patches are always ranked in float32.
    """
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    if isinstance(model.encoder, VisionTransformer):
        # Pixels are not cast, because the texture maps are computed from them.
        inside = whole if dtype is None else MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        outside = whole if dtype is None else MixedPrecisionPolicy(dtype, torch.float32, torch.float32, False)
        for block in model.encoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inside)
        fully_shard(model.encoder, mesh=mesh, mp_policy=outside)
    fully_shard(model, mesh=mesh, mp_policy=whole)
    return model

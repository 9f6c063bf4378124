"""The model's parameters shared out among the processes that train it, by FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from exportkit.models.arr_coc.encoder import VisionTransformer
from exportkit.models.arr_coc.pipeline import ARRCOC


def shard(model: ARRCOC, mesh: DeviceMesh | None = None, *, dtype: torch.dtype | None = None) -> ARRCOC:
    """Shards a model in place: each block of a transformer for itself, then the rest.

    A process holds its part of every parameter, gradient and optimiser state, and gathers a block's only while it
    computes it. For a state dict of whole tensors see `torch.distributed.checkpoint.state_dict.get_model_state_dict`.

    Args:
        model: On the mesh's device, the same in every process.
        mesh: The processes; by default all of them.
        dtype: Compute the encoder in this one, such as torch.bfloat16, with float32 parameters, gradients summed over
            the processes in float32, and float32 features: what ranks the patches is measured in float32 always.

    Returns:
        The model itself.
    """
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    if isinstance(model.encoder, VisionTransformer):
        # Pixels stay as they are: the texture maps are made of them.
        inside = whole if dtype is None else MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        outside = whole if dtype is None else MixedPrecisionPolicy(dtype, torch.float32, torch.float32, False)
        for block in model.encoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inside)
        fully_shard(model.encoder, mesh=mesh, mp_policy=outside)
    fully_shard(model, mesh=mesh, mp_policy=whole)
    return model

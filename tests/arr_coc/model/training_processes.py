"""Training by several processes against the same training by one, in each of them; the tests run it on gloo.

    python -m tests.arr_coc.model.training_processes --device cuda      # a process for each GPU, on NCCL

Each process checks what it holds, so a difference anywhere ends the run with an error.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from exportkit.arr_coc.model import ARRCOC, build, draw_image
from exportkit.arr_coc.model.sharding import shard
from tests.arr_coc.model.model_cases import FILTERS_14, shallow

SAMPLES, STEPS = 2, 2  # samples a process
TRANSFORMER = {"encoder": "vit-tiny", "balancer": "learned", "k": 9}


def batch(model: ARRCOC, count: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """An image, a query and a target for each of `count` samples."""
    generator, side = torch.Generator().manual_seed(0), model.encoder.patch_size
    image = draw_image(count, 4 * side, 5 * side, generator)
    query, target = (torch.randn(count, width, generator=generator) for width in (model.query_dim, model.encoder.dim))
    return [tensor.to(device, dtype) for tensor in (image, query, target)]


def loss_of(model: nn.Module, image: Tensor, query: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, which is what makes the mean of the processes' gradients that of the whole batch."""
    outputs = model(image, query)
    return nn.functional.mse_loss(outputs["features"].mean(1), target) - outputs["scores"].mean()


def train(model: nn.Module, parameters: nn.Module, samples: list[Tensor]) -> list[dict[str, Tensor]]:
    """Gradients after each step, then the parameters, as whole tensors by name."""
    # With momentum, not Adam: that makes a full step of a gradient that is zero but for rounding, such as a key's bias.
    optimiser = torch.optim.SGD(parameters.parameters(), lr=0.1, momentum=0.9)
    results = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss_of(model, *samples).backward()
        results.append({name: whole(p.grad) for name, p in parameters.named_parameters()})
        optimiser.step()
    results.append(get_model_state_dict(parameters, options=StateDictOptions(full_state_dict=True)))
    return results


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def sharded(model: ARRCOC, device: torch.device) -> nn.Module:
    shard(model, init_device_mesh(device.type, (dist.get_world_size(),)))
    held, total = (sum(p.numel() for p in part) for part in (map(local, model.parameters()), model.parameters()))
    assert held < 1.1 * total / dist.get_world_size()
    return model


def local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def check_equal(kwargs: dict[str, Any], device: torch.device) -> None:
    """Gradients and parameters are those of one process that has the whole batch.

    In float64, where another order of summation shows in the last digits only and chooses no other patch.
    """
    model = shallow(build(**kwargs), 2).to(device, torch.float64).train()
    alone = copy.deepcopy(model)
    samples = batch(model, SAMPLES * dist.get_world_size(), device, torch.float64)
    mine = [tensor[SAMPLES * dist.get_rank() :][:SAMPLES] for tensor in samples]
    actual, expected = train(sharded(model, device), model, mine), train(alone, alone, samples)
    for result, reference in zip(actual, expected):
        assert all(tensor.abs().max() > 0 for tensor in reference.values())
        torch.testing.assert_close(result, reference, rtol=1e-7, atol=1e-10)


def check_mixed_precision(device: torch.device) -> None:
    """An encoder sharded in bfloat16 learns what one of one process does, and nearly what a float32 one does."""
    # All patches: a near tie chooses no other one.
    model = shallow(build(**TRANSFORMER | {"k": 20}), 2).to(device).train()
    single, halved = copy.deepcopy(model), copy.deepcopy(model)
    halved.encoder.bfloat16().register_forward_hook(lambda module, args, features: features.float())
    samples = batch(model, SAMPLES * dist.get_world_size(), device, torch.float32)
    mine = [tensor[SAMPLES * dist.get_rank() :][:SAMPLES] for tensor in samples]
    shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), dtype=torch.bfloat16)
    loss_of(model, *mine).backward()
    for reference, least in ((halved, 0.999), (single, 0.99)):
        loss_of(reference, *samples).backward()
        flat = [torch.cat([whole(p.grad).float().flatten() for p in m.parameters()]) for m in (model, reference)]
        assert nn.functional.cosine_similarity(*flat, dim=0) > least
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "FSDP2, transformer": lambda device: check_equal(TRANSFORMER, device),
    "FSDP2, filters": lambda device: check_equal(FILTERS_14, device),
    "FSDP2, transformer in bfloat16": check_mixed_precision,
}


def work(rank: int, processes: int, device_type: str, meeting: str) -> None:
    """One process: every check, in the same order as the others."""
    # All processes are on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(minutes=5),  # a process may wait for a core that others keep busy
    )
    for name, check in CHECKS.items():
        check(device)
        if rank == 0:
            with Path(f"{meeting}.done").open("a") as done:
                done.write(f"{name}\n")
    dist.destroy_process_group()


def run(device_type: str, processes: int) -> list[str]:
    """The names of the checks that held, all of them; an error of any process is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "processes")
        arguments = (processes, device_type, str(meeting))
        start = "spawn" if device_type == "cuda" else "fork"  # a fork has what this process has imported
        torch.multiprocessing.start_processes(work, arguments, nprocs=processes, start_method=start)
        return Path(f"{meeting}.done").read_text().splitlines()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, help="by default one for each GPU, or 2")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 2
    print("\n".join(run(arguments.device, arguments.processes or gpus)))

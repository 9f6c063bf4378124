"""A training step of ARR-COC (forward, loss, backward, AdamW): our operators and their references, in float32 and under
autocast, eager and compiled; by several processes with DDP and FSDP2.

    python benchmarks/training.py [--device cuda] [--encoder vit-small] [--batch 32] [--side 448]
    torchrun --nproc-per-node 2 benchmarks/training.py --device cuda     # --batch is each process's

Medians of --steps steps, one after the other, after two to warm up; memory is the most a process had allocated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from exportkit.arr_coc.model import ARRCOC, build, draw_image
from exportkit.arr_coc.model.sharding import shard
from exportkit.bench.timed_models import WithReferences

Prepare = Callable[[ARRCOC], Callable[..., Tensor]]


def loss_of(model: nn.Module, image: Tensor, query: Tensor, target: Tensor) -> Tensor:
    outputs = model(image, query)
    return nn.functional.mse_loss(outputs["features"].float().mean(1), target) - outputs["scores"].mean()


def plain(model: ARRCOC) -> Callable[..., Tensor]:
    return lambda *samples: loss_of(model, *samples)


def compiled(model: ARRCOC) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(plain(model), fullgraph=True, dynamic=False)


def data_parallel(model: ARRCOC) -> Callable[..., Tensor]:
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    return lambda *samples: loss_of(wrapped, *samples)


def sharded(dtype: torch.dtype | None) -> Prepare:
    def prepare(model: ARRCOC) -> Callable[..., Tensor]:
        device = next(model.parameters()).device
        return plain(shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), dtype=dtype))

    return prepare


ALONE: dict[str, tuple[Prepare, bool, bool]] = {  # name: (how, autocast, on references)
    "references, eager": (plain, False, True),
    "references, compiled": (compiled, False, True),
    "exportkit, eager": (plain, False, False),
    "exportkit, compiled": (compiled, False, False),
    "references, compiled, autocast": (compiled, True, True),
    "exportkit, eager, autocast": (plain, True, False),
    "exportkit, compiled, autocast": (compiled, True, False),
}
TOGETHER: dict[str, tuple[Prepare, bool, bool]] = {
    "DDP": (data_parallel, False, False),
    "DDP, autocast": (data_parallel, True, False),
    "FSDP2": (sharded(None), False, False),
    "FSDP2, encoder in bfloat16": (sharded(torch.bfloat16), False, False),
}


def measure(prepare: Prepare, autocast: bool, on_references: bool, arguments: argparse.Namespace, device: torch.device):
    """(median milliseconds of a step, GB at most)."""
    model = build(encoder=arguments.encoder, balancer="learned").to(device).train()
    side = arguments.side // model.encoder.patch_size * model.encoder.patch_size
    image = draw_image(arguments.batch, side, side, torch.Generator().manual_seed(0)).to(device)
    query, target = (
        torch.randn(arguments.batch, width, device=device) for width in (model.query_dim, model.encoder.dim)
    )
    within: AbstractContextManager[object] = WithReferences() if on_references else nullcontext()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    with within:
        loss_fn = prepare(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2 + arguments.steps):
            synchronise(device)
            start = time.perf_counter()
            optimiser.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                loss = loss_fn(image, query, target)
            loss.backward()
            optimiser.step()
            synchronise(device)
            times.append((time.perf_counter() - start) * 1e3)
    assert loss.isfinite()
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
    return statistics.median(times[2:]), peak


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--encoder", default="vit-small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", action="append", help="a name from the table; repeatable")
    arguments = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(arguments.device, *([int(os.environ.get("LOCAL_RANK", "0"))] * (arguments.device == "cuda")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    chief = int(os.environ.get("RANK", "0")) == 0
    if chief:
        print(f"{arguments.encoder}, {processes} x {arguments.batch} images of {arguments.side}^2, {device.type}")
    for name, way in (TOGETHER if "WORLD_SIZE" in os.environ else ALONE).items():
        if arguments.only and name not in arguments.only:
            continue
        milliseconds, peak = measure(*way, arguments, device)
        if chief:
            rate = processes * arguments.batch / milliseconds * 1e3
            print(f"{name:32} {milliseconds:9.1f} ms a step {rate:9.1f} images/s {peak:7.2f} GB", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

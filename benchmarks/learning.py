"""A training step in a package, beside eager and torch.compile: ARR-COC with a vision transformer, or its head alone.

    python benchmarks/learning.py [--device cuda] [--encoder vit-tiny] [--batch 8] [--side 224] [--head]

The three train the same model on the same batches for --steps steps, in turns, so that the machine is the same for all.
Medians of a step's time, and how far the parameters are from eager's at the end. torch.compile compiles loss and
gradients as one graph, and the optimizer as another.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import exportkit
from benchmarks.training import loss_of, synchronise
from exportkit import ExportSpec, Method, training
from exportkit.arr_coc.model import build, draw_image
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.packaging import PackOptions, build_package

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def loss(model: nn.Module, image: Tensor, query: Tensor, target: Tensor) -> Tensor:
    return loss_of(model, image, query, target)


def make(encoder: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return build(encoder=encoder, balancer="learned").eval().to(device)


def trained(model: nn.Module, head: bool) -> list[nn.Parameter]:
    """The parameters that a step updates; others need no gradient."""
    if head:
        model.requires_grad_(False)
        model.get_submodule("balancing").requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: nn.Module, head: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model, head), lr=1e-4)


def samples(model: nn.Module, count: int, side: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = draw_image(count, side, side, generator)
    query, target = (torch.randn(count, width, generator=generator) for width in (model.query_dim, model.encoder.dim))
    return image.to(device), query.to(device), target.to(device)


def spec(encoder: str = "vit-tiny", count: int = 8, side: int = 224, head: bool = False) -> ExportSpec:
    """The model with `step`, for one size of batches."""
    model = make(encoder, "cpu")
    batch = samples(model, count, side, 0, "cpu")
    return training.spec(
        model,
        optimizer_of(model, head),
        loss,
        step=Method(example_inputs=batch),
        methods={"forward": Method(example_inputs=batch[:2])},
        draw_sequence=lambda sizes, generator: [
            ("step", batch, {}),
            ("step", samples(model, count, side, 1, "cpu"), {}),
        ],
    )


def packaged(path: Path, arguments: argparse.Namespace) -> Path:
    named = {name: getattr(arguments, name) for name in ("encoder", "side", "head")}
    resolved = resolve("benchmarks.learning:spec", model_kwargs={**named, "count": arguments.batch})
    artifact = path / "learner_aoti.pt2"
    export_aoti(resolved, artifact, TraceOptions(device=arguments.device, cases=1, edge_cases=False))
    build_package([artifact], path / "learner.pt2", PackOptions(verify=False))
    return path / "learner.pt2"


def eager_step(model: nn.Module, head: bool, *, compiled: bool = False) -> Step:
    optimizer = optimizer_of(model, head)
    of = torch.compile(loss, fullgraph=True, dynamic=False) if compiled else loss
    update = torch.compile(optimizer.step, fullgraph=False, dynamic=False) if compiled else optimizer.step

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = of(model, *batch)
        value.backward()
        update()
        return value.detach()

    return step


def distance(found: dict[str, Tensor], exact: nn.Module) -> float:
    """The greatest relative distance of a parameter from a model's."""
    pairs = [(found[name].double(), each.detach().double()) for name, each in exact.named_parameters() if name in found]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--encoder", default="vit-tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--head", action="store_true", help="train the balancer alone")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    side = arguments.side
    eager = make(arguments.encoder, arguments.device)
    other = copy.deepcopy(eager)
    with tempfile.TemporaryDirectory() as folder:
        package = packaged(Path(folder), arguments)
        with exportkit.load(package, arguments.device, cuda_graphs=device.type == "cuda") as model:
            session = model.session()
            steps = {
                "eager": eager_step(eager, arguments.head),
                "torch.compile": eager_step(other, arguments.head, compiled=True),
                "package": session.methods["step"],
            }
            times: dict[str, list[float]] = {name: [] for name in steps}
            losses: dict[str, list[float]] = {name: [] for name in steps}
            for number in range(arguments.steps):
                batch = samples(eager, arguments.batch, side, number % 10, arguments.device)
                for name, step in steps.items():
                    synchronise(device)
                    start = time.perf_counter()
                    value = step(*batch)
                    synchronise(device)
                    times[name].append((time.perf_counter() - start) * 1e3)
                    losses[name].append(float(value))
            after = {"package": distance(dict(session.state), eager)}
            after["torch.compile"] = distance(dict(other.named_parameters()), eager)
    found = {
        name: {
            "milliseconds": round(statistics.median(taken[3:]), 3),
            "losses": [losses[name][0], losses[name][-1]],
            "from eager": after.get(name, 0.0),
        }
        for name, taken in times.items()
    }
    print(json.dumps({"arguments": vars(arguments), "torch": torch.__version__, "steps": found}))


if __name__ == "__main__":
    main()

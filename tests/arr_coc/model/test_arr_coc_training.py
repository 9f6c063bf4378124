"""The model learns: gradients reach everything that has parameters, and the query."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from exportkit.arr_coc.model import ARRCOC, build
from tests.arr_coc.model.model_cases import FILTERS_14, VIT, VIT_14, inputs, shallow

pytestmark = pytest.mark.usefixtures("two_blocks")

TRAINED = {
    "filters, learned balancer, projected query": {**FILTERS_14, "gating": "scale"},
    "vit, learned balancer": {**VIT, "gating": "scale"},
    "vit, straight-through": {**VIT, "gating": "straight-through"},
    "vit, fixed weights": VIT_14,
}


@pytest.mark.slow_but("filters*")
@pytest.mark.parametrize("kwargs", TRAINED.values(), ids=TRAINED.keys())
def test_twenty_steps_lower_the_loss_and_move_balancer_encoder_and_query(kwargs: dict[str, Any]):
    model = shallow(build(**kwargs, k=9)).train()
    image, query = inputs(model, 3, 5, 6)
    query = nn.Parameter(query)
    target = torch.randn(3, model.encoder.dim)
    parameters = [query, *model.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        outputs = model(image, query)
        # A second term that only relevance can serve: features alone would be learned without it.
        loss = nn.functional.mse_loss(outputs["features"].sum(1), target) - outputs["scores"].mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    assert query.grad is not None
    assert query.grad.abs().max() > 0
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert still == []


@pytest.mark.parametrize("gating", ["scale", "straight-through"])
def test_relevance_learns_through_the_kept_features_alone(gating: str):
    model = build(**{**VIT, "gating": gating, "k": 9}).train()
    image, query = inputs(model, 2, 5, 6)
    query.requires_grad_()
    outputs = model(image, query)
    (outputs["features"] * torch.randn_like(outputs["features"])).sum().backward()
    assert query.grad is not None
    assert (query.grad.abs().amax(1) > 0).all()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.balancing.parameters())


def test_scaling_and_straight_through_have_the_gradient_of_a_product():
    model = build(k=7, gating="straight-through").train()
    image, query = inputs(model, 1, 4, 5)
    query.requires_grad_()
    outputs = model(image, query)
    weights = torch.randn_like(outputs["features"])
    straight = torch.autograd.grad((outputs["features"] * weights).sum(), query, retain_graph=True)[0]
    product = outputs["features"].detach() * outputs["scores"].unsqueeze(-1)
    torch.testing.assert_close(straight, torch.autograd.grad((product * weights).sum(), query)[0])


def test_training_and_evaluation_compute_the_same():
    model = build(**VIT)
    image, query = inputs(model, 2, 5, 6)
    with torch.no_grad():
        evaluated = model(image, query)["relevance"]
        trained = model.train()(image, query)["relevance"]
    torch.testing.assert_close(trained, evaluated, rtol=1e-4, atol=1e-5)


# --- mixed precision --------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, image: Tensor, query: Tensor, target: Tensor) -> Tensor:
    outputs = model(image, query)
    return nn.functional.mse_loss(outputs["features"].float().mean(1), target) - outputs["scores"].mean()


def _samples(model: ARRCOC, batch: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return *inputs(model, batch, rows, columns), torch.randn(batch, model.encoder.dim)


@pytest.mark.parametrize(
    ("dtype", "backward_inside"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=["bfloat16", "bfloat16, backward too", "float16"],
)
@pytest.mark.parametrize("kwargs", [VIT, FILTERS_14], ids=["vit", "filters"])
def test_under_autocast_loss_and_gradients_are_nearly_those_of_float32(
    kwargs: dict[str, Any], dtype: torch.dtype, backward_inside: bool
):
    model = build(**{**kwargs, "k": 30}).train()  # all patches: a near tie chooses no other one
    samples = _samples(model, 2, 5, 6)
    parameters = list(model.parameters())
    exact = _loss(model, *samples)
    expected = torch.autograd.grad(exact, parameters)
    with torch.autocast("cpu", dtype=dtype):
        loss = _loss(model, *samples)
        assert loss.dtype == torch.float32
        if backward_inside:
            actual = torch.autograd.grad(loss, parameters)
    if not backward_inside:
        actual = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(loss, exact, rtol=0, atol=5e-3)
    assert [g.dtype for g in actual] == [torch.float32] * len(parameters)
    flat = [torch.cat([g.flatten() for g in gradients]) for gradients in (actual, expected)]
    assert nn.functional.cosine_similarity(*flat, dim=0) > 0.99


@pytest.mark.parametrize("kwargs", [VIT, FILTERS_14], ids=["vit", "filters"])
def test_patches_are_ranked_in_float32_under_autocast(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 2, 5, 6)
    with torch.no_grad():
        expected = model(image, query)["relevance"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            relevance = model(image, query)["relevance"]
    assert relevance.dtype == torch.float32
    torch.testing.assert_close(relevance, expected, rtol=0, atol=2e-2)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kwargs", "autocast"), [(VIT, True), (FILTERS_14, False)], ids=["vit, autocast", "filters"])
def test_a_training_step_compiles_as_one_graph_for_every_size(kwargs: dict[str, Any], autocast: bool):
    """Forward, loss and backward; losses of several steps with sizes that vary are those of eager, bit for bit."""
    torch._dynamo.reset()
    model = shallow(build(**{**kwargs, "k": 9})).train()
    counter = CompileCounterWithBackend("aot_eager")

    def losses(model: ARRCOC, compiler: Any) -> list[float]:
        def step(*samples: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = _loss(model, *samples)
            loss.backward()
            return loss.detach()

        step = compiler(step)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        found, compiled = [], []
        for size in [(2, 5, 6), (2, 5, 6), (3, 7, 4), (5, 4, 9)]:
            optimiser.zero_grad()
            found.append(step(*_samples(model, *size)).item())
            compiled.append(counter.frame_count)
            optimiser.step()
        assert len(set(compiled)) == 1  # once, for the first step
        return found

    expected = losses(copy.deepcopy(model), lambda step: step)
    # backward() within the graph; and the model's numbers are constants at once, not after the whole was traced once.
    with torch._dynamo.config.patch(trace_autograd_ops=True, specialize_float=True):
        actual = losses(model, lambda step: torch.compile(step, fullgraph=True, dynamic=True, backend=counter))
    assert actual == expected
    torch._dynamo.reset()

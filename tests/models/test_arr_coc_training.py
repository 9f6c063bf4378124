"""The model learns: gradients reach everything that has parameters, and the query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exportkit.models.arr_coc import build
from tests.models.model_cases import FILTERS_14, VIT, VIT_14, inputs

TRAINED = {
    "filters, learned balancer, projected query": {**FILTERS_14, "gating": "scale"},
    "vit, learned balancer": {**VIT, "gating": "scale"},
    "vit, straight-through": {**VIT, "gating": "straight-through"},
    "vit, fixed weights": VIT_14,
}


@pytest.mark.parametrize("kwargs", TRAINED.values(), ids=TRAINED.keys())
def test_twenty_steps_lower_the_loss_and_move_balancer_encoder_and_query(kwargs: dict[str, Any]):
    model = build(**kwargs, k=9).train()
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


def test_flat_images_have_finite_gradients():
    model = build(balancer="learned").train()
    image = torch.full((1, 3, 64, 64), 0.5, requires_grad=True)
    outputs = model(image, torch.randn(1, model.query_dim))
    outputs["features"].sum().backward()
    assert image.grad is not None
    assert image.grad.isfinite().all()


def test_training_and_evaluation_compute_the_same():
    model = build(**VIT)
    image, query = inputs(model, 2, 5, 6)
    with torch.no_grad():
        evaluated = model(image, query)["relevance"]
        trained = model.train()(image, query)["relevance"]
    torch.testing.assert_close(trained, evaluated, rtol=1e-4, atol=1e-5)

"""Steps of training as methods of a package: gradients, an optimizer of torch.optim, and its moments as state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from exportkit.errors import UsageError
from exportkit.spec import ExportSpec, Method

Loss: TypeAlias = Callable[..., Tensor]

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_HOME = "optimizer"


def spec(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    *,
    step: Method,
    accumulates: bool = False,
    clip_norm: float | None = None,
    lr_input: bool = False,
    **fields: Any,
) -> ExportSpec:
    """Returns the spec of a model that learns.

    Besides the methods in `fields` it has `step`, which takes what `loss` takes after the model, computes gradients,
    updates the optimizer's parameters, and returns the loss before that. With `accumulates` there are two in its
    place: `accumulate` adds the gradients of one batch to those before and returns the loss, and `update` takes them,
    begins anew, and returns their norm. The parameters, the optimizer's moments and gradients are state of a session.

    The update is that of torch.optim in eager mode, without its fused and foreach forms. What the optimizer remembers
    already goes along. The model gets a submodule `optimizer`, which has the moments as buffers.

    Args:
        model: The model. It is exported in eval mode, so that dropout and statistics of batches do nothing.
        optimizer: SGD, Adam or AdamW of torch.optim over parameters of the model.
        loss: A function (model, *inputs) -> a floating tensor without dimensions. The names of its inputs are those of
            `step`.
        step: The example inputs of `step`, or of `accumulate`, and their dynamic sizes.
        accumulates: Gradients of several calls make one update.
        clip_norm: Gradients of a greater 2-norm over all parameters are scaled to it, as
            torch.nn.utils.clip_grad_norm_ does.
        lr_input: The learning rate is an input `lr` of the update, a float32 tensor without dimensions, for all
            parameters.
        **fields: Of ExportSpec, such as `methods`, `state`, `name`. `methods` is {"forward": Method(...)} or more.

    Returns:
        The spec. The state of a parameter, its moments and its gradient have its dtype and shape.

    Raises:
        UsageError: The optimizer is another one, or it updates what is no parameter of the model, or one that requires
            no gradient; its parameters were updated unequally often, or have several rates where one is an input; the
            model has an attribute `optimizer` already.
    """
    if hasattr(model, _HOME):
        raise UsageError(
            f"{type(model).__name__} has an attribute `{_HOME}`, where the moments would go",
            hint="Give it another name. One model has one optimizer: make the model again for another spec.",
        )
    names = _names(model, optimizer)
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if lr_input and len(rates) > 1:
        said = f"the optimizer's groups have the rates {sorted(rates)}, and `lr` would be one for all"
        raise UsageError(said, hint="Leave out lr_input, or give all groups one rate.")
    steps = _with_signatures(loss, lr_input=lr_input)
    setattr(model, _HOME, steps(model, optimizer, loss, names, accumulates, clip_norm))
    rate = {"lr": torch.tensor(rates.pop())} if lr_input else {}
    if accumulates:
        methods = {
            "accumulate": replace(step, attribute=f"{_HOME}.accumulate"),
            "update": Method(example_kwargs=rate, attribute=f"{_HOME}.update"),
        }
    else:
        kwargs = {**step.example_kwargs, **rate}
        methods = {"step": replace(step, example_kwargs=kwargs, attribute=f"{_HOME}.step")}
    given = fields.pop("state", ())
    patterns: Mapping[str, str | None] = given if isinstance(given, Mapping) else dict.fromkeys(given)
    state = {**patterns, **dict.fromkeys(names.values()), f"{_HOME}.*": None}
    return ExportSpec(model=model, methods={**fields.pop("methods", {}), **methods}, state=state, **fields)


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    if type(optimizer) not in _KINDS:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be a method",
            hint="There are SGD, Adam and AdamW of torch.optim. Write another one as a method of the model: "
            "learning.md of the documentation.",
        )
    known = {parameter: name for name, parameter in model.named_parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := [parameter for parameter in updated if parameter not in known]:
        raise UsageError(
            f"the optimizer updates {len(others)} tensors that are no parameters of {type(model).__name__}, the first "
            f"of the shape {list(others[0].shape)}",
            hint="Make the optimizer of parameters of this model.",
        )
    if frozen := [known[parameter] for parameter in updated if not parameter.requires_grad]:
        said = f"the optimizer updates {frozen[0]}, which requires no gradient"
        raise UsageError(said, hint="Leave it out of the optimizer, or let it require one: parameter.requires_grad_().")
    counts = {int(known["step"]) for known in optimizer.state.values() if "step" in known}
    if len(counts) > 1:
        raise UsageError(
            f"the optimizer has updated some parameters {min(counts)} times and others {max(counts)} times, and a "
            "package has one count",
            hint="Begin with a new optimizer, or make an optimizer of those that were updated equally often.",
        )
    return {parameter: known[parameter] for parameter in updated}


class _Steps(torch.nn.Module):
    """The optimizer of a model: moments as buffers, and the methods that update."""

    count: Tensor

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        names: Mapping[Tensor, str],
        accumulates: bool,
        clip_norm: float | None,
    ) -> None:
        super().__init__()
        self._model = [model]  # in a list: it is no submodule of its own submodule
        self._loss = loss
        self._clip_norm = clip_norm
        self._adam = not isinstance(optimizer, torch.optim.SGD)
        self._groups = [
            ([names[parameter] for parameter in group["params"]], {k: v for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]
        for parameter, name in names.items():
            group = next(g for g in optimizer.param_groups if any(parameter is each for each in g["params"]))
            known = optimizer.state.get(parameter, {})
            for kind in _moments(self._adam, group):
                self._register(kind, name, known.get(kind), parameter)
            if accumulates:
                self._register("gradient", name, parameter.grad, parameter)
        done = next((each["step"] for each in optimizer.state.values() if "step" in each), bool(optimizer.state))
        self.register_buffer("count", torch.tensor(int(done)))

    def _register(self, kind: str, name: str, value: Tensor | None, like: Tensor) -> None:
        made = torch.zeros_like(like) if value is None else value
        self.register_buffer(_buffer(kind, name), made.detach().clone())

    def step(self, *args: Any, lr: Tensor | None = None, **kwargs: Any) -> Tensor:
        loss, gradients = self._gradients(args, kwargs)
        self._applied(gradients, lr)
        return loss

    def accumulate(self, *args: Any, **kwargs: Any) -> Tensor:
        loss, gradients = self._gradients(args, kwargs)
        for name, gradient in gradients.items():
            self._of("gradient", name).add_(gradient)
        return loss

    def update(self, *, lr: Tensor | None = None) -> Tensor:
        gradients = {name: self._of("gradient", name).clone() for names, _ in self._groups for name in names}
        norm = self._applied(gradients, lr)
        for name in gradients:
            self._of("gradient", name).zero_()
        return norm

    def _gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        model = self._model[0]
        names = [name for names, _ in self._groups for name in names]
        parameters = [attrgetter(name)(model) for name in names]
        with torch.enable_grad():
            loss = self._loss(model, *args, **kwargs)
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        return loss.detach(), dict(zip(names, found))

    @torch.no_grad()
    def _applied(self, gradients: Mapping[str, Tensor], lr: Tensor | None) -> Tensor:
        norm = _norm(gradients.values())
        if self._clip_norm is not None:  # as torch.nn.utils.clip_grad_norm_
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        self.count.add_(1)
        for names, group in self._groups:
            rate = group["lr"] if lr is None else lr.double()
            for name in names:
                gradient = -gradients[name] if group["maximize"] else gradients[name]
                (self._adam_update if self._adam else self._sgd_update)(name, gradient, group, rate)
        return norm

    def _sgd_update(self, name: str, gradient: Tensor, group: Mapping[str, Any], rate: Any) -> None:
        # torch.optim.sgd._single_tensor_sgd
        parameter = attrgetter(name)(self._model[0])
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            moment = self._of("momentum_buffer", name)
            moment.mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
            if group["dampening"]:  # the first gradient is whole
                moment.copy_(torch.where(torch.eq(self.count, 1), gradient, moment))
            gradient = gradient.add(moment, alpha=group["momentum"]) if group["nesterov"] else moment
        if isinstance(rate, Tensor):
            parameter.sub_(gradient * rate)
        else:
            parameter.add_(gradient, alpha=-rate)

    def _adam_update(self, name: str, gradient: Tensor, group: Mapping[str, Any], rate: Any) -> None:
        # torch.optim.adam._single_tensor_adam. What depends on the count is computed in float64, as there.
        parameter = attrgetter(name)(self._model[0])
        first, second = group["betas"]
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        mean, square = self._of("exp_avg", name), self._of("exp_avg_sq", name)
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["amsgrad"]:
            greatest = self._of("max_exp_avg_sq", name)
            square = greatest.copy_(torch.maximum(greatest, square))
        count = self.count.double()
        root = (1 - second**count).sqrt()
        size = -rate / (1 - first**count)
        parameter.add_(mean * size / (square.sqrt() / root).add_(group["eps"]))

    def _of(self, kind: str, name: str) -> Tensor:
        found: Tensor = getattr(self, _buffer(kind, name))
        return found


def _moments(adam: bool, group: Mapping[str, Any]) -> list[str]:
    if not adam:
        return ["momentum_buffer"] if group["momentum"] else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _buffer(kind: str, name: str) -> str:
    return f"{kind}__{name.replace('.', '__')}"


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))


def _with_signatures(loss: Loss, *, lr_input: bool) -> type[_Steps]:
    """Returns a class whose methods have the parameters of a loss after the model."""
    itself, *inputs = inspect.signature(loss).parameters.values()
    rate = [inspect.Parameter("lr", inspect.Parameter.KEYWORD_ONLY)] if lr_input else []

    class Steps(_Steps):
        def step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().step(*args, **kwargs)

        def accumulate(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().accumulate(*args, **kwargs)

        def update(self, **kwargs: Any) -> Tensor:
            return super().update(**kwargs)

    for method, parameters in ((Steps.step, [*inputs, *rate]), (Steps.accumulate, inputs), (Steps.update, rate)):
        method.__dict__["__signature__"] = inspect.Signature([itself, *parameters])
    return Steps

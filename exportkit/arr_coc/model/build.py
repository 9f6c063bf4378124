"""Builds the pipeline from plain values, such as a command line or a manifest has."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from exportkit.arr_coc.model.encoder import (
    SIZES,
    Activation,
    AttentionForm,
    GivenFeatures,
    Positions,
    VisionTransformer,
    VitForms,
)
from exportkit.arr_coc.model.filters import FilterBank
from exportkit.arr_coc.model.fusion import DEFAULT_WEIGHTS, FixedBalancer, Fusion, LearnedBalancer, Scoring
from exportkit.arr_coc.model.linear import LinearForm
from exportkit.arr_coc.model.pipeline import ARRCOC
from exportkit.arr_coc.model.selection import FeatureDtype, Gating, Selector
from exportkit.errors import UsageError, WeightsError
from exportkit.package.atomic import write_whole

ENCODERS = ("filters", *(f"vit-{size}" for size in SIZES), "given")
BALANCERS = ("fixed", "learned")


def build(
    *,
    encoder: str = "filters",
    patch_size: int = 16,
    dim: int | None = None,
    k: int = 200,
    query_dim: int | None = None,
    balancer: Literal["fixed", "learned"] = "fixed",
    entropy_weight: float = DEFAULT_WEIGHTS[0],
    salience_weight: float = DEFAULT_WEIGHTS[1],
    alignment_weight: float = DEFAULT_WEIGHTS[2],
    temperature: float | None = None,
    invert_entropy: bool = False,
    gating: Gating = "scale",
    feature_dtype: FeatureDtype = "float",
    min_tokens: int = 64,
    max_tokens: int = 400,
    gamma: float = 1.0,
    mean_tokens: int | None = None,
    positions: Positions = "sincos",
    layer_scale: bool = False,
    activation: Activation = "gelu",
    attention: AttentionForm = "sdpa",
    linear: LinearForm = "auto",
    weights: str | Path | None = None,
    encoder_weights: str | Path | None = None,
    seed: int = 0,
) -> ARRCOC:
    """Builds the model, in eval mode on the CPU.

    The same arguments give the same weights. The caller's random state does not change.

    Args:
        encoder: "filters" (fixed, without training), "vit-tiny", "vit-small" or "vit-base"; "given" if features are an
            input, see FromFeatures.
        patch_size: 14 or 16; any size with the encoder "given".
        dim: The width of the features, with the encoder "given".
        k: The number of patches to select; all patches if an image has fewer.
        query_dim: The width of queries. None: the features' width, without a projection.
        balancer: "fixed" weights or "learned", a network that starts near them.
        entropy_weight: The weight of the entropy.
        salience_weight: The weight of the salience.
        alignment_weight: The weight of the alignment.
        temperature: The temperature of the entropy's softmax. None: 1, or 0.15 for "filters", whose features are small.
        invert_entropy: Count a peaked feature vector as more informative than an even one.
        gating: "scale" or "straight-through", see Selector.
        feature_dtype: "float" or "int8", see Selector.
        min_tokens: The budget of a patch of relevance 0.
        max_tokens: The budget of a patch of relevance 1.
        gamma: The exponent of relevance in budgets.
        mean_tokens: The exact mean number of tokens per patch, distributed by relevance.
        positions: "sincos" or "interpolated", for a transformer.
        layer_scale: Whether a transformer has layer scales, as DINOv2 has.
        activation: "gelu" or "relu", for a transformer.
        attention: "sdpa", which is faster, or "explicit", for a transformer. See Attention.
        linear: "auto", "invariant", "per-sample" or "folded", for a transformer. See SampleLinear.
        weights: A safetensors file of the whole model.
        encoder_weights: A safetensors file of the encoder alone.
        seed: The seed of weights that are not loaded.

    Raises:
        UsageError: An argument is invalid. The message says what is allowed.
        WeightsError: A weights file does not fit.
    """
    if encoder not in ENCODERS:
        raise UsageError(f"encoder must be one of {', '.join(ENCODERS)}, got {encoder!r}")
    if balancer not in BALANCERS:
        raise UsageError(f"balancer must be one of {', '.join(BALANCERS)}, got {balancer!r}")
    forms = VitForms(activation, attention, linear)
    plain = (positions, layer_scale, forms) == ("sincos", False, VitForms())
    if not plain and not encoder.startswith("vit-"):
        names = "positions, layer_scale, activation, attention and linear"
        raise UsageError(f'{names} need a transformer; encoder is "{encoder}"')
    if (dim is None) == (encoder == "given"):
        raise UsageError(f'dim must be given if and only if encoder is "given"; encoder is "{encoder}", dim is {dim}')
    if temperature is None:
        temperature = 0.15 if encoder == "filters" else 1.0
    shares = (entropy_weight, salience_weight, alignment_weight)
    selector = Selector(
        k,
        gating=gating,
        feature_dtype=feature_dtype,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        gamma=gamma,
        mean_tokens=mean_tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        eye: FilterBank | VisionTransformer | GivenFeatures
        if dim is not None:
            eye = GivenFeatures(dim, patch_size)
        elif encoder == "filters":
            eye = FilterBank(patch_size)
        else:
            eye = VisionTransformer(
                encoder.removeprefix("vit-"),
                patch_size,
                positions=positions,
                layer_scale=layer_scale,
                forms=forms,
            )
        balance = LearnedBalancer(eye.dim, weights=shares) if balancer == "learned" else FixedBalancer(shares)
        fusion = Fusion(balance, invert_entropy=invert_entropy)
        model = ARRCOC(eye, Scoring(patch_size, temperature), fusion, selector, query_dim=query_dim)
    if encoder_weights is not None:
        load_weights(model.encoder, encoder_weights)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def check_arguments(arguments: Mapping[str, Any], *, beside: Sequence[str] = ()) -> None:
    """Refuses names and types that `build` does not take, as JSON of a command line, whose caller takes those `beside`.

    UsageError says what is allowed.
    """
    parameters = inspect.signature(build, eval_str=True).parameters
    if unknown := sorted(arguments.keys() - parameters.keys()):
        names = ", ".join([*beside, *parameters])
        raise UsageError(f"arr-coc takes no {', '.join(unknown)}", hint=f"It takes {names}.")
    for name, value in arguments.items():
        allowed = _plain_types(parameters[name].annotation)
        given = float if type(value) is int and float in allowed else type(value)
        if not any(issubclass(given, one) for one in allowed) or (given is bool and bool not in allowed):
            kinds = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
            raise UsageError(f"{name} must be {kinds}, got {value!r}")


def _plain_types(annotation: Any) -> tuple[type, ...]:
    """Returns the classes a value may have: the members of a union, and str for a Literal of strings."""
    if typing.get_origin(annotation) is Literal:
        return (str,)
    return typing.get_args(annotation) or (annotation,)


_SHOWN = 5  # names of each kind in an error message


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fills a module's parameters and buffers from a safetensors file with the names of its state_dict.

    Floating tensors are converted to the module's dtype. If a tensor is missing, unexpected, or has another shape or
    kind of dtype, it is a WeightsError, and nothing changes.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    state = module.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())  # the handle is not iterable itself
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            _check_names(path, module, state, shapes)
            tensors = {name: file.get_tensor(name) for name in state}
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error
    _check_dtypes(path, state, tensors)
    with torch.no_grad():
        for name, target in state.items():
            target.copy_(tensors[name])


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Writes a module's parameters and buffers to a safetensors file, atomically."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    write_whole(Path(path), save(state))


def _check_names(path: Path, module: nn.Module, state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    reshaped = [
        f"{name} is {list(shapes[name])}, must be {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = [
        _listed("missing", (name for name in state if name not in shapes)),
        _listed("unexpected", (name for name in shapes if name not in state)),
        _listed("with another shape", reshaped),
    ]
    if any(problems):
        raise WeightsError(
            f"{path} does not fit {type(module).__name__}: {'; '.join(filter(None, problems))}",
            hint="Build the model with the sizes of the weights, and remove tensors that it does not have from the "
            "file, such as a classification head.",
        )


def _check_dtypes(path: Path, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    changed = [
        f"{name} is {tensors[name].dtype}, must be {tensor.dtype}"
        for name, tensor in state.items()
        if tensor.dtype != tensors[name].dtype
        and not (tensor.is_floating_point() and tensors[name].is_floating_point())
    ]
    if changed:
        raise WeightsError(f"{path}: {_listed('with another kind of dtype', changed)}")


def _listed(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    if not found:
        return ""
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}"

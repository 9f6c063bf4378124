"""Finds the model that MODEL names, with its example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from exportkit.errors import ModelNotFoundError, UsageError, WeightsError
from exportkit.export.models.call_signature import bind_call, check_plain, needed_tensors, rebind
from exportkit.export.models.importing import import_code, named_attribute
from exportkit.export.models.method_specs import matches
from exportkit.export.models.option_parsing import NO_TENSOR, check_dtype, parse_input_text
from exportkit.export.models.resolved import EagerModel, ResolvedModel
from exportkit.export.models.source_lines import users_code
from exportkit.libraries import LoadedLibrary, load_library
from exportkit.package.consistency import STATE_OWNER
from exportkit.package.describe_library import describe_with_needed
from exportkit.package.manifest import Library
from exportkit.package.trust import Trust
from exportkit.package.weights_hints import renamed, to_safetensors
from exportkit.spec import ExportSpec


def resolve(
    model: str,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    weights: Path | None = None,
    op_libraries: Sequence[Path | str] = (),
    seed: int = 0,
    trust: Trust = Trust(),
    trusted: bool = False,
) -> ResolvedModel:
    """Imports or reads MODEL.

    Args:
        model: A name that an installed package declares (`arr-coc`), `package.module:attr`, `path/file.py:attr`, or an
            ExportedProgram `.pt2`.
            The attribute is an ExportSpec, a callable that returns one, an nn.Module or a callable that returns one.
        model_kwargs: Arguments for the callable.
        inputs: Example inputs, as "NAME=float32[2,3,256,256]". An nn.Module needs all of them. They replace a spec's
            inputs.
        weights: A safetensors file with every parameter and buffer of the model.
        op_libraries: Operator libraries, or modules that load some. They are loaded before
            the model is imported. The spec's libraries are loaded after it.
        seed: The seed of torch's generators while the model and its example inputs are made.
        trust: Who must have signed the `.pt2`.
        trusted: Whether MODEL may be a file of torch.export.save, which is code of its author.

    Raises:
        ModelNotFoundError: MODEL cannot be imported, or is not a model.
        ExportError: Importing or making the model raised an error.
        UsageError: Keyword arguments or inputs do not fit the model.
        WeightsError: The weights do not fit the model.
        LibraryLoadError: An operator library cannot be loaded.
        PackageError: A `.pt2` of exportkit breaks a rule of the format, or lacks a required signature.
        PolicyError: A policy of this machine cannot be read.
    """
    if trust != Trust() and not model.endswith(".pt2"):
        raise UsageError(
            f"--public-key and --signature need an exported program, but {model} is Python source",
            hint="Leave them out, or give the signed .pt2.",
        )
    load_operator_libraries(op_libraries)
    kwargs = dict(model_kwargs or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.endswith(".pt2"):
            _refuse_for_program(model, kwargs, inputs, weights)
            from exportkit.export.models.program_file import load_program  # imported late: it takes a second

            return load_program(Path(model), trust, trusted=trusted)
        with users_code(f"importing {model}"):
            value = named_attribute(model)
        # Seeds again, because an import may draw random numbers, but only the first time.
        torch.manual_seed(seed)
        made = _call(value, model, kwargs)
        spec = made if isinstance(made, ExportSpec) else ExportSpec(model=made, example_inputs=())  # from --input
        spec = _with_inputs(model, spec, inputs)
    load_operator_libraries(Path(library) for library in spec.operator_libraries)
    if weights is not None:
        _load_weights(spec, Path(weights))
    return EagerModel(spec=spec, name=model, model_kwargs=kwargs, seed=seed)


def load_operator_libraries(libraries: Iterable[Path | str]) -> None:
    """Loads operator libraries. A separate process tries each file first, so a bad library cannot end this process.

    Skips a library that needs CUDA if torch has no CUDA.
    """
    beside: list[LoadedLibrary] = []
    described_files: list[tuple[Path, Library]] = []
    for library in libraries:
        if isinstance(library, str):
            with users_code(f"importing {library}"):
                import_code(library)
        else:
            described_files += describe_with_needed(library)
    for path, described in described_files:
        if described.device == "cuda" and torch.version.cuda is None:
            continue
        defines = sorted({operator.name.partition("::")[0] for operator in described.defines})
        beside.append(load_library(path, defines=defines, beside=beside))


def _refuse_for_program(model: str, kwargs: Mapping[str, Any], inputs: Sequence[str], weights: Path | None) -> None:
    given = {"--model-kwargs": kwargs, "--input": inputs, "--weights": weights}
    if used := [option for option, value in given.items() if value]:
        raise UsageError(
            f"{model} is an exported program with fixed inputs and weights: {', '.join(used)} cannot change them",
            hint="To change them, export the model itself.",
        )


def resolve_decompositions(texts: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Imports the functions that compute custom operators."""
    found = {}
    for operator, text in texts.items():
        with users_code(f"importing {text}"):
            function = named_attribute(text)
        if not callable(function):
            raise UsageError(
                f"the decomposition {text} of {operator} is of type {type(function).__name__}",
                hint="Name a function with the operator's parameters.",
            )
        found[operator] = function
    return found


# --- from an attribute to a spec --------------------------------------------------------------------------------------


def _call(value: Any, model: str, kwargs: Mapping[str, Any]) -> Any:
    """Calls a callable that makes a model; returns an instance unchanged."""
    if isinstance(value, (ExportSpec, torch.nn.Module)):
        if kwargs:
            raise UsageError(f"--model-kwargs needs a callable; {model} is of type {type(value).__name__}")
        return value
    if not callable(value):
        raise ModelNotFoundError(
            f"{model} is of type {type(value).__name__}",
            hint="Name an ExportSpec, an nn.Module, or a callable that returns one.",
        )
    _check_kwargs(value, model, kwargs)
    with users_code(f"making {model}"):
        made = value(**kwargs)
    if not isinstance(made, (ExportSpec, torch.nn.Module)):
        raise ModelNotFoundError(
            f"{model} returned a {type(made).__name__}", hint="It must return an ExportSpec or an nn.Module."
        )
    return made


def _check_kwargs(maker: Callable[..., Any], model: str, kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise UsageError(
                f"--model-kwargs: {name} is a {type(value).__name__}; allowed are numbers, strings, booleans and null"
            )
    signature = inspect.signature(maker)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        # Such as `width=6`, without annotations, which may be long.
        parameters = [str(each.replace(annotation=each.empty)) for each in signature.parameters.values()]
        takes = f"takes {', '.join(parameters)}; give them with --model-kwargs" if parameters else "takes no arguments"
        wrap = "" if isinstance(maker, type) else " A function that computes goes into the forward of an nn.Module."
        raise UsageError(f"{model}: {error}", hint=f"It {takes}.{wrap}") from error


def _with_inputs(model: str, spec: ExportSpec, texts: Sequence[str]) -> ExportSpec:
    """Returns the spec with its inputs replaced by inputs given as text."""
    if spec.methods:
        if texts:
            raise UsageError(
                f"--input {texts[0]}: {model} has several methods",
                hint="Their inputs are in the spec: exportkit.Method(example_inputs=...).",
            )
        return spec
    given: dict[str, torch.Tensor] = {}
    for name, tensor in map(parse_input, texts):
        if name in given:
            raise UsageError(f"--input {name} is given twice: {list(given[name].shape)} and {list(tensor.shape)}")
        given[name] = tensor
    if given:
        known = bind_call(spec.model, spec.example_inputs, spec.example_kwargs, partial=True)
        arguments = {**known, **_nested(given)}
        args, kwargs = rebind(spec.model, arguments)
        spec = replace(spec, example_inputs=args, example_kwargs=kwargs)
    tensors = " ".join(f"--input {name}=float32[2,3]" for name in needed_tensors(spec.model))
    every = f"Give its inputs and no others{tensors and f', such as {tensors}'}. {NO_TENSOR}"
    try:
        bind_call(spec.model, spec.example_inputs, spec.example_kwargs)
    except UsageError as error:
        raise UsageError(f"{model}: {error.message}", hint=error.hint or every) from error
    return spec


def _nested(given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Makes arguments of tensors named as --dynamic names them: batch["mask"] is `batch.mask`, past[0] is `past.0`."""
    arguments: dict[str, Any] = {}
    for name, tensor in given.items():
        *path, last = name.split(".")
        place = arguments
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place
        if not isinstance(place, dict) or last in place:
            raise UsageError(
                f"--input {name}: a parameter is a tensor or has tensors inside, not both",
                hint=f"The inputs are {', '.join(given)}.",
            )
        place[last] = tensor
    return {name: _listed(name, value) for name, value in arguments.items()}


def _listed(name: str, value: Any) -> Any:
    """Makes lists of the dicts whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    inside = {key: _listed(f"{name}.{key}", each) for key, each in value.items()}
    numbers = sorted(int(key) for key in inside if key.isdecimal())
    if not numbers:
        return inside
    if len(numbers) != len(inside) or numbers != list(range(len(numbers))):
        raise UsageError(
            f"--input {name}: the places in a list are 0, 1, 2 and so on; given are {', '.join(inside)}",
            hint=f"Give every one, from --input '{name}.0=...' on.",
        )
    return [inside[str(number)] for number in numbers]


def parse_input(text: str) -> tuple[str, torch.Tensor]:
    """Makes a random example input from "image=float32[2,3,256,256]": floats in [0, 1), integers 0 and 1."""
    name, dtype_name, shape = parse_input_text(text)
    dtype = parse_dtype(dtype_name)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return name, torch.rand(shape, dtype=torch.float64).to(dtype)
        return name, torch.randint(0, 2, shape).to(dtype)
    except RuntimeError as error:
        raise UsageError(f"cannot make the input {text!r}: {str(error).partition('] ')[2] or error}") from error


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype with this name."""
    check_dtype(name)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _load_weights(spec: ExportSpec, path: Path) -> None:
    """Fills every parameter and buffer from a safetensors file, which may lack what is declared as state.

    The file of a session's state has nothing else.

    safetensors' load_model cannot do this, because it refuses tensors that are not contiguous.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    try:
        given = load_file(path)
        with safe_open(path, framework="pt") as file:
            of_a_session = STATE_OWNER in (file.metadata() or {})
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}", hint=to_safetensors(path)) from error
    model = spec.model
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        if is_lazy(tensor):
            check_plain(name, tensor)  # raises an error: a lazy weight has no shape to compare
    filled = {id(state[name]) for name in given if name in state}  # one name of a tied tensor is enough
    faults = {
        "missing": [
            n for n, t in state.items() if id(t) not in filled and not matches(n, spec.state) and not of_a_session
        ],
        "not in the model": [name for name in given if name not in state],
        "wrong shape": [
            f"{n} is {_form(t)}, not {_form(state[n])}"
            for n, t in given.items()
            if n in state and state[n].shape != t.shape
        ],
    }
    if any(faults.values()):
        raise WeightsError(
            f"{path} does not fit {type(model).__name__}"
            + "".join(f"\n  {what}: {', '.join(names)}" for what, names in faults.items() if names),
            hint=renamed(path, [n for n in state if not matches(n, spec.state)], given)
            or "It must have exactly the model's parameters and buffers, with the same names and shapes.",
        )
    model.load_state_dict(given, strict=False)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""Makes a module of saved programs: it has their methods, and the weights and the state of the model."""

from __future__ import annotations

import dataclasses
import glob
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind, TensorArgument

from exportkit.package.manifest import Manifest, PackagedMethod, Size, StateTensor
from exportkit.spec import FORWARD, ExportSpec, Method

STATE = "exportkit_state"
"""The keyword argument of a program that has its state, a tuple of tensors. It comes after all others."""


def graphs_of(module: torch.nn.Module) -> list[torch.fx.GraphModule]:
    """Returns the graph of a program and those within it: of loops, branches, and other higher-order operators."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def taken(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the names of the tensors that a program takes from its caller, in order; the state comes last."""
    specs = program.graph_signature.input_specs
    return [s.arg.name for s in specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]


def rebuilt(
    program: torch.export.ExportedProgram,
    module: torch.fx.GraphModule,
    signature: ExportGraphSignature,
    example_inputs: tuple[Any, Any] | None = None,
    **called: Any,
) -> torch.export.ExportedProgram:
    """Returns a program with another graph over the same weights and constants.

    `called` changes the description of its call.
    """
    whole, *parts = program.module_call_graph
    assert whole.signature is not None
    whole = dataclasses.replace(whole, signature=dataclasses.replace(whole.signature, **called))
    return torch.export.ExportedProgram(
        module,
        module.graph,
        signature,
        program.state_dict,
        program.range_constraints,
        [whole, *parts],
        program.example_inputs if example_inputs is None else example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def called_signature(program: torch.export.ExportedProgram) -> Any:
    """Returns the description of a program's call."""
    return program.module_call_graph[0].signature


def program_spec(
    programs: Mapping[str, torch.export.ExportedProgram],
    manifest: Manifest | None,
    initial: Mapping[str, torch.Tensor],
    name: str,
) -> ExportSpec:
    """Returns a spec of saved programs.

    Programs without a manifest are torch.export.save's. `initial` is what the state begins with, by name.
    """
    if manifest is None or (list(programs) == [FORWARD] and not manifest.state):
        (program,) = programs.values()
        args, kwargs = program.example_inputs
        return ExportSpec(
            model=program.module(),
            example_inputs=args,
            example_kwargs=kwargs,
            name=name,
            writes=_writes(manifest.method(FORWARD)) if manifest else (),
        )
    methods, model = {}, ProgramModel(programs, manifest, initial)
    for method, program in programs.items():
        args, kwargs = program.example_inputs
        methods[method] = Method(
            example_inputs=args,
            example_kwargs={name: value for name, value in kwargs.items() if name != STATE},
            writes=_writes(manifest.method(method)),
            attribute=f"methods.{method}",
        )
    return ExportSpec(
        model=model, methods=methods, name=name, state={glob.escape(s.name): dimension_of(s) for s in manifest.state}
    )


def state_of(manifest: Manifest, read: Callable[[str], bytes]) -> dict[str, torch.Tensor]:
    """Returns what the state of an artifact begins with, by name."""
    found = {}
    for state in manifest.state:
        shape = [1 if isinstance(size, Size) else size for size in state.shape]
        tensor = torch.zeros(shape, dtype=getattr(torch, state.dtype))
        if state.initial is not None:
            content = bytearray(read(state.initial))
            tensor = torch.frombuffer(content, dtype=tensor.dtype).reshape(shape)
        found[state.name] = tensor
    return found


def dimension_of(state: StateTensor) -> str | None:
    """Returns the dimension that is the first axis of a state; None if its size is fixed."""
    first = state.shape[0] if state.shape else None
    return first.dimension if isinstance(first, Size) else None


class _Holder(torch.nn.Module):
    """A module that has tensors by the names that they had in another one."""

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a parameter or buffer by name."""
        path, _, key = name.rpartition(".")
        found: torch.Tensor = getattr(self.get_submodule(path), key)
        return found

    def hold(self, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
        """Makes a parameter or buffer with this name, unless there is one."""
        *path, key = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        if key in module._parameters or key in module._buffers:
            return
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(key, tensor)
        else:
            module.register_buffer(key, tensor, persistent=persistent)


class ForeignModel(_Holder):
    """A program that exportkit did not write, as a module that can be traced again and writes into its buffers."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        _make_bases(program.constants)
        module, signature = program.module(check_guards=False), program.graph_signature
        tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        names = [name for name in (*signature.parameters, *signature.buffers) if name in tensors]
        for name in names:
            self.hold(name, tensors[name], persistent=name not in signature.non_persistent_buffers)
        self.forward = _calling(self, module, names, [])


def _make_bases(constants: dict[str, Any]) -> None:
    """Copies tensors that torch read from a file as views, into which a program that is traced again may not write."""
    made: dict[int, torch.Tensor] = {}  # one copy for two names of one tensor
    for name, tensor in constants.items():
        if isinstance(tensor, torch.Tensor) and tensor._is_view():
            constants[name] = made.setdefault(id(tensor), tensor.clone())


class ProgramModel(_Holder):
    """The methods of a model as its programs compute them, over one set of weights.

    Attributes:
        methods: An object with a function for each method.
    """

    def __init__(
        self,
        programs: Mapping[str, torch.export.ExportedProgram],
        manifest: Manifest,
        initial: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        functions: dict[str, Any] = {}
        tied: dict[int, torch.Tensor] = {}
        for method, program in programs.items():
            module = program.module(check_guards=False)
            own = [n for n, _ in module.named_parameters(remove_duplicate=False)]
            own += [n for n in program.state_dict if n not in own]
            for name in own:
                tensor = program.state_dict[name]
                self.hold(name, tied.setdefault(id(tensor), tensor))
            used = [manifest.state[use.index].name for use in manifest.method(method).state]
            functions[method] = _calling(self, module, own, used)
        for state in manifest.state:
            for name in (state.name, *state.aliases):
                self.hold(name, initial[state.name])
        self.__dict__["methods"] = type("Methods", (), {name: staticmethod(f) for name, f in functions.items()})


def _calling(model: _Holder, module: torch.nn.Module, weights: list[str], state: list[str]) -> Callable[..., Any]:
    """Returns what calls the program of a method, by the method's signature, with the tensors that the model has."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if state:
            kwargs[STATE] = tuple(model.tensor(name) for name in state)
        now = {name: model.tensor(name) for name in weights}
        return torch.func.functional_call(module, now, args, kwargs, tie_weights=False)

    signature = inspect.signature(module.forward)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != STATE]
    call.__dict__["__signature__"] = signature.replace(parameters=kept)
    return call


def _writes(method: PackagedMethod) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in method.call.inputs if tensor.written is not None)

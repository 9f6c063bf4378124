"""Keeps a program's weights outside of the compiled code, for the package to hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch._inductor import config
from torch.export.graph_signature import InputKind

from exportkit.errors import ExportError
from exportkit.export.record.host_copies import elements
from exportkit.export.torch_patches.needed_nodes import needed_for
from exportkit.export.torch_patches.patched import Function, all_patched
from exportkit.package.consistency import WEIGHTS_DIR
from exportkit.package.dtypes import DTYPES
from exportkit.package.manifest import Weight

_EMBED = "Use --embed-weights to keep the weights inside the compiled code."


class ProgramWeights:
    """The weights of a model's programs, and the constants that the compiled code reads from outside.

    Attributes:
        records: The elements of each weight, by name in the archive. They are the program's own memory where that is on
            the CPU.
    """

    def __init__(self, programs: Sequence[torch.export.ExportedProgram]) -> None:
        """Takes the weights of programs, which share them. One with gaps between its elements is replaced.

        Raises:
            ExportError: A package cannot hold a weight.
        """
        self.records: dict[str, memoryview] = {}
        self._weights: dict[str, Weight] = {}
        self._names: dict[str, str] = {}  # the weight's name, by each name in the state: aliases too
        without_gaps: dict[Any, torch.Tensor] = {}
        for program in programs:
            _close_gaps(program.state_dict, without_gaps)
            _close_gaps(program.constants, without_gaps)
        state = {name: tensor for program in programs for name, tensor in program.state_dict.items()}
        for first, *aliases in _tied(state):
            self._weights[first] = _describe(first, state[first], aliases=tuple(aliases))
            self._names |= dict.fromkeys((first, *aliases), first)
        # The compiler may have computed with a weight that the program reads and the code does not. The package keeps
        # it, so that a loader can tell whether another state has the same value.
        read = {self._names[name]: state[name] for program in programs for name in _read(program)}
        contents = [elements(tensor) for tensor in read.values()]
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:  # hashing does not hold the GIL
            for name, content, digest in zip(read, contents, pool.map(_sha256, contents)):
                self._keep(name, content, digest)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights, for the manifest."""
        return tuple(self._weights.values())

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each weight of the state that a program reads, by its first name."""
        records = {name: weight.record for name, weight in self._weights.items() if weight.state}
        return {name: record.rpartition("/")[2] for name, record in records.items() if record}

    def first_name(self, name: str) -> str | None:
        """Returns the first name of a weight of the state, or None if it has none of this name."""
        return self._names.get(name)

    @property
    def options(self) -> dict[str, Any]:
        """The options of Inductor that keep the state outside of the code, in the context of `outside`."""
        options: dict[str, Any] = {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.package_constants_on_disk_format": "pickle_weights",  # returns the tensors, and pickles none
        }
        if any(weight.shape.count(1) == len(weight.shape) for weight in self._weights.values()):
            options["joint_graph_constant_folding"] = False
        return options

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Keeps the whole state outside of the code that is compiled with `options` while the block runs.

        By default Inductor writes tensors of up to eight elements into the code, and computes with tensors of one
        element at compile time. A second fine-tune of the model would silently get these values of the first.
        """

        def keeping_weights(get_attr: Function, graph: object, target: str, *rest: Any, **named: Any) -> Any:
            keep = config.always_keep_tensor_constants or target in self._names
            with config.patch(always_keep_tensor_constants=keep):
                return get_attr(graph, target, *rest, **named)

        with all_patched(
            ("GraphLowering.get_attr", keeping_weights),
            ("GraphLowering.allocate_non_dup_const_name", _one_name_for_one_tensor),
        ):
            yield

    def take(self, constants: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, str]:
        """Keeps the constants that code reads from outside. Returns the name of the weight for each of AOTInductor's.

        Raises:
            ExportError: A package cannot hold a constant, or a loader cannot set it.
        """
        found = {}
        for constant, tensor in sorted(constants.items()):
            if tensor.device.type != device.type:
                raise ExportError(
                    f"the code for {device.type} takes the tensor {constant} on {tensor.device.type}, which torch 2.11 "
                    "cannot set from outside",
                    hint=f"Make it a buffer, which moves with the model. {_EMBED}",
                )
            described = _describe(constant, tensor)
            if constant in self._names:
                name = self._names[constant]
                known = self._weights[name]
                if (known.dtype, known.shape, known.strides) != (described.dtype, described.shape, described.strides):
                    raise ExportError(f"the compiler changed the layout of the weight {constant}", hint=_EMBED)
            else:
                name = f"{constant}@{_sha256(elements(tensor))[:16]}"
                self._weights.setdefault(name, msgspec.structs.replace(described, name=name, state=False))
            if self._weights[name].record is None:
                content = elements(tensor)
                self._keep(name, content, _sha256(content))
            found[constant] = name
        return found

    def _keep(self, name: str, content: memoryview, digest: str) -> None:
        record = f"{WEIGHTS_DIR}/{digest}"
        self.records.setdefault(record, content)
        self._weights[name] = msgspec.structs.replace(self._weights[name], record=record)


def _one_name_for_one_tensor(allocate: Function, graph: Any, name: str | None, data: torch.Tensor) -> Any:
    """Names the constants of a graph so that who sets them by name sets all of them.

    Where code computes at load, Inductor makes a constant of each use of a tensor, and calls them all the same outside.
    """
    names = graph.allocated_constant_name
    for constant, outside in names.items():
        if outside == name and graph.constants.get(constant) is data:
            return constant
    constant = allocate(graph, name, data)
    if any(outside == names[constant] for other, outside in names.items() if other != constant):
        names[constant] = constant  # another tensor has that name, in a branch or a body of a loop
    return constant


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _describe(name: str, tensor: torch.Tensor, *, aliases: tuple[str, ...] = ()) -> Weight:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or dtype not in DTYPES:
        raise ExportError(f"a package cannot hold {name}: {dtype} with the layout {tensor.layout}", hint=_EMBED)
    if not is_dense(tensor.shape, tensor.stride()):
        raise ExportError(f"the compiler gave the tensor {name} gaps between its elements", hint=_EMBED)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Weight(name=name, aliases=aliases, state=True, dtype=dtype, shape=shape, strides=strides, record=None)


def _close_gaps(tensors: dict[str, Any], replaced: dict[Any, torch.Tensor]) -> None:
    """Replaces tensors that a package cannot hold as they are in memory. Tied tensors stay tied, by `replaced`."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        if is_dense(tensor.shape, tensor.stride()) and not tensor.is_conj() and not tensor.is_neg():
            continue
        plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        if isinstance(tensor, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
        tensors[name] = replaced.setdefault(tensor_identity(name, tensor), plain)


def _tied(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups the names of the state by tensor, as Inductor does."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(tensor_identity(name, tensor), []).append(name)
    return list(groups.values())


def tensor_identity(name: str, tensor: torch.Tensor) -> Any:
    """Returns what tied tensors have in common."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return name
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _read(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the names of the state that the program's outputs or checks depend on."""
    # torch calls placeholders impure, too, which would make each weight one that is read.
    ends = [node for node in program.graph.nodes if node.op != "placeholder" and node.is_impure()]
    used = {node.name for node in needed_for(ends)}
    return [
        spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        and getattr(spec.arg, "name", None) in used
        and spec.target in program.state_dict
    ]


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tells whether these strides address each element once, without gaps."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride != step:
            return False
        step *= size
    return True

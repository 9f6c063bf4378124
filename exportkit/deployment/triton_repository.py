"""Writes a package as a model for Triton's PyTorch backend. Does not import torch.

What Triton takes is read from the code of its backend (triton-inference-server/pytorch_backend, src/pt2, as of May
2026) and from docs/user_guide of the server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from exportkit.errors import UsageError
from exportkit.package import core
from exportkit.package.archive import Content, PackageReader, StoredRecord, write_package
from exportkit.package.atomic import check_writable, temporary_folder, write_whole
from exportkit.package.consistency import AOTINDUCTOR_DIR, is_complete, libraries_for
from exportkit.package.manifest import (
    Call,
    ConstantNode,
    Dimension,
    Library,
    Manifest,
    MappingNode,
    Node,
    Size,
    Target,
    TensorInput,
    TensorNode,
    TensorOutput,
    code_folder,
)
from exportkit.spec import FORWARD

TARGET_NAME = "model"  # the only target that the backend looks for (INDUCTOR_MODEL_NAME_DEFAULT)
LIBRARIES_DIR = "operators"  # Triton ignores folders of a model whose names are not numbers

# The backend's ModelConfigDataTypeToTorchType. It has no bfloat16 and no unsigned type but uint8.
DATA_TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
_KEY = re.compile(r"[!#-Z^-~]+")  # what the backend allows in a dict's key, without the backslash

_ELSEWHERE = "`exportkit serve` takes the package as it is."


@dataclass(frozen=True)
class TritonModel:
    """A model in a repository.

    Attributes:
        folder: Its folder, `<repository>/<name>`.
        target: The target of the package that Triton runs.
        libraries: The operator libraries to preload, in this order.
        inputs: The name in Triton of each input, by its name in the package.
        outputs: The same for the outputs.
        command: The command that starts Triton.
    """

    folder: Path
    target: str
    libraries: tuple[Path, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    command: str


def write_triton_model(
    package: Path,
    repository: Path,
    *,
    method: str | None = None,
    target: str | None = None,
    demand: core.Demand | None = None,
) -> TritonModel:
    """Adds a method of a package to a model repository of Triton. Every digest of the package is checked before.

    The default method's model has the package's name. The name of another one is `<package>.<method>`.

    The model's folder appears when it is complete.

    Args:
        package: The package. Its weights must be inside of the code.
        repository: The repository; it is made if its parent exists.
        method: The method's name; None for the default one. It has no state and writes into no input.
        target: The name of the target that Triton shall run. Default: the only one.
        demand: The required signatures, as for `PackageReader`.

    Raises:
        UsageError: Triton cannot run the package, or the repository has a model with its name.
        PackageError: The package breaks a rule of the format or lacks a required signature.
        OSError: The repository cannot be written.
    """
    with PackageReader(package, demand=demand) as reader:
        reader.verify()
        manifest = _alone(reader.manifest, method)
        chosen = _choose(reader, target, reader.manifest.method(method).name)
        inputs, outputs = _input_names(manifest.call), _output_names(manifest.call)
        config = _config(manifest, chosen, inputs, outputs)
        libraries = libraries_for(manifest, chosen)
        check_writable(repository)
        repository.mkdir(exist_ok=True)
        folder = repository / manifest.name
        _refuse_existing(folder)
        files = tuple(folder / LIBRARIES_DIR / PurePosixPath(library.record).name for library in libraries)
        command = _command(str(repository.resolve()), manifest, libraries)
        model = TritonModel(folder, chosen.name, files, inputs, outputs, command)
        with temporary_folder(repository, ".exportkit-triton-") as temporary:
            made = temporary / manifest.name
            (made / "1").mkdir(parents=True)
            code = code_folder(chosen.name, reader.manifest.method(method).name)
            _write_target(reader, manifest, chosen, code, made / "1" / "model.pt2")
            for library, file in zip(libraries, files):
                (made / LIBRARIES_DIR).mkdir(exist_ok=True)
                reader.extract(library.record, made / LIBRARIES_DIR / file.name)
            write_whole(made / "config.pbtxt", config.encode())
            write_whole(made / "README.md", _readme(manifest, chosen, libraries, inputs, outputs).encode())
            _refuse_existing(folder)  # another process may have written it meanwhile
            os.rename(made, folder)
    return model


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise UsageError(
            f"{folder} exists",
            hint="Remove it, write to another repository, or package the model under another name: "
            "`exportkit package --name`.",
        )


def _alone(manifest: Manifest, name: str | None) -> Manifest:
    """Returns the manifest of a package that has one of the methods only, as `forward`.

    Raises:
        UsageError: There is no such method, or Triton cannot call it.
    """
    method = manifest.method(name)
    if method.state:
        state = ", ".join(manifest.state[use.index].name for use in method.state[:3])
        raise UsageError(
            f"{method.name} of {manifest.name} has state ({state}), and Triton has no sessions for it",
            hint=f"--method names a method without state. In a process, `model.session().{method.name}` calls it.",
        )
    if written := [tensor.name for tensor in method.call.inputs if tensor.written is not None]:
        raise UsageError(
            f"{method.name} of {manifest.name} writes into its input {written[0]}, which Triton does not give back",
            hint="--method names a method that writes nothing.",
        )
    cases = tuple(
        msgspec.structs.replace(case, calls=(msgspec.structs.replace(case.calls[0], method=FORWARD),))
        for case in manifest.cases
        if [call.method for call in case.calls] == [method.name]
    )
    own = manifest.default is method
    return msgspec.structs.replace(
        manifest,
        name=manifest.name if own else f"{manifest.name}.{method.name}",
        methods=(msgspec.structs.replace(method, name=FORWARD),),
        state=(),
        cases=cases,
    )


def _choose(reader: PackageReader, name: str | None, method: str) -> Target:
    """Returns the target that Triton shall run."""
    manifest, path = reader.manifest, reader.path.name
    targets = {target.name: target for target in manifest.targets}
    if not targets:
        raise UsageError(
            f"{path} has no compiled target", hint="`exportkit export` makes one, unless --format says otherwise."
        )
    if not is_complete(manifest):
        raise UsageError(
            f"{path} has no libraries for its operators", hint="`exportkit package` adds the operator libraries."
        )
    if name is None and len(targets) > 1:
        raise UsageError(
            f"{path} has the targets {', '.join(targets)}, and Triton does not choose among them",
            hint="Name one with --target. It must run on every machine of the Triton deployment.",
        )
    chosen = next(iter(targets.values())) if name is None else targets.get(name)
    if chosen is None:
        raise UsageError(f"{path} has no target {name!r}; it has {', '.join(targets)}")
    if chosen.constants.get(method):
        raise UsageError(
            f"the weights of {path} are beside its code, where Triton does not look for them",
            hint="Export the model with `exportkit export --embed-weights`, and package it again.",
        )
    return chosen


def _write_target(reader: PackageReader, manifest: Manifest, target: Target, code: str, path: Path) -> None:
    """Writes a package with this target only, under the name that Triton looks for.

    Args:
        reader: The whole package.
        manifest: The manifest of the package with one method.
        target: The target.
        code: The folder of the method's code.
        path: The file to write.
    """
    old, new = f"{AOTINDUCTOR_DIR}/{code}/", f"{AOTINDUCTOR_DIR}/{TARGET_NAME}/"
    kept = {name: new + name.removeprefix(old) for name in reader.names if name.startswith(old)}
    libraries = libraries_for(manifest, target)
    kept |= {library.record: library.record for library in libraries}
    kept |= {case.record: case.record for case in manifest.cases}
    records: dict[str, Content] = {named: StoredRecord(reader, name) for name, named in kept.items()}
    alone = msgspec.structs.replace(
        manifest,
        targets=(msgspec.structs.replace(target, name=TARGET_NAME, constants={FORWARD: {}}),),
        weights=(),
        program=None,
        libraries=tuple(library for library in manifest.libraries if library in libraries),
    )
    write_package(path, alone, records)


# --- config.pbtxt -----------------------------------------------------------------------------------------------------


def _config(manifest: Manifest, target: Target, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """Returns the text of config.pbtxt."""
    call = manifest.call
    kind = "KIND_GPU" if target.device == "cuda" else "KIND_CPU"
    return f"""\
name: "{manifest.name}"
backend: "pytorch"
platform: "torch_aoti"
# The backend merges requests into a batch, and does not split the answer. A request may have several rows all the same.
max_batch_size: 0
{_tensors("input", inputs, call.inputs, call.dimensions)}\
{_tensors("output", outputs, call.outputs, call.dimensions)}\
instance_group [ {{ kind: {kind} count: 1 }} ]
"""


def _tensors(
    what: str,
    names: Mapping[str, str],
    tensors: Sequence[TensorInput | TensorOutput],
    dimensions: Sequence[Dimension],
) -> str:
    lines = []
    for tensor in tensors:
        if tensor.dtype not in DATA_TYPES:
            raise UsageError(
                f"the {what} {tensor.name!r} is {tensor.dtype}, which Triton's PyTorch backend does not take; it takes "
                f"{', '.join(DATA_TYPES)}",
                hint=f"Cast it in the model. {_ELSEWHERE}",
            )
        if not tensor.shape:
            raise UsageError(
                f"the {what} {tensor.name!r} is a scalar, which Triton's PyTorch backend does not take",
                hint=f"Give it a dimension of size 1 in the model. {_ELSEWHERE}",
            )
        dims = ", ".join(str(_size(size, dimensions)) for size in tensor.shape)
        lines.append(
            f'{what} {{ name: "{names[tensor.name]}" data_type: {DATA_TYPES[tensor.dtype]} dims: [ {dims} ] }}\n'
        )
    return "".join(lines)


def _size(size: int | Size | None, dimensions: Sequence[Dimension]) -> int:
    """Returns a fixed size, or -1 for one that varies. Triton takes no 0 there."""
    if isinstance(size, Size):
        found = next(dimension for dimension in dimensions if dimension.name == size.dimension)
        size = size.at({found.name: found.min}) if found.min == found.max else None
    return size or -1


def _input_names(call: Call) -> dict[str, str]:
    """Returns the backend's name of each input, by its name in the package.

    It takes the name from the place in the call. Inputs that are given by keyword get their number: the backend's
    document calls them `KWARGS[key]`, its code `KWARGSkey`, and both know `INPUT__<number>`.
    """
    for parameter in call.parameters:
        if any(isinstance(node, ConstantNode) for node in _leaves(parameter.value)):
            raise UsageError(
                f"the parameter {parameter.name!r} has a value that was fixed at export, and Triton takes only tensors",
                hint=f"Leave the parameter to its default at export. {_ELSEWHERE}",
            )
    positional = [parameter for parameter in call.parameters if parameter.kind == "positional"]
    keyword = [parameter for parameter in call.parameters if parameter.kind == "keyword"]
    if not positional:
        raise UsageError(
            "every input is given by keyword, and Triton's PyTorch backend needs a positional one",
            hint=f"Export with positional example inputs. {_ELSEWHERE}",
        )
    for parameter in keyword:
        if not isinstance(parameter.value, TensorNode):
            raise UsageError(
                f"the keyword {parameter.name!r} has several tensors, and Triton's PyTorch backend takes one",
                hint=f"Give it by position at export. {_ELSEWHERE}",
            )
    names = [name for i, p in enumerate(positional) for name in _names(p.value, f"ARGS[{i}]")]
    names += [f"INPUT__{len(names) + i}" for i in range(len(keyword))]
    return {tensor.name: name for tensor, name in zip(call.inputs, names)}


def _output_names(call: Call) -> dict[str, str]:
    """Returns the backend's name of each output, by its name in the package.

    The compiled code of a result with constants returns its tensors alone, in a tuple.
    """
    if any(isinstance(node, ConstantNode) for node in _leaves(call.result)):
        names = [f"RESULT[{i}]" for i in range(len(call.outputs))]
    else:
        names = list(_names(call.result, "RESULT"))
    return {tensor.name: name for tensor, name in zip(call.outputs, names)}


def _leaves(node: Node) -> Iterator[TensorNode | ConstantNode]:
    if isinstance(node, (TensorNode, ConstantNode)):
        yield node
    else:
        for item in node.items:
            yield from _leaves(item)


def _names(node: Node, path: str) -> Iterator[str]:
    """Yields a name for each tensor. The compiled code has tuples in place of named tuples."""
    if isinstance(node, TensorNode):
        yield path
    elif not isinstance(node, ConstantNode):
        steps = node.keys if isinstance(node, MappingNode) else [str(i) for i in range(len(node.items))]
        for step, item in zip(steps, node.items):
            if not _KEY.fullmatch(step):
                raise UsageError(
                    f"{path} has the key {step!r}, which Triton's PyTorch backend does not take",
                    hint=f"Use printable ASCII without spaces, quotes, brackets and backslashes. {_ELSEWHERE}",
                )
            yield from _names(item, f"{path}[{step}]")


# --- how to start it --------------------------------------------------------------------------------------------------


def _command(repository: str, manifest: Manifest, libraries: Sequence[Library]) -> str:
    """Returns the command that starts Triton with the libraries, as docs/user_guide/custom_operations.md has it."""
    start = f'tritonserver --model-repository="{repository}"'
    if not libraries:
        return start
    files = [f"{repository}/{manifest.name}/{LIBRARIES_DIR}/{PurePosixPath(item.record).name}" for item in libraries]
    path = "LD_LIBRARY_PATH=/opt/tritonserver/backends/pytorch:$LD_LIBRARY_PATH"
    return f'{path} LD_PRELOAD="{":".join(files)}" {start}'


def _readme(
    manifest: Manifest,
    target: Target,
    libraries: Sequence[Library],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> str:
    bound = next((library.torch_bound for library in libraries if library.torch_bound), None)
    torch = f"torch {bound}, because of an operator library" if bound else f"torch {target.needs_torch} or newer"
    rows = [("input", *item) for item in inputs.items()] + [("output", *item) for item in outputs.items()]
    table = "\n".join(f"| {what} | {_code(name)} | {_code(given)} |" for what, name, given in rows)
    why = "\nTriton loads no operator libraries by itself, therefore they are preloaded.\n" if libraries else ""
    return f"""\
# {manifest.name} for Triton

Written by `exportkit triton` from the target {target.name} of version {_code(manifest.version)}. Start Triton with this
command; REPOSITORY is the folder that has this one:

    REPOSITORY=/models
    {_command("$REPOSITORY", manifest, libraries)}
{why}
Triton must have {torch}; the notes of each release name its version. Its PyTorch backend loads `.pt2` files since
release 26.03, and knows the names below since 26.05.

| | in the package | in Triton |
| --- | --- | --- |
{table}

What is different from `exportkit serve`:

- Triton checks dtypes and fixed sizes. It does not know the ranges of the sizes that vary, and the compiled code does
  not check them. A request outside of the ranges may be answered wrongly, or end the process.
- The backend cannot batch this kind of model: `max_batch_size` is 0. A request may have several rows.
- Triton checks neither digests nor signatures. `1/model.pt2` is a package with one target. It has no signature:
  `exportkit verify 1/model.pt2` checks it, `exportkit sign` signs it.
- One process has one build of a library. Two models that bring different builds of it cannot be in one Triton.
"""


def _code(text: str) -> str:
    """Returns a package's text as code in a table of Markdown. Such text is untrusted."""
    return "`" + ascii(text)[1:-1].replace("|", "\\x7c").replace("`", "\\x60") + "`"

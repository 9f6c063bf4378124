"""What a manifest must satisfy beyond its shape: everything it refers to is there, and nothing is said twice."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from exportkit.errors import ManifestConsistencyError
from exportkit.package import structure
from exportkit.package.dtypes import DTYPES
from exportkit.package.manifest import (
    Call,
    Case,
    ConstantNode,
    Dimension,
    Library,
    Manifest,
    MappingNode,
    NamedTupleNode,
    Node,
    Operator,
    OutputTolerance,
    Size,
    Target,
    TensorInput,
    TensorNode,
    TensorOutput,
)
from exportkit.package.weights import check_weights

AOTINDUCTOR_DIR = "data/aotinductor"
OPERATORS_DIR = "exportkit/ops"
CASES_DIR = "exportkit/cases"

MAX_RANK = 64  # sizes of a tensor; torch's own iteration takes no more

_VERSION = re.compile(r"\d+\.\d+(\.[0-9A-Za-z.+]+)?", re.ASCII)
_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)
_MAX_SIZE = 2**62


def check_consistency(manifest: Manifest) -> None:
    """Checks a manifest against itself; no record is looked at.

    Raises:
        ManifestConsistencyError: It contradicts itself; the message names the part.
    """
    _check_call(manifest.call)
    _check_records(manifest)
    _check_targets(manifest)
    check_weights(manifest)
    _check_operators(manifest.operators, "operators")
    _check_libraries(manifest)
    _check_cases(manifest.cases, manifest.call)


def missing_operators(manifest: Manifest, target: Target) -> tuple[Operator, ...]:
    """The graph's operators that no library of the package defines on a target's platform.

    An artifact that `export` wrote has no libraries yet, and so lacks them all; a package may lack none.
    """
    defined = {operator.name for library in libraries_for(manifest, target) for operator in library.defines}
    return tuple(operator for operator in manifest.operators if operator.name not in defined)


def is_complete(manifest: Manifest) -> bool:
    """Whether it can be loaded as it is: there is a target, and libraries define every operator for each."""
    return bool(manifest.targets) and not any(missing_operators(manifest, target) for target in manifest.targets)


def libraries_for(manifest: Manifest, target: Target) -> tuple[Library, ...]:
    """The libraries a target needs, in the order to load them: those for the CPU, which define operators, first."""
    usable = [
        lib for lib in manifest.libraries if lib.platform == target.platform and lib.device in ("cpu", target.device)
    ]
    return tuple(sorted(usable, key=lambda library: (library.device != "cpu", library.record)))


# --- the call ---------------------------------------------------------------------------------------------------------


def _check_call(call: Call) -> None:
    _refuse_repeated((parameter.name for parameter in call.parameters), "parameter")
    for parameter in call.parameters:
        if not parameter.name.isidentifier():
            raise ManifestConsistencyError(f"parameter {parameter.name!r} is no Python name")
    nodes = [(parameter.name, parameter.value) for parameter in call.parameters]
    _check_structure(nodes, call.inputs, "inputs")
    _check_structure([("", call.result)], call.outputs, "outputs")
    _check_dimensions(call)
    outputs = {output.name: output for output in call.outputs}
    for output in call.outputs:
        _check_tolerance(output.name, output.tolerance, outputs)


def _check_structure(
    nodes: Sequence[tuple[str, Node]], tensors: Sequence[TensorInput | TensorOutput], what: str
) -> None:
    """Every tensor has its one place in the structure, in order, and is named by that place."""
    found = [index for _, node in nodes for index in _indices(node, what)]
    if found != list(range(len(tensors))):
        raise ManifestConsistencyError(
            f"the structure of the {what} has the tensors {found}; it must have 0 to {len(tensors) - 1} once, in order"
        )
    names = (name for prefix, node in nodes for name in structure.leaf_names(node, prefix))
    for name, tensor in zip(names, tensors):
        if tensor.name != name:
            raise ManifestConsistencyError(f"{what}: the tensor named {tensor.name!r} has its place at {name!r}")
        if tensor.dtype not in DTYPES:
            raise ManifestConsistencyError(f"{what}: {name} has the unknown dtype {tensor.dtype!r}")
    _refuse_repeated((tensor.name for tensor in tensors), f"tensor among the {what}:")


def _indices(node: Node, what: str, depth: int = 0) -> Iterator[int]:
    if depth > structure.MAX_DEPTH:
        raise ManifestConsistencyError(f"the {what} are nested deeper than {structure.MAX_DEPTH} containers")
    if isinstance(node, TensorNode):
        yield node.index
        return
    if isinstance(node, ConstantNode):
        return
    if isinstance(node, (MappingNode, NamedTupleNode)):
        keys = node.keys if isinstance(node, MappingNode) else node.fields
        _refuse_repeated(keys, f"key of the {what}")
        if len(keys) != len(node.items):
            raise ManifestConsistencyError(f"{what}: {len(keys)} keys for {len(node.items)} items: {', '.join(keys)}")
        if isinstance(node, NamedTupleNode):
            structure.check_named_tuple(node.class_name, node.fields)
    for item in node.items:
        yield from _indices(item, what, depth + 1)


def _check_dimensions(call: Call) -> None:
    _refuse_repeated((dimension.name for dimension in call.dimensions), "dimension")
    dimensions = {dimension.name: dimension for dimension in call.dimensions}
    for dimension in call.dimensions:
        if dimension.min > dimension.max:
            raise ManifestConsistencyError(
                f"dimension {dimension.name} has min {dimension.min} above max {dimension.max}"
            )
    tensors: tuple[TensorInput | TensorOutput, ...] = (*call.inputs, *call.outputs)
    for tensor in tensors:
        if len(tensor.shape) > MAX_RANK:
            raise ManifestConsistencyError(
                f"{tensor.name} has {len(tensor.shape)} sizes; at most {MAX_RANK} are allowed"
            )
        for size in tensor.shape:
            if not isinstance(size, Size):
                continue
            if size.dimension not in dimensions:
                raise ManifestConsistencyError(
                    f"{tensor.name} has a size of dimension {size.dimension!r}, which is not declared"
                )
            ends = [size.scale * end + size.offset for end in _ends(dimensions[size.dimension])]
            if ends[0] < 0 or ends[1] > _MAX_SIZE:
                raise ManifestConsistencyError(
                    f"{tensor.name} has a size of {size.scale}*{size.dimension}{size.offset:+}: {ends[0]} to {ends[1]}"
                )
        if (least := math.prod(_least(size, dimensions) for size in tensor.shape)) > _MAX_SIZE:
            raise ManifestConsistencyError(f"{tensor.name} has {least} elements at least, which no memory holds")
    used = {size.dimension for tensor in call.inputs for size in tensor.shape if isinstance(size, Size)}
    if unused := sorted(dimensions.keys() - used):
        raise ManifestConsistencyError(f"dimension {unused[0]} is no input's: nothing gives it a value")


def _least(size: int | Size | None, dimensions: dict[str, Dimension]) -> int:
    """The least value of a size; of one that is not known, 0."""
    if isinstance(size, Size):
        return size.scale * dimensions[size.dimension].min + size.offset
    return size or 0


def _ends(dimension: Dimension) -> tuple[int, int]:
    return dimension.min, dimension.max


def _check_tolerance(name: str, tolerance: OutputTolerance, outputs: dict[str, TensorOutput]) -> None:
    if not (math.isfinite(tolerance.rtol) and math.isfinite(tolerance.atol)):
        raise ManifestConsistencyError(f"output {name} has a tolerance that is not finite")
    for key in ("ranking_of", "rows_of"):
        other = getattr(tolerance, key)
        if other is not None and (other == name or other not in outputs):
            raise ManifestConsistencyError(f"output {name} has {key} {other!r}, which is not another output")


# --- what can run it --------------------------------------------------------------------------------------------------


def _check_records(manifest: Manifest) -> None:
    names = [record.name for record in manifest.records]
    if names != sorted(set(names)):
        raise ManifestConsistencyError("the records are not sorted by name, each once")
    references = [
        (f"library {library.record}", library.record, f"{OPERATORS_DIR}/{library.platform}/")
        for library in manifest.libraries
    ]
    references += [(f"case {case.record}", case.record, f"{CASES_DIR}/") for case in manifest.cases]
    if manifest.program:
        references.append(("the program", manifest.program.record, ""))
        _check_version(manifest.program.built_with_torch, "the program's built_with_torch")
    present = set(names)
    for what, record, folder in references:
        if record not in present:
            raise ManifestConsistencyError(f"{what}: there is no record {record!r}")
        if not record.startswith(folder):
            raise ManifestConsistencyError(f"{what}: it is not under {folder}")


def _check_targets(manifest: Manifest) -> None:
    if not manifest.targets and manifest.program is None:
        raise ManifestConsistencyError("there is neither a target nor a program: nothing to run")
    names = sorted(target.name for target in manifest.targets)
    _refuse_repeated(names, "target")
    for shorter, longer in itertools.pairwise(names):  # sorted: a prefix comes right before what it is a prefix of
        if longer.startswith(shorter):
            raise ManifestConsistencyError(
                f"target {shorter} is a prefix of target {longer}: torch would take the records of both for one model"
            )
    compiled = [r.name for r in manifest.records if r.name.startswith(f"{AOTINDUCTOR_DIR}/")]
    with_code = {name.split("/")[2] for name in compiled if name.count("/") > 2 and name.endswith(".so")}
    for target in manifest.targets:
        if target.name not in with_code:
            raise ManifestConsistencyError(
                f"target {target.name} has no compiled code: no record {AOTINDUCTOR_DIR}/{target.name}/*.so"
            )
        _check_target(target)
    known = set(names)
    for record in compiled:
        if record.split("/")[2] not in known:
            raise ManifestConsistencyError(f"record {record} belongs to no target")


def _check_target(target: Target) -> None:
    for key in ("needs_torch", "built_with_torch"):
        _check_version(getattr(target, key), f"target {target.name}: {key}")
    if target.built_with_cuda is not None:
        _check_version(target.built_with_cuda, f"target {target.name}: built_with_cuda")
    if (target.device == "cuda") != (target.cuda_architecture is not None):
        raise ManifestConsistencyError(
            f"target {target.name} for {target.device} has cuda_architecture {target.cuda_architecture!r}"
        )
    if target.cuda_ptx and target.device != "cuda":
        raise ManifestConsistencyError(f"target {target.name} for {target.device} has cuda_ptx")


def _check_operators(operators: Sequence[Operator], where: str) -> None:
    _refuse_repeated((operator.name for operator in operators), f"operator in {where}:")
    for operator in operators:
        if not _OPERATOR.fullmatch(operator.name):
            raise ManifestConsistencyError(
                f"{where}: {operator.name!r} is no operator's name (namespace::name.overload)"
            )
        if not operator.schema.startswith(f"{operator.name}("):
            raise ManifestConsistencyError(f"{where}: {operator.name} has the schema of another: {operator.schema!r}")


def _check_libraries(manifest: Manifest) -> None:
    _refuse_repeated((library.record for library in manifest.libraries), "library")
    digests = {record.name: record.sha256 for record in manifest.records}
    wanted = {operator.name: operator.schema for operator in manifest.operators}
    definers: dict[tuple[str, str], str] = {}
    for library in manifest.libraries:
        if library.sha256 != digests[library.record]:
            raise ManifestConsistencyError(f"library {library.record} has another sha256 than its record")
        _check_operators(library.defines, library.record)
        _check_version(library.needs_torch, f"library {library.record}: needs_torch")
        if library.torch_bound is not None:
            _check_version(library.torch_bound, f"library {library.record}: torch_bound")
        for operator in library.defines:
            other = definers.setdefault((library.platform, operator.name), library.record)
            if other != library.record:
                raise ManifestConsistencyError(f"{other} and {library.record} both define {operator.name}")
            if wanted.get(operator.name, operator.schema) != operator.schema:
                raise ManifestConsistencyError(
                    f"{library.record} defines {operator.schema}, but the graph was traced with {wanted[operator.name]}"
                )


def _check_cases(cases: Sequence[Case], call: Call) -> None:
    _refuse_repeated((case.record for case in cases), "case")
    dimensions = {dimension.name: dimension for dimension in call.dimensions}
    for case in cases:
        if case.sizes.keys() != dimensions.keys():
            raise ManifestConsistencyError(
                f"case {case.record} gives sizes for {sorted(case.sizes)}; the dimensions are {sorted(dimensions)}"
            )
        for name, size in case.sizes.items():
            low, high = _ends(dimensions[name])
            if not low <= size <= high:
                raise ManifestConsistencyError(f"case {case.record} has {name} = {size}, outside of {low} to {high}")


def _check_version(version: str, what: str) -> None:
    if not _VERSION.fullmatch(version):
        raise ManifestConsistencyError(f'{what} is {version!r}, which is no version such as "2.13"')


def _refuse_repeated(names: Sequence[str] | Iterator[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ManifestConsistencyError(f"{what} {name} is there twice")
        seen.add(name)

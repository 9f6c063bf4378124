"""The manifest: what a package says of itself. FORMAT.md beside this file explains every key.

Never imports torch: `inspect` and the loader's checks come before it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta, Struct

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
MANIFEST_NAME = "exportkit/manifest.json"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
Symbol = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """Unknown keys are refused: a reader that does not know a key cannot honour it."""


# --- sizes ------------------------------------------------------------------------------------------------------------


class Dimension(Strict):
    """A named number that varies from call to call, min <= n <= max."""

    name: Symbol
    min: Count
    max: Count


class Size(Strict):
    """scale * dimension + offset."""

    dimension: Symbol
    scale: Annotated[int, Meta(ge=1)] = 1
    offset: int = 0


# --- the call ---------------------------------------------------------------------------------------------------------


class TensorInput(Strict):
    """One tensor the compiled code takes. `name` is its place in the call, such as `image` or `batch.mask`."""

    name: str
    dtype: str
    shape: tuple[Count | Size, ...]


class OutputTolerance(Strict):
    """How far an output may be from eager's; see exportkit.spec.Tolerance."""

    rtol: Annotated[float, Meta(ge=0)]
    atol: Annotated[float, Meta(ge=0)]
    ranking_of: str | None = None
    rows_of: str | None = None


class TensorOutput(Strict):
    """One tensor the compiled code returns. A size that is no multiple of one dimension is null."""

    name: str
    dtype: str
    shape: tuple[Count | Size | None, ...]
    tolerance: OutputTolerance


class TensorNode(Strict, tag="tensor"):
    """A tensor: the index into `inputs` or `outputs`."""

    index: Count


class ConstantNode(Strict, tag="constant"):
    """A value that was fixed at export."""

    value: bool | int | float | str | None


class SequenceNode(Strict, tag="sequence"):
    """A list or tuple."""

    kind: Literal["list", "tuple"]
    items: tuple[Node, ...]


class MappingNode(Strict, tag="mapping"):
    """A dict with string keys, in order."""

    keys: tuple[str, ...]
    items: tuple[Node, ...]


class NamedTupleNode(Strict, tag="namedtuple"):
    """A named tuple; the loader makes a class with this name and these fields."""

    class_name: str
    fields: tuple[str, ...]
    items: tuple[Node, ...]


Node = Union[TensorNode, ConstantNode, SequenceNode, MappingNode, NamedTupleNode]


class Parameter(Strict):
    """A parameter of the module's forward that was given at export, with the structure of its value."""

    name: str
    kind: Literal["positional", "keyword"]
    value: Node


class Call(Strict):
    """The module's own call signature and output structure, over flat lists of tensors."""

    parameters: tuple[Parameter, ...]
    inputs: tuple[TensorInput, ...]
    result: Node
    outputs: tuple[TensorOutput, ...]
    dimensions: tuple[Dimension, ...]


# --- what can run it --------------------------------------------------------------------------------------------------


class Target(Strict):
    """One compiled model, under data/aotinductor/<name>/. `needs_torch` is the oldest torch its code loads in.

    `platform` is such as "linux-x86_64" (libraries.host_platform), `cpu_isa` "x86-64-v3", `cuda_architecture` "sm_90".
    """

    name: Name
    device: Literal["cpu", "cuda"]
    platform: Name
    cpu_isa: str | None
    cuda_architecture: str | None
    cuda_ptx: bool
    needs_torch: str
    built_with_torch: str
    built_with_cuda: str | None


class Program(Strict):
    """The ExportedProgram, so that the package can be compiled again. `record` is a torch.export archive."""

    record: str
    device: Literal["cpu", "cuda"]
    built_with_torch: str


class Operator(Strict):
    """A custom operator of the graph, `namespace::name` or `namespace::name.overload`, with its full schema."""

    name: str
    schema: str


class Library(Strict):
    """An operator library, under exportkit/ops/<platform>/.

    `defines` are the schemas it registers, by operator; none for one that only adds kernels. `torch_bound` names the torch
    minor version a library that uses more than the stable ABI works with, such as "2.13"; null for a stable one,
    which works from `needs_torch` on.
    """

    record: str
    sha256: Sha256
    platform: Name
    device: Literal["cpu", "cuda"]
    defines: tuple[Operator, ...]
    needs_torch: str
    torch_bound: str | None


class Case(Strict):
    """A recorded call: inputs, and what eager answered, in exportkit/cases/<n>.safetensors as `input.<i>`, `output.<i>`."""

    record: str
    sizes: dict[Symbol, Count]


class Record(Strict):
    """Every record of the archive but the manifest itself."""

    name: str
    size: Count
    sha256: Sha256


class Source(Strict):
    """What the eager model was, so that `verify` can ask it again.

    `dtype` is what its floating parameters, buffers and inputs were cast to, null where they were left as they were.
    `state_sha256` is over its parameters and buffers after that.
    """

    model: str | None
    model_kwargs: dict[str, bool | int | float | str | None]
    dtype: str | None
    seed: int
    state_sha256: Sha256


class Provenance(Strict):
    """Where the package comes from. Nothing here depends on the clock or on the machine's paths."""

    exportkit: str
    torch: str
    commit: str | None
    dirty: bool | None
    tf32: bool


class Manifest(Strict):
    """All of it."""

    format_version: int
    name: Name
    version: str
    call: Call
    targets: tuple[Target, ...]
    program: Program | None
    operators: tuple[Operator, ...]
    libraries: tuple[Library, ...]
    cases: tuple[Case, ...]
    source: Source
    provenance: Provenance
    records: tuple[Record, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with sorted keys and a final newline, the same bytes for the same manifest."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"

"""The manifest: what a package says of itself. FORMAT.md beside this file explains every key.

Never imports torch: `inspect` and the loader's checks come before it.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec
from msgspec import Struct

from exportkit.package import core

FORMAT_VERSION = 3  # what is written; 1 and 2 are read as well
MANIFEST_NAME = "exportkit/manifest.json"


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """A part of a manifest. What values it may have is FORMAT.md's to say and the library's to check.

    msgspec hands `frozen` down to subclasses; each says it again for type checkers, which do not know.
    """


# --- sizes ------------------------------------------------------------------------------------------------------------


class Dimension(Strict, frozen=True):
    """A named number that varies from call to call, min <= n <= max."""

    name: str
    min: int
    max: int


class Size(Strict, frozen=True):
    """scale * dimension + offset."""

    dimension: str
    scale: int = 1
    offset: int = 0


# --- the call ---------------------------------------------------------------------------------------------------------


class TensorInput(Strict, frozen=True):
    """One tensor the compiled code takes. `name` is its place in the call, such as `image` or `batch.mask`."""

    name: str
    dtype: str
    shape: tuple[int | Size, ...]


class OutputTolerance(Strict, frozen=True):
    """How far an output may be from eager's; see exportkit.spec.Tolerance."""

    rtol: float
    atol: float
    ranking_of: str | None = None
    rows_of: str | None = None


class TensorOutput(Strict, frozen=True):
    """One tensor the compiled code returns. A size that is no multiple of one dimension is null."""

    name: str
    dtype: str
    shape: tuple[int | Size | None, ...]
    tolerance: OutputTolerance


class TensorNode(Strict, frozen=True, tag="tensor"):
    """A tensor: the index into `inputs` or `outputs`."""

    index: int


class ConstantNode(Strict, frozen=True, tag="constant"):
    """A value that was fixed at export."""

    value: bool | int | float | str | None


class SequenceNode(Strict, frozen=True, tag="sequence"):
    """A list or tuple."""

    kind: Literal["list", "tuple"]
    items: tuple[Node, ...]


class MappingNode(Strict, frozen=True, tag="mapping"):
    """A dict with string keys, in order."""

    keys: tuple[str, ...]
    items: tuple[Node, ...]


class NamedTupleNode(Strict, frozen=True, tag="namedtuple"):
    """A named tuple; the loader makes a class with this name and these fields."""

    class_name: str
    fields: tuple[str, ...]
    items: tuple[Node, ...]


# msgspec evaluates this under Python 3.10, where `|` knows no forward references.
Node = Union[TensorNode, ConstantNode, SequenceNode, MappingNode, NamedTupleNode]  # noqa: UP007


class Parameter(Strict, frozen=True):
    """A parameter of the module's forward that was given at export, with the structure of its value."""

    name: str
    kind: Literal["positional", "keyword"]
    value: Node


class Call(Strict, frozen=True):
    """The module's own call signature and output structure, over flat lists of tensors."""

    parameters: tuple[Parameter, ...]
    inputs: tuple[TensorInput, ...]
    result: Node
    outputs: tuple[TensorOutput, ...]
    dimensions: tuple[Dimension, ...]


# --- what can run it --------------------------------------------------------------------------------------------------


class Target(Strict, frozen=True):
    """One compiled model, under data/aotinductor/<name>/. `needs_torch` is the oldest torch its code loads in.

    `platform` is such as "linux-x86_64" (libraries.host_platform), `cpu_isa` "x86-64-v3", `cuda_architecture` "sm_90".
    `constants` are the tensors that the code takes from outside: AOTInductor's name for each, and the weight's name.
    """

    name: str
    device: Literal["cpu", "cuda"]
    platform: str
    cpu_isa: str | None
    cuda_architecture: str | None
    cuda_ptx: bool
    needs_torch: str
    built_with_torch: str
    built_with_cuda: str | None
    constants: dict[str, str] = {}


class Weight(Strict, frozen=True):
    """A tensor of the model's state, or a constant that the targets' code reads (`state` is false).

    `aliases` are further names of the same tensor (tied weights). The elements lie in `record` without gaps, `strides`
    apart, as the compiled code expects them; there is no record where no code reads the tensor.
    """

    name: str
    aliases: tuple[str, ...]
    state: bool
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record: str | None


class Program(Strict, frozen=True):
    """The ExportedProgram, so that the package can be compiled again. `record` is a torch.export archive."""

    record: str
    device: Literal["cpu", "cuda"]
    built_with_torch: str


class Operator(Strict, frozen=True):
    """A custom operator of the graph, `namespace::name` or `namespace::name.overload`, with its full schema."""

    name: str
    schema: str


class Library(Strict, frozen=True):
    """An operator library, under exportkit/ops/<platform>/.

    `defines` are the schemas it registers, by operator; none for one that only adds kernels. `kernels` says what its
    kernels run on; "any" is for kernels that call other operators. `torch_bound` names the torch minor version a
    library that uses more than the stable ABI works with, such as "2.13"; null for a stable one, which works from
    `needs_torch` on. `needs` is what the host brings beside torch: versions of glibc and libstdc++ such as
    "GLIBC_2.34", and libraries.
    """

    record: str
    sha256: str
    platform: str
    device: Literal["cpu", "cuda"]
    kernels: tuple[Literal["cpu", "cuda", "any"], ...]
    defines: tuple[Operator, ...]
    needs_torch: str
    torch_bound: str | None
    needs: tuple[str, ...]


class Case(Strict, frozen=True):
    """A recorded call, inputs and what eager answered: exportkit/cases/<n>.safetensors, `input.<i>`, `output.<i>`."""

    record: str
    sizes: dict[str, int]


class Record(Strict, frozen=True):
    """Every record of the archive but the manifest itself."""

    name: str
    size: int
    sha256: str


class Source(Strict, frozen=True):
    """What the eager model was, so that `verify` can ask it again.

    `dtype` is what its floating parameters, buffers and inputs were cast to, null where they were left as they were.
    `state_sha256` is over its parameters and buffers after that.
    """

    model: str | None
    model_kwargs: dict[str, bool | int | float | str | None]
    dtype: str | None
    seed: int
    state_sha256: str


class Provenance(Strict, frozen=True):
    """Where the package comes from. Nothing here depends on the clock or on the machine's paths."""

    exportkit: str
    torch: str
    commit: str | None
    dirty: bool | None
    tf32: bool


class Manifest(Strict, frozen=True, kw_only=True):
    """All of it."""

    format_version: int
    name: str
    version: str
    call: Call
    targets: tuple[Target, ...]
    weights: tuple[Weight, ...] = ()
    program: Program | None
    operators: tuple[Operator, ...]
    libraries: tuple[Library, ...]
    cases: tuple[Case, ...]
    source: Source
    provenance: Provenance
    records: tuple[Record, ...]


# Made at import, which one thread does: msgspec works out a type's fields when it first needs them, and crashes where
# two threads are in the middle of that (seen with 0.22).
_DECODER = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with its keys in the order above and a final newline, the same bytes for the same manifest."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def check(data: bytes) -> None:
    """Holds a manifest by itself against rules 7, 8 and 9. No record is looked at.

    Raises:
        FormatVersionError: It is a manifest of another version of the format.
        ManifestSyntaxError: It is not JSON of this shape, or has a key twice.
        ManifestConsistencyError: It contradicts itself.
    """
    core.call("ek_check_manifest", data, len(data))


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest by itself; the errors are those of `check`."""
    check(data)
    return decode_checked(data)


def decode_checked(data: bytes) -> Manifest:
    """A manifest that the library has checked."""
    return _DECODER.decode(data)

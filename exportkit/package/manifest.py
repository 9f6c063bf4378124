"""The manifest: what a package says of itself. FORMAT.md beside this file explains every key.

Never imports torch: `inspect` and the loader's checks come before it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta, Struct

from exportkit.errors import FormatVersionError, ManifestSyntaxError
from exportkit.package import strict_json

FORMAT_VERSION = 2  # what is written; 1 is read as well
MAX_MANIFEST_BYTES = 16 << 20
MAX_MANIFEST_DEPTH = 80  # of brackets: twice a call's 32 containers, which have two each, and what is around them
MANIFEST_NAME = "exportkit/manifest.json"

# \Z rather than $, which would allow a final newline.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")]
Symbol = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what other languages can hold


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """Unknown keys are refused: a reader that does not know a key cannot honour it.

    msgspec hands `frozen` down to subclasses; each says it again for type checkers, which do not know.
    """


# --- sizes ------------------------------------------------------------------------------------------------------------


class Dimension(Strict, frozen=True):
    """A named number that varies from call to call, min <= n <= max."""

    name: Symbol
    min: Count
    max: Count


class Size(Strict, frozen=True):
    """scale * dimension + offset."""

    dimension: Symbol
    scale: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 1
    offset: Integer = 0


# --- the call ---------------------------------------------------------------------------------------------------------


class TensorInput(Strict, frozen=True):
    """One tensor the compiled code takes. `name` is its place in the call, such as `image` or `batch.mask`."""

    name: str
    dtype: str
    shape: tuple[Count | Size, ...]


class OutputTolerance(Strict, frozen=True):
    """How far an output may be from eager's; see exportkit.spec.Tolerance."""

    rtol: Annotated[float, Meta(ge=0)]
    atol: Annotated[float, Meta(ge=0)]
    ranking_of: str | None = None
    rows_of: str | None = None


class TensorOutput(Strict, frozen=True):
    """One tensor the compiled code returns. A size that is no multiple of one dimension is null."""

    name: str
    dtype: str
    shape: tuple[Count | Size | None, ...]
    tolerance: OutputTolerance


class TensorNode(Strict, frozen=True, tag="tensor"):
    """A tensor: the index into `inputs` or `outputs`."""

    index: Count


class ConstantNode(Strict, frozen=True, tag="constant"):
    """A value that was fixed at export."""

    value: bool | Integer | float | str | None


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

    name: Name
    device: Literal["cpu", "cuda"]
    platform: Name
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
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]
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
    sha256: Sha256
    platform: Name
    device: Literal["cpu", "cuda"]
    kernels: tuple[Literal["cpu", "cuda", "any"], ...]
    defines: tuple[Operator, ...]
    needs_torch: str
    torch_bound: str | None
    needs: tuple[str, ...]


class Case(Strict, frozen=True):
    """A recorded call, inputs and what eager answered: exportkit/cases/<n>.safetensors, `input.<i>`, `output.<i>`."""

    record: str
    sizes: dict[Symbol, Count]


class Record(Strict, frozen=True):
    """Every record of the archive but the manifest itself."""

    name: str
    size: Count
    sha256: Sha256


class Source(Strict, frozen=True):
    """What the eager model was, so that `verify` can ask it again.

    `dtype` is what its floating parameters, buffers and inputs were cast to, null where they were left as they were.
    `state_sha256` is over its parameters and buffers after that.
    """

    model: str | None
    model_kwargs: dict[str, bool | Integer | float | str | None]
    dtype: str | None
    seed: Integer
    state_sha256: Sha256


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
    name: Name
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


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest strictly. What it says is not checked against itself here; see consistency.py.

    Raises:
        FormatVersionError: It is a manifest of another version of the format.
        ManifestSyntaxError: It is not JSON of this shape, or has a key twice.
    """
    try:
        # msgspec takes the last of two equal keys without a word, so the standard library looks at the keys first.
        value = strict_json.parse(data, max_depth=MAX_MANIFEST_DEPTH)
    except ValueError as error:
        raise ManifestSyntaxError(f"the manifest {error}") from error
    _check_version(value)
    try:
        manifest = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestSyntaxError(
            f"the manifest is not of the shape FORMAT.md gives: {error}",
            hint="A key or value that this exportkit does not know is refused, since it could not be honoured.",
        ) from error
    if manifest.format_version == 1 and (manifest.weights or any(target.constants for target in manifest.targets)):
        raise ManifestSyntaxError("the manifest has weights outside the code, which format version 1 does not know")
    return manifest


def _check_version(value: Any) -> None:
    """Before anything else, since another version may have other keys."""
    if not isinstance(value, dict) or type(value.get("format_version")) is not int:
        raise ManifestSyntaxError("the manifest is no object with an integer `format_version`")
    if not 1 <= value["format_version"] <= FORMAT_VERSION:
        raise FormatVersionError(
            f"the package has format version {value['format_version']}; this exportkit reads 1 to {FORMAT_VERSION}",
            hint="Install an exportkit that reads it, or export the model again with this one.",
        )

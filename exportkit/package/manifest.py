"""The manifest of a package. FORMAT.md beside this file explains every key.

Does not import torch, because `inspect` and the loader's checks run without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal, Union

import msgspec
from msgspec import UNSET, Struct, UnsetType

from exportkit.errors import UsageError
from exportkit.package import core

FORMAT_VERSION = 1
MANIFEST_NAME = "exportkit/manifest.json"


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """A part of a manifest. FORMAT.md has the allowed values. Subclasses repeat `frozen` for type checkers."""


class Dimension(Strict, frozen=True):
    """A named number that may differ between calls, min <= n <= max. `tried`: where conditions of the trace end."""

    name: str
    min: int
    max: int
    tried: tuple[int, ...] | UnsetType = UNSET


class Size(Strict, frozen=True):
    """scale * dimension + offset."""

    dimension: str
    scale: int = 1
    offset: int = 0

    def at(self, numbers: Mapping[str, int]) -> int:
        """Returns the size for the numbers of the dimensions."""
        return self.scale * numbers[self.dimension] + self.offset

    def number_of(self, size: int) -> int | None:
        """Returns the dimension's number at a size; None if no integer gives that size."""
        number, rest = divmod(size - self.offset, self.scale)
        return None if rest else number

    def __str__(self) -> str:
        """As `--dynamic` takes it, such as `16*h+1`."""
        text = self.dimension if self.scale == 1 else f"{self.scale}*{self.dimension}"
        return f"{text}{self.offset:+d}" if self.offset else text


# --- the call ---------------------------------------------------------------------------------------------------------


class GradientOf(Strict, frozen=True):
    """What a result is: `scale` times the gradient of the sum of another output with respect to an input."""

    output: str
    input: str
    scale: float


class OutputTolerance(Strict, frozen=True):
    """How far a result may differ from eager's; see exportkit.spec.Tolerance. `dim`, `gradient_of` may be absent."""

    rtol: float
    atol: float
    ranking_of: str | None = None
    dim: int | UnsetType = UNSET
    rows_of: str | None = None
    gradient_of: GradientOf | UnsetType = UNSET


# The `atol` of an output whose values need not repeat. Every finite value is within it.
ANY_VALUE = sys.float_info.max


class TensorInput(Strict, frozen=True):
    """An input tensor of the compiled code. `name` is its place in the call, such as `image` or `batch.mask`.

    `written` is the tolerance of what the call writes into it, or null if the call only reads it.
    """

    name: str
    dtype: str
    shape: tuple[int | Size, ...]
    written: OutputTolerance | None


class TensorOutput(Strict, frozen=True):
    """An output tensor of the compiled code. A size other than a Size or a number is null."""

    name: str
    dtype: str
    shape: tuple[int | Size | None, ...]
    tolerance: OutputTolerance


class TensorNode(Strict, frozen=True, tag="tensor"):
    """A tensor. `index` counts in `inputs` or `outputs`."""

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
    """A named tuple. The loader makes a class with this name and these fields."""

    class_name: str
    fields: tuple[str, ...]
    items: tuple[Node, ...]


# msgspec evaluates this under Python 3.10, where `|` does not support forward references.
Node = Union[TensorNode, ConstantNode, SequenceNode, MappingNode, NamedTupleNode]  # noqa: UP007


class Parameter(Strict, frozen=True):
    """A parameter of the module's forward that was given at export, with the structure of its value."""

    name: str
    kind: Literal["positional", "keyword"]
    value: Node


class Call(Strict, frozen=True):
    """The module's call signature and output structure, over flat lists of tensors."""

    parameters: tuple[Parameter, ...]
    inputs: tuple[TensorInput, ...]
    result: Node
    outputs: tuple[TensorOutput, ...]
    dimensions: tuple[Dimension, ...]


# --- methods and state ------------------------------------------------------------------------------------------------


class StateTensor(Strict, frozen=True):
    """A tensor that methods write and that outlives a call: a buffer of the model. A session has one of its own.

    `aliases` are further names of the same buffer. `initial` is the record with the elements that a new session
    begins with, without gaps in row-major order, or null if they are zeros. If a size is a Size, the record has one
    row there, which every row begins with.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int | Size, ...]
    initial: str | None
    tolerance: OutputTolerance


class StateUse(Strict, frozen=True):
    """A tensor of the manifest's `state` that a method's code takes after its inputs."""

    index: int
    written: bool


class PackagedMethod(Strict, frozen=True):
    """One entry of the model: how it is called, and the state that its code takes after the inputs, in this order."""

    name: str
    call: Call
    state: tuple[StateUse, ...]


# --- what can run it --------------------------------------------------------------------------------------------------


class Target(Strict, frozen=True):
    """One compiled model: for each method a folder under data/aotinductor/ (`code_folder`).

    `needs_torch` is the oldest torch that can load its code.

    Examples are "linux-x86_64" for `platform` (libraries.host_platform), "x86-64-v3" for `cpu_isa` and "sm_90" for
    `cuda_architecture`. `constants` has, by method, AOTInductor's name of each external tensor with the weight's name.
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
    constants: dict[str, dict[str, str]] = {}


class Weight(Strict, frozen=True):
    """A tensor of the model's state, or a constant that the targets' code reads (`state` is false).

    `aliases` are further names of the same tensor (tied weights). `record` holds the elements without gaps, in the
    order of `strides` that the compiled code expects. It is null if no code reads the tensor.
    """

    name: str
    aliases: tuple[str, ...]
    state: bool
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record: str | None


class Program(Strict, frozen=True):
    """The ExportedPrograms, to compile the package again from. `records` has a torch.export archive for each method."""

    records: dict[str, str]
    device: Literal["cpu", "cuda"]
    built_with_torch: str


class OnnxData(Strict, frozen=True):
    """The file beside an ONNX model that has its weights."""

    name: str
    size: int
    sha256: str


class OnnxFunction(Strict, frozen=True):
    """The ONNX function that computes a custom operator. `operator` is a name in the manifest's `operators`."""

    operator: str
    domain: str
    name: str
    overload: str


class Onnx(Strict, frozen=True):
    """An ONNX model that the package stands beside, and the file with its weights, if they are not inside it.

    `functions` is empty if the model has no custom operators, or if they were inlined.
    """

    method: str
    size: int
    sha256: str
    data: OnnxData | None
    opset: int
    functions: tuple[OnnxFunction, ...]


class Operator(Strict, frozen=True):
    """A custom operator of the graph, `namespace::name` or `namespace::name.overload`, with its full schema."""

    name: str
    schema: str


class Library(Strict, frozen=True):
    """An operator library, under exportkit/ops/<platform>/.

    `defines` are the operators it defines; a library that only adds kernels defines none, and has device "cuda" if they
    are CUDA kernels. `adds_to` are others that it adds kernels to, if known. `kernels` are the devices of its kernels;
    "any" is for kernels that call other operators. `torch_bound` is the only torch minor version that a library beyond
    the stable ABI works with, such as "2.13"; null for a stable library, which works with `needs_torch` and newer.
    `attestations` are the records of in-toto statements about it.
    `needs` are its requirements besides torch: versions such as "GLIBC_2.34", and libraries of the package or the host.
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
    adds_to: tuple[str, ...] | UnsetType = UNSET
    attestations: tuple[str, ...] | UnsetType = UNSET


class Accuracy(Strict, frozen=True):
    """How far an output is from its reference, relative to the reference's magnitude; see FORMAT.md, "Verdicts"."""

    rms: float
    greatest: float


class CaseCall(Strict, frozen=True):
    """One recorded call of a method.

    `accuracy` has eager's error by the name of the output, or null for an index output; what is written into an input
    has the name `written.<input>`.
    """

    method: str
    sizes: dict[str, int]
    accuracy: dict[str, Accuracy | None] = {}


class Case(Strict, frozen=True):
    """A recorded sequence of calls of eager, in one session: exportkit/cases/<n>.safetensors.

    Its tensors are `<call>.input.<i>`, `<call>.output.<i>`, `<call>.reference.<i>` and, for inputs that are written,
    `<call>.written.<i>` and `<call>.written_reference.<i>`. After the last call: `state.<j>` and `state_reference.<j>`,
    where j counts in the manifest's `state`, for all of it or none. `state_accuracy` has eager's error by the name of
    the state, and `reference_dtype` what the references were computed in.
    """

    record: str
    calls: tuple[CaseCall, ...]
    reference_dtype: Literal["float64", "float32"] | None = None
    state_accuracy: dict[str, Accuracy | None] = {}


class Record(Strict, frozen=True):
    """A record of the archive. The manifest does not list itself."""

    name: str
    size: int
    sha256: str


class Source(Strict, frozen=True):
    """The source of the eager model, so that `verify` can make it again.

    `dtype` is the dtype that its floating parameters, buffers and inputs were cast to, or null. `state_sha256` is the
    digest of its parameters and buffers after the cast.
    """

    model: str | None
    model_kwargs: dict[str, bool | int | float | str | None]
    dtype: str | None
    seed: int
    state_sha256: str


class Provenance(Strict, frozen=True):
    """The origin of the package. It does not depend on the clock or on the machine's paths."""

    exportkit: str
    torch: str
    commit: str | None
    dirty: bool | None
    tf32: bool


class Manifest(Strict, frozen=True, kw_only=True):
    """The whole manifest."""

    format_version: int
    name: str
    version: str
    methods: tuple[PackagedMethod, ...]
    state: tuple[StateTensor, ...] = ()
    targets: tuple[Target, ...]
    weights: tuple[Weight, ...] = ()
    program: Program | None
    onnx: tuple[Onnx, ...] = ()
    operators: tuple[Operator, ...]
    libraries: tuple[Library, ...]
    cases: tuple[Case, ...]
    source: Source
    provenance: Provenance
    records: tuple[Record, ...]

    @property
    def default(self) -> PackagedMethod | None:
        """The method that a call without a name means: `forward`, or the only one; None if there are several others."""
        named = {method.name: method for method in self.methods}
        return named.get("forward", self.methods[0] if len(self.methods) == 1 else None)

    def method(self, name: str | None = None) -> PackagedMethod:
        """Returns a method by name, or the default one.

        Raises:
            UsageError: There is no such method, or no default.
        """
        found = self.default if name is None else next((each for each in self.methods if each.name == name), None)
        if found is not None:
            return found
        names = ", ".join(each.name for each in self.methods)
        problem = f"{self.name} has several methods" if name is None else f"{self.name} has no method {name}"
        raise UsageError(problem, hint=f"Name one of its methods: {names}.")

    @property
    def call(self) -> Call:
        """The call of the default method. Raises UsageError if there is none."""
        return self.method().call


def code_folder(target: str, method: str) -> str:
    """The folder of a method's compiled code under data/aotinductor/: the target's name, if it is `forward`."""
    return target if method == "forward" else f"{method}.{target}"


# Made at import, which only one thread does: msgspec resolves a type's fields on first use, and crashes if two threads
# do so at the same time (seen with 0.22).
_DECODER = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes as JSON with the keys in the order above and a final newline. The same manifest gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def check(data: bytes) -> None:
    """Checks a manifest against rules 7, 8 and 9, without its records.

    Raises:
        FormatVersionError: The manifest has an unknown version of the format.
        ManifestSyntaxError: The manifest is not JSON of this shape, or repeats a key.
        ManifestConsistencyError: The manifest contradicts itself.
    """
    core.call("ek_check_manifest", data, len(data))


def decode_manifest(data: bytes) -> Manifest:
    """Checks and decodes a manifest without its records. Errors are the same as for `check`."""
    check(data)
    return decode_checked(data)


def decode_checked(data: bytes) -> Manifest:
    """Decodes a manifest that csrc/package has checked."""
    return _DECODER.decode(data)

"""Writes and opens the files of an ONNX model: the model, its weights, and the sidecar that describes both.

The sidecar is a package without targets, beside the model: FORMAT.md, "ONNX models". Reading needs neither onnx nor
onnxruntime, and parses neither the model nor its weights.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from exportkit.errors import ExportError, OnnxFileError, PackageError, UsageError
from exportkit.package import core
from exportkit.package.archive import Content, PackageReader, write_package
from exportkit.package.atomic import temporary_folder, write_whole
from exportkit.package.keys import SigningKey
from exportkit.package.manifest import Manifest, Onnx, OnnxData, OnnxFunction, PackagedMethod
from exportkit.package.signing import sign_package

if TYPE_CHECKING:
    import onnx_ir

SIDECAR_SUFFIX = ".exportkit"
DATA_THRESHOLD = 2 * 10**9  # bytes of tensors inside a model; protobuf takes 2^31 with everything else
_KEPT_INSIDE = 1024  # bytes of a tensor that stays in the model: shapes are among them, and checkers read those
_WORTH_SHARING = 1 << 20  # bytes that models of several methods would have twice
_ALIGNMENT = 4096  # of tensors in the data file, so that they can be mapped
_COPY_ALL = "Copy all files that `exportkit export --format onnx` wrote, or export again."
_PACKAGE_START = b"PK\x03\x04"  # never that of an ONNX model: it would be a field of ModelProto that does not exist


# --- names ------------------------------------------------------------------------------------------------------------


def sidecar_path(model: Path) -> Path:
    """Returns the path of the sidecar of a model that stands alone."""
    return model.with_name(model.name + SIDECAR_SUFFIX)


def method_path(base: Path, methods: Sequence[PackagedMethod], method: str) -> Path:
    """Returns the path of the model of a method: `model.onnx`, the base; of several, such as `model.decode.onnx`."""
    return base if len(methods) == 1 else base.with_name(f"{base.stem}.{method}{base.suffix}")


def model_path(sidecar: PackageReader, method: str) -> Path:
    """Returns the path of the model of a method beside its sidecar."""
    base = sidecar.path.with_name(sidecar.path.name.removesuffix(SIDECAR_SUFFIX))
    return method_path(base, sidecar.manifest.methods, method)


def model_paths(sidecar: PackageReader) -> dict[str, Path]:
    """Returns the paths of the models of several methods, by method; nothing for one that stands alone."""
    methods = sidecar.manifest.methods
    return {each.name: model_path(sidecar, each.name) for each in methods} if len(methods) > 1 else {}


def _sidecar_of(model: Path) -> Path | None:
    """Returns the sidecar of a model: its own, or that of a model with several methods; None if there is none."""
    shared = model.with_name(Path(model.stem).stem + model.suffix)
    return next(filter(Path.exists, (sidecar_path(model), sidecar_path(shared))), None)


def named_model(given: Path) -> Path | None:
    """Returns the ONNX model that a file belongs to: itself, or the one beside its sidecar. None for other files."""
    if not given.is_file():
        return None
    try:
        with given.open("rb") as file:
            is_package = file.read(len(_PACKAGE_START)) == _PACKAGE_START
    except OSError as error:
        raise UsageError(f"cannot read {given}: {error.strerror}") from error
    if not is_package:
        return given if given.suffix == ".onnx" or sidecar_path(given).exists() else None
    name = given.name.removesuffix(SIDECAR_SUFFIX)
    return given.with_name(name) if name not in ("", given.name) else None


def _beside(model: Path, name: str) -> Path:
    """Returns a file beside the model; if there is none, and the model is a link, beside the file it links to."""
    found = model.with_name(name)
    return found if found.exists() or not model.is_symlink() else model.resolve().with_name(name)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodModel:
    """The ONNX model of a method, and its functions that compute custom operators. Its tensors may be lazy."""

    model: onnx_ir.Model
    functions: tuple[OnnxFunction, ...] = ()


def write_onnx(
    out: Path,
    models: Sequence[MethodModel],
    manifest: Manifest,
    records: Mapping[str, Content],
    *,
    opset: int,
    data_threshold: int = DATA_THRESHOLD,
) -> Manifest:
    """Writes the models of all methods, in their order, their weights if they are not inside, and the sidecar.

    The files get their names when all of them are complete. The name of a data file has its digest, so a process that
    is killed leaves no model with the weights of another. Data files of models that are replaced are removed. The
    manifest that describes them has no targets, weights and libraries. It returns the sidecar's.

    ExportError: a model without its weights is larger than ONNX allows. PackageError: the manifest breaks a rule.
    """
    described: list[Onnx] = []
    ready: list[tuple[Path, Path]] = []
    with (
        temporary_folder(out.parent, "exportkit-onnx") as folder,
        weights_outside([each.model for each in models], out.name, folder, data_threshold) as needed,
    ):
        for method, each, data in zip(manifest.methods, models, needed, strict=True):
            path, place = method_path(out, manifest.methods, method.name), folder / f"model-{len(ready)}"
            content = _serialized(each.model)
            write_whole(place, content)
            described.append(
                Onnx(
                    method=method.name,
                    size=len(content),
                    sha256=hashlib.sha256(content).hexdigest(),
                    data=data,
                    opset=opset,
                    functions=each.functions,
                )
            )
            ready.append((path, place))
        written = write_package(folder / "sidecar", msgspec.structs.replace(manifest, onnx=tuple(described)), records)
        for data in {data.name: data for data in needed if data is not None}.values():
            (folder / "data").replace(out.with_name(data.name))
        for path, place in ready:
            place.replace(path)
        (folder / "sidecar").replace(sidecar_path(out))
    _remove_old_data(out, {data.name for data in needed if data is not None})
    return written


def _serialized(model: onnx_ir.Model) -> bytes:
    from google.protobuf.message import EncodeError
    from onnx_ir import serde

    try:
        content: bytes = serde.serialize_model(model).SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ExportError(
            f"the model cannot be written as ONNX: {error}",
            hint="Without its weights it may have 2 GB. Tensors that the code of forward makes count as well: make "
            "them buffers.",
        ) from error
    return content


def _remove_old_data(out: Path, needed: set[str]) -> None:
    pattern = re.compile(re.escape(out.name) + r"\.[0-9a-f]{16}\.data")
    for file in out.parent.iterdir():
        if pattern.fullmatch(file.name) and file.name not in needed:
            file.unlink(missing_ok=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def open_onnx(model: Path, *, demand: core.Demand | None = None) -> PackageReader:
    """Opens the sidecar of a model, and checks the digests of all its records, of the models and of their data.

    Required signatures are checked first. Of several methods, any model may be given.

    Raises:
        OnnxFileError: A file is missing, or it is not the one that the sidecar describes.
        PackageError: The sidecar breaks a rule of the format or lacks a required signature.
        PolicyError: A policy cannot be read or trusted.
    """
    sidecar = _sidecar_of(model) or (_sidecar_of(model.resolve()) if model.is_symlink() else None)
    if sidecar is None:
        said = f"{model.name} has no {sidecar_path(model).name} beside it, which has its digests and recorded cases"
        raise OnnxFileError(said, hint=f"{_COPY_ALL} Models of other exporters have no sidecar.")
    with _naming(sidecar):
        reader = PackageReader(sidecar, demand=demand)
    try:
        with _naming(sidecar):
            reader.verify()
        described(reader, reader.manifest.methods[0].name)
        several = model_paths(reader)
        if several and model.exists() and not any(model.samefile(each) for each in several.values() if each.exists()):
            raise OnnxFileError(
                f"{model.name} is not among the models that {sidecar.name} describes: "
                f"{', '.join(path.name for path in several.values())}",
                hint="It may be left from an export of another model. Remove it, or export again.",
            )
        known: set[OnnxData | None] = {None}  # methods may share a file
        for onnx in reader.manifest.onnx:
            # A link may stand for the model, with its sidecar elsewhere.
            path = several.get(onnx.method, model)
            with _opened(path, onnx.size) as file:
                _check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), onnx.sha256)
            if onnx.data not in known:
                with open_data(path, onnx):
                    known.add(onnx.data)
        return reader
    except BaseException:
        reader.close()
        raise


def open_artifact(path: Path, *, demand: core.Demand | None = None) -> PackageReader:
    """Opens a package, or the sidecar of an ONNX model, and checks every digest. Errors are those of `open_onnx`.

    UsageError: the file does not exist or cannot be read.
    """
    if (model := named_model(path)) is not None:
        return open_onnx(model, demand=demand)
    reader = PackageReader(path, demand=demand)
    try:
        reader.verify()
    except BaseException:
        reader.close()
        raise
    return reader


@contextmanager
def _naming(sidecar: Path) -> Iterator[None]:
    """Names the sidecar in errors of packages, because the caller named the model."""
    try:
        yield
    except PackageError as error:
        if sidecar.name in error.message:
            raise
        raise type(error)(f"{sidecar.name}: {error.message}", hint=error.hint or _COPY_ALL) from error


def sign_onnx(model: Path, key: SigningKey, output: Path | None = None) -> Path:
    """Checks the digests of all files of a model and signs its sidecar.

    Arguments, errors and result are those of `open_onnx` and `sign_package`.
    """
    with open_onnx(model) as reader:
        return sign_package(reader.path, key, output, manifest_sha256=reader.manifest_sha256)


def refuse_sidecar(reader: PackageReader) -> None:
    """Raises UsageError for the sidecar of an ONNX model, in which nothing can be run."""
    if reader.manifest.onnx:
        raise UsageError(
            f"{reader.path.name} describes an ONNX model, and has nothing that could run",
            hint="Give the model: `exportkit verify`, `inspect`, `sign` and `bench` take it. The name of its "
            f"sidecar must be the model's name with {SIDECAR_SUFFIX}.",
        )


def described(sidecar: PackageReader, method: str | None = None) -> Onnx:
    """Returns what a sidecar says of the model of a method; without a name, of the default one. Or OnnxFileError."""
    models = {onnx.method: onnx for onnx in sidecar.manifest.onnx}
    if not models:
        raise OnnxFileError(
            f"{sidecar.path.name} is a package that describes no ONNX model",
            hint=f"Give it a name that does not end in {SIDECAR_SUFFIX}, or export the ONNX model again.",
        )
    return models[sidecar.manifest.method(method).name]


def read_model(model: Path, onnx: Onnx) -> bytes:
    """Reads a model and checks what was read. OnnxFileError: it is missing, or another model."""
    with _opened(model, onnx.size) as file:
        content = file.read()
    _check_digest(model, hashlib.sha256(content).hexdigest(), onnx.sha256)
    return content


@contextmanager
def open_data(model: Path, onnx: Onnx) -> Iterator[BufferedReader | None]:
    """Opens the data file of a model, if it has one, and checks it. Errors are the same as for `read_model`."""
    if onnx.data is None:
        yield None
        return
    path = _beside(model, onnx.data.name)
    with _opened(path, onnx.data.size) as file:
        _check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), onnx.data.sha256)
        yield file


@contextmanager
def _opened(path: Path, size: int) -> Iterator[BufferedReader]:
    if not path.is_file():
        raise OnnxFileError(f"there is no file {path.name} in {path.parent.absolute()}", hint=_COPY_ALL)
    try:
        file = path.open("rb")
    except OSError as error:
        raise OnnxFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise _changed(path, f"it has {found} bytes; {size} were written")
        yield file


def _check_digest(path: Path, found: str, written: str) -> None:
    if found != written:
        raise _changed(path, f"its sha256 is {found}; {written} was written")


def _changed(path: Path, how: str) -> OnnxFileError:
    text = f"{path.name} is not the file that was exported: {how}"
    return OnnxFileError(text, hint=f"It was changed, or it belongs to another export. {_COPY_ALL}")


# --- large weights, which several methods share -----------------------------------------------------------------------


@contextmanager
def weights_outside(
    models: Sequence[onnx_ir.Model], name: str, folder: Path, threshold: int
) -> Iterator[list[OnnxData | None]]:
    """Puts large tensors into the file `data` in a folder while the block runs, if they are too many for the models.

    They are if one model has more bytes than the threshold, or if several methods would repeat a MiB of weights. What
    is equal in several models is written once. It yields for each model the file that it needs, whose name begins so;
    None if its weights are inside.
    """
    import onnx_ir
    from onnx_ir.external_data import convert_tensors_to_external

    tensors = [_tensors(model) for model in models]
    large = [{v: t for v, t in each.items() if t.nbytes > _KEPT_INSIDE} for each in tensors]
    several = len(models) > 1
    keys: dict[onnx_ir.Value, object] = {
        value: _content(tensor) if several else value for each in large for value, tensor in each.items()
    }
    written: dict[object, onnx_ir.TensorProtocol] = {}  # in the order of their first use
    for each in large:
        for value, tensor in each.items():
            written.setdefault(keys[value], tensor)
    repeated = sum(t.nbytes for each in large for t in each.values()) - sum(t.nbytes for t in written.values())
    most = max(sum(tensor.nbytes for tensor in each.values()) for each in tensors)
    if not written or (most <= threshold and repeated < _WORTH_SHARING):
        yield [None] * len(models)
        return
    placed = convert_tensors_to_external(
        list(written.values()), folder, "data", alignment=_ALIGNMENT, align_threshold=_KEPT_INSIDE
    )
    places = dict(zip(written, placed))
    with (folder / "data").open("rb") as file:
        os.fsync(file.fileno())
        sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
    data = OnnxData(name=f"{name}.{sha256[:16]}.data", size=size, sha256=sha256)
    try:
        for each in large:
            for value, tensor in each.items():
                at = places[keys[value]]
                value.const_value = onnx_ir.ExternalTensor(
                    data.name,
                    at.offset,
                    at.length,
                    tensor.dtype,
                    shape=onnx_ir.Shape(tensor.shape.numpy()),
                    name=tensor.name or "",
                )
        yield [data if each else None for each in large]
    finally:
        for each in large:
            for value, tensor in each.items():
                value.const_value = tensor


def _tensors(model: onnx_ir.Model) -> dict[onnx_ir.Value, onnx_ir.TensorProtocol]:
    """Returns the constants of a model that a file can hold."""
    import onnx_ir

    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    return {
        value: value.const_value
        for value in values
        if value.const_value is not None and value.const_value.dtype != onnx_ir.DataType.STRING
    }


def _content(tensor: onnx_ir.TensorProtocol) -> tuple[object, ...]:
    """Returns what is the same for tensors of the same bytes."""
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()

"""Compares two artifacts part by part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from exportkit.diff import manifests
from exportkit.diff.difference import Comparison, Difference, Side, both, entries, fields, paired
from exportkit.diff.graph import GraphMeaning, UnreadableGraphError, compare_graphs
from exportkit.diff.onnx_graph import read_onnx
from exportkit.diff.program_meaning import read_program
from exportkit.diff.stored_tensors import StoredTensor, case_tensors, compare_tensors, packaged_weights
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.onnx.files import named_model, open_onnx
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.elf import read_elf
from exportkit.package.manifest import Case, Library, Manifest
from exportkit.package.trust import signature_info
from exportkit.progress import Progress, silent
from exportkit.sizes import label_of

_SHOWN_SYMBOLS = 8
_NO_STATE = hashlib.sha256().hexdigest()


def compare_artifacts(a: Path, b: Path, *, progress: Progress = silent) -> Comparison:
    """Compares two artifacts without executing or importing anything of either, and without torch.

    Args:
        a: An artifact or a package, or an ONNX model with its companion beside it.
        b: Another one.
        progress: Called with each step before it starts.

    Raises:
        UsageError: A file does not exist or cannot be read.
        PackageError: An artifact breaks a rule of the format, or a digest does not hold.
        HostError: The library that reads packages was not built.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(None, "exportkit-diff"))
        opened = [_Opened.open(path, folder / name, stack, progress) for path, name in ((a, "a"), (b, "b"))]
        one, other = opened
        progress("comparing")
        differences = tuple(_differences(one, other))
        for side in opened:
            side.reader.check_unchanged()
        notes = tuple(f"{name}: {note}" for name, side in zip("AB", opened) for note in side.notes)
        return Comparison(one.side, other.side, differences, notes)


@dataclass(frozen=True)
class _Opened:
    """An open artifact, whose digests hold.

    Attributes:
        reader: The artifact, or the companion of an ONNX model.
        side: Its description.
        folder: An empty private folder.
        graph: The graph that it has, if it has one that can be read.
        notes: What could not be read.
    """

    reader: PackageReader
    side: Side
    folder: Path
    graph: GraphMeaning | None
    notes: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, folder: Path, stack: ExitStack, progress: Progress) -> _Opened:
        progress(f"checking {path.name}")
        folder.mkdir()
        model = named_model(path)
        reader = stack.enter_context(PackageReader(path) if model is None else open_onnx(model))
        reader.verify()
        manifest, graph, notes = reader.manifest, None, []
        try:
            if model is not None and manifest.onnx is not None:
                graph = read_onnx(model, manifest.onnx, stack)
            elif manifest.program is not None:
                program = folder / "program.pt2"
                reader.extract(manifest.program.record, program)
                graph = read_program(reader, program, stack.enter_context(program.open("rb")).fileno())
        except UnreadableGraphError as error:
            notes.append(f"the graph cannot be read, so that only its digest was compared: {error}")
        if _has_weights_inside(manifest):
            notes.append("the weights are inside the compiled code, so that they were not compared by name")
        size, sha256 = reader.size, reader.sha256
        if manifest.onnx is not None:
            size, sha256 = manifest.onnx.size, manifest.onnx.sha256
        side = Side(str(path), manifest.name, manifest.version, size, sha256)
        return cls(reader, side, folder, graph, tuple(notes))

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def weights(self) -> Mapping[str, StoredTensor]:
        return packaged_weights(self.reader) or (self.graph.weights if self.graph else {})


def _differences(a: _Opened, b: _Opened) -> Iterator[Difference]:
    one, other = a.manifest, b.manifest
    yield from manifests.identity(one, other)
    yield from manifests.call(one.call, other.call)
    yield from _graphs(a, b)
    yield from manifests.operators(one, other)
    yield from _libraries(a, b)
    yield from manifests.targets(one, other)
    yield from _weights(a, b)
    yield from _cases(a, b)
    yield from _sizes(a, b)
    yield from manifests.origin(one, other)
    here, there = both(_keys, a, b)
    if here != there:
        # They stand beside the package, and whether they are needed is the host's policy.
        yield Difference("signatures", "keys", here, there)


def _keys(side: _Opened) -> str:
    return ", ".join(sorted(key for info in signature_info(side.reader) for key in info.key_ids)) or "none"


def _weights(a: _Opened, b: _Opened) -> Iterator[Difference]:
    here, there = both(_has_weights_inside, a.manifest, b.manifest)
    if not here and not there:
        yield from compare_tensors("weights", "", a.weights, b.weights, "answer")
    elif here != there:
        places = both(lambda inside: "inside the compiled code" if inside else "outside", here, there)
        yield Difference("weights", "place", *places, "load", "weights inside the code cannot be swapped")


def _has_weights_inside(manifest: Manifest) -> bool:
    """Whether the model has a state, and the compiled code has it inside."""
    return bool(manifest.targets) and not manifest.weights and manifest.source.state_sha256 != _NO_STATE


def _graphs(a: _Opened, b: _Opened) -> Iterator[Difference]:
    """Compares programs and ONNX models: by what they compute, or by their digests if they cannot be read."""
    kinds = both(_graph_kind, a.manifest, b.manifest)
    if kinds[0] != kinds[1]:
        yield Difference("graph", "kind", *kinds, "load")
    elif a.graph is not None and b.graph is not None:
        yield from compare_graphs(a.graph, b.graph)
        if a.manifest.weights and b.manifest.weights:
            yield from compare_tensors("graph", "weight", a.graph.weights, b.graph.weights, "answer")
        yield from compare_tensors("graph", "constant", a.graph.constants, b.graph.constants, "answer")
        pickled = a.graph.pickled, b.graph.pickled
        yield from entries("graph", "record", *pickled, "load", note="loading the program may unpickle it")
    if kinds[0] == kinds[1] != "none":
        here, there = both(_graph_sha256, a, b)
        if here != there:
            compared = a.graph is not None and b.graph is not None
            note = "the whole file, with names and source lines" if compared else None
            yield Difference("graph", "sha256", here, there, None if compared else "answer", note)
    one, other = a.manifest.program, b.manifest.program
    if one is not None and other is not None:
        yield from fields("graph", "program", one, other, {"device": "load", "built_with_torch": None})


def _graph_kind(manifest: Manifest) -> str:
    if manifest.onnx is not None:
        return "ONNX model"
    return "ExportedProgram" if manifest.program is not None else "none"


def _graph_sha256(side: _Opened) -> str:
    manifest = side.manifest
    if manifest.onnx is not None:
        data = manifest.onnx.data
        return manifest.onnx.sha256 + (f" with data {data.sha256}" if data is not None else "")
    assert manifest.program is not None
    return side.reader.record(manifest.program.record).sha256


def _libraries(a: _Opened, b: _Opened) -> Iterator[Difference]:
    by_record = both(lambda side: {_short(library): library for library in side.manifest.libraries}, a, b)
    for found in paired("libraries", "", *by_record, "answer", lambda library: f"sha256 {library.sha256}"):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        yield from manifests.library(name, one, other)
        if one.sha256 != other.sha256:
            here, there = _symbols(a, one), _symbols(b, other)
            if here != there:
                note = "; ".join(filter(None, (_listed("A", here - there), _listed("B", there - here))))
                counts = str(len(here)), str(len(there))
                yield Difference("libraries", f"{name}: symbols of torch", *counts, "load", note)


def _listed(side: str, symbols: frozenset[str]) -> str:
    """Says which symbols only one side needs."""
    more = ", ..." if len(symbols) > _SHOWN_SYMBOLS else ""
    return f"only {side} needs {', '.join(sorted(symbols)[:_SHOWN_SYMBOLS])}{more}" if symbols else ""


def _short(library: Library) -> str:
    return f"{library.platform}/{Path(library.record).name}"


def _symbols(side: _Opened, library: Library) -> frozenset[str]:
    path = side.folder / "library.so"
    side.reader.extract(library.record, path)
    try:
        return read_elf(path).torch_symbols
    except NotAnOperatorLibraryError:
        return frozenset()
    finally:
        path.unlink()


def _cases(a: _Opened, b: _Opened) -> Iterator[Difference]:
    """Compares the recorded cases in their order. They change no answer: they are what eager answered."""
    by_number = both(lambda side: {str(number): case for number, case in enumerate(side.manifest.cases)}, a, b)
    for found in paired("cases", "case", *by_number, None, lambda case: label_of(case.sizes)):
        if isinstance(found, Difference):
            yield found
            continue
        number, one, other = found
        if one.sizes != other.sizes:
            yield Difference("cases", f"case {number}: sizes", label_of(one.sizes), label_of(other.sizes))
        if a.reader.record(one.record).sha256 == b.reader.record(other.record).sha256:
            continue
        try:
            tensors = _named_case(a, one), _named_case(b, other)
        except ValueError as error:
            yield Difference("cases", f"case {number}", "not readable", "not readable", None, str(error))
            continue
        yield from compare_tensors("cases", f"case {number}:", *tensors, None)


def _named_case(side: _Opened, case: Case) -> dict[str, StoredTensor]:
    """Returns the tensors of a case by words such as "input image"."""
    call = side.manifest.call
    outputs = [output.name for output in call.outputs]
    names = {"input": [each.name for each in call.inputs], "output": outputs, "reference": outputs}
    found = {}
    for key, tensor in case_tensors(side.reader.read(case.record)).items():
        kind, _, index = key.partition(".")
        described = names.get(kind, ())
        inside = index.isdecimal() and int(index) < len(described)
        found[f"{kind} {described[int(index)]}" if inside else key] = tensor
    return found


def _sizes(a: _Opened, b: _Opened) -> Iterator[Difference]:
    sizes = both(_part_sizes, a, b)
    for name in dict.fromkeys([*sizes[0], *sizes[1]]):
        here, there = (side.get(name, 0) for side in sizes)
        if here != there:
            yield Difference("sizes", name, f"{here} bytes", f"{there} bytes")


def _part_sizes(side: _Opened) -> dict[str, int]:
    manifest, found = side.manifest, {"file": side.side.size}
    libraries = {library.record for library in manifest.libraries}
    cases = {case.record for case in manifest.cases}
    weights = {weight.record for weight in manifest.weights}
    for record in manifest.records:
        if record.name.startswith(f"{AOTINDUCTOR_DIR}/"):
            kind = f"code of {record.name.split('/')[2]}"
        elif record.name in libraries:
            kind = "libraries"
        elif record.name in cases:
            kind = "cases"
        elif record.name in weights:
            kind = "weights"
        elif manifest.program is not None and record.name == manifest.program.record:
            kind = "program"
        else:
            continue
        found[kind] = found.get(kind, 0) + record.size
    return found

"""Compares two artifacts part by part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from exportkit.diff import manifests
from exportkit.diff.difference import Comparison, Difference, Side, both, entries, fields, paired
from exportkit.diff.graph import GraphMeaning, UnreadableGraphError, compare_graphs
from exportkit.diff.onnx_graph import read_onnx
from exportkit.diff.program_meaning import read_program
from exportkit.diff.stored_tensors import (
    StoredTensor,
    case_tensors,
    compare_tensors,
    initial_tensors,
    packaged_weights,
)
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.onnx.files import model_path, named_model, open_onnx
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.case_files import result_keys, state_keys
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.elf import read_elf
from exportkit.package.manifest import Case, Library, Manifest
from exportkit.package.trust import signature_info
from exportkit.progress import Progress, silent
from exportkit.sizes import case_label
from exportkit.spec import FORWARD

_SHOWN_SYMBOLS = 8
_NO_STATE = hashlib.sha256().hexdigest()


def compare_artifacts(a: Path, b: Path, *, progress: Progress = silent) -> Comparison:
    """Compares two artifacts without executing or importing anything of either, and without torch.

    Args:
        a: An artifact or a package, or an ONNX model with its sidecar beside it.
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
        reader: The artifact, or the sidecar of an ONNX model.
        side: Its description.
        folder: An empty private folder.
        graphs: The graphs that it has by method, if they can be read.
        notes: What could not be read.
    """

    reader: PackageReader
    side: Side
    folder: Path
    graphs: Mapping[str, GraphMeaning]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, folder: Path, stack: ExitStack, progress: Progress) -> _Opened:
        progress(f"checking {path.name}")
        folder.mkdir()
        model = named_model(path)
        reader = stack.enter_context(PackageReader(path) if model is None else open_onnx(model))
        reader.verify()
        manifest, graphs, notes = reader.manifest, dict[str, GraphMeaning](), []
        try:
            for onnx in manifest.onnx if model is not None else ():
                assert model is not None
                path = model if len(manifest.onnx) == 1 else model_path(reader, onnx.method)
                graphs[onnx.method] = read_onnx(path, onnx, stack)
            for number, (method, record) in enumerate(manifest.program.records.items() if manifest.program else ()):
                program = folder / f"program-{number}.pt2"
                reader.extract(record, program)
                descriptor = stack.enter_context(program.open("rb")).fileno()
                graphs[method] = read_program(reader, method, program, descriptor)
        except UnreadableGraphError as error:
            graphs = {}
            notes.append(f"the graph cannot be read, so that only its digest was compared: {error}")
        if _has_weights_inside(manifest):
            notes.append("the weights are inside the compiled code, so that they were not compared by name")
        size, sha256 = reader.size, reader.sha256
        if len(manifest.onnx) == 1:
            size, sha256 = manifest.onnx[0].size, manifest.onnx[0].sha256
        side = Side(str(path), manifest.name, manifest.version, size, sha256)
        return cls(reader, side, folder, graphs, tuple(notes))

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def weights(self) -> Mapping[str, StoredTensor]:
        found = {name: tensor for graph in self.graphs.values() for name, tensor in graph.weights.items()}
        return packaged_weights(self.reader) or found


def _differences(a: _Opened, b: _Opened) -> Iterator[Difference]:
    one, other = a.manifest, b.manifest
    yield from manifests.identity(one, other)
    yield from manifests.methods(one, other)
    yield from manifests.state(one, other)
    yield from _initial_values(a, b)
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


def _initial_values(a: _Opened, b: _Opened) -> Iterator[Difference]:
    """Compares what the state of a new session begins with, where its types are the same."""
    first = both(lambda side: initial_tensors(side.reader), a, b)
    same = {name for name, tensor in first[0].items() if str(tensor) == str(first[1].get(name))}
    one, other = ({name: tensor for name, tensor in side.items() if name in same} for side in first)
    yield from compare_tensors("state", "initial value of", one, other, "answer")


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
    weights = bool(a.manifest.weights and b.manifest.weights)
    for method in [name for name in a.graphs if name in b.graphs]:
        prefix = "" if method == FORWARD else f"{method}: "
        for difference in _graph(a.graphs[method], b.graphs[method], weights=weights):
            yield replace(difference, what=f"{prefix}{difference.what}")
    if kinds[0] == kinds[1] != "none":
        digests = both(_graph_sha256, a, b)
        for method in [name for name in digests[0] if name in digests[1]]:
            here, there = (side[method] for side in digests)
            if here != there:
                compared = method in a.graphs and method in b.graphs
                note = "the whole file, with names and source lines" if compared else None
                what = "sha256" if method == FORWARD else f"{method}: sha256"
                yield Difference("graph", what, here, there, None if compared else "answer", note)
    one, other = a.manifest.program, b.manifest.program
    if one is not None and other is not None:
        yield from fields("graph", "program", one, other, {"device": "load", "built_with_torch": None})


def _graph(a: GraphMeaning, b: GraphMeaning, *, weights: bool) -> Iterator[Difference]:
    """Compares two graphs. `weights`: also those that they have inside, because both packages have others beside."""
    yield from compare_graphs(a, b)
    if weights:
        yield from compare_tensors("graph", "weight", a.weights, b.weights, "answer")
    yield from compare_tensors("graph", "constant", a.constants, b.constants, "answer")
    yield from entries("graph", "record", a.pickled, b.pickled, "load", note="loading the program may unpickle it")


def _graph_kind(manifest: Manifest) -> str:
    if manifest.onnx:
        return "ONNX model"
    return "ExportedProgram" if manifest.program is not None else "none"


def _graph_sha256(side: _Opened) -> dict[str, str]:
    """Returns the digest of the graph of each method."""
    manifest = side.manifest
    found = {
        onnx.method: onnx.sha256 + (f" with data {onnx.data.sha256}" if onnx.data is not None else "")
        for onnx in manifest.onnx
    }
    records = manifest.program.records if manifest.program is not None else {}
    return found | {method: side.reader.record(record).sha256 for method, record in records.items()}


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
    for found in paired("cases", "case", *by_number, None, case_label):
        if isinstance(found, Difference):
            yield found
            continue
        number, one, other = found
        calls = both(lambda case: [(call.method, call.sizes) for call in case.calls], one, other)
        if calls[0] != calls[1]:
            labels = both(case_label, one, other)
            note = "single calls have other sizes" if labels[0] == labels[1] else None
            yield Difference("cases", f"case {number}: calls", *labels, None, note)
        if a.reader.record(one.record).sha256 == b.reader.record(other.record).sha256:
            continue
        try:
            tensors = _named_case(a, one), _named_case(b, other)
        except ValueError as error:
            yield Difference("cases", f"case {number}", "not readable", "not readable", None, str(error))
            continue
        yield from compare_tensors("cases", f"case {number}:", *tensors, None)


def _named_case(side: _Opened, case: Case) -> dict[str, StoredTensor]:
    """Returns the tensors of a case by words such as "input image", or "call 2 (decode) output 0"."""
    manifest = side.manifest
    names: dict[str, str] = {}  # words by the names in the file
    for number, call in enumerate(case.calls):
        described = manifest.method(call.method).call
        prefix = f"call {number} ({call.method}) " if len(case.calls) > 1 else ""
        names |= {f"{number}.input.{i}": f"{prefix}input {each.name}" for i, each in enumerate(described.inputs)}
        for kind, reference in (("output", False), ("reference", True)):
            keys = result_keys(number, described, reference=reference)
            names |= {key: f"{prefix}{kind} {name}" for name, key in keys.items()}
    for kind, reference in (("state", False), ("reference of state", True)):
        keys = state_keys(manifest.state, reference=reference)
        names |= {key: f"{kind} {name}" for name, key in keys.items()}
    return {names.get(key, key): tensor for key, tensor in case_tensors(side.reader.read(case.record)).items()}


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
    programs = set(manifest.program.records.values()) if manifest.program is not None else set()
    state = {each.initial for each in manifest.state}
    for record in manifest.records:
        if record.name.startswith(f"{AOTINDUCTOR_DIR}/"):
            kind = f"code of {record.name.split('/')[2]}"
        elif record.name in libraries:
            kind = "libraries"
        elif record.name in cases:
            kind = "cases"
        elif record.name in weights:
            kind = "weights"
        elif record.name in programs:
            kind = "program"
        elif record.name in state:
            kind = "initial state"
        else:
            continue
        found[kind] = found.get(kind, 0) + record.size
    return found

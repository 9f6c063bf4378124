"""Describes the graph of an ExportedProgram so that it can be compared, without torch, and finds its tensors."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from exportkit.diff.graph import GraphMeaning, NodeMeaning, UnreadableGraphError
from exportkit.diff.stored_tensors import StoredTensor, in_file
from exportkit.package import exported_graph as saved
from exportkit.package.archive import PackageReader

_SYMBOL = re.compile(r"\b(?:[su]|zuf)\d+\b")
_LINE = re.compile(r'File "(?:[^"]*/)?([^"/]*)", line (\d+)')
_LOCAL_HEADER = 30  # bytes before an entry's name
_CHUNK = 1 << 22
# The records that torch.export.load reads as text, with the graph, which is read elsewhere.
_TEXT = re.compile(
    r"models/[^/]*\.json|archive_format|archive_version|byteorder|\.data/(version|serialization_id)|version"
)


def read_program(reader: PackageReader, method: str, path: Path, descriptor: int) -> GraphMeaning:
    """Reads the program of a method of an open artifact.

    Args:
        reader: The artifact, which has programs.
        method: The method's name.
        path: A file with the record of the program.
        descriptor: An open descriptor of that file, from which tensors are read later.

    Raises:
        UnreadableGraphError: The program has another form than torch writes.
    """
    try:
        program = saved.graph_of(reader, method)
        assert program is not None
        with zipfile.ZipFile(path) as archive:
            file = _Records(archive, descriptor)
            weights = file.tensors("data/weights/model_weights_config.json")
            constants = file.tensors("data/constants/model_constants_config.json")
            pickled = file.pickled()
        meaning = _GraphReader()
        inputs = meaning.inputs(program)
        nodes = meaning.nodes(program.graph)
        outputs = [meaning.argument(spec) for spec in program.signature.output_specs]
        return GraphMeaning(nodes, meaning.text([inputs, outputs]), weights, constants, pickled)
    except saved.ProgramGraphError as error:
        raise UnreadableGraphError(error.message) from error
    except (  # what a damaged zip, damaged JSON and values of other types raise
        *(zipfile.BadZipFile, KeyError, TypeError, ValueError, IndexError, AttributeError, OSError),
        *(RecursionError, NotImplementedError, EOFError, OverflowError, msgspec.MsgspecError),
    ) as error:
        raise UnreadableGraphError(f"{type(error).__name__}: {error}") from error


class _Records:
    def __init__(self, archive: zipfile.ZipFile, descriptor: int) -> None:
        self._archive, self._descriptor = archive, descriptor
        self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(self._entries) != len(archive.infolist()):
            raise UnreadableGraphError("two of its records have the same name")
        self._plain = {name for name in self._entries if _TEXT.fullmatch(name)}

    def tensors(self, config: str) -> dict[str, StoredTensor]:
        folder, found = config.rpartition("/")[0], {}
        for name, described in json.loads(self._archive.read(self._entry(config)))["config"].items():
            meta = described["tensor_meta"]
            if described["use_pickle"] or meta is None:
                continue
            entry = self._entry(f"{folder}/{described['path_name']}")
            shape, strides = (tuple(int(size["as_int"]) for size in meta[kind]) for kind in ("sizes", "strides"))
            read = in_file(self._descriptor, self._data_offset(entry))
            found[name] = StoredTensor(saved.DTYPE_NAMES[meta["dtype"]], shape, strides, entry.file_size, read)
        return found

    def pickled(self) -> dict[str, str]:
        """Returns the digests of all records but those that are known to be text or raw tensors."""
        found = {}
        for name, entry in self._entries.items():
            if name not in self._plain:
                stored = hashlib.sha256(f"{entry.compress_type} {entry.flag_bits} ".encode())
                read, size = in_file(self._descriptor, self._data_offset(entry)), entry.compress_size
                for offset in range(0, size, _CHUNK):
                    stored.update(read(offset, min(_CHUNK, size - offset)))
                found[name] = stored.hexdigest()
        return found

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._entries.get(name)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise UnreadableGraphError(f"it has no plain record {name}")
        self._plain.add(name)
        return entry

    def _data_offset(self, entry: zipfile.ZipInfo) -> int:
        """Returns where an entry's bytes begin. The extra field in front of them may have another size than listed."""
        assert self._archive.fp is not None
        self._archive.fp.seek(entry.header_offset)
        header = self._archive.fp.read(_LOCAL_HEADER)
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return entry.header_offset + _LOCAL_HEADER + sum(lengths)


class _GraphReader:
    """Gives values and symbols the names of their places, so that two graphs can be compared."""

    def __init__(self, symbols: dict[str, str] | None = None) -> None:
        self._names: dict[str, str] = {}
        self._symbols = {} if symbols is None else symbols

    def inputs(self, program: saved.GraphModule) -> list[Any]:
        """Names the inputs of a program by what they are: weights and constants by their names in the model."""
        found = []
        for index, (spec, argument) in enumerate(zip(program.signature.input_specs, program.graph.inputs)):
            ((kind, described),) = spec.items()
            label = next((described[key] for key in described if key.endswith("_name")), index)
            for name in saved.tensors_in(argument):
                self._names[name] = f"{kind} {label}"
                found.append([self._names[name], self._value(name, program.graph)])
        return found

    def nodes(self, graph: saved.Graph) -> tuple[NodeMeaning, ...]:
        found = []
        for index, node in enumerate(graph.nodes):
            given = [[each.name, self.argument(each.arg)] for each in node.inputs]
            returned = [self._define(each, f"{index}.{number}", graph) for number, each in enumerate(node.outputs)]
            operator = node.target.removeprefix("torch.ops.")
            lines = _LINE.findall(node.metadata.get("stack_trace", ""))
            where = ":".join(lines[0]) if lines else ""
            found.append(NodeMeaning(operator, node.name or operator, where, self.text([operator, given, returned])))
        return tuple(found)

    def argument(self, value: Any) -> Any:
        """Returns an argument with the names of values replaced, and an inner graph by what it computes."""
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("graph"), dict):  # its name means nothing
            graph, inner = msgspec.convert(value["graph"], saved.Graph), _GraphReader(self._symbols)
            inputs = [inner._define(each, f"input {index}", graph) for index, each in enumerate(graph.inputs)]
            return [inputs, [node.meaning for node in inner.nodes(graph)], inner.argument(graph.outputs)]
        return {
            key: self._names.get(item, item) if _is_name(key, item) else self.argument(item)
            for key, item in value.items()
        }

    def text(self, value: Any) -> str:
        """Returns a value as text in which symbols such as s77 are named in the order in which they are met."""
        return _SYMBOL.sub(
            lambda match: self._symbols.setdefault(match[0], f"symbol {len(self._symbols)}"), json.dumps(value)
        )

    def _define(self, output: Any, place: str, graph: saved.Graph) -> Any:
        """Names the values of a node's output, and describes them."""
        if isinstance(output, list):
            return [self._define(item, f"{place}.{number}", graph) for number, item in enumerate(output)]
        if not isinstance(output, dict):
            return output
        described = {}
        for key, item in output.items():
            if _is_name(key, item):
                self._names[item] = f"%{place}"
                described[key] = self._value(item, graph)
            else:
                described[key] = self._define(item, place, graph)
        return described

    def _value(self, name: str, graph: saved.Graph) -> Any:
        """Returns the dtype and sizes of a value, without what is known only while tracing."""
        if (meta := graph.tensor_values.get(name)) is not None:
            return [meta.dtype, _without_hints(meta.sizes)]
        return _without_hints(graph.sym_int_values.get(name))


def _is_name(key: str, item: Any) -> bool:
    return key in ("name", "as_name") and isinstance(item, str)


def _without_hints(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_hints(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_hints(item) for key, item in value.items() if key != "hint"}
    return value

"""Reads the graph of an ExportedProgram from its file, without torch: the JSON, and the bytes of the tensors."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exportkit.diff.graph import Graph, Node, UnreadableGraphError
from exportkit.diff.stored_tensors import StoredTensor, in_file

# torch's numbers of the dtypes in the file (torch/_export/serde/schema.py, ScalarType).
_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
    " - - - - - - - - - - - - - - uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz - uint32 uint64"
)
_DTYPES = {number: name for number, name in enumerate(_NAMES.split(), start=1) if name != "-"}
_SYMBOL = re.compile(r"\b(?:[su]|zuf)\d+\b")
_LINE = re.compile(r'File "(?:[^"]*/)?([^"/]*)", line (\d+)')
_LOCAL_HEADER = 30  # bytes before an entry's name
_MAX_JSON = 1 << 30


def read_program(path: Path, descriptor: int) -> Graph:
    """Reads the file of a program.

    Args:
        path: The file.
        descriptor: An open descriptor of the file, from which tensors are read later.

    Raises:
        UnreadableGraphError: The file has another form.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            model = json.loads(_content(archive, "models/model.json"))
            weights = _tensors(archive, descriptor, "data/weights/model_weights_config.json")
            constants = _tensors(archive, descriptor, "data/constants/model_constants_config.json")
        return _graph(model, weights, constants)
    except UnreadableGraphError:
        raise
    except (
        *(zipfile.BadZipFile, KeyError, TypeError, ValueError, IndexError, AttributeError, OSError),
        *(RecursionError, NotImplementedError, EOFError, OverflowError, StopIteration),
    ) as error:
        raise UnreadableGraphError(f"{type(error).__name__}: {error}") from error


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].flag_bits & 1:
        raise UnreadableGraphError(f"it has no plain record {name}")
    return found[0]


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    entry = _entry(archive, name)
    if entry.file_size > _MAX_JSON:
        raise UnreadableGraphError(f"{name} has {entry.file_size} bytes")
    return archive.read(entry)


def _tensors(archive: zipfile.ZipFile, descriptor: int, config: str) -> dict[str, StoredTensor]:
    folder, found = config.rpartition("/")[0], {}
    for name, described in json.loads(_content(archive, config))["config"].items():
        entry = _entry(archive, f"{folder}/{described['path_name']}")
        read = in_file(descriptor, _data_offset(archive, entry))
        meta = described["tensor_meta"]
        if described["use_pickle"] or meta is None:
            found[name] = StoredTensor("a pickled object", (), (), entry.file_size, read)
            continue
        shape, strides = (tuple(int(size["as_int"]) for size in meta[kind]) for kind in ("sizes", "strides"))
        found[name] = StoredTensor(_DTYPES[meta["dtype"]], shape, strides, entry.file_size, read)
    return found


def _data_offset(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Returns where an entry's bytes begin. The extra field in front of them may have another size than listed."""
    assert archive.fp is not None
    archive.fp.seek(entry.header_offset)
    header = archive.fp.read(_LOCAL_HEADER)
    return entry.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))


def _graph(model: Any, weights: Mapping[str, StoredTensor], constants: Mapping[str, StoredTensor]) -> Graph:
    signature, graph = model["graph_module"]["signature"], model["graph_module"]["graph"]
    reader = _GraphReader()
    for index, spec in enumerate(signature["input_specs"]):
        ((kind, described),) = spec.items()
        argument = described["arg"]
        name = argument["name"] if "name" in argument else next(iter(argument.values()))
        label = next((described[key] for key in described if key.endswith("_name")), None)
        if isinstance(name, dict):
            name = name.get("name")
        reader.names[str(name)] = f"{kind} {label or index}"
    inputs = [[place, reader.value(name, graph)] for name, place in reader.names.items()]
    nodes = reader.nodes(graph)
    outputs = [reader.argument(spec) for spec in signature["output_specs"]]
    ranges = {reader.symbols_in(symbol): ends for symbol, ends in model["range_constraints"].items()}
    return Graph(nodes, reader.text([inputs, outputs, ranges]), weights, constants)


class _GraphReader:
    """Gives values and symbols the names of their places, so that two graphs can be compared."""

    def __init__(self, symbols: dict[str, str] | None = None) -> None:
        self.names: dict[str, str] = {}
        self._symbols = {} if symbols is None else symbols

    def nodes(self, graph: Any) -> tuple[Node, ...]:
        """Reads all nodes in their order."""
        found = []
        for index, node in enumerate(graph["nodes"]):
            given = [[each["name"], self.argument(each["arg"])] for each in node["inputs"]]
            returned = [self._define(each, f"{index}.{number}", graph) for number, each in enumerate(node["outputs"])]
            operator = str(node["target"]).removeprefix("torch.ops.")
            lines = _LINE.findall(node["metadata"].get("stack_trace") or "")
            where = ":".join(lines[0]) if lines else ""
            name = str(node.get("name") or operator)
            found.append(Node(operator, name, where, self.text([operator, given, returned])))
        return tuple(found)

    def argument(self, value: Any) -> Any:
        """Returns an argument with the names of values replaced."""
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "nodes" in value:
            inner = _GraphReader(self._symbols)
            for index, each in enumerate(value["inputs"]):
                inner._define(each, f"input {index}", value)
            return [[node.meaning for node in inner.nodes(value)], inner.argument(value["outputs"])]
        return {
            key: self.names.get(item, item)
            if key in ("name", "as_name") and isinstance(item, str)
            # The name of an inner graph means nothing.
            else self.argument(item)
            for key, item in value.items()
            if not (key == "name" and "graph" in value)
        }

    def value(self, name: str, graph: Any) -> Any:
        """Returns the dtype, sizes and strides of a value, with what is known only while tracing left out."""
        for kind in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
            if name in (graph.get(kind) or {}):
                return _without_hints(graph[kind][name])
        return None

    def _define(self, output: Any, place: object, graph: Any) -> Any:
        """Names the values of a node's output, and describes them."""
        if isinstance(output, list):
            return [self._define(item, f"{place}.{number}", graph) for number, item in enumerate(output)]
        if not isinstance(output, dict):
            return output
        described = {}
        for key, item in output.items():
            if key in ("name", "as_name") and isinstance(item, str):
                self.names[item] = f"%{place}"
                described[key] = self.value(item, graph)
            else:
                described[key] = self._define(item, place, graph)
        return described

    def symbols_in(self, text: str) -> str:
        """Names symbols such as s77 in the order in which they are met."""
        return _SYMBOL.sub(lambda match: self._symbols.setdefault(match[0], f"symbol {len(self._symbols)}"), text)

    def text(self, value: Any) -> str:
        """Returns a value as text in which symbols have canonical names."""
        return self.symbols_in(json.dumps(value))


def _without_hints(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_hints(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_hints(item) for key, item in value.items() if key not in ("hint", "requires_grad")}
    return value

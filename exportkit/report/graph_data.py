"""The graph of a program as the page draws it: nodes, the arrows between them, and the modules that they belong to."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from exportkit.package.exported_graph import DTYPE_NAMES, Argument, Node, ProgramGraph, ProgramGraphError, tensors_in
from exportkit.package.manifest import Manifest, PackagedMethod
from exportkit.report.argument_text import argument_text, inner_graph
from exportkit.report.module_tree import Stack, tree_of
from exportkit.report.symbolic_sizes import Symbols, size_text, symbols_of
from exportkit.report.untrusted import LeftOut

_NUMBERS = ("as_sym_int", "as_sym_bool", "as_sym_float", "as_sym_ints", "as_int", "as_bool", "as_float")
# Namespaces of operators that come with torch.
_OF_TORCH = frozenset(
    ["aten", "prim", "prims", "higher_order", "quantized", "quantized_decomposed", "_c10d_functional", "mkldnn"]
)
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]+)(?:\n(?!\s*File ")\s*([^\n]*))?')
_WRITTEN = re.compile(r"Tensor\(\w+!\)[\[\]?]* (\w+)")  # in a schema
_MOST_FRAMES = 12
_PACKAGES = ("/site-packages/", "/dist-packages/")
_MACHINERY = re.compile(r"(^|/)torch/|/lib/python3\.\d+/|^<")


def graph_data(
    program: ProgramGraph, manifest: Manifest, left_out: LeftOut, method: str | None = None
) -> dict[str, Any]:
    """Describes the graph of a method: by default, the manifest's default method.

    `manifest` has the names of inputs, state, outputs and operators.

    Returns:
        `nodes`, in an order in which they can run, so that a node's place is its number; `edges`, pairs of numbers,
        from and to; `tree`, the modules, see module_tree; `calls`, the number of calls of each target.

    Raises:
        ProgramGraphError: The graph refers to something in a form that torch does not write.
    """
    try:
        return _Builder(program, manifest, manifest.method(method), left_out).build()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        # The unions in torch's schema are plain objects here, and each use of them may meet another form.
        raise ProgramGraphError(f"the graph is not in the form that torch writes: {error!r}") from error


def operator_name(target: str) -> str | None:
    """Returns `namespace::name`, with the overload unless it is the default; None for what is not an operator."""
    match = _TARGET.fullmatch(target)
    if match is None:
        return None
    overload = f".{match[3]}" if match[3] and match[3] != "default" else ""
    return f"{match[1]}::{match[2]}{overload}"


class _Builder:
    def __init__(self, program: ProgramGraph, manifest: Manifest, method: PackagedMethod, left_out: LeftOut) -> None:
        self._left_out, self._limits = left_out, left_out.limits
        self._graph, self._signature, self._called = program.graph, program.signature, method.call
        self._taken = [
            *(tensor.name for tensor in method.call.inputs),
            *(f"state {manifest.state[use.index].name}" for use in method.state),
        ]
        self._operators = {operator.name: operator.schema for operator in manifest.operators}
        self._nodes: list[dict[str, Any]] = []
        self._stacks: list[Stack | None] = []
        self._maker: dict[str, int] = {}  # the number of the node that makes a value
        self._writer: dict[str, int] = {}  # the number of the node that was the last to write to a value in place
        self._weights: dict[str, str] = {}
        self._edges: dict[tuple[int, int], None] = {}
        self._symbols: Symbols = {}

    def build(self) -> dict[str, Any]:
        self._inputs()
        for number, node in enumerate(
            self._left_out.first(self._graph.nodes, self._limits.nodes, "nodes of the graph")
        ):
            self._call(number, node)
        self._outputs()
        edges = self._left_out.first(list(self._edges), self._limits.edges, "arrows of the graph")
        calls = Counter(node.target for node in self._graph.nodes)
        return {"nodes": self._nodes, "edges": edges, "tree": tree_of(self._stacks), "calls": calls}

    def _inputs(self) -> None:
        users: list[str] = []
        for spec in self._signature.input_specs:
            ((kind, content),) = spec.items()
            argument = content.get("arg", content)
            if kind == "user_input":
                users += tensors_in(argument)
            elif kind in ("parameter", "buffer", "tensor_constant"):
                self._weights[argument["name"]] = str(content[f"{kind}_name"])
        values = self._graph.tensor_values
        self._symbols = symbols_of(self._called, [values[name].sizes for name in users if name in values])
        for index, name in enumerate(self._left_out.first(users, self._limits.ends, "inputs of the graph")):
            title = self._taken[index] if index < len(self._taken) else name
            self._maker[name] = self._add({"kind": "input", "title": title, "out": [self._value(name)]}, None)

    def _call(self, number: int, node: Node) -> None:
        operator = operator_name(node.target)
        outputs = [name for output in node.outputs for name in tensors_in(output)]
        tensors = [name for name in outputs if name in self._graph.tensor_values]
        numbers = any(kind in _NUMBERS for output in node.outputs for kind in output)
        inner = [g for a in node.inputs if "as_graph" in a.arg if (g := inner_graph(a.arg)) is not None]
        called = {operator_name(each.target) for graph in inner for each in graph.nodes} | {operator}
        custom = next((name for name in called if name is not None and self._is_custom(name)), None)
        described: dict[str, Any] = {
            "kind": "custom" if custom else "op" if tensors else "size" if numbers else "check",
            "title": _short(node.target),
            "name": node.name or (outputs[0] if outputs else ""),
            "target": node.target,
            "index": number,
            "out": [self._value(name) for name in outputs],
            "args": [
                [argument.name, argument_text(argument.arg, self._shown), self._sources(argument.arg)]
                for argument in node.inputs[: self._limits.arguments]
            ],
        }
        if custom is not None:
            described["operator"] = custom
        if frames := frames_of(node.metadata.get("stack_trace", "")):
            described["frames"] = frames
        here = self._add(described, Stack.parse(node.metadata.get("nn_module_stack", "")))
        weights = []
        for argument in node.inputs:
            for name in tensors_in(argument.arg):
                if name in self._weights:
                    weights.append([self._weights[name], self._type(name)])
                elif name in self._maker:
                    self._read(name, here)
        if weights:
            described["weights"] = weights
        written = self._written(node, operator)
        described["out"] += [self._value(name) for name in written]
        self._maker.update(dict.fromkeys(outputs, here))
        self._writer.update(dict.fromkeys(written, here))

    def _written(self, node: Node, operator: str | None) -> list[str]:
        """Returns the values that an operator writes to in place."""
        if operator is None:
            return []
        name, _, overload = operator.partition("::")[2].partition(".")
        if operator in self._operators:
            arguments = _WRITTEN.findall(self._operators[operator])
        else:
            arguments = [*["self"] * (name.endswith("_") and not name.endswith("__")), *["out"] * ("out" in overload)]
        return [value for given in node.inputs if given.name in arguments for value in tensors_in(given.arg)]

    def _outputs(self) -> None:
        users = [
            name
            for spec in self._signature.output_specs
            if "user_output" in spec
            for name in tensors_in(spec["user_output"]["arg"])
        ]
        named = self._called.outputs
        for index, name in enumerate(self._left_out.first(users, self._limits.ends, "outputs of the graph")):
            title = named[index].name if index < len(named) else name
            here = self._add({"kind": "output", "title": title, "out": [self._value(name)]}, None)
            if name in self._maker:
                self._read(name, here)

    def _read(self, name: str, here: int) -> None:
        """Draws the arrows to a node that reads a value: from what makes it, and from what has last written to it."""
        self._edges[self._maker[name], here] = None
        if name in self._writer:
            self._edges[self._writer[name], here] = None

    def _add(self, node: dict[str, Any], stack: Stack | None) -> int:
        self._nodes.append(node)
        self._stacks.append(stack)
        return len(self._nodes) - 1

    def _is_custom(self, operator: str) -> bool:
        return operator in self._operators or operator.partition("::")[0] not in _OF_TORCH

    def _value(self, name: str) -> list[str]:
        return [name, self._type(name)]

    def _type(self, name: str) -> str:
        meta = self._graph.tensor_values.get(name)
        if meta is not None:
            sizes = ", ".join(size_text(size, self._symbols) for size in meta.sizes)
            return f"{DTYPE_NAMES.get(meta.dtype, f'dtype {meta.dtype}')}[{sizes}]"
        number = self._graph.sym_int_values.get(name)
        return size_text(number, self._symbols) if isinstance(number, dict) else ""

    def _sources(self, argument: Argument) -> list[int]:
        return [self._maker[name] for name in tensors_in(argument) if name in self._maker]

    def _shown(self, name: str) -> str:
        """A number as an expression, a weight by its name in the model."""
        return (self._type(name) if name in self._graph.sym_int_values else "") or self._weights.get(name, name)


def _short(target: str) -> str:
    """Returns such as `add.Tensor` for torch.ops.aten.add.Tensor; of other namespaces the namespace too."""
    name = operator_name(target)
    if name is None:
        return target.rpartition(".")[2]
    return name.removeprefix("aten::").removeprefix("higher_order::")


def frames_of(trace: str) -> list[list[object]]:
    """Returns the lines of the model's code that a node was traced from, the innermost first. They are never opened.

    A frame is a file, a line, a function, a text, and whether it is code of the model: not torch's, not Python's, not
    an installed package's, unless there is nothing else.
    """
    found = [[m[1], int(m[2]), m[3], m[4] or ""] for m in _FRAME.finditer(trace) if len(m[2]) < 10][-_MOST_FRAMES:][
        ::-1
    ]
    own = [not _MACHINERY.search(str(f[0])) and not any(p in str(f[0]) for p in _PACKAGES) for f in found]
    if not any(own):
        own = [not _MACHINERY.search(str(f[0])) for f in found]
    return [[*frame, mine] for frame, mine in zip(found, own)]

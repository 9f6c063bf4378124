"""Draws an ONNX model with its functions as SVG: `python -m tools.onnx_picture MODEL.onnx --function NAME -o FILE.svg`.

The left side has the graph of the model: its inputs, its calls of functions, its outputs, and a box for all
other nodes that come after the same calls. The right side has the body of one function, node by node.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tools.layers import Box, Drawing, Edge, draw

if TYPE_CHECKING:
    import onnx

_NAMED = 3  # operators that a box of several nodes names
_MARGIN, _HEAD, _BETWEEN = 24, 34, 56  # pixels
_HEAD_CHARACTER = 9.1  # pixels, of a monospaced font of 15 pixels

_STYLE = """\
svg { --page: #ffffff; --text: #1f2328; --faint: #59636e; --line: #818b98; --plain: #f6f8fa; --call: #ddf4ff;
  --calls: #0969da; --end: #dafbe1; --ends: #1a7f37; }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --text: #f0f6fc; --faint: #9198a1; --line: #6e7681; --plain: #151b23; --call: #10294c;
    --calls: #4493f8; --end: #12261e; --ends: #3fb950; }
}
text { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--faint); text-anchor: middle; }
text.title { fill: var(--text); font-weight: bold; }
text.head { fill: var(--text); font-size: 15px; text-anchor: start; }
.page { fill: var(--page); }
.node rect, .folded rect { fill: var(--plain); stroke: var(--line); }
.folded rect { stroke-dasharray: 4 3; }
.function rect { fill: var(--call); stroke: var(--calls); stroke-width: 1.5; }
.end rect { fill: var(--end); stroke: var(--ends); }
.arrow { fill: none; stroke: var(--line); }
#tip path { fill: var(--line); }
"""


@dataclass(frozen=True)
class _Graph:
    """A graph of a model or a function: what is drawn of both."""

    inputs: Mapping[str, tuple[str, ...]]  # the lines of each input's box
    outputs: Mapping[str, tuple[str, ...]]
    nodes: Sequence[onnx.NodeProto]

    def edges(self, owner: Sequence[str]) -> Iterable[Edge]:
        """Yields the arrows between boxes, where `owner` names the box of each node."""
        maker = {name: _input(name) for name in self.inputs}
        maker |= {name: box for node, box in zip(self.nodes, owner) for name in node.output}
        for node, box in zip(self.nodes, owner):
            yield from ((maker[name], box) for name in _read(node) if name in maker and maker[name] != box)
        yield from ((maker[name], _output(name)) for name in self.outputs if name in maker)


def picture(model: onnx.ModelProto, function: str) -> str:
    """Returns the SVG of a model.

    Args:
        model: The model.
        function: The name of the function whose body is drawn too, with or without its domain.

    Raises:
        ValueError: The model has no such function.
    """
    found = [f for f in model.functions if function in (f.name, f"{f.domain}::{f.name}")]
    if not found:
        raise ValueError(f"there is no function {function}; there is {', '.join(f.name for f in model.functions)}")
    left, right = _model_drawing(model), _function_drawing(found[0])
    return _svg([(f"{model.graph.name}.onnx", left), (f"{found[0].domain}::{found[0].name}", right)])


def _model_drawing(model: onnx.ModelProto) -> Drawing:
    graph = _Graph(
        {v.name: (v.name, _type_text(v)) for v in model.graph.input},
        {v.name: (v.name, _type_text(v)) for v in model.graph.output},
        model.graph.node,
    )
    functions = {(f.domain, f.name): f for f in model.functions}
    owner = _folded(graph, functions)
    boxes = {_input(name): Box("end", lines) for name, lines in graph.inputs.items()}
    members: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node, box in zip(graph.nodes, owner):
        members[box].append(node)
    for box, nodes in members.items():
        called = functions.get((nodes[0].domain, nodes[0].op_type))
        if called is None:
            boxes[box] = Box("folded", _folded_text(nodes))
        else:
            boxes[box] = Box("function", (f"{called.domain}::{called.name}", f"function of {_count(called.node)}"))
    boxes |= {_output(name): Box("end", lines) for name, lines in graph.outputs.items()}
    return _drawn(boxes, list(graph.edges(owner)))


def _function_drawing(function: onnx.FunctionProto) -> Drawing:
    results = [f"result {number}" for number in range(1, len(function.output) + 1)]
    graph = _Graph(
        {name: (name,) for name in function.input},
        {name: (text if len(results) > 1 else "result",) for name, text in zip(function.output, results)},
        [node for node in function.node if node.op_type != "Constant"],
    )
    constants = {node.output[0]: _constant_text(node) for node in function.node if node.op_type == "Constant"}
    owner = [f"node {number}" for number in range(len(graph.nodes))]
    boxes = {_input(name): Box("end", lines) for name, lines in graph.inputs.items()}
    boxes |= {box: Box("node", _node_text(node, constants)) for box, node in zip(owner, graph.nodes)}
    boxes |= {_output(name): Box("end", lines) for name, lines in graph.outputs.items()}
    return _drawn(boxes, list(graph.edges(owner)))


def _folded(graph: _Graph, functions: Container[tuple[str, str]]) -> list[str]:
    """Returns the box of each node. Nodes that depend on the same calls share one, so boxes never form a circle."""
    after: dict[str, frozenset[str]] = {}  # the calls that each value depends on
    owner = []
    for number, node in enumerate(graph.nodes):
        calls = frozenset[str]().union(*(after.get(name, frozenset()) for name in _read(node)))
        if (node.domain, node.op_type) in functions:
            owner.append(f"call {number}")
            calls |= {owner[-1]}
        else:
            owner.append(f"after {sorted(calls)}")
        after |= dict.fromkeys(node.output, calls)
    return owner


def _drawn(boxes: Mapping[str, Box], edges: Sequence[Edge]) -> Drawing:
    """Draws boxes in an order in which each comes after those that lead to it; leaves out what leads nowhere."""
    waiting = defaultdict(set)
    for start, end in edges:
        waiting[end].add(start)
    placed: dict[str, Box] = {}
    while len(placed) < len(boxes):
        placed |= {n: box for n, box in boxes.items() if n not in placed and waiting[n] <= placed.keys()}
    return draw(placed, edges)


# --- text -------------------------------------------------------------------------------------------------------------


def _input(name: str) -> str:
    return f"input {name}"


def _output(name: str) -> str:
    return f"output {name}"


def _read(node: onnx.NodeProto) -> list[str]:
    """Returns the names that a node reads, those inside of its branches and loops included."""
    inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return [*node.input, *(name for graph in inner for other in graph.node for name in _read(other))]


def _type_text(value: onnx.ValueInfoProto) -> str:
    import onnx

    tensor = value.type.tensor_type
    sizes = [size.dim_param or str(size.dim_value) for size in tensor.shape.dim]
    return f"{onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{', '.join(sizes)}]"


def _folded_text(nodes: Sequence[onnx.NodeProto]) -> tuple[str, ...]:
    counts = Counter(node.op_type for node in nodes).most_common()
    named = [f"{count} {name}" for name, count in counts[:_NAMED]]
    return _count(nodes), ", ".join(named) + ", ..." * (len(counts) > _NAMED)


def _count(nodes: Sequence[object]) -> str:
    return f"{len(nodes)} node" + "s" * (len(nodes) != 1)


def _node_text(node: onnx.NodeProto, constants: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the operator, then its constant inputs and its attributes."""
    given = [constants[name] for name in node.input if name in constants]
    given += [f"{a.name}={_attribute_text(node, a)}" for a in node.attribute]
    return (node.op_type, *([", ".join(given)] if given else []))


def _attribute_text(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> str:
    import onnx

    if attribute.ref_attr_name:
        return f"the call's {attribute.ref_attr_name}"
    if node.op_type == "Cast" and attribute.name == "to":
        return onnx.TensorProto.DataType.Name(attribute.i).lower()
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else str(value)


def _constant_text(node: onnx.NodeProto) -> str:
    import onnx

    value = onnx.helper.get_attribute_value(node.attribute[0])
    if not isinstance(value, onnx.TensorProto):
        return str(value)
    array = onnx.numpy_helper.to_array(value)
    return str(array.tolist()) if array.size <= 4 else f"{array.dtype}{list(array.shape)}"


def _svg(drawings: Sequence[tuple[str, Drawing]]) -> str:
    """Puts drawings beside each other, each with its heading."""
    height = max(drawing.height for _, drawing in drawings) + _HEAD + 2 * _MARGIN
    parts, x = [], float(_MARGIN)
    for heading, drawing in drawings:
        parts.append(f'<text class="head" x="{x:.0f}" y="{_MARGIN + 12}">{escape(heading)}</text>')
        width = max(drawing.width, len(heading) * _HEAD_CHARACTER)
        parts.append(f'<g transform="translate({x + (width - drawing.width) / 2:.0f},{_MARGIN + _HEAD})">')
        parts += [*drawing.elements, "</g>"]
        x += width + _BETWEEN
    size = f"{x - _BETWEEN + _MARGIN:.0f}", f"{height:.0f}"
    top = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" '
        f'height="{size[1]}">',
        f"<style>\n{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        '<rect class="page" width="100%" height="100%"/>',
    ]
    return "\n".join([*top, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Reads the command line."""
    import onnx

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model that `exportkit export --format onnx` wrote")
    parser.add_argument("--function", required=True, help="the function whose body is drawn too")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    # Weights beside the model are not needed.
    model = onnx.load(options.model, load_external_data=False)
    try:
        options.output.write_text(picture(model, options.function))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

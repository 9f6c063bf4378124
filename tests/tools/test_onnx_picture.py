"""The picture of an ONNX model names its functions and whatever else is in it, and nothing lies over anything else."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.onnx.small_models import model_proto
from tools.layers import Box, Edge, draw
from tools.onnx_picture import picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_has_each_function_with_its_domain_and_all_inputs_and_outputs() -> None:
    svg = picture(model_proto(), "twice")
    assert texts(svg) == [
        "small.onnx", "x", "float[rows, 3]", "toy::twice", "function of 1 node", "2 nodes", "1 MatMul, 1 ArgMax",
        "y", "float[rows, 400]", "n", "int64[rows]",
        "toy::twice", "x", "Add", "result",
    ]  # fmt: skip
    assert picture(model_proto(), "toy::twice") == svg


def test_nodes_of_branches_belong_to_the_values_that_they_read_and_constants_stand_in_their_nodes() -> None:
    def branch(name: str, operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["doubled"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"])])

    body = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Mul", ["a", "two"], ["b"]),
        helper.make_node("Identity", ["two"], ["c"]),
    ]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("toy", 1)]
    function = helper.make_function("toy", "twice", ["a"], ["b", "c"], body, opset_imports=imports[:1])
    nodes = [
        helper.make_node("twice", ["x"], ["doubled", ""], domain="toy"),
        helper.make_node("If", ["which"], ["y"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Exp")),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    which = helper.make_tensor_value_info("which", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "branches", [ends[0], which], [ends[1]])
    found = texts(picture(helper.make_model(graph, functions=[function], opset_imports=imports), "twice"))
    assert found.index("toy::twice") < found.index("1 If")
    body_of = found[found.index("a") :]
    assert sorted(body_of) == ["2.0", "2.0", "Identity", "Mul", "a", "result 1", "result 2"]
    assert body_of.index("Mul") + 1 == body_of.index("2.0", body_of.index("Mul"))


def test_a_function_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="there is no function thrice; there is twice"):
        picture(model_proto(), "thrice")


@st.composite
def graphs(draw_: st.DrawFn) -> tuple[dict[str, Box], list[Edge]]:
    count = draw_(st.integers(1, 12))
    boxes = {f"b{n}": Box("node", ("x" * draw_(st.integers(1, 40)),) * draw_(st.integers(1, 2))) for n in range(count)}
    pairs = list(itertools.combinations(boxes, 2))
    return boxes, draw_(st.lists(st.sampled_from(pairs), max_size=20) if pairs else st.just([]))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_boxes_lie_apart_within_the_picture_and_arrows_go_down(graph: tuple[dict[str, Box], list[Edge]]) -> None:
    boxes, edges = graph
    drawing = draw(boxes, edges)
    root = ET.fromstring(f"<svg>{''.join(drawing.elements)}</svg>")
    places = [tuple(float(box.attrib[key]) for key in ("x", "y", "width", "height")) for box in root.iter("rect")]
    assert len(places) == len(boxes)
    for x, y, width, height in places:
        assert x >= -1
        assert y >= -1
        assert x + width <= drawing.width + 1
        assert y + height <= drawing.height + 1
    for (x, y, width, height), (other_x, other_y, other_width, other_height) in itertools.combinations(places, 2):
        beside = x + width <= other_x or other_x + other_width <= x
        assert beside or y + height <= other_y or other_y + other_height <= y
    at = dict(zip(boxes, places))
    assert all(at[start][1] + at[start][3] < at[end][1] for start, end in edges)
    assert len(list(root.iter("path"))) == len(set(edges))

"""What a converted model looks like, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import exportkit.arr_coc.ops  # noqa: F401 (registers muladd)
from exportkit import ExportSpec
from exportkit.errors import ExportError, HostError, UsageError
from exportkit.libraries import load_library
from exportkit.onnx.convert import Converted
from exportkit.onnx.export_onnx import export_onnx
from exportkit.onnx.onnx_options import OnnxOptions
from tests.export.function_models import spec_of
from tests.fixtures import stable_library
from tests.onnx.conversions import checked, convert_spec, run, run_reference, session_of, tensors_of

OP_SHAPES = Path(__file__).parents[1] / "export" / "op_shapes.cpp"


def add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    out.copy_(a + b)


def twice_(x: Tensor) -> None:
    x.mul_(2)


def sum_of(xs: list[Tensor], bias: Tensor | None = None, *, weights: list[int]) -> Tensor:
    total = torch.stack([x * weight for x, weight in zip(xs, weights)]).sum(0)
    return total if bias is None else total + bias


DECOMPOSITIONS: dict[str, Any] = {
    "op_shapes::add_out": add_out,
    "op_shapes::twice_": twice_,
    "op_shapes::scaled": lambda x, by: x * by,
    "op_shapes::scaled.Tensor": lambda x, by: x * by[0],
    "op_shapes::sum_of": sum_of,
    "op_shapes::halves": lambda x: [x * 0.5, x * torch.tensor([0.5])],
    "op_shapes::filled": lambda x, dtype, device, how: torch.full_like(x, int(how == "ones"), dtype=dtype),
    "op_shapes::negated": lambda x: -x,
    "op_shapes::positive": lambda x: x[x > 0],
}


@pytest.fixture(scope="module")
def op_shapes() -> Any:
    """The operators of op_shapes.cpp, with their fakes."""
    load_library(stable_library.build(OP_SHAPES))
    import tests.export.shapes_models

    return tests.export.shapes_models


def muladds(rows: str = "rows[1:64]", **fields: Any) -> ExportSpec:
    """Two calls of muladd with one number and one with another."""
    muladd, sizes = torch.ops.arr_coc.muladd, {0: rows, 1: "2*width[1:8]"}
    return spec_of(
        lambda a, b: muladd(muladd(muladd(a, b, 0.5), b, 0.25), a, 0.5),
        *torch.randn(2, 4, 6),
        shapes={"a": sizes, "b": sizes},
        **fields,
    )


@pytest.fixture(scope="module")
def muladds_converted() -> Converted:
    return convert_spec(muladds())


# --- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kind_of_argument_and_result_answers_like_the_kernel(op_shapes: Any) -> None:
    model = checked(convert_spec(replace(op_shapes.shapes(), decompositions=DECOMPOSITIONS)))
    functions = {function.name: function for function in model.functions}
    assert {function.domain for function in model.functions} == {"op_shapes"}
    names = {"add_out", "twice_", "sum_of", "sum_of_2", "halves", "filled", "filled_2", "negated", "minus", "positive"}
    assert functions.keys() == names | {"scaled", "scaled_Tensor"}
    assert list(functions["sum_of"].input) == ["xs_0", "xs_1", "bias"]
    assert len(functions["halves"].output) == 2
    assert [node.domain for node in functions["minus"].node] == ["op_shapes"]  # it calls negated
    attributes = {node.op_type: {a.name: a for a in node.attribute} for node in model.graph.node if node.domain}
    assert attributes["scaled"]["by"].f == 3.0
    assert list(attributes["sum_of"]["weights"].ints) == [1, 2]
    assert attributes["filled"]["how"].s == b"ones"
    for rows in (1, 2, 5):
        x = torch.randn(rows, 3)
        expected = tensors_of(op_shapes.Shapes()(x))
        for answers in (run(session_of(model), [x]), run_reference(model, [x])):
            for answer, kernel in zip(answers, expected, strict=True):
                assert_close(answer, kernel)


def test_calls_that_trace_alike_share_a_function(muladds_converted: Converted) -> None:
    model = checked(muladds_converted)
    assert [(f.operator, f.name) for f in muladds_converted.functions] == [
        ("arr_coc::muladd", "muladd"),
        ("arr_coc::muladd", "muladd_2"),
    ]
    assert [node.op_type for node in model.graph.node] == ["muladd", "muladd_2", "muladd"]


@pytest.mark.slow
def test_inlined_there_is_no_function_and_the_answer_is_the_same() -> None:
    spec, inputs = muladds(), (torch.randn(3, 4), torch.randn(3, 4))
    converted = convert_spec(spec, inline=True)
    model = checked(converted)
    assert not model.functions
    assert not converted.functions
    assert {opset.domain for opset in model.opset_import} == {""}
    assert_close(run(session_of(model), inputs), [spec.model(*inputs)])


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_the_first_and_the_last_opset_work(opset: int) -> None:
    spec, inputs = muladds(), (torch.randn(1, 2), torch.randn(1, 2))
    model = checked(convert_spec(spec, opset=opset))
    assert {imported.domain: imported.version for imported in model.opset_import} == {"": opset, "arr_coc": 1}
    assert {o.version for function in model.functions for o in function.opset_import} == {opset}
    assert_close(run(session_of(model), inputs), [spec.model(*inputs)])


# --- names ------------------------------------------------------------------------------------------------------------


def test_axes_have_the_names_of_the_dimensions_and_their_ranges_are_metadata(muladds_converted: Converted) -> None:
    model = checked(muladds_converted)
    assert [_dims(value) for value in (*model.graph.input, *model.graph.output)] == [["rows", "2*width"]] * 3
    ranges = {prop.key: json.loads(prop.value) for prop in model.metadata_props}
    assert ranges == {"exportkit.dimensions": {"rows": [1, 64], "width": [1, 8]}}


@pytest.mark.slow
def test_outputs_that_are_inputs_or_the_same_tensor_have_names_of_their_own() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("x", torch.ones(3))

        def forward(self, x: Tensor, scale: float, absent: Tensor | None = None) -> dict[str, Any]:
            y = x * self.x * scale
            constants = {"nothing": None, "patch": 8, "kind": "one"}
            return {"x": x, "y": y, **constants, "again": y, "weight": self.x.clone()}

    spec = ExportSpec(Net(), (torch.randn(2, 3), 2.0), {"absent": None}, {"x": {0: "rows[1:9]"}})
    model = checked(convert_spec(spec))
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["output.x", "y", "again", "weight"]
    x = torch.randn(5, 3)
    assert_close(run(session_of(model), [x]), tensors_of(Net()(x, 2.0)))


def test_no_path_of_this_machine_is_in_the_model(muladds_converted: Converted) -> None:
    content = checked(muladds_converted).SerializeToString()
    assert str(Path(__file__).parent).encode() not in content
    assert b".py" not in content


def _dims(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


# --- refusals ---------------------------------------------------------------------------------------------------------


def scaled(op_shapes: Any, decomposition: Any) -> Converted:
    decompositions = {"op_shapes::scaled": decomposition} if decomposition else {}
    sizes = {"x": {0: "rows[1:64]"}}
    spec = spec_of(
        lambda x: torch.ops.op_shapes.scaled(x, 3.0), torch.randn(4, 4), shapes=sizes, decompositions=decompositions
    )
    return convert_spec(spec)


def with_cholesky(x: Tensor, by: float) -> Tensor:
    return torch.linalg.cholesky(x @ x.mT) * by  # here


def raising(x: Tensor, by: float) -> Tensor:
    raise ValueError("not for 3")


THE = "the decomposition of op_shapes::scaled"
RETURNS = "the operator returns float32 with 2"


@pytest.mark.slow_but("None-*", "*message7", "*30")
@pytest.mark.parametrize(
    ("decomposition", "message"),
    [
        (
            None,
            r"operator op_shapes::scaled has no decomposition[\s\S]*--decomposition op_shapes::scaled=package\.module:"
            r"function[\s\S]*ExportSpec\(decompositions=\{'op_shapes::scaled': function\}\)",
        ),
        (
            with_cholesky,
            rf"{THE} cannot become ONNX at test_convert.py:\d+ in with_cholesky: `.*# here`: "
            r"torch.onnx does not translate aten.\w*cholesky",
        ),
        (raising, rf"{THE} .*ValueError: not for 3"),
        # right for some sizes only
        (lambda x, by: x * by if x.shape[0] > 30 else by * x, rf"{THE}.*needs to know whether .*30"),
        (lambda x, by: x * (by * int(x.shape[0]) / x.shape[0]), rf"{THE}.*needs to know whether"),
        (lambda x, by: torch.cat([row[None] for row in x]) * by, rf"{THE}.*needs to know whether .* == 4"),
        # another function
        (lambda x, by: (x * by).double(), f"{THE} returns float64 with 2 dimensions; {RETURNS}"),
        (lambda x, by: (x * by)[0], f"{THE} returns float32 with 1 dimensions; {RETURNS}"),
        (lambda x, by: None, f"{THE} returns no tensor; {RETURNS} dimensions"),
        (lambda x, by: torch.ops.op_shapes.scaled(x, by), f"{THE} calls op_shapes::scaled"),
    ],
)
def test_a_decomposition_that_is_not_right_is_refused_and_named(
    op_shapes: Any, decomposition: Any, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        scaled(op_shapes, decomposition)


def test_what_stops_a_model_is_named_with_its_line() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x @ x.mT)  # here

    refused = r"the model cannot become ONNX at test_convert.py:\d+ in forward: `.*# here`: torch.onnx does not"
    with pytest.raises(ExportError, match=refused):
        convert_spec(ExportSpec(Net(), (torch.randn(4, 4),)))


class _Scaled(torch.nn.Module):
    """A branch with a constant of its code, or with a buffer of the same value."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]) if buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        def scaled(x: Tensor) -> Tensor:
            return x * (torch.tensor([2.0]) if self.factor is None else self.factor)

        return torch.cond(x.sum() > 0, scaled, torch.neg, (x,))


@pytest.mark.slow
def test_what_stops_a_branch_is_named_with_its_line_and_the_advice_works() -> None:
    spec = ExportSpec(_Scaled(buffer=False), (torch.rand(3),))
    with pytest.raises(
        ExportError, match=r"torch\.onnx fails within cond: .*\n    cond at test_convert\.py:"
    ) as caught:
        convert_spec(spec)
    assert "a buffer" in (caught.value.hint or "")
    checked(convert_spec(ExportSpec(_Scaled(buffer=True), (torch.rand(3),))))


def test_a_branch_that_every_size_takes_is_allowed(op_shapes: Any) -> None:
    converted = scaled(op_shapes, lambda x, by: x * by if x.shape[0] < 65 and x.shape[1] == 4 else x)
    assert_close(run(session_of(checked(converted)), [torch.ones(7, 4)]), [torch.full((7, 4), 3.0)])


def test_complex_numbers_are_refused_by_the_name_of_the_tensor() -> None:
    with pytest.raises(ExportError, match="signal is complex64"):
        convert_spec(spec_of(lambda signal: signal.real * 2, torch.randn(3, dtype=torch.complex64)))


# --- the whole export -------------------------------------------------------------------------------------------------


def test_a_decomposition_of_an_operator_that_is_not_called_is_refused(tmp_path: Path) -> None:
    options = OnnxOptions(decompositions={"arr_coc::mulad": add_out})
    with pytest.raises(UsageError, match="decomposition of arr_coc::mulad, which the model does not call") as error:
        export_onnx(muladds(), tmp_path / "net.onnx", onnx_options=options)
    assert "It calls arr_coc::muladd." in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_machine_without_the_packages_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(HostError, match=r"needs onnxscript[\s\S]*pip install 'exportkit\[onnx\]'"):
        export_onnx(muladds(), tmp_path / "net.onnx")


def test_a_spec_refuses_decompositions_that_are_not_functions() -> None:
    with pytest.raises(UsageError, match=r"ExportSpec.decompositions is .*it must be a dict such as"):
        muladds(decompositions={"arr_coc::muladd": 3})

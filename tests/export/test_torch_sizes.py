"""Sizes as the command line has them, and as torch.export takes them, with its names and ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import AdditionalInputs, Dim, ShapesCollection

from exportkit import ExportSpec
from exportkit.errors import ExportError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.option_parsing import parse_expression, parse_places, parse_ranges
from exportkit.export.models.resolve import resolve
from exportkit.export.models.resolved import EagerModel, SavedProgram
from exportkit.export.sizes.shapes import MAX_SIZE, dynamic_sizes, merge_shapes
from exportkit.export.sizes.size_changes import sizes_as_texts
from exportkit.export.sizes.torch_sizes import plain_shapes
from exportkit.export.trace.saved_program import trace_saved
from exportkit.export.trace.trace import ready_to_trace
from exportkit.export.trace.traced import Traced
from exportkit.package.manifest import Dimension, Size
from tests.export.function_models import CPU, spec_of, traced

# --- of the command line ---------------------------------------------------------------------------------------------


IMAGE = {"image": (2, 3, 64, 80), "query": (2, 24), "few": (1, 0)}


@pytest.mark.parametrize(
    ("text", "size", "ends"),
    [
        ("batch[1:64]", Size(dimension="batch"), (1, 64)),
        ("batch", Size(dimension="batch"), None),
        ("16*gh[8:96]", Size(dimension="gh", scale=16), (8, 96)),
        ("16 * gh [ 8 : 96 ]", Size(dimension="gh", scale=16), (8, 96)),
        ("2*n+1[2:9]", Size(dimension="n", scale=2, offset=1), (2, 9)),
        ("n-1[2:9]", Size(dimension="n", offset=-1), (2, 9)),
    ],
)
def test_a_size_is_a_name_or_a_multiple_of_one_with_or_without_its_range(text, size, ends) -> None:
    assert parse_expression(text) == (size, ends)


@pytest.mark.parametrize(
    ("read", "texts", "says"),
    [
        (
            parse_expression,
            ["", "1", "[1:2]", "n[1]", "n[a:b]", "n*16", "n*m", "0x2*n", "n[3:3]", "0*n[1:2]", "a b"],
            "size|range",
        ),
        (lambda text: parse_places([text]), ["image", "image:0", "image=n[1:2]", ":0=n[1:2]", "image:0="], "NAME:DIM="),
        (lambda text: parse_places([text, text]), ["image:0=a[1:2]"], "twice"),
        (
            lambda text: parse_ranges([text]),
            ["length", "length=4", "length=4:2", "length=a:b", "2n=1:4"],
            "NAME=MIN:MAX",
        ),
    ],
)
def test_what_cannot_be_read_says_the_form(read, texts, says) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=says):
            read(text)


def test_the_command_line_replaces_the_spec_place_by_place() -> None:
    spec = {"image": {0: "batch[1:64]", 2: "16*gh[8:96]"}, "query": {0: "batch"}}
    given = parse_places(["image:0=batch[1:8]", "batch.mask:1=t[1:4]"])
    image = {0: "batch[1:8]", 2: "16*gh[8:96]"}
    assert merge_shapes(spec, given) == {"image": image, "query": {0: "batch"}, "batch.mask": {1: "t[1:4]"}}


def test_one_name_is_one_number_with_one_range() -> None:
    sizes = dynamic_sizes({"image": {0: "batch[1:64]", 2: "16*gh[2:8]"}, "query": {0: "batch"}}, IMAGE)
    assert sizes.dimensions == (Dimension(name="batch", min=1, max=64), Dimension(name="gh", min=2, max=8))
    assert sizes.example == {"batch": 2, "gh": 4}
    assert sizes.at("query", 0) == Size(dimension="batch")
    assert sizes.at("query", 1) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"imag": {0: "n[1:4]"}}, r"no tensor input 'imag'.*\n.*image \[2, 3, 64, 80\], query \[2, 24\]"),
        ({"image": {0: "n[1:4]"}, "query": {0: "n[1:8]"}}, "1 to 4 in one place and 1 to 8"),
        ({"image": {0: "n[4:8]"}}, r"`n` is 2, which is outside \[4:8\]"),
        ({"image": {2: "48*n[1:4]"}}, "image:2 is 64 .* not 48"),
        ({"image": {2: "n[1:99]", 3: "n"}}, "`n` is 64 elsewhere .* 80"),
        ({"image": {0: "n-2[1:9]"}}, "would be -1"),
        ({"image": {1: "8"}}, "image:1 is 3 in the example inputs, and image:1=8 would fix it at another size"),
        ({"few": {0: "n[1:4]"}}, "constants"),  # torch takes it for one
        ({"few": {1: "n[0:4]"}}, "constants"),
    ],
)
def test_sizes_that_do_not_fit_the_example_inputs_are_refused(shapes, message) -> None:
    with pytest.raises(UsageError, match=message):
        dynamic_sizes(shapes, IMAGE)


def test_sizes_of_outputs_are_told_in_the_callers_dimensions() -> None:
    def cropped(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x[1:], y.repeat_interleave(2, 0), torch.cat([x, y])

    spec = spec_of(cropped, torch.rand(5, 3), torch.rand(8, 3), shapes={"x": {0: "n[3:9]"}, "y": {0: "4*m[1:5]"}})
    (method,) = traced(spec, cases=1, edge_cases=False).methods
    sizes = [output.shape[0] for output in method.call.outputs]
    assert sizes == [Size(dimension="n", offset=-1), Size(dimension="m", scale=8), None]  # the last has two dimensions


# --- of torch.export -------------------------------------------------------------------------------------------------


def step(x: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A step of a decoder, whose cache is nested."""
    return x @ past[0][0].transpose(-1, -2), [(torch.cat([a, x], -2), b) for a, b in past]


def paired(x: Tensor, y: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, 2, 3).sum(2) + y


def variadic(x: Tensor, *rest: Any, **others: Any) -> Tensor:
    return x.sum(1) + rest[0].sum(1) * rest[1] + others["more"]["a"].sum(1)


def nested(shapes: Any) -> ExportSpec:
    return spec_of(step, torch.randn(2, 1, 4), [(torch.randn(2, 7, 4), torch.randn(2, 7, 4))], shapes=shapes)


def pair(shapes: Any) -> ExportSpec:
    return spec_of(paired, *PAIR, shapes=shapes)


def sizes_of(spec: ExportSpec, *ranges: str) -> dict[str, dict[int, str]]:
    """Returns the sizes of a spec as they are traced, with the ranges of their names."""
    with ready_to_trace(EagerModel(spec), TraceOptions(ranges=ranges), CPU) as (_, tasks):
        _, sizes = tasks["forward"]
    return sizes_as_texts(sizes)


PAIR = (torch.randn(2, 14, 3), torch.randn(2, 7, 3))
BATCH, LENGTH, N = Dim("batch", min=1, max=8), Dim("length", min=1, max=100), Dim("n", max=50)
STEP = {
    "x": {0: "batch[1:8]"},
    "past.0.0": {0: "batch[1:8]", 1: "length[1:100]"},
    "past.0.1": {0: "batch[1:8]", 1: "length[1:100]"},
}
TWICE = {"x": {0: "batch[1:8]", 1: "2*n[1:50]"}, "y": {0: "batch[1:8]", 1: "n[1:50]"}}


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: BATCH}, "past": [({0: BATCH, 1: LENGTH}, (BATCH, LENGTH, None))]},
        ({0: BATCH}, [[{0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH, 2: Dim.STATIC}]]),
        {"x": {0: "batch[1:8]"}, "past": [({0: BATCH, 1: "length[1:100]"}, {0: "batch[1:8]", 1: LENGTH})]},
        {"x": (BATCH, 1, 4), "past.0.0": {0: BATCH, 1: LENGTH}, "past.0.1": {0: BATCH, 1: LENGTH}},
        STEP,
    ],
)
def test_nested_sizes_mean_the_same_in_every_form(shapes: Any) -> None:
    found = plain_shapes(nested(shapes))
    assert {t: {d: text for d, text in dims.items() if "[" in text} for t, dims in found.items()} == STEP
    assert sizes_of(nested(shapes)) == STEP


def test_parts_of_variadic_parameters_have_sizes_by_their_own_names_or_as_in_torch() -> None:
    inputs, keywords = (torch.randn(3, 4), torch.randn(3, 5), 2.0), {"more": {"a": torch.randn(3, 2)}, "flag": True}
    names = {"x": {0: "batch[1:8]"}, "rest_0": {0: "batch[1:8]"}, "more.a": {0: "batch[1:8]"}}
    more = {"more": {"a": {0: BATCH}}}
    by_torch = {"x": {0: BATCH}, "rest": ({0: BATCH}, None), "others": more | {"flag": None}}
    for shapes in (names, by_torch, tuple(by_torch.values()), {"x": (BATCH, None), "rest_0": {0: BATCH}} | more):
        spec = spec_of(variadic, *inputs, example_kwargs=keywords, shapes=shapes)
        assert sizes_of(spec) == names


def test_sizes_from_1_to_2_of_one_name_are_one_size_in_the_trace() -> None:
    # As two, torch 2.13 takes each for 2 while it compiles, and a batch of 1 gets an answer of 2 rows.
    (method,) = traced(pair({"x": {0: "batch[1:2]"}, "y": {0: "batch"}}), cases=1).methods
    values = [node.meta["val"] for node in method.program.graph.nodes if node.op == "placeholder"]
    assert len({value.shape[0].node.expr for value in values}) == 1
    assert [(d.name, d.min, d.max) for d in method.call.dimensions] == [("batch", 1, 2)]


def test_a_spec_at_forward_is_refused_and_not_overlooked() -> None:
    spec = pair({})
    spec.model.forward.__dict__["_dynamic_spec"] = object()  # as torch 2.15's decorator does
    try:
        with pytest.raises(UsageError, match="Give them as dynamic_shapes"):
            plain_shapes(spec)
    finally:
        del spec.model.forward.__dict__["_dynamic_spec"]


def test_a_dim_that_follows_from_another_keeps_its_factor_and_its_offset() -> None:
    assert plain_shapes(pair({"x": {0: BATCH, 1: 2 * N}, "y": {0: BATCH, 1: N}})) == TWICE
    assert plain_shapes(pair(({1: 2 * N + 4}, {1: N - 1}))) == {"x": {1: "2*n+4[2:50]"}, "y": {1: "n-1[2:50]"}}
    assert plain_shapes(pair(({0: Dim("b")}, None))) == {"x": {0: f"b[1:{MAX_SIZE}]"}}


def test_a_collection_is_read_before_its_tensors_are_cast() -> None:
    shapes = ShapesCollection()
    shapes[PAIR[0]] = {0: BATCH, 1: 2 * N}
    shapes[PAIR[1]] = (BATCH, N, None)
    with ready_to_trace(EagerModel(pair(shapes)), TraceOptions(dtype="float64"), CPU) as (_, tasks):
        task, sizes = tasks["forward"]
    assert task.bound.tensors[0].dtype == torch.float64
    assert str(sizes.at("x", 1)) == "2*n"


def more_inputs() -> AdditionalInputs:
    shapes = AdditionalInputs()
    shapes.add((torch.randn(2, 20, 3), torch.randn(2, 10, 3)))
    return shapes


ANY, AUTO = f"[1:{MAX_SIZE}]", {0: Dim.AUTO, 1: Dim.AUTO}


@pytest.mark.slow_but("spec0*")
@pytest.mark.parametrize(
    ("spec", "ranges", "sizes"),
    [
        # Sizes that torch infers get names and follow one another, or a declared one.
        (
            nested({"x": {0: Dim.AUTO}, "past": [(AUTO, AUTO)]}),
            [],
            {
                "x": {0: f"x_0{ANY}"},
                "past.0.0": {0: f"x_0{ANY}", 1: f"past_0_0_1{ANY}"},
                "past.0.1": {0: f"past_0_1_0{ANY}", 1: f"past_0_1_1{ANY}"},
            },
        ),
        (pair({"x": {0: Dim.DYNAMIC, 1: Dim.AUTO}, "y": {0: "batch[1:8]", 1: N}}), [], TWICE),
        (pair(more_inputs()), ["y_1=1:64"], {"x": {1: "2*y_1[1:64]"}, "y": {1: "y_1[1:64]"}}),
    ],
)
def test_sizes_that_torch_infers_get_names(
    spec: ExportSpec, ranges: list[str], sizes: dict[str, dict[int, str]]
) -> None:
    assert sizes_of(spec, *ranges) == sizes


@pytest.mark.slow
def test_an_inferred_size_is_narrowed_to_what_the_model_takes() -> None:
    rows = torch.rand(100, 3)
    spec = spec_of(
        lambda x: (x + rows[: x.shape[1]]).view(x.shape[0], -1, 4, 3).sum(2),
        torch.rand(2, 8, 3),
        shapes=({0: Dim.AUTO(max=16), 1: Dim.AUTO},),
    )
    assert sizes_of(spec) == {"x": {0: "x_0[1:16]", 1: "4*x_1[1:25]"}}


def test_a_size_that_must_vary_and_does_not_is_an_error() -> None:
    spec = spec_of(lambda x: x.view(4, 7), torch.rand(4, 7), shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(ExportError, match=r"x:0 was declared Dim\.DYNAMIC, and is always 4"):
        sizes_of(spec)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {0: 3.5}, "y": None}, r"dynamic_shapes gives x:0 3\.5"),
        ({"x": (BATCH,), "y": None}, "gives x, a tensor of 3 dimensions,"),
        ((None,), "has 1 entries; the example inputs are 2: x, y"),
        ({"z": {0: BATCH}}, "the model has no tensor input 'z'"),
        ({"y": {5: BATCH}}, "y has no dimension 5"),
        ({"y": {5: Dim.AUTO}}, "y has no dimension 5"),
        ({"x": {"0": BATCH}}, "a tensor of 3 dimensions"),
        ({"x": {0: Dim("a", max=3)}, "y": {0: "a[1:9]"}}, "1 to 3 in one place and 1 to 9"),
    ],
)
def test_what_does_not_fit_the_inputs_names_the_place(shapes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sizes_of(pair(shapes))


def test_another_structure_than_the_arguments_says_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"gives past .* it holds 0(.|\n)*name its tensors: past\.0"):
        plain_shapes(nested({"x": None, "past": {0: BATCH}}))


def test_a_range_by_name_replaces_every_declared_one_and_must_have_a_name() -> None:
    found = sizes_of(nested(STEP), "length=1:4096")
    assert [dims[1] for dims in found.values() if 1 in dims] == ["length[1:4096]"] * 2
    with pytest.raises(UsageError, match=r"no size has the name `lenght`\n  There are batch, length"):
        sizes_of(nested(STEP), "lenght=1:4096")


# --- files of torch.export.save ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedProgram:
    path = tmp_path_factory.mktemp("saved") / "auto.pt2"
    spec, shapes = nested({}), {"x": {0: Dim.AUTO}, "past": [(AUTO, AUTO)]}
    torch.export.save(torch.export.export(spec.model, spec.example_inputs, dynamic_shapes=shapes), path)
    found = resolve(str(path), trusted=True)
    assert isinstance(found, SavedProgram)
    return found


def of_saved(saved: SavedProgram, **options: Any) -> Traced:
    return trace_saved(saved, TraceOptions(**options), CPU, lambda _: None)


def test_a_saved_programs_sizes_get_names_and_ends(saved: SavedProgram) -> None:
    found = of_saved(saved, dynamic=["past.0.0:0=batch[2:8]", "past.0.0:1=length"], ranges=["length=2:64"])
    call = found.methods[0].call
    assert [str(size) for size in call.inputs[0].shape] == ["batch", "1", "4"]
    assert {d.name: (d.min, d.max) for d in call.dimensions if d.name in ("batch", "length")} == {
        "batch": (2, 8),
        "length": (2, 64),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": ["x:1=k[1:2]"]}, "x:1=k.*traced with that size fixed\n.*These vary: x:0 as "),
        ({"dynamic": ["x:0=2*k[1:4]"]}, "Write a name in place of"),
        ({"dynamic": ["x:0=batch[0:8]"]}, "`batch` would be 0 to 8, and the program was traced for 2 to"),
        ({"ranges": ["nothing=2:4"]}, "no size has the name `nothing`"),
        ({"static": True}, "its dtype and sizes cannot change"),
    ],
)
def test_a_saved_program_takes_no_other_sizes(saved: SavedProgram, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of_saved(saved, **options)


def test_no_cases_of_wide_ranges_take_more_than_four_megabytes() -> None:
    wide = {"x": {0: Dim("batch"), 1: 2 * Dim("n")}, "y": {0: Dim("batch"), 1: Dim("n")}}
    found = traced(pair(wide), cases=8)
    assert len([case for case in found.cases if not case.edge_case]) == 8
    assert sum(len(case.tensors) for case in found.cases) < 4_000_000

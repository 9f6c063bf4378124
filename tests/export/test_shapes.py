from __future__ import annotations

import pytest
import torch

from exportkit.errors import UsageError
from exportkit.export.models.option_parsing import parse_expression, parse_places
from exportkit.export.sizes.shapes import (
    DynamicSizes,
    Symbols,
    dynamic_sizes,
    merge_shapes,
    torch_dimensions,
    torch_shape,
)
from exportkit.package.manifest import Dimension, Size

IMAGE = {"image": (2, 3, 64, 80), "query": (2, 24)}


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


@pytest.mark.parametrize("text", ["", "1", "[1:2]", "n[1]", "n[a:b]", "n*16", "n*m", "0x2*n", "n[3:3]", "0*n[1:2]"])
def test_what_is_no_size_is_refused_with_the_text_that_was_given(text) -> None:
    with pytest.raises(UsageError, match=r"size|range"):
        parse_expression(text)


def test_places_of_the_command_line_are_taken_apart() -> None:
    assert parse_places(["image:0=batch[1:64]", "image:2=16*gh[8:96]", "batch.mask:1=t[1:4]"]) == {
        "image": {0: "batch[1:64]", 2: "16*gh[8:96]"},
        "batch.mask": {1: "t[1:4]"},
    }


@pytest.mark.parametrize("text", ["image", "image:0", "image=n[1:2]", "image:x=n[1:2]", ":0=n[1:2]", "image:0="])
def test_a_place_that_cannot_be_read_says_the_form(text) -> None:
    with pytest.raises(UsageError, match=r"NAME:DIM="):
        parse_places([text])


def test_a_place_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_places(["image:0=a[1:2]", "image:0=b[1:2]"])


def test_the_command_line_replaces_the_spec_place_by_place() -> None:
    spec = {"image": {0: "batch[1:64]", 2: "16*gh[8:96]"}, "query": {0: "batch"}}
    assert merge_shapes(spec, {"image": {0: "batch[1:8]"}}) == {
        "image": {0: "batch[1:8]", 2: "16*gh[8:96]"},
        "query": {0: "batch"},
    }


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
    ],
)
def test_sizes_that_do_not_fit_the_example_inputs_are_refused(shapes, message) -> None:
    with pytest.raises(UsageError, match=message):
        dynamic_sizes(shapes, IMAGE)


@pytest.mark.parametrize("actual", [0, 1])
def test_an_example_of_size_0_or_1_is_refused_before_torch_takes_it_for_a_constant(actual) -> None:
    with pytest.raises(UsageError, match="constants"):
        dynamic_sizes({"x": {0: "n[0:4]"}} if actual == 0 else {"x": {0: "n[1:4]"}}, {"x": (actual, 3)})


class _Crop(torch.nn.Module):
    def forward(self, x, y):
        return x[1:], y.repeat_interleave(2, 0), x[:, None] + y[None, : 0 + 1, 0], torch.cat([x, y])


def _symbols(sizes: DynamicSizes, module, args, shapes) -> tuple[Symbols, list]:
    program = torch.export.export(module, args, dynamic_shapes=shapes)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [(name, tuple(values[name].shape)) for name in program.graph_signature.user_inputs]
    return Symbols(inputs, sizes, program.range_constraints), [values[n] for n in program.graph_signature.user_outputs]


def test_sizes_of_outputs_are_told_in_the_callers_dimensions() -> None:
    shapes = {"x": {0: "n[3:9]"}, "y": {0: "4*m[1:5]"}}
    args = (torch.rand(5, 3), torch.rand(8, 3))
    sizes = dynamic_sizes(shapes, {"x": (5, 3), "y": (8, 3)})
    dims = torch_dimensions(sizes)
    symbols, outputs = _symbols(sizes, _Crop(), args, {name: torch_shape(sizes, dims, name) for name in ("x", "y")})
    first = [symbols.size(output.shape[0]) for output in outputs]
    assert first[0] == Size(dimension="n", offset=-1)
    assert first[1] == Size(dimension="m", scale=8)
    assert first[3] is None  # n + 4m is of two dimensions


def test_a_foreign_programs_symbols_become_dimensions_with_their_ranges() -> None:
    shapes = {"x": {0: torch.export.Dim("n", min=3, max=9)}, "y": None}
    symbols, outputs = _symbols(DynamicSizes(), _Crop(), (torch.rand(5, 3), torch.rand(8, 3)), shapes)
    (dimension,) = symbols.dimensions
    assert (dimension.min, dimension.max) == (3, 9)
    assert symbols.size(outputs[0].shape[0]) == Size(dimension=dimension.name, offset=-1)


def test_a_plain_number_fixes_a_size_that_a_spec_makes_vary() -> None:
    shapes = merge_shapes({"x": {0: "n[1:8]", 1: "m[1:8]"}}, parse_places(["x:0=4"]))
    sizes = dynamic_sizes(shapes, {"x": (4, 3)})
    assert sizes.at("x", 0) is None
    assert [dimension.name for dimension in sizes.dimensions] == ["m"]


def test_a_plain_number_that_is_not_the_examples_size_is_refused() -> None:
    with pytest.raises(UsageError, match="x:0 is 4 in the example inputs, and x:0=8 would fix it at another size"):
        dynamic_sizes({"x": {0: "8"}}, {"x": (4, 3)})

"""Which models ARR-COC's part of the page is for."""

from __future__ import annotations

import msgspec
import pytest

from exportkit.arr_coc.page import recognise
from exportkit.package import manifest as m
from exportkit.serve.page.page_routes import page_status
from tests.arr_coc.page.calls import region_call
from tests.serve.page.doubles import Model, Models


def test_a_model_that_chooses_patches_is_recognised_by_its_call():
    expected = {"image": "picture", "query": "wanted", "mask": None, "patch": 14, "width": 8}
    assert recognise(region_call()) == expected
    model = Model(call=region_call())
    part = page_status(Models([model]))["models"][0]["part"]
    assert part == {"name": "arr_coc", "facts": expected}


def test_query_tokens_are_recognised_with_their_mask():
    call = region_call()
    batch, tokens = m.Size(dimension="b"), m.Size(dimension="t")
    inputs = (
        call.inputs[0],
        m.TensorInput(name="wanted", dtype="float32", shape=(batch, tokens, 8), written=None),
        m.TensorInput(name="counts", dtype="bool", shape=(batch, tokens), written=None),
    )
    dimensions = (*call.dimensions, m.Dimension(name="t", min=1, max=9))
    found = recognise(region_call(inputs=inputs, dimensions=dimensions))
    assert found is not None
    assert (found["query"], found["mask"]) == ("wanted", "counts")
    few = (*call.dimensions, m.Dimension(name="t", min=2, max=9))
    assert recognise(region_call(inputs=inputs, dimensions=few)) is None


def changed(index: int, **changes) -> m.Call:
    inputs = list(region_call().inputs)
    inputs[index] = msgspec.structs.replace(inputs[index], **changes)
    return region_call(inputs=tuple(inputs))


BATCH, ROWS, COLUMNS = (m.Size(dimension="b"), m.Size(dimension="gh", scale=14), m.Size(dimension="gw", scale=14))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(region_call(outputs=region_call().outputs[1:]), id="no features"),
        pytest.param(region_call(inputs=region_call().inputs[:1]), id="no query"),
        pytest.param(region_call(inputs=region_call().inputs[1:]), id="no image"),
        pytest.param(changed(0, dtype="uint8"), id="image of bytes"),
        pytest.param(changed(0, shape=(BATCH, 4, ROWS, COLUMNS)), id="four channels"),
        pytest.param(changed(0, shape=(BATCH, 3, ROWS, ROWS)), id="squares only"),
        pytest.param(changed(0, shape=(BATCH, 3, 224, 224)), id="one size only"),
        pytest.param(changed(0, shape=(2, 3, ROWS, COLUMNS)), id="pairs only"),
        pytest.param(changed(0, shape=(BATCH, 3, ROWS, m.Size(dimension="gw", scale=16))), id="oblong patches"),
        pytest.param(changed(1, shape=(BATCH, 9)), id="a query of another space"),
        pytest.param(changed(1, dtype="float16"), id="a query of another dtype"),
        pytest.param(
            region_call(
                inputs=(
                    *region_call().inputs,
                    m.TensorInput(name="more", dtype="int64", shape=(1, 1, 1, 1), written=None),
                ),
            ),
            id="one input more",
        ),
    ],
)
def test_other_models_are_not_taken_for_such_a_model(call: m.Call):
    assert recognise(call) is None

"""Several requests in one call: each has the bits of its own call, in every dtype, in this process and in a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import InputError, ModelRunError, UsageError
from exportkit.serve.protocol.datatypes import DATATYPES
from tests.runtime import everything, exportkit_run, tiny, ways
from tests.runtime.everything import drawn, example
from tests.serve.engine import ticker

SIZES = [(1,), (40,), (0,), (0, 2), (2, 1, 3), (1, 1), (3,) * 13]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything.write(tmp_path_factory.mktemp("everything") / "everything.pt2")


@pytest.fixture(scope="module", params=ways.PYTHON)
def model(request: pytest.FixtureRequest, package: Path) -> Iterator[exportkit.Model]:
    yield from ways.opened(request, package)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_of_every_dtype_are_answered_together(model, sizes):
    requests = [example(rows) for rows in sizes]
    before = time.perf_counter()
    answers = model.run_requests(requests, range(len(DATATYPES)))
    spent = time.perf_counter() - before
    for place, output in enumerate(answers.outputs):
        assert output.is_contiguous()
        assert output.dtype is requests[0][place].dtype
        assert list(output.shape) == [sum(sizes), *requests[0][place].shape[1:]]
        assert bits(output) == b"".join(bits(request[place]) for request in requests)
    times = (answers.input_seconds, answers.wait_seconds, answers.run_seconds, answers.output_seconds)
    assert all(each >= 0 for each in times)
    assert sum(times) <= spent


def test_only_the_outputs_that_are_asked_for_come_back_and_in_that_order(model):
    request = example(2)
    outputs = model.run_requests([request], [5, 0]).outputs
    assert [bits(output) for output in outputs] == [bits(request[5]), bits(request[0])]
    assert model.run_requests([request], []).outputs == []


def test_more_rows_than_the_package_allows_are_refused(model):
    with pytest.raises(InputError, match=r"65.*64|64.*65"):
        model.run_requests([example(40), example(25)], [0])
    assert model.run_requests([example(40), example(24)], [0]).outputs[0].shape[0] == 64


def test_what_the_package_does_not_take_is_refused_and_the_model_goes_on(model):
    one = example(2)

    def refused(place: int, other: object, message: str) -> None:
        with pytest.raises(InputError, match=message):
            model.run_requests([one, [*one[:place], other, *one[place + 1 :]]], [0])

    refused(1, drawn(torch.int8, 2, 3), "`of_uint8` must be uint8, got int8")
    refused(1, drawn(torch.uint8, 2, 4), "`of_uint8` must have size 3 in dimension 1")
    refused(1, drawn(torch.uint8, 3, 3), "they must agree")
    refused(
        1,
        torch.zeros(2, 3, dtype=torch.uint8, device="meta"),
        "`of_uint8` must be on cpu, where requests begin; got one on meta",
    )
    refused(1, one[1].numpy(), "`of_uint8` must be a tensor")
    with pytest.raises(InputError, match=r"1 tensors were given; the package takes 13"):
        model.run_requests([one, one[:1]], [0])
    with pytest.raises(InputError, match="no request was given"):
        model.run_requests([], [0])
    for output in (-1, len(DATATYPES), "scores"):
        with pytest.raises(UsageError, match=f"there is no output {output}: the package has 13"):
            model.run_requests([one], [output])
    assert bits(model.run_requests([one], [0]).outputs[0]) == bits(one[0])


def test_inputs_with_gaps_are_copied(model):
    one = example(2)
    turned = [tensor.movedim(0, -1).contiguous().movedim(-1, 0) for tensor in one]
    for output, expected in zip(model.run_requests([turned, one], range(len(DATATYPES))).outputs, one):
        assert bits(output) == 2 * bits(expected)


def test_inputs_without_dimensions_are_not_put_together(tiny_package):
    """`offset` has the same size in every call."""
    (image, query), named = tiny.example(2)
    request = [image, query["features"], named["offset"]]
    with exportkit.load(tiny_package) as model:
        assert model.run_requests([request], [0]).outputs[0].shape[0] == 2
        with pytest.raises(InputError, match="`offset` must have size 5 in dimension 0"):
            model.run_requests([request, request], [0])


def test_steps_of_sessions_run_together_as_alone(tmp_path):
    exportkit_run.require_built()
    with exportkit.load(ticker.write(tmp_path / "ticker.pt2")) as model:
        together, alone = ([model.session(batch=rows) for rows in (2, 1, 3)] for _ in range(2))
        for number in range(3):
            given = [list(ticker.inputs(number, session.sizes["batch"]).values()) for session in alone]
            (output,) = model.run_steps(list(zip(together, given)), [0]).outputs
            assert bits(output) == b"".join(bits(session(*each)) for session, each in zip(alone, given))
        with pytest.raises(ModelRunError, match="a request has 1 rows, and its session 2"):
            model.run_steps([(together[0], given[1]), (together[1], given[0])], [0])
        for one, other in zip(together, alone):
            assert bits(one.state["memory"]) == bits(other.state["memory"])
        with pytest.raises(UsageError, match="has state"):
            model.run_requests(given, [0])

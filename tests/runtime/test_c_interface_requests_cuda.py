"""exportkit.h on a GPU: requests whose memory lies here and there, refused values, and streams of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.artifacts import artifact
from tests.runtime import c_interface
from tests.runtime.c_interface import CPU, CUDA, CUDA_GRAPHS, CUDA_HOST, HOST_TENSORS, OWN_STREAM, view
from tests.runtime.c_requests import Ask, Gathered, codes, run_requests
from tests.runtime.c_structures import Device, Piece, Request
from tests.runtime.threads import together

pytestmark = pytest.mark.cuda

REFUSED_VALUE, BROKEN, INPUT = 107, 105, 201


@pytest.fixture(scope="module", params=[0, CUDA_GRAPHS], ids=["calls", "graphs"])
def flags(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def words(c_library: c_interface.Library, flags: int) -> Iterator[c_interface.Model]:
    with c_library.open(artifact("words-cuda"), device=b"cuda:0", flags=flags, runners=3) as model:
        yield model


class Anywhere(Ask):
    """Ids in pieces of 8 bytes, in memory of the CPU, pinned memory and the GPU in turn."""

    kinds: tuple[int, ...] = (CPU, CUDA, CUDA, CUDA_HOST, CPU)

    def c(self) -> Request:
        request = super().c()
        numbers = torch.from_numpy(self.inputs[0]).reshape(-1)
        places = [self.kinds[place % len(self.kinds)] for place in range(len(numbers))]
        parts = [
            part.cuda() if kind == CUDA else part.pin_memory() if kind == CUDA_HOST else part.clone()
            for part, kind in zip(numbers.split(1), places)
        ]
        pieces = (Piece * len(parts))(*(Piece(p.data_ptr(), 8, Device(k, 0)) for p, k in zip(parts, places)))
        torch.cuda.synchronize()
        self._memory += [parts, pieces]
        request.inputs[0].piece_count, request.inputs[0].pieces = len(parts), pieces
        return request


def ids(rows: int) -> np.ndarray:
    return np.random.randint(0, 10, (rows, 2))


def alone(model: c_interface.Model, *inputs: np.ndarray) -> np.ndarray:
    (output,) = model.run(*map(view, inputs), flags=HOST_TENSORS)
    return np.from_dlpack(output).copy()


@pytest.mark.parametrize("most", [0, 4, 64])
def test_memory_of_every_kind_is_read(words, most):
    given = [ids(rows) for rows in (1, 3, 2, 1, 4)]
    for kind in (Ask, Anywhere):
        for (output,), each in zip(run_requests(words, [kind([each]) for each in given], most), given):
            np.testing.assert_array_equal(output, alone(words, each))


def test_an_input_on_the_gpu_is_read_there_and_answers_may_stay_there(words):
    given, kept = [ids(2), ids(3)], {}

    class Stays(Gathered):
        def _place(self, request: int, output: int, *about: Any) -> int:
            shape, data, device = about[2], about[4], about[5]
            kept[request] = torch.full(shape[: about[1]], 99.0, device="cuda")
            data[0], device[0] = kept[request].data_ptr(), Device(CUDA, 0)
            return 1

    class There(Ask):
        def c(self) -> Request:
            request = super().c()
            tensor = torch.from_numpy(self.inputs[0]).cuda()
            pieces = (Piece * 1)(Piece(tensor.data_ptr(), tensor.nbytes, Device(CUDA, 0)))
            torch.cuda.synchronize()
            self._memory += [tensor, pieces]
            request.inputs[0].pieces = pieces
            return request

    for most in (0, 64):
        assert codes(run_requests(words, [There([each]) for each in given], most, answers=Stays())) == [0, 0]
        for place, each in enumerate(given):
            np.testing.assert_array_equal(kept[place].cpu().numpy(), alone(words, each))


def test_a_refused_value_fails_its_own_request_alone_before_anything_is_answered(words):
    wrong = np.array([[1, 99]])
    for asked in ([ids(2), wrong, ids(1)], [wrong, ids(2), ids(1)], [wrong]):
        results = run_requests(words, [Ask([each]) for each in asked], 64)
        assert codes(results) == [REFUSED_VALUE if each is wrong else 0 for each in asked]
        for result, each in zip(results, asked):
            assert each is wrong or np.array_equal(result[0], alone(words, each))


def test_threads_hear_of_their_own_values_alone(words):
    def ask(own: int) -> None:
        for number in range(50):
            wrong = (number + own) % 3 == 0
            given = [ids(2), np.array([[1, 99]]) if wrong else ids(1)]
            results = run_requests(words, [Ask([each]) for each in given], 64, flags=own % 2 and OWN_STREAM)
            assert codes(results) == [0, REFUSED_VALUE * wrong]

    together(ask, range(4))


class Misplaced(Ask):
    """A request that says of memory of the CPU that it is the GPU's."""

    def c(self) -> Request:
        request = super().c()
        request.inputs[0].pieces[0].device = Device(CUDA, 0)
        return request


def test_memory_that_is_not_where_it_is_said_to_be_fails_its_request(words):
    given = ids(2)
    results = run_requests(words, [Misplaced([given]), Ask([given])], 0)
    assert codes(results) == [INPUT, 0]

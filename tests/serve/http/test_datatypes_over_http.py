"""Tensors of every datatype survive the way there and back to the last bit, in binary and as JSON."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as client

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.http.asking import ask
from tests.serve.http.doubles import FakeModel, FakeRepository
from tests.serve.page.in_thread import Site, served
from tests.serve.protocol.messages import NUMPY

NOT_IN_JSON = ("FP16", "BF16")


def repository() -> FakeRepository:
    return FakeRepository(*(FakeModel(name, {"x": (name, [-1])}, 1 << 20) for name in NUMPY))


@pytest.fixture(scope="module")
def datatypes() -> Any:
    with served(make_app(repository(), HttpOptions())) as site:
        yield site


def extremes(datatype: str) -> np.ndarray:
    dtype = NUMPY[datatype]
    if datatype == "BOOL":
        return np.array([True, False, True])
    info = (np.iinfo if np.issubdtype(dtype, np.integer) else ml_dtypes.finfo)(dtype)
    return np.array([info.min, info.max, 0, 1], dtype)


@pytest.mark.parametrize("datatype", NUMPY)
def test_by_tritonclient(datatypes: Site, datatype: str) -> None:
    values = extremes(datatype)
    with client.InferenceServerClient(f"127.0.0.1:{datatypes.port}") as ours:
        for binary in (True, False) if datatype not in NOT_IN_JSON else (True,):
            for given in (values, values.reshape(1, -1), values[:1].reshape(()), values[:0], values[:0].reshape(3, 0)):
                tensor = client.InferInput("x", given.shape, datatype).set_data_from_numpy(given, binary_data=binary)
                wanted = client.InferRequestedOutput("x", binary_data=binary)
                found = ours.infer(datatype, [tensor], outputs=[wanted])
                assert (found.as_numpy("x").shape, found.as_numpy("x").tobytes()) == (given.shape, given.tobytes())
                assert found.get_output("x")["datatype"] == datatype


def test_a_body_that_is_one_tensor() -> None:
    """Triton's raw form: the header says that there is no JSON."""
    app = make_app(repository(), HttpOptions())
    reply = ask(app, "POST", "/v2/models/INT32/infer", bytes(20), {"inference-header-content-length": "0"})
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.body[:length])["outputs"][0]["shape"] == [5]
    assert reply.body[length:] == bytes(20)

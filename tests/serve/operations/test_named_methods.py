"""The methods of a package by the parameter `method` and by their names, as clients of the protocol ask for them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.runtime import stateful
from tests.serve.operations import sequence_server
from tests.serve.operations.sequence_server import bearer, clients, given, inputs, rows, which
from tests.serve.operations.server_processes import ServerProcess

recorder, server, expected = sequence_server.recorder, sequence_server.server, sequence_server.expected  # fixtures
both = pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
SCALE = np.ones((2, 1), np.float32)


def ask(client: Any, module: Any, method: Any, name: str = "recorder", **more: Any) -> np.ndarray[Any, Any]:
    tensors = inputs(module, scale=SCALE) if method == "peek" else given(module, 0, 0)
    parameters = {} if method is None else {"method": method}
    return client.infer(name, tensors, headers=bearer(), parameters=parameters, **more).as_numpy("0")


@both
def test_the_parameter_names_the_method(server: ServerProcess, expected, protocol):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        np.testing.assert_allclose(ask(client, protocol, "embed"), 2 * np.tanh(rows(0, 0)), rtol=1e-6)
        np.testing.assert_array_equal(ask(client, protocol, "push", **which("m", 0, 1)), expected[0][0])
        peeked = ask(client, protocol, "peek", **which("m", 1, 1))
        np.testing.assert_allclose(peeked, rows(0, 0) / stateful.ROWS, rtol=1e-6)
        assert ask(client, protocol, "embed", "recorder.embed").shape == (2, stateful.WIDTH)


@both
@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("recorder", None, "recorder has no default method that is served"),
        ("recorder", "none", "the method `none` of recorder is not served"),
        ("recorder", "fill", "the method `fill` of recorder is not served: it writes into its input out"),
        ("recorder.embed", "push", "the request is for recorder.embed, and its parameter `method` says `push`"),
    ],
)
def test_what_names_no_method_is_refused(server: ServerProcess, protocol, name, method, words):
    client = protocol.InferenceServerClient(clients(server)[protocol])
    with client, pytest.raises(InferenceServerException, match=re.escape(words)):
        ask(client, protocol, method, name)


@both
def test_what_is_asked_of_a_package_is_said_of_all_its_methods(server: ServerProcess, protocol):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        more = {"headers": bearer()} | ({"as_json": True} if protocol is tritonclient.grpc else {})
        assert client.is_model_ready("recorder", headers=bearer())
        metadata = client.get_model_metadata("recorder", **more)
        assert (metadata["name"], metadata["versions"]) == ("recorder", ["1"])
        config = client.get_model_config("recorder.push", **more)
        config = config.get("config", config)
        methods = json.loads(config["parameters"]["methods"]["string_value"])
        assert methods["push"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, stateful.WIDTH]}]
        assert methods["peek"]["served_as"] == "recorder.peek"
        if protocol is tritonclient.http:
            assert metadata["methods"] == methods
        found = client.get_inference_statistics("recorder", **more)["model_stats"]
        assert [each["name"] for each in found] == ["recorder.embed", "recorder.peek", "recorder.push"]
        with pytest.raises(InferenceServerException, match="no default method"):
            client.get_model_config("recorder", **more)
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="loaded and unloaded as a whole"):
                change("recorder.push", headers=bearer())

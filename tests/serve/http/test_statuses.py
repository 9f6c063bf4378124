"""Each way to be refused has its status, and every error is a JSON object with the key `error` alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.statuses import UnauthorizedError
from tests.serve.echo_models import EchoRepository, Remembers
from tests.serve.http.asking import Reply, ask, infer_body

INFER = "/v2/models/echo/infer"
FLOATS = infer_body(("x", "FP32", [2], bytes(8)))


def refused(reply: Reply, status: int, *words: str) -> None:
    assert reply.status == status
    for each in words:
        assert each in reply.error
    assert reply.complete
    assert reply.headers["content-length"] == str(len(reply.body))
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nowhere", 404, "there is nothing at GET /nowhere"),
        ("GET", "/v2/" + "a" * 5000, 404, "a" * 100),
        ("GET", "/v2/models/\udcff", 404, "no model"),
        ("GET", "/v2/models/a\r\nb", 404, "no model a\r\nb"),
        ("GET", INFER, 405, "The URL takes POST"),
        ("HEAD", INFER, 405, "The URL takes POST"),
        ("POST", "/v2/health/live", 405, "GET"),
        ("POST", "/v2/models/absent/infer", 404, "no model absent"),
        ("POST", "/v2/models/echo/versions/2/infer", 404, "no model echo 2"),
        ("POST", "/v2/models/echo/generate", 404, "there is nothing at"),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501, "shared memory"),
        ("POST", "/v2/systemsharedmemory/unregister", 501, "shared memory"),
        ("POST", "/v2/logging", 501, "log settings"),
    ],
)
def test_urls_and_methods(app: Any, method: str, path: str, status: int, words: str) -> None:
    reply = ask(app, method, path)
    refused(reply, status, words)
    assert len(reply.body) < 1000
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"{", {}, 400, "cannot be read"),
        (b"{}", {"inference-header-content-length": "3"}, 400, "Inference-Header-Content-Length is 3"),
        (b"{}", {"inference-header-content-length": "1e30"}, 400, "not a number"),
        (b"{}", {"content-length": "-2"}, 400, "Content-Length"),
        (b"{}", {"content-length": "9" * 30}, 400, "Content-Length"),
        (b"{}", {"content-encoding": "br"}, 415, "`br`. This server reads gzip"),
        (b"{}", {"content-encoding": "gzip"}, 400, "not gzip data"),
        (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}', {}, 501, "BYTES"),
    ],
)
def test_bodies(app: Any, body: bytes, headers: dict[str, str], status: int, words: str) -> None:
    reply = ask(app, "POST", INFER, body, headers)
    refused(reply, status, words)
    assert reply.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)


def test_refusals_before_the_body_is_read(app: Any, models: EchoRepository) -> None:
    """Nothing was received of any of these."""
    large = {"content-length": str(1 << 30)}
    too_large = ask(app, "POST", INFER, b"{}", large)
    absent = ask(app, "POST", "/v2/models/absent/infer", b"{}", {"content-length": "2"})
    models.model("echo").room = 1
    full = ask(app, "POST", INFER, *FLOATS)
    models.model("echo").ready = False
    drains = ask(app, "POST", INFER, *FLOATS)
    for reply, status in [(too_large, 413), (absent, 404), (full, 429), (drains, 503)]:
        assert reply.status == status
        assert reply.error
    assert [full.headers["retry-after"], drains.headers["retry-after"]] == ["1", "1"]
    assert "retry-after" not in too_large.headers
    assert [reply.chunks_read for reply in (too_large, absent, full, drains)] == [0, 0, 0, 0]
    models_known = [reply.scope["exportkit"].model for reply in (too_large, absent, full, drains)]
    assert models_known == ["echo", "", "echo", "echo"]  # for the metrics


def test_draining(app: Any, models: EchoRepository) -> None:
    """Probes of life go on while the server drains; it is not ready, nor are its models."""
    models.model("echo").ready = False
    refused(ask(app, "GET", "/v2/models/echo/ready"), 503, "not ready")
    models.draining = True
    assert ask(app, "GET", "/v2/health/live").json() == {"live": True}
    refused(ask(app, "GET", "/v2/health/ready"), 503, "drains")


def test_a_process_that_must_end_is_not_live(app: Any, models: EchoRepository) -> None:
    models.lost = "cuda:0 is lost to this process"
    refused(ask(app, "GET", "/v2/health/live"), 503, "cuda:0 is lost")


@pytest.mark.parametrize("path", ["/v2/", "/v2/health/live/", "/v2/models/echo/", "/v2/models/broken down/ready/"])
def test_slashes_at_the_end_change_nothing(app: Any, path: str) -> None:
    assert ask(app, "GET", path).body == ask(app, "GET", path[:-1]).body


def test_request_ids(app: Any) -> None:
    """An id that is given comes back, unless it could forge a header or a line of a log."""
    given = ask(app, "GET", "/v2", headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    made = {
        ask(app, "GET", "/v2", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("a b", "é", "a" * 129)
    }
    assert len(made) == 3
    assert all(len(each) == 32 for each in made)


def test_index(app: Any) -> None:
    def asked(body: bytes) -> Reply:
        return ask(app, "POST", "/v2/repository/index", body)

    def names(body: bytes) -> list[str]:
        return [each["name"] for each in asked(body).json()]

    assert names(b"") == names(b'{"ready": false}') == ["echo", "small", "broken down", "broken"]
    assert names(b'{"ready": true}') == ["echo", "small", "broken down"]
    for body, words in ((b"[]", "object"), (b'{"ready": 1}', "`ready`"), (b"[" * 90_000, "not JSON")):
        refused(asked(body), 400, words)


def test_parameters_reach_the_repository(app: Any, models: EchoRepository) -> None:
    load = "/v2/repository/models/echo/load"
    assert ask(app, "POST", load, b'{"parameters": {"weights": "b.safetensors"}}').json() == {}
    assert models.asked == [("load", "echo", {"weights": "b.safetensors"})]
    refused(ask(app, "POST", load, b'{"parameters": []}'), 400, "`parameters`")
    refused(ask(app, "POST", load, bytes(2 << 20)), 413, "1048576")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        # What browsers say to an address of the network without TLS, to which they do not send Sec-Fetch-Site.
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "HTTP://LOCALHOST:8000", "host": "localhost:8000"}, 200),
        ({"origin": "http://192.0.2.7"}, 403),
        ({"origin": "http://127.0.0.1:8080"}, 403),
        ({"origin": "http://127.0.0.1.example.com"}, 403),
        ({"origin": "http://[::1]:8000", "host": "[::1]:8000"}, 200),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://192.0.2.7", "sec-fetch-site": "none"}, 403),
        # A proxy has another name than the server: the browser says that the page is the server's own.
        ({"origin": "https://models.example.com", "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_web_pages_of_other_origins_change_nothing(
    app: Any, models: EchoRepository, headers: dict[str, str], status: int
) -> None:
    """A browser would send what such a page asks for to a server that only it can reach."""
    assert ask(app, "POST", "/v2/repository/models/echo/load", b"", headers).status == status
    assert len(models.asked) == (status == 200)
    assert ask(app, "DELETE", "/v2", headers=headers).status == (403 if status == 403 else 405)
    for method in ("GET", "HEAD"):
        assert ask(app, method, "/v2", headers=headers).status == 200


# --- what the other parts of a server program against -----------------------------------------------------------------


def test_further_routes(models: EchoRepository) -> None:
    async def page(request: Any) -> Any:
        if kind := request.headers.get("raises"):
            raise {"404": HTTPException(404), "418": HTTPException(418, "a teapot"), "key": KeyError("k")}[kind]
        return PlainTextResponse("the page")

    app = make_app(models, HttpOptions(), routes=[Route("/", page)])
    assert ask(app, "GET", "/").body == b"the page"
    refused(ask(app, "GET", "/", headers={"raises": "404"}), 404, "nothing at GET /")
    refused(ask(app, "GET", "/", headers={"raises": "418"}), 400, "a teapot")
    refused(ask(app, "GET", "/", headers={"raises": "key"}), 500, "KeyError")


def test_what_a_middleware_refuses_is_not_read(models: EchoRepository) -> None:
    def keys(app: Any) -> Any:
        async def check(scope: Any, receive: Any, send: Any) -> None:
            raise UnauthorizedError("no API key")

        return check

    reply = ask(make_app(models, HttpOptions(), middleware=[keys]), "POST", INFER, *FLOATS)
    refused(reply, 401, "no API key")
    assert reply.chunks_read == 0
    record = reply.scope["exportkit"]
    assert (record.status, record.error.reason, record.model) == (401, "unauthorized", "")


@pytest.mark.parametrize("failed", [OSError, ValueError])
def test_an_answer_that_cannot_be_sent_to_its_end(
    app: Any, failed: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is sent after it: what the client got is not an answer, and must not look like one."""
    sent: list[str] = []
    body, headers = FLOATS

    async def breaking(scope: Any, receive: Any, send: Any) -> None:
        async def breaks(message: Any) -> None:
            sent.append(message["type"])
            if len(sent) == 2:
                raise failed("broken")

        await app(scope, receive, breaks)

    reply = ask(breaking, "POST", INFER, body, headers)
    assert sent == ["http.response.start", "http.response.body"]
    record = reply.scope["exportkit"]
    assert record.error is not None
    assert record.status == (499 if failed is OSError else 500)
    assert bool(caplog.records) == (failed is ValueError)


def test_an_answer_that_cannot_be_written_ends_its_sequence() -> None:
    model = Remembers("echo", "FP32", 1000)
    app, nan = make_app(EchoRepository(model), HttpOptions()), np.array([np.nan], np.float32).tobytes()
    body, headers = infer_body(("x", "FP32", [1], nan), parameters={"sequence_id": 7, "binary_data_output": False})
    reply = ask(app, "POST", INFER, body, headers)
    assert (reply.status, "NaN" in reply.error) == (400, True)
    assert model.given_up == [SequenceStep(7)]
    body, headers = infer_body(("x", "FP32", [1], nan), parameters={"binary_data_output": False})
    assert ask(app, "POST", INFER, body, headers).status == 400
    assert len(model.given_up) == 1

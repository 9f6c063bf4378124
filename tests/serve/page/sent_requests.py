"""What a page sent to a server, read without the server's own reader."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


class Recorder:
    """Notes the inputs of each request for an answer, and lets everything pass."""

    def __init__(self) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, Any]] = []  # of each request

    def around(self, application: Any) -> Callable[..., Any]:
        """Wraps an ASGI application."""

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or not scope["path"].endswith("/infer"):
                return await application(scope, receive, send)
            body = bytearray()

            async def hears() -> Any:
                message = await receive()
                if message["type"] == "http.request":
                    body.extend(message["body"])
                    if not message.get("more_body"):
                        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
                        length = int(headers["inference-header-content-length"])
                        self.parameters.append(json.loads(body[:length])["parameters"])
                        self.sent.append(_tensors(bytes(body), length))
                return message

            await application({**scope, "extensions": {}}, hears, send)  # or the body comes another way

        return noting


def _tensors(body: bytes, offset: int) -> dict[str, torch.Tensor]:
    found = {}
    for each in json.loads(body[:offset])["inputs"]:
        size = each["parameters"]["binary_data_size"]
        dtype = DTYPES[each["datatype"]]
        assert size == math.prod(each["shape"]) * dtype.itemsize
        found[each["name"]] = torch.frombuffer(bytearray(body[offset : offset + size]), dtype=dtype).view(each["shape"])
        offset += size
    assert offset == len(body)
    return found

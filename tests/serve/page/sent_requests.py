"""What a page sent to a server, read without the server's own reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from exportkit.serve.protocol.datatypes import DATATYPES

DTYPES = {datatype: getattr(torch, dtype) for dtype, datatype in DATATYPES.items()}


class Recorder:
    """Notes the inputs and parameters of each request for an answer, and lets everything pass."""

    def __init__(self) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, Any]] = []

    def around(self, application: Any) -> Callable[..., Any]:
        """Wraps an ASGI application."""

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or not scope["path"].endswith("/infer"):
                return await application(scope, receive, send)
            body = bytearray()

            async def hears() -> Any:
                message = await receive()
                body.extend(message.get("body", b""))
                if message["type"] == "http.request" and not message.get("more_body"):
                    self._note(body, int(dict(scope["headers"]).get(b"inference-header-content-length", len(body))))
                return message

            await application({**scope, "extensions": {}}, hears, send)  # or the body comes another way

        return noting

    def _note(self, body: bytearray, offset: int) -> None:
        header = json.loads(body[:offset])
        tensors = {}
        for each in header["inputs"]:
            dtype = DTYPES[each["datatype"]]
            if "data" in each:  # JSON
                tensors[each["name"]] = torch.tensor(each["data"], dtype=dtype).view(each["shape"])
                continue
            raw = body[offset : offset + each["parameters"]["binary_data_size"]]
            tensors[each["name"]] = torch.frombuffer(raw, dtype=dtype).view(each["shape"])
            offset += len(raw)
        assert offset == len(body)
        self.sent.append(tensors)
        self.parameters.append(header["parameters"])

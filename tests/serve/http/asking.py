"""Asks an ASGI application without a server between: what it reads and sends can be seen to the byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """An answer, and what was read of the request before it began."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)  # of the body, as they were sent
    complete: bool = False
    chunks_read: int = 0
    bytes_read: int = 0
    scope: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        return b"".join(bytes(part) for part in self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of an error, which has nothing beside it."""
        assert self.headers["content-type"] == "application/json", self.headers
        assert list(self.json()) == ["error"]
        return str(self.json()["error"])


async def asked(
    app: Any,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    chunked: bool = False,
    pause: float = 0.0,
    leaves: asyncio.Event | bool = False,
    begins: Callable[[], None] | None = None,
) -> Reply:
    """Asks.

    Args:
        app: The application.
        method: The method.
        path: The path, decoded.
        body: The body, or its chunks.
        headers: Further headers.
        chunked: Whether Content-Length is left out.
        pause: Seconds before each chunk.
        leaves: Whether the client goes away after the body, or when.
        begins: Called when the answer begins.
    """
    chunks = iter([body] if isinstance(body, bytes) else body)
    named = {"host": "127.0.0.1", **(headers or {})}
    if chunked:
        named["transfer-encoding"] = "chunked"
    elif isinstance(body, bytes) and method == "POST":
        named.setdefault("content-length", str(len(body)))
    reply = Reply()
    upcoming = next(chunks, b"")
    ended = False

    async def receive() -> dict[str, Any]:
        nonlocal upcoming, ended
        if ended:
            if leaves is not True:
                await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        await asyncio.sleep(pause)
        chunk, upcoming = upcoming, next(chunks, None)
        ended = upcoming is None
        if not reply.status:
            reply.chunks_read += 1
            reply.bytes_read += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": not ended}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not reply.status
            if begins is not None:
                begins()
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert not reply.complete
            reply.parts.append(message.get("body", b""))
            reply.complete = not message.get("more_body", False)

    reply.scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(reply.scope, receive, send)
    return reply


def ask(app: Any, method: str, path: str, *arguments: Any, **options: Any) -> Reply:
    """`asked`, in a loop for this request alone."""
    return asyncio.run(asked(app, method, path, *arguments, **options))


def infer_body(*tensors: tuple[str, str, list[int], bytes], **message: Any) -> tuple[bytes, dict[str, str]]:
    """A binary request for all outputs in binary, and its header."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in tensors
    ]
    parameters = {"binary_data_output": True, **message.pop("parameters", {})}
    text = json.dumps({"inputs": inputs, "parameters": parameters, **message}).encode()
    return text + b"".join(data for *_, data in tensors), {"inference-header-content-length": str(len(text))}

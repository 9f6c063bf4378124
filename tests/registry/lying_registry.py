"""A registry in this process, which keeps to the protocol until a test gives it a lie to tell."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    server: _Server
    body: bytes

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Answers. `_` in a header's name stands for `-`."""
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(content))} | given).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def cut(self) -> None:
        """Ends the connection."""
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def _handle(self) -> None:
        registry = self.server.registry
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        registry.seen.append(Seen(self.command, self.path, dict(self.headers), self.body))
        try:
            if not registry.lie(self):
                registry.answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _handle


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: LyingRegistry

    def handle_error(self, *_: object) -> None:
        """Says nothing: the client went away."""


class LyingRegistry:
    """Its content, and what it was asked.

    Attributes:
        lie: Answers a request in place of the registry if it returns True.
        password: `user:password`, which it asks for. `tokens`: it wants a token for that instead.
        referrers: Whether it has the referrers API.
    """

    def __init__(self, server: _Server) -> None:
        self.host = f"localhost:{server.server_port}"
        self.lie: Callable[[Exchange], bool] = lambda exchange: False
        self.password, self.tokens, self.referrers = "", False, True
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}
        self.seen: list[Seen] = []

    def answer(self, exchange: Exchange) -> None:
        """Answers as the specification says."""
        url = urlsplit(exchange.path)
        if url.path == "/token":
            self._token(exchange)
        elif self.password and not self._known(exchange.headers.get("Authorization", "")):
            asks = f'Bearer realm="http://{self.host}/token",service="tests",scope="repository:models/net:pull"'
            exchange.answer(401, WWW_Authenticate=asks if self.tokens else 'Basic realm="tests"')
        elif match := re.fullmatch(r"/v2/([a-z/]+)/(blobs/uploads|blobs|manifests|referrers)/([^/]*)", url.path):
            kind = match[2].replace("/", "_")
            getattr(self, f"_{kind}")(exchange, match[3], parse_qs(url.query))
        else:
            exchange.answer(404)

    def _known(self, authorization: str) -> bool:
        basic = "Basic " + base64.b64encode(self.password.encode()).decode()
        return authorization == ("Bearer a-token" if self.tokens else basic)

    def _token(self, exchange: Exchange) -> None:
        basic = "Basic " + base64.b64encode(self.password.encode()).decode()
        known = exchange.headers.get("Authorization") == basic or b"refresh_token=identity" in exchange.body
        exchange.answer(200 if known else 401, json.dumps({"token": "a-token"}).encode())

    def _blobs(self, exchange: Exchange, digest: str, _: object) -> None:
        content = self.blobs.get(digest)
        if content is None:
            exchange.answer(404)
        elif asked := re.fullmatch(r"bytes=(\d+)-", exchange.headers.get("Range", "")):
            begin = int(asked[1])
            given = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            exchange.answer(206, content[begin:], Content_Range=given)
        else:
            exchange.answer(200, content)

    def _blobs_uploads(self, exchange: Exchange, name: str, query: dict[str, list[str]]) -> None:
        if exchange.command == "POST":
            name = f"upload{len(self.uploads)}"
            self.uploads[name] = bytearray()
            exchange.answer(202, Location=f"{exchange.path}{name}?state=1")
            return
        sent = self.uploads[name]
        sent += exchange.body
        where = {"Location": exchange.path.partition("?")[0] + "?state=2", "Range": f"0-{max(len(sent) - 1, 0)}"}
        if exchange.command != "PUT":
            exchange.answer(202 if exchange.command == "PATCH" else 204, **where)
            return
        digest = query["digest"][0]
        if digest != f"sha256:{hashlib.sha256(sent).hexdigest()}":
            exchange.answer(400, b'{"errors": [{"code": "DIGEST_INVALID", "message": "other bytes"}]}')
            return
        self.blobs[digest] = bytes(sent)
        exchange.answer(201)

    def _manifests(self, exchange: Exchange, place: str, _: object) -> None:
        if exchange.command != "PUT":
            content = self.manifests.get(place)
            exchange.answer(404 if content is None else 200, content or b"")
            return
        digest = f"sha256:{hashlib.sha256(exchange.body).hexdigest()}"
        self.manifests[place] = self.manifests[digest] = exchange.body
        subject = json.loads(exchange.body).get("subject")
        knows = {"OCI-Subject": subject["digest"]} if subject and self.referrers else {}
        exchange.answer(201, Docker_Content_Digest=digest, **knows)

    def _referrers(self, exchange: Exchange, subject: str, _: object) -> None:
        if not self.referrers:
            exchange.answer(404)
            return
        listed = []
        for digest, content in self.manifests.items():
            manifest = json.loads(content)
            if digest.startswith("sha256:") and manifest.get("subject", {}).get("digest") == subject:
                kind = {"mediaType": manifest["mediaType"], "artifactType": manifest["artifactType"]}
                listed.append({**kind, "digest": digest, "size": len(content)})
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}
        exchange.answer(200, json.dumps(index).encode(), Content_Type=INDEX)


@contextmanager
def lying_registry() -> Iterator[LyingRegistry]:
    """Runs one."""
    server = _Server(("127.0.0.1", 0), Exchange)
    server.registry = LyingRegistry(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

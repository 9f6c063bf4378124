"""The routes of the page: its files, and the status that it asks for every second."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from exportkit import web
from exportkit.serve.engine.repository import Repository
from exportkit.serve.page.page_parts import page_parts
from exportkit.serve.page.page_status import page_status
from exportkit.serve.serve_options import ServeOptions

# The page loads nothing from elsewhere, runs nothing that is written inline, and is shown in no other page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).with_name("static")


def page_routes(repository: Repository, options: ServeOptions) -> list[Route]:
    """Returns the routes of the page: `/`, `/page/<file>`, `/page/parts/<part>/<file>` and `/page/status`."""

    async def status(_: Request) -> Response:
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
        return JSONResponse(page_status(repository, options), headers=headers)

    files = [Route(path, _answer(file)) for path, file in _files().items()]
    return [*files, Route("/page/status", status)]


def open_paths() -> frozenset[str]:
    """Returns the paths that are answered without an API key: the page's files, so that the page can ask for one."""
    return frozenset(_files())


@dataclass(frozen=True)
class _File:
    body: bytes
    media_type: str
    etag: str


def _files() -> dict[str, _File]:
    """Returns the page's files by path. They are few and small, and no other path can reach the file system."""
    folders = {"/page": _FOLDER, **{f"/page/parts/{name}": part.STATIC for name, part in page_parts().items()}}
    found = {f"/page/{path.name}": path for path in web.STATIC.iterdir()}
    found |= {f"{place}/{path.name}": path for place, folder in folders.items() for path in folder.iterdir()}
    found["/"] = found.pop("/page/index.html")
    return {place: _file(path) for place, path in sorted(found.items()) if path.suffix in _TYPES}


def _file(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(file: _File) -> Callable[[Request], Awaitable[Response]]:
    # A browser asks each time whether its copy is still right, so an upgrade never mixes old files with new ones.
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}

    async def answer(request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return answer

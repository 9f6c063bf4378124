"""The routes of the page: its files, and the status that it asks for every second."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from exportkit import web
from exportkit.serve.engine.repository import Repository
from exportkit.serve.page.page_parts import page_parts
from exportkit.serve.page.page_status import page_status

_HEADERS = {
    # The page loads nothing from elsewhere, runs nothing that is written inline, and is shown in no other page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # so that an upgrade never mixes old files with new ones
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page_routes(repository: Repository) -> list[Route]:
    """Returns the routes of the page: `/`, `/page/<file>`, `/page/parts/<part>/<file>` and `/page/status`."""

    async def status(_: Request) -> Response:
        return JSONResponse(page_status(repository), headers=_HEADERS)

    files = [
        Route(place, Response(path.read_bytes(), headers=_HEADERS, media_type=_TYPES[path.suffix]), methods=["GET"])
        for place, path in _files().items()
    ]
    return [*files, Route("/page/status", status)]


def open_paths() -> frozenset[str]:
    """Returns the paths that are answered without an API key: the page's files, so that the page can ask for one."""
    return frozenset(_files())


def _files() -> dict[str, Path]:
    """Returns the page's files by URL. They are few and small, and no other URL can reach the file system."""
    folders = [("/page", web.STATIC), ("/page", Path(__file__).with_name("static"))]
    folders += [(f"/page/parts/{name}", part.STATIC) for name, part in page_parts().items()]
    found = {
        f"{place}/{path.name}": path
        for place, folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in _TYPES
    }
    return {"/": found.pop("/page/index.html"), **found}

"""The routes of the page: its files, its parts, and the status that it asks for every second.

Installed packages bring parts: each is a try-it for models whose call it recognises. A package declares one as an entry
point of `exportkit.pages`: a name, which goes into URLs -> a module, which has

- `recognise(call)`: what `tryIt` has to know of a call, as JSON's types; None: the call is of another kind of model.
- `STATIC`: a folder with `part.js`, whose `tryIt(model, facts)` returns an element, `part.css`, and what else these
  name. All of it is served to whoever asks, also without an API key.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import exportkit
from exportkit import web
from exportkit.installed import declared
from exportkit.package.manifest import Call, Size, TensorInput, TensorOutput
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.datatypes import datatype_of


@functools.cache
def page_parts() -> dict[str, ModuleType]:
    """Returns the parts by name, without those that cannot be loaded: the log says why, and the server serves."""
    parts = {}
    for name, entry in sorted(declared("exportkit.pages").items()):
        try:
            part = importlib.import_module(entry.module)
            (part.STATIC / "part.js").stat()
            parts[name] = part
        except Exception:  # of a stranger's module, which may raise anything
            logging.getLogger(__name__).exception("the part %r of the page is left out", name)
    return parts


def part_of(call: Call) -> dict[str, Any] | None:
    """Returns the first part that recognises a call, by name, and the facts that it found. None: there is none."""
    for name, part in page_parts().items():
        if (facts := part.recognise(call)) is not None:
            return {"name": name, "facts": facts}
    return None


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


def page_status(repository: Repository) -> dict[str, Any]:
    """Returns the state of the server and of every model.

    What may change while a model is served is in its `now`. Durations are seconds of all answered requests together.
    """
    return {
        "server": {"version": exportkit.__version__, "ready": repository.ready, "draining": repository.draining},
        "models": [_model(model) for model in repository.models()],
    }


def _model(model: ServedModel) -> dict[str, Any]:
    call, metadata, counted = model.call, model.metadata(), model.counted
    return {
        "name": model.name,
        "version": model.version,
        "devices": list(model.devices),
        "batching": metadata["batching"],
        "dimensions": msgspec.to_builtins(call.dimensions),
        "inputs": _tensors(call.inputs),
        "outputs": _tensors(call.outputs),
        "part": part_of(call),
        "sequences": metadata.get("sequences"),
        "now": {
            "ready": model.ready,
            "failure": model.failure,
            "requests": counted.success.count,
            "seconds": counted.success.seconds,
            "queue_seconds": counted.stages.queue.seconds,
            "failures": {reason: spent.count for reason, spent in sorted(counted.failures.items())},
            "rows": counted.rows,
            "executions": counted.executions,
            "queued_rows": counted.queued_rows,
        },
    }


def _tensors(tensors: Sequence[TensorInput | TensorOutput]) -> list[dict[str, Any]]:
    """Returns tensors with their sizes: numbers, multiples of a dimension, or null where the manifest does not say."""
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "datatype": datatype_of(tensor.dtype),
            "shape": [msgspec.structs.asdict(size) if isinstance(size, Size) else size for size in tensor.shape],
        }
        for tensor in tensors
    ]

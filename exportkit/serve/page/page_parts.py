"""Parts of the page that installed packages bring: each is a try-it for models whose call it recognises.

A package declares one as an entry point of `exportkit.pages`: a name, which goes into URLs -> a module. Its folder
STATIC has `part.js`, whose `tryIt(model, facts)` returns an element, `part.css`, and whatever else these name.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from exportkit.installed import declared
from exportkit.package.manifest import Call

_NAME = re.compile(r"[A-Za-z0-9_-]+")

_log = logging.getLogger(__name__)


class PagePart(Protocol):
    """The module that a package declares.

    Attributes:
        STATIC: A folder of files. All of them are served to whoever asks, also without an API key.
    """

    STATIC: Path

    def recognise(self, call: Call) -> Mapping[str, Any] | None:
        """Returns what `tryIt` has to know of a call, as JSON's types; None: the call is of another kind of model."""


@functools.cache
def page_parts() -> dict[str, PagePart]:
    """Returns the parts by name, without those that do not work: the log says why, and the server serves."""
    parts = {}
    for name, entry in sorted(declared("exportkit.pages").items()):
        try:
            if not _NAME.fullmatch(name):
                raise ValueError("a name has letters, digits, _ and -")
            part = cast(PagePart, importlib.import_module(entry.module))
            (part.STATIC / "part.js").stat()
            parts[name] = part
        except Exception:  # of a stranger's module, which may raise anything
            _left_out(name)
    return parts


def part_of(call: Call) -> dict[str, Any] | None:
    """Returns the first part that recognises a call, by name, and the facts that it found. None: there is none."""
    for name, part in list(page_parts().items()):
        try:
            facts = part.recognise(call)
        except Exception:  # as above
            del page_parts()[name]
            _left_out(name)
            continue
        if facts is not None:
            return {"name": name, "facts": facts}
    return None


def _left_out(name: str) -> None:
    _log.exception("the part %r of the page, which an installed package declares, is left out", name)

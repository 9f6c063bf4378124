"""Parts of the page that installed packages bring: each is a try-it for models whose call it recognises.

A package declares one as an entry point of `exportkit.pages`: a name, which goes into URLs -> a module, which has

- `recognise(call)`: what `tryIt` has to know of a call, as JSON's types; None: the call is of another kind of model.
- `STATIC`: a folder with `part.js`, whose `tryIt(model, facts)` returns an element, `part.css`, and what else these
  name. All of it is served to whoever asks, also without an API key.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

from exportkit.installed import declared
from exportkit.package.manifest import Call


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

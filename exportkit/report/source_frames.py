"""The lines of the model's code that a node was traced from, as the graph has them: text, which is never opened."""

from __future__ import annotations

import re

_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]+)(?:\n(?!\s*File ")\s*([^\n]*))?')
_MOST = 12
_PACKAGES = ("/site-packages/", "/dist-packages/")
_MACHINERY = re.compile(r"(^|/)torch/|/lib/python3\.\d+/|^<")

Frame = list[object]  # file, line, function, code, whether it is the model's own


def frames_of(trace: str) -> list[Frame]:
    """Returns the frames of a trace, the innermost first.

    The last value of a frame tells whether it is code of the model: not torch's, not Python's, not an installed
    package's, unless there is nothing else.
    """
    found = [[m[1], int(m[2]), m[3], m[4] or ""] for m in _FRAME.finditer(trace) if len(m[2]) < 10][-_MOST:][::-1]
    own = [not _MACHINERY.search(str(f[0])) and not any(p in str(f[0]) for p in _PACKAGES) for f in found]
    if not any(own):
        own = [not _MACHINERY.search(str(f[0])) for f in found]
    return [[*frame, mine] for frame, mine in zip(found, own)]

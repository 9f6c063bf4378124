"""The one text of an operator's schema, by which schemas are compared."""

from __future__ import annotations

import re

_WRITTEN = re.compile(r"\(\$\d+! -> \)")


def schema_text(schema: object) -> str:
    """Returns the text of a torch.FunctionSchema; csrc/runtime/operators.cpp has the same.

    Torch cannot read back all that it prints, such as the default `Device d="cpu"`, so texts are compared and none is
    read. `Tensor!` is the one thing that it prints otherwise than a person writes it.
    """
    return _WRITTEN.sub("!", str(schema))

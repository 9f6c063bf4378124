"""The operators `exportkit_recurrent::*`: recurrent layers of any length, and sequences packed and unpacked.

torch.export unrolls `nn.LSTM` and its kin, which fixes the length. While exportkit traces, each call becomes one of
these operators instead (`exportkit.export.trace.recurrent_layers`). They call torch's own layers, so that the bits
are eager's. A package carries their library, csrc/recurrent, like that of any operator; no option is needed.

Programs name these operators for ever: what one computes never changes. What computes something else gets another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.libraries import LIBRARY_DIR, OWN_NAMESPACE

if TYPE_CHECKING:
    from exportkit.installed import DescribedOperator

NAMESPACE = OWN_NAMESPACE

_LIBRARY: Path = LIBRARY_DIR / "libexportkit_recurrent.so"

LIBRARIES = {"cpu": _LIBRARY} if _LIBRARY.exists() else {}
"""The library, which serves every device."""


def register() -> Mapping[str, DescribedOperator]:
    """Loads the library and registers the fakes. None of the operators is made of others, so none is described.

    Raises:
        HostError: The library was never built.
    """
    from exportkit.recurrent.fakes import registered

    registered()
    return {}

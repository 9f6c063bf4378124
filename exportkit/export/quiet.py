"""Keeps torch from writing to stderr what an error of exportkit says better."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Drops torch's log, warnings and half-traced graphs while the block runs.

    The model's own log and warnings were seen when it ran in eager mode. With TORCH_LOGS set, the log is kept.
    """
    disabled = logging.root.manager.disable
    if "TORCH_LOGS" not in os.environ:
        logging.disable(max(disabled, logging.ERROR))
    # torch.export prints this attribute of an error if it has one.
    refuses = property(_no_graph, lambda error, graph: None)
    GuardOnDataDependentSymNode.partial_fx_graph = refuses  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del GuardOnDataDependentSymNode.partial_fx_graph  # type: ignore[attr-defined]
        logging.disable(disabled)


def _no_graph(error: object) -> object:
    raise AttributeError("partial_fx_graph")

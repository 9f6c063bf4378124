"""Keeps torch from writing to stderr what an error of exportkit says better."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Drops torch's log, warnings and half-traced graphs while the block runs.

    The model's own warnings were seen when it ran in eager mode. With TORCH_LOGS set, the log is kept.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imported late: SymPy takes long

    levels = {} if "TORCH_LOGS" in os.environ else {handler: handler.level for handler in _torch_handlers()}
    for handler in levels:
        handler.setLevel(logging.CRITICAL + 1)
    # torch.export prints this attribute of an error if it has one.
    refuses = property(_no_graph, lambda error, graph: None)
    GuardOnDataDependentSymNode.partial_fx_graph = refuses  # type: ignore[attr-defined]  # torch declares none
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del GuardOnDataDependentSymNode.partial_fx_graph  # type: ignore[attr-defined]  # torch declares none
        for handler, level in levels.items():
            handler.setLevel(level)


def _torch_handlers() -> list[logging.Handler]:
    names = [name for name in logging.root.manager.loggerDict if name == "torch" or name.startswith("torch.")]
    return [handler for name in names for handler in logging.getLogger(name).handlers]


def _no_graph(error: object) -> object:
    raise AttributeError("partial_fx_graph")

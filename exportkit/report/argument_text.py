"""Arguments of nodes as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from exportkit.package.exported_graph import DTYPE_NAMES, Argument, Graph

_MOST_ITEMS = 16  # of a list
_DEEPEST = 6


def argument_text(argument: Argument, shown: Callable[[str], str] = str) -> str:
    """Returns an argument as text. `shown` gives the text for the name of a value."""
    ((kind, value),) = argument.items()
    if kind == "as_scalar_type":
        return DTYPE_NAMES.get(value, str(value))
    if kind == "as_device":
        return f"{value['type']}" + (f":{value['index']}" if value.get("index") is not None else "")
    if kind == "as_graph":
        graph = inner_graph(argument)
        return "a graph" if graph is None else f"a graph of {len(graph.nodes)} nodes"
    return "None" if kind == "as_none" else _item(value, shown, 0)


def inner_graph(argument: Argument) -> Graph | None:
    """Returns the graph that a node such as cond or scan runs; None for other arguments."""
    try:
        return msgspec.convert(argument["as_graph"]["graph"], Graph)
    except (msgspec.ValidationError, KeyError, TypeError):
        return None


def _item(value: Any, shown: Callable[[str], str], depth: int) -> str:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        items = [_item(item, shown, depth + 1) for item in value[:_MOST_ITEMS]] + ["..."] * (len(value) > _MOST_ITEMS)
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        name = value.get("name", value.get("as_name"))
        if isinstance(name, str):
            return shown(name)
        if value.get("as_none"):
            return "None"
        return ", ".join(_item(item, shown, depth + 1) for item in value.values())
    return repr(value)

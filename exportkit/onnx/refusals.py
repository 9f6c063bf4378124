"""Explains torch.onnx's errors: which operator of torch it cannot translate, and which line calls it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from exportkit.errors import ExportError
from exportkit.export.models.source_lines import where_now, where_traced
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.trace.hop_subgraphs import flow_nodes
from exportkit.onnx.bodies import Decomposition
from exportkit.onnx.corrections import NotTranslatedError
from exportkit.onnx.placeholders import CustomCall

_DETERMINANT = "For matrices of 3 rows a, b and c, write the determinant as (a * torch.linalg.cross(b, c)).sum(-1)"
_INVERSE = (
    f"{_DETERMINANT}, and the inverse as torch.stack([cross(b, c), cross(c, a), cross(a, b)], -1) / "
    "determinant[..., None, None]."
)

# What to write where ONNX has nothing: of its operators, Det alone looks at a matrix as a whole.
_INSTEAD = {
    "_linalg_slogdet": "Write d = torch.linalg.det(x), d.sign() and d.abs().log(), if d does not overflow.",
    "linalg_inv_ex": _INVERSE,
    "linalg_inv": _INVERSE,
    "map_impl": "Write torch.vmap(f)(rows).",
    "_linalg_solve_ex": f"Multiply by an inverse. {_INVERSE}",
    "linalg_lu_solve": f"The gradient of torch.linalg.det solves equations, those of products do not. {_DETERMINANT}.",
}


def refused_model(error: Exception, program: torch.export.ExportedProgram) -> ExportError:
    """Returns the error to raise where torch.onnx refused the model itself."""
    node = _node(error)
    if node is None and (loops := flow_nodes(program.graph_module)):
        return _refused_flow(error, program, loops)
    place = where_traced(node) if node is not None else ""
    text = f"the model cannot become ONNX{' at ' + place if place else ''}: {_problem(error, node)}"
    return ExportError(text, hint=_instead(node) or "Write that line with other operators of torch.")


def _refused_flow(
    error: Exception, program: torch.export.ExportedProgram, loops: Sequence[tuple[str, str]]
) -> ExportError:
    """Explains an error that torch raises where it takes the graphs of loops and branches apart."""
    graphs = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    advice = next((text for graph in graphs for node in graph.graph.nodes if (text := _instead(node))), "")
    return ExportError(
        f"the model cannot become ONNX: torch.onnx fails within {' or '.join(name for name, _ in loops)}: "
        f"{_problem(error, None)}" + "".join(f"\n    {name} at {where}" for name, where in loops),
        hint=advice
        or "Make a constant of its code, such as torch.tensor([2.0]), a buffer, or write torch.full((1,), 2.0).",
    )


def _instead(node: torch.fx.Node | None) -> str:
    """Returns what to write in place of an operator, or ""."""
    target = node.target if node is not None else None
    if isinstance(target, OpOverload):
        return _INSTEAD.get(target.overloadpacket.__name__, "")
    return _INSTEAD.get(target.name(), "") if isinstance(target, HigherOrderOperator) else ""


def refused_body(error: Exception, call: CustomCall, decomposition: Decomposition) -> ExportError:
    """Returns the error to raise where a decomposition cannot be traced, or torch.onnx refused it."""
    node = _node(error)
    place = _line_of(node.target, call, decomposition) if node is not None else ""
    return ExportError(
        f"the decomposition of {call.name} cannot become ONNX{' at ' + place if place else ''}: "
        f"{_problem(error, node)}",
        hint=_instead(node) or "Write that line of the decomposition with other operators of torch.",
    )


def _problem(error: Exception, node: torch.fx.Node | None) -> str:
    *_, cause = _causes(error)
    text = next((line.strip() for line in str(cause).splitlines() if line.strip()), "no message")
    if node is not None and "No ONNX function found" in text:
        return f"torch.onnx does not translate {node.target}"
    if isinstance(cause, NotTranslatedError):
        return f"{node.target if node is not None else 'an operator'} is not translated: {cause}"
    doing = f"torch.onnx fails at {node.target}: " if node is not None else ""
    return f"{doing}{type(cause).__name__}: {re.sub(r'<class .*?>', '', text)}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and what it was raised from, down to the first one."""
    yield error
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _node(error: BaseException) -> torch.fx.Node | None:
    """Returns the node that was translated when an error was raised: the exporter's messages have its text only."""
    for cause in _causes(error):
        trace = cause.__traceback__
        while trace is not None:
            node = trace.tb_frame.f_locals.get("node")
            if trace.tb_frame.f_code.co_name == "_translate_fx_graph" and isinstance(node, torch.fx.Node):
                return node
            trace = trace.tb_next
    return None


class _Finder(OperatorMode):
    def __init__(self, wanted: object) -> None:
        super().__init__()
        self._wanted = wanted
        self.line = ""

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == self._wanted and not self.line:
            self.line = where_now()
        return func(*args, **kwargs)


def _line_of(target: object, call: CustomCall, decomposition: Decomposition) -> str:
    """Returns the line of a decomposition that calls an operator, or ""."""
    # The decomposition is the user's and may raise anything. The conversion reports that; here, only the line counts.
    with call.fake_mode, watched_by(_Finder(target)) as finder, contextlib.suppress(Exception):
        call.run(decomposition, call.tensors, call.sizes)
    return finder.line

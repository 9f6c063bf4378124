"""Writes a part of a graph as a Python file that needs torch alone: for a report to PyTorch."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from exportkit.errors import ExportError
from exportkit.export.models.source_lines import where_traced
from exportkit.libraries import TORCH_NAMESPACES

MOST_LITERALS = 2000  # elements of all inputs: more of them are drawn
_MOST_COPIED = 1 << 20  # elements of a value: a later node may write into it, but larger ones take too much memory


@dataclass(frozen=True)
class Reproduction:
    """What a file computes.

    Attributes:
        nodes: The nodes that it calls, in the order of the graph.
        inputs: What they read, with its values.
        results: What is compared.
        drawn: Whether the inputs' values are drawn by the file, because there are too many.
    """

    nodes: tuple[torch.fx.Node, ...]
    inputs: Mapping[torch.fx.Node, torch.Tensor]
    results: tuple[torch.fx.Node, ...]
    drawn: bool


def values_of(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> dict[torch.fx.Node, Any]:
    """Returns what eager computes for each node of a program.

    Args:
        program: The program.
        tensors: The values of its inputs that are tensors, without its weights, in their order.
    """
    given, weights = iter(tensors), {**program.state_dict, **program.constants}

    def value(spec: InputSpec, node: torch.fx.Node) -> Any:
        """What may be written into is a copy."""
        if spec.kind is not InputKind.USER_INPUT:
            kept = weights[spec.target] if spec.target is not None else node.meta.get("val")
            return kept.clone() if spec.kind is InputKind.BUFFER and isinstance(kept, torch.Tensor) else kept
        if isinstance(node.meta.get("val"), torch.Tensor):
            return next(given).clone()
        return getattr(spec.arg, "value", None)

    found: dict[torch.fx.Node, Any] = {}

    class Keeping(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            small = isinstance(result, torch.Tensor) and result.numel() <= _MOST_COPIED
            found[n] = result.clone() if small else result
            return result

    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    values = [value(spec, node) for spec, node in zip(program.graph_signature.input_specs, placeholders)]
    with torch.no_grad():
        Keeping(program.graph_module, garbage_collect_values=False).run(*values)
    return found


def reproduction(
    results: Sequence[torch.fx.Node], values: Mapping[torch.fx.Node, Any], depth: int | None
) -> Reproduction:
    """Takes the nodes that compute some results, and eager's values of what these read.

    Args:
        results: The results.
        values: What `values_of` returned.
        depth: How many nodes back from a result. None takes all of them.

    Raises:
        ExportError: A node is no call of an operator, or what it reads is no tensor.
    """
    nodes: dict[torch.fx.Node, None] = {}
    wanted, level = list(results), 0
    while wanted and (depth is None or level < depth):
        calls = [node for node in wanted if node.op == "call_function" and node not in nodes]
        nodes.update(dict.fromkeys(calls))
        wanted, level = [each for node in calls for each in node.all_input_nodes], level + 1
    for node in [node for node in nodes if node.target is operator.getitem]:  # a part alone means nothing
        nodes.setdefault(node.all_input_nodes[0])
    ordered = tuple(node for node in next(iter(nodes)).graph.nodes if node in nodes)
    read = dict.fromkeys(each for node in ordered for each in node.all_input_nodes if each not in nodes)
    inputs = {each: values[each] for each in read}
    for node in ordered:
        own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in TORCH_NAMESPACES
        if not own and node.target not in _PYTHON:
            raise ExportError(f"{node.name} calls {node.target}, which is not written as Python")
    for each, value in inputs.items():
        if not isinstance(value, (torch.Tensor, int, float, bool)):
            raise ExportError(f"{each.name} is of type {type(value).__name__}, which is not written as Python")
    size = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    return Reproduction(ordered, inputs, tuple(results), size > MOST_LITERALS)


_PYTHON = {
    getattr(operator, name): f"operator.{name}"
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv", "ge", "le", "gt", "lt", "eq", "ne")
} | {operator.getitem: "operator.getitem"}


def reproduction_source(found: Reproduction, options: Mapping[str, Any], *, dynamic: bool, title: str) -> str:
    """Returns the Python file.

    Args:
        found: What it computes.
        options: Options of torch._inductor.config.
        dynamic: Whether torch.compile is told that sizes vary.
        title: The first line of its docstring.
    """
    names = _names([*found.inputs, *found.nodes])
    body = []
    for node in found.nodes:
        where = where_traced(node)
        comment = f"  # {_plain(where)}" if where else ""
        body.append(f"    {names[node]} = {_call(node, names)}{comment}")
    given = [f"        {_literal(value, drawn=found.drawn)}," for value in found.inputs.values()]
    return _FILE.format(
        title=_plain(title),
        torch=torch.__version__,
        drawn="    torch.manual_seed(0)\n" if found.drawn else "",
        parameters=", ".join(names[each] for each in found.inputs),
        body="\n".join(body),
        results=", ".join(names[each] for each in found.results) + ",",
        names=repr(tuple(names[each] for each in found.results)),
        inputs="\n".join(given),
        options=repr(dict(options)),
        dynamic=dynamic,
    )


_FILE = '''"""{title}

Needs torch alone (written for {torch}). Run it: it ends with status 1 where torch.compile and eager differ.
"""

import operator
import sys

import torch
from torch import device, inf, nan

OPTIONS = {options}
RESULTS = {names}


def function({parameters}):
{body}
    return ({results})


def inputs():
{drawn}    return (
{inputs}
    )


def differs():
    """Compares torch.compile with eager, and prints the elements that differ most."""
    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True
    found = False
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        eager = function(*inputs())
        compiled = torch.compile(function, dynamic={dynamic})(*inputs())
    for name, one, other in zip(RESULTS, compiled, eager):
        if one.dtype != other.dtype or one.shape != other.shape:
            print(f"{{name}}: compiled {{one.dtype}} {{list(one.shape)}}, eager {{other.dtype}} {{list(other.shape)}}")
            found = True
            continue
        wrong = ~torch.isclose(one, other, **tolerance(one.dtype), equal_nan=one.is_floating_point())
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            print(f"{{name}}: {{int(wrong.sum())}} of {{wrong.numel()}} elements differ")
            print(f"  at {{place}}: compiled {{one[place].item()!r}}, eager {{other[place].item()!r}}")
            found = True
    return found


def tolerance(dtype):
    """torch.testing.assert_close's."""
    rtol = {{torch.float64: 1e-7, torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}}.get(dtype, 0.0)
    return {{"rtol": rtol, "atol": 1e-5 if rtol else 0.0}}


if __name__ == "__main__":
    wrong = differs()
    print("compiled and eager differ" if wrong else "compiled and eager agree", "with torch", torch.__version__)
    sys.exit(int(wrong))
'''


def _names(nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Returns a name for each node that is legal in Python and that nothing else has."""
    taken = {"operator", "sys", "torch", "device", "inf", "nan", "function", "inputs"}
    found: dict[torch.fx.Node, str] = {}
    for node in nodes:
        name = re.sub(r"\W", "_", node.name, flags=re.ASCII)
        name = (
            name
            if name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
            else f"value_{len(found)}"
        )
        while name in taken:
            name += "_"
        taken.add(name)
        found[node] = name
    return found


def _call(node: torch.fx.Node, names: Mapping[torch.fx.Node, str]) -> str:
    function = _PYTHON.get(node.target)
    arguments = [_argument(each, names) for each in node.args]
    arguments += [f"{name}={_argument(each, names)}" for name, each in node.kwargs.items()]
    return f"{function or f'torch.ops.{node.target}'}({', '.join(arguments)})"


def _argument(value: Any, names: Mapping[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(each, names) for each in value)}]"
    return repr(value)  # dtypes, devices and layouts are written as torch's names


def _literal(value: Any, *, drawn: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape, dtype = list(value.shape), value.dtype
    if not drawn or value.numel() <= 1:
        text = f"torch.tensor({value.detach().cpu().flatten().tolist()}, dtype={dtype}).reshape({shape})"
    elif dtype.is_floating_point:
        text = f"torch.randn({shape}).to({dtype})"
    elif dtype is torch.bool:
        text = f"torch.rand({shape}) < 0.5"
    else:
        text = f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}, dtype={dtype})"
    return text if value.device.type == "cpu" else f"({text}).to({str(value.device)!r})"


def _plain(text: str) -> str:
    """Returns one line that can stand in a comment or a docstring."""
    return "".join(each if each.isprintable() else " " for each in text).replace("\\", "/").replace('"', "'")

"""What to write in place of a line that needs a value as Python's own, by what the line does with it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable

_ITEM = (
    "Leave int(), float() or range() out there: .item() gives a number that torch.export follows. State its range with "
    "torch._check(n >= 1) and torch._check(n <= 64), and take a part of a tensor with torch.narrow."
)
_BRANCH = (
    "Compute both ways and choose with torch.where(condition, a, b), or write torch.cond(condition, f, g, (x,)). If "
    "the condition always holds, remove the branch or state it: torch._check(condition), and of a tensor "
    "torch._check(condition.item())."
)
# By what stands in the line. The first that fits is told.
_NUMBERS = (
    (
        r"\brange\(",
        "Loop as often as it may be, and keep what was in the other turns: for t in range(64): "
        "h = torch.where(t < n, step(h), h). Or write torch's while_loop.",
    ),
    (r"\bone_hot\([^,]*\)", "Say how many classes there are: one_hot(labels, num_classes=10)."),
    (
        r"\.tolist\(|\bin torch\.bincount\(",
        "How many numbers there are must not depend on values: torch.bincount(i) has as many as the greatest of i "
        "says, one_hot(i, 3).sum(0).tolist() always has three.",
    ),
    (r"\bmath\.\w+\(", "Compute with tensors: torch.exp(x.max()) in place of math.exp(x.max().item())."),
    (r"\bfloat\(", "Leave float() out: a tensor with one element computes as a number does."),
)
_INDEX = (
    "Python's lists, and nn.ModuleList, have no index that only a call knows. Compute all and choose with a tensor: "
    "torch.stack([f(x) for f in layers]).index_select(0, n.view(1))[0]."
)
_CHECKED = "Leave validate_args=True out: a distribution that checks its arguments reads them. Eager checks without it."
_INDEXED = r"[\w\])]\[[a-z_][^\[\]:]*\]"  # by a name, not by a number or a slice
_BRANCHES = (
    (
        r"^while\b",
        "Write while_loop(lambda x: x.norm() > 1, lambda x: (x * 0.5,), (x.clone(),)), of "
        "torch._higher_order_ops.while_loop.",
    ),
    (
        r"^for\b.+\bin\b",
        "Loop over all that there may be, such as range(experts): where torch.where(i == n) finds no rows, the rest "
        "computes with none of them.",
    ),
)
# A line that branches, and one that makes a size of a number, or takes a part of a tensor.
_CHOOSES = r"\b(if|elif|while|assert|and|or|not)\b|^for\b|[<>]|[=!]=|\b(max|min|sorted|bool|any|all)\("
_SIZED = (
    r"\b(reshape|view|expand|narrow|split\w*|chunk|zeros|ones|empty|full|new_\w+|arange|repeat\w*|unflatten|pad\w*)\("
    r"|\[[^\]]*:"
)
_OF_VALUE = (
    "Take the number with h = sizes.tolist() or .item(), and say what it can be: torch._check(h >= 0) and "
    "torch._check(h <= x.shape[0]). Take the part with torch.narrow(x, 0, 0, h), and write -1 in reshape for the size "
    "that depends on values, no other. Or compute at the greatest size, and mask what lies beyond."
)
_SIZES = (
    (
        r"`if\b.* needs .*(>|<=|[=!]=) 0$",
        "If the branch only pads, write it without the `if`, which takes every size: padding by 0 changes nothing.",
    ),
    (
        r"` needs .*\b(TruncToInt|FloorToInt|CeilToInt|RoundToInt)\((?!FloatPow)",
        "Or compute it with whole numbers, which takes every size: n // 2 for int(n / 2), 3 * n // 10 for "
        "int(0.3 * n), -(-n // 4) for math.ceil(n / 4).",
    ),
    (
        r"\blen\(.* needs \S+ == \d+$",
        "Or write x.shape[0] for len(x), which takes every size: Python makes a number of len(x).",
    ),
    (
        r"\bmath\.(sqrt|log\w*|exp|pow)\(.* needs \S+ == \d+$",
        "Or compute with a tensor, which takes every size: torch.scalar_tensor(n).sqrt() for math.sqrt(n).",
    ),
    (
        # Not a list that is made of sizes: tensor([f.shape[0] for f in features]).
        r"^(?!.*tensor\()(?!.*\b(\w+)\.(?:shape|size)\b.*\bfor \1 in\b).*\bfor\b.+\bin\b.* needs \S+ == \d+$",
        "Or write no Python loop, which is unrolled: torch.vmap(f)(rows), or torch's scan(step, start, rows) where a "
        "row needs the one before.",
    ),
)


def needs_number(place: str, frames: Iterable[traceback.FrameSummary]) -> tuple[str, str]:
    """Returns what a line does that needs a number from a tensor, and what to write instead.

    Args:
        place: The line, as `source_lines.where` writes it.
        frames: The stack where torch was asked for the number.
    """
    code = _code(place)
    found = next((hint for pattern, hint in _NUMBERS if re.search(pattern, code)), None)
    of_modules = any(frame.filename.endswith("/torch/nn/modules/container.py") for frame in frames)
    is_index = of_modules or (re.search(_INDEXED, code) and not re.search(r"\bint\(|\.item\(", code))
    hint = found or (_INDEX if is_index else _ITEM)
    return "the model needs a number from a tensor as Python's own number", hint


def branches(place: str, frames: Iterable[traceback.FrameSummary]) -> tuple[str, str]:
    """Returns what a line does where torch asks whether something is true of a tensor's value, and what to write.

    Args:
        place: The line, as `source_lines.where` writes it.
        frames: The stack where torch was asked for the value.
    """
    if any("/torch/distributions/" in frame.filename for frame in frames):
        return "the model branches on the value of a tensor", _CHECKED
    code = _code(place)
    if re.search(_SIZED, code) and not re.search(_CHOOSES, code):
        return "the model makes a size of the value of a tensor", _OF_VALUE
    hint = next((hint for pattern, hint in _BRANCHES if re.search(pattern, code)), _BRANCH)
    return "the model branches on the value of a tensor", hint


def to_keep_the_range(lines: Iterable[str]) -> str:
    """Returns how lines that fix a size are written so that they do not; empty if nothing is known.

    Args:
        lines: The lines, each with the condition that it needs.
    """
    known = [hint for pattern, hint in _SIZES for line in lines if re.search(pattern, line)]
    return " ".join(dict.fromkeys(known))


def _code(place: str) -> str:
    found = re.search("`(.*)`", place)
    return found[1] if found else ""

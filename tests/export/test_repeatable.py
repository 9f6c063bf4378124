"""What a model keeps from call to call, and a program that answers otherwise, are refused; tests/gallery has more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.trace.repeatable import agree
from exportkit.inspect.rows import output_rows
from exportkit.package.manifest import ANY_VALUE, Manifest
from exportkit.verify.compare import compare_outputs
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Match, WrongDtype, WrongShape
from exportkit.verify.verify import verify
from tests.export.function_models import exported, spec_of


class Function(torch.nn.Module):
    """A model of one function, which gets the module and its input."""

    def __init__(self, function: Callable[[Function, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout()
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def export(
    function: Callable[[Function, Tensor], Tensor], tmp_path: Path, *, allow_nondeterministic: bool = False
) -> Manifest:
    spec = ExportSpec(Function(function), (torch.rand(3, 4),), dynamic_shapes={"x": {0: "n[2:8]"}})
    options = TraceOptions(allow_nondeterministic=allow_nondeterministic)
    return export_program(spec, tmp_path / "x.pt2", options)


def counter(m: Function, x: Tensor) -> Tensor:
    m.calls += 1
    return x + m.calls


def seeded(m: Function, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn_like(x)


def drawn_in_place(m: Function, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    y = torch.zeros_like(x)
    y[0].uniform_()
    return x + y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: torch.empty_like(x) + x, r"unwritten memory of aten.empty_like.default at "),
        (seeded, r"the model draws random numbers(?s:.*)aten.randn_like.default at test_repeatable.py:"),
        (drawn_in_place, r"the model draws random numbers(?s:.*)aten.uniform_.default at test_repeatable.py:"),
    ],
)
def test_memory_and_numbers_that_a_seed_hides_are_refused_with_the_line(function, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export(function, tmp_path)
    assert "--allow-nondeterministic" in str(caught.value)
    assert not (tmp_path / "x.pt2").exists()


def keeps_its_input(m: Function, x: Tensor) -> Tensor:
    y = x - m.seen
    m.seen = x * 1
    return y


def copies_its_input(m: Function, x: Tensor) -> Tensor:
    y = x - m.seen
    m.seen.copy_(x.sum())
    return y


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (keeps_its_input, ""),
        (copies_its_input, r"buffer seen: aten.copy_.default at test_repeatable.py:\d+ in copies_its_input"),
    ],
)
def test_a_buffer_that_holds_the_last_input_is_named(function, line: str, tmp_path: Path) -> None:
    message = rf"changes its buffers seen(?s:.*)\n *{line}(?s:.*)Declare what outlives a call"
    with pytest.raises(ExportError, match=message):
        export(function, tmp_path)


@pytest.mark.parametrize("allow", [False, True])
def test_what_a_call_writes_is_refused_whatever_need_not_repeat_itself(allow: bool, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"changes its parameters norm\.weight"):
        export(lambda m, x: x + m.norm.weight.data.mul_(2), tmp_path, allow_nondeterministic=allow)


def filled(m: Function, x: Tensor) -> Tensor:
    y = torch.empty(2 * x.shape[0], x.shape[1])
    y[: x.shape[0]] = x
    y[x.shape[0] :] = 1
    return y


def drawn_for_nothing(m: Function, x: Tensor) -> Tensor:
    torch.rand([])
    return x * 2


def first_call(m: Function, x: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.arange(4.0)
    return x + m.table


@pytest.mark.slow_but("filled", "first_call")
@pytest.mark.parametrize(
    "function",
    [
        filled,
        drawn_for_nothing,
        first_call,
        lambda m, x: m.drop(m.norm(x)),
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda m, x: F.batch_norm(x, m.norm.running_mean.clone(), m.norm.running_var.clone(), training=True),
        lambda m, x: x / 0 - x / 0,
    ],
)
def test_what_repeats_itself_is_exported(function, tmp_path: Path) -> None:
    export(function, tmp_path)
    assert (tmp_path / "x.pt2").exists()


def test_what_need_not_repeat_itself_is_verified_by_dtype_and_shape_alone(tmp_path: Path) -> None:
    manifest = export(lambda m, x: x + torch.randn_like(x), tmp_path, allow_nondeterministic=True)
    assert [row[2] for row in output_rows(manifest.methods[0])] == ["any values"]
    outputs = manifest.call.outputs
    drawn = [torch.randn(3, 4) for _ in range(2)]
    assert isinstance(compare_outputs(outputs, drawn[:1], drawn[1:]), Match)
    assert isinstance(compare_outputs(outputs, drawn[:1], [torch.randn(2, 4)]), WrongShape)
    assert isinstance(compare_outputs(outputs, drawn[:1], [torch.randn(3, 4).double()]), WrongDtype)
    assert verify(tmp_path / "x.pt2", VerifyOptions(against="cases")).exit_code == 0


def test_a_spec_may_allow_what_the_option_allows(tmp_path: Path) -> None:
    spec = ExportSpec(Function(counter), (torch.rand(3, 4),), allow_nondeterministic=True)
    assert export_program(spec, tmp_path / "x.pt2").call.outputs[0].tolerance.atol == ANY_VALUE


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("exportkit_kept", "DEF") as library:
        yield library


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        ("state", ExportError, r"kept.op.default at .* answers the same arguments differently: it keeps a state"),
        ("write", OperatorNotExportableError, r"kept.op.default at .* writes into an argument.*\n.*Tensor\(a!\)"),
    ],
)
def test_an_operator_that_keeps_a_state_or_writes_in_secret_is_named(
    library, kernel: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = itertools.count()
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", {"state": lambda x: x + next(count), "write": lambda x: x.mul_(2) + 1}[kernel], "CPU")
    # The operators here are written in Python, which is refused for a reason of its own.
    monkeypatch.setattr("exportkit.export.trace.preflight._check_registered", lambda *_: None)
    monkeypatch.setattr("exportkit.export.trace.preflight.check_fake", lambda *_: None)
    with pytest.raises(error, match=message):
        export(lambda m, x: torch.ops.exportkit_kept.op(x * 2), tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, True),
        (torch.ones(3), torch.ones(3) + 1e-2, False),
        (torch.ones(3).half(), torch.ones(3).half() + 1e-2, True),
        (torch.ones(3).half(), torch.ones(3).half() + 1e-1, False),
        (torch.tensor([1e9, 0.0]), torch.tensor([1e9, 1.0]), True),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([-float("inf"), 1.0]), False),
        (torch.tensor([1j, 1.0]), torch.tensor([1j, 1.1]), False),
        (torch.zeros(3), torch.zeros(3), True),
        (torch.zeros(3), torch.zeros(2), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(3), torch.zeros(3).double(), False),
        (torch.zeros(200, dtype=torch.int64), torch.arange(200) // 199, True),
        (torch.zeros(2, dtype=torch.bool), torch.tensor([False, True]), False),
    ],
)
def test_answers_agree_where_rounding_explains_what_differs(one: Tensor, other: Tensor, same: bool) -> None:
    assert agree(one, other) is same


# --- programs that answer something else than eager ------------------------------------------------------------------


CONSTANT = "tracing made a constant of something that depends on a size"


def compare(model: Callable[..., Tensor], folder: Path, x: Tensor) -> None:
    exported(spec_of(model, x, shapes={"x": {0: "batch[2:8]"}}), folder)


class Untold(torch.nn.Module):
    """Adds a table of as many rows as the last eager call had: the traced program cannot add it to another number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.table = torch.ones(x.shape[0])
        return torch.cat([x.sum(1), self.table])


def test_an_output_of_another_size_than_eagers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"promises output 0 of \[6\], and eager answered \[4\] at batch=2.*"
    ) as caught:
        compare(Untold(), tmp_path, torch.rand(4, 3))
    assert CONSTANT in caught.value.message


def test_a_program_that_differs_at_the_examples_sizes_is_no_matter_of_sizes(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="answers other values than eager in output 0 at batch=4: tracing made"
    ) as caught:
        compare(lambda x: x * 3 if torch.compiler.is_exporting() else x, tmp_path, torch.rand(4, 3))
    assert CONSTANT not in caught.value.message


def branches(x: Tensor) -> Tensor:
    """Takes another way for few rows, of which tracing knows nothing."""
    if not torch.compiler.is_exporting() and x.shape[0] < 4:
        return x + x
    # As the int8 product on CUDA does.
    torch._assert_async(torch.full((), x.shape[0]) >= 4, "needs at least 4 rows")
    return x * 2


def test_sizes_at_which_eager_takes_another_way_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="eager takes another way there, which") as caught:
        compare(branches, tmp_path, torch.rand(5, 3))
    assert "raises RuntimeError: needs at least 4 rows at batch=2" in caught.value.message
    assert exported(spec_of(branches, torch.rand(5, 3), shapes={"x": {0: "batch[4:8]"}}), tmp_path)


def padded(allocate: Any) -> Callable[[Tensor], Tensor]:
    """Writes two rows at each end, which are all that the example has."""

    def forward(x: Tensor) -> Tensor:
        scratch = torch.empty_like(x)
        scratch.copy_(x * 2)
        room = allocate(x.shape[0], 3)
        room[:2], room[-2:] = x[:2], x[-2:]
        return room + scratch

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_memory_that_nobody_wrote_is_named_as_such_with_its_line(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(4, 3).to(dtype)
    with pytest.raises(ExportError, match="the model reads memory that nobody wrote, at batch=") as caught:
        compare(padded(lambda *size: torch.empty(*size, dtype=dtype)), tmp_path, x)
    assert "aten.empty.memory_format at test_repeatable.py:" in caught.value.message
    assert "empty_like" not in caught.value.message
    assert caught.value.hint.startswith("Write every element before it is read, or allocate with torch.zeros")
    compare(padded(lambda *size: torch.zeros(*size, dtype=dtype)), tmp_path, x)

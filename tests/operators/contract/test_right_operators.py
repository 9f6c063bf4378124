"""A check blames no right operator: each call is made on tensors of its own, and what a kernel refuses is not valid."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import EXPANDED, FRAMED, STRIDED
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample
from tests.operators.contract.faulty_operators import WITHOUT_COMPILERS, operator


def _subject(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Subject:
    name, *rest = schema.partition("(")
    key = "CPU" if "Tensor" in schema.partition("->")[0] else "CompositeExplicitAutograd"
    overload = operator(name, kernel, fake, "".join(rest), key=key)
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        if isinstance(value, torch.Size):
            return torch.randn(value, generator=generator)
        return [drawn(each) for each in value] if isinstance(value, list) else value

    samples = tuple(Sample(str(index), tuple(map(drawn, call))) for index, call in enumerate(calls))
    return Subject(overload, samples)


def _shape(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


def _nothing(*_: Any) -> None:
    return None


def _add_one(x: Tensor) -> None:
    x.add_(1.0)


def _add_one_to_each(xs: list[Tensor], by: float) -> None:
    for x in xs:
        x.add_(by)


def _checked(right: bool, said: str) -> None:
    if not right:
        raise RuntimeError(said)


def _finite(x: Tensor) -> Tensor:
    _checked(bool(torch.isfinite(x).all()), "x must be finite")
    return x.contiguous() * 2


def _of_sorted(x: Tensor) -> Tensor:
    _checked(bool((x.diff() >= 0).all()), "x must be sorted")
    return x.contiguous() * 2


def _reshaped(x: Tensor, sizes: list[int]) -> Tensor:
    return x.contiguous().reshape(sizes).clone()


def _segments(x: Tensor, offsets: Tensor) -> Tensor:
    _checked(offsets.dim() == 1 and int(offsets[-1]) == x.shape[0], "offsets must end with the number of rows")
    return x.contiguous() * 2


def _tail(x: Tensor) -> Tensor:
    _checked(x.dim() == 2 and x.shape[1] >= 4, "x must have rows of at least 4")
    return x[:, 4:].clone(memory_format=torch.contiguous_format)


def _tail_of_fake(x: Tensor) -> Tensor:
    torch._check(x.dim() == 2, lambda: "x must have rows of at least 4")
    torch._check(x.shape[1] >= 4, lambda: "x must have rows of at least 4")
    return x.new_empty(x.shape[0], x.shape[1] - 4)


def _with_little_memory(x: Tensor) -> Tensor:
    _checked(x.storage_offset() == 0, "DefaultCPUAllocator: can't allocate memory")
    return x.contiguous() * 2


def _some(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def _some_by_the_older_name(x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and torchvision uses it
        return x.new_empty(torch.library.get_ctx().create_unbacked_symint())


RIGHT = {
    "writes to a single number": _subject("add_one_0_(Tensor(a!) x) -> ()", _add_one, _nothing, [(_shape(),)]),
    "writes to each of a list": _subject(
        "add_each_(Tensor(a!)[] xs, float by) -> ()", _add_one_to_each, _nothing, [([_shape(3), _shape(1, 2)], 0.5)]
    ),
    "takes its sizes as an argument": _subject(
        "reshaped(Tensor x, SymInt[] sizes) -> Tensor",
        _reshaped,
        lambda x, sizes: x.new_empty(sizes),
        [(_shape(4, 2, 3), [4, 6]), (_shape(5, 2, 2), [5, 4])],
    ),
    "refuses NaN": _subject(
        "finite(Tensor x) -> Tensor", _finite, lambda x: x.new_empty(x.shape), [(_shape(3, 4),), (_shape(5, 2),)]
    ),
    "refuses what is not sorted": _subject(
        "of_sorted(Tensor x) -> Tensor",
        _of_sorted,
        lambda x: x.new_empty(x.shape),
        [(torch.arange(5.0),), (torch.arange(8.0),)],
    ),
    "takes offsets into its rows": _subject(
        "segments(Tensor x, Tensor offsets) -> Tensor",
        _segments,
        lambda x, offsets: x.new_empty(x.shape),
        [(_shape(4, 3), torch.tensor([0, 2, 4])), (_shape(6, 2), torch.tensor([0, 6]))],
    ),
    "has a size that depends on values": _subject(
        "positive(Tensor x) -> Tensor", lambda x: x[x > 0], _some, [(_shape(3, 4),), (_shape(7),)]
    ),
    "finds one thing": _subject(
        "greatest(Tensor x) -> Tensor", lambda x: x[x == x.max()], _some_by_the_older_name, [(_shape(3),), (_shape(7),)]
    ),
    "runs out of memory in a check": _subject(
        "large(Tensor x) -> Tensor", _with_little_memory, lambda x: x.new_empty(x.shape), [(_shape(3, 4),)]
    ),
    "takes no tensor": _subject("ramp(SymInt n) -> Tensor", torch.arange, lambda n: torch.empty(n).long(), [(4,)]),
    "computes a size that is one in its smallest call": _subject(
        "tail(Tensor x) -> Tensor",
        _tail,
        _tail_of_fake,
        [(_shape(2, 5),), (_shape(3, 9),)],
    ),
    "takes a list of numbers that opcheck cannot read": _subject(
        "split_rows(Tensor x, SymInt[] sizes) -> Tensor[]",
        lambda x, sizes: [part.clone() for part in x.contiguous().split(list(sizes))],
        lambda x, sizes: [x.new_empty(size, *x.shape[1:]) for size in sizes],
        [(_shape(4, 2), [2, 2]), (_shape(3, 2), [1, 2])],
    ),
}
"""Each is called in a way that it must refuse, or the check itself changes what it compares."""


@pytest.mark.slow_but("writes to a single*", "finds one*", "takes no tensor")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_is_not_called_broken(name: str):
    broken = [f for f in check_operator(RIGHT[name], WITHOUT_COMPILERS).findings if f.severity is Severity.broken]
    assert not broken, broken


@pytest.mark.slow_but("takes no tensor", "finds one*")
@pytest.mark.parametrize(
    "name", ["takes no tensor", "computes a size that is one in its smallest call", "finds one thing"]
)
def test_a_right_operator_is_exported(name: str):
    assert not check_operator(RIGHT[name], ["exports"]).findings


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 4), (1, 1), (2, 1, 3, 3), (2, 3), (0, 3)])
@pytest.mark.parametrize("layout", [each for each in STRIDED if each is not EXPANDED], ids=lambda each: each.name)
def test_a_layout_has_memory_of_its_own_or_is_the_tensor_itself(layout, shape):
    tensor = torch.randn(shape)
    laid = layout.apply(tensor)
    assert torch.equal(laid, tensor)
    shares = laid.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert (laid is tensor) == shares or not tensor.numel()
    assert layout is not FRAMED or laid is not tensor


def test_a_row_that_the_kernel_refuses_alone_is_said_to_be_so():
    report = check_operator(RIGHT["takes its sizes as an argument"], ["batch"])
    assert "the operator refuses a row of the call" in report.skipped["batch"]


def test_a_kernel_that_records_a_gradient_is_one_finding_with_advice():
    library = torch.library.Library("recording", "DEF")
    library.define("peak(Tensor x) -> (Tensor, Tensor)")
    library.impl("peak", lambda x: tuple(x.max(1)), "CPU")
    torch.library.register_fake(
        "recording::peak",
        lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.int64)),
        lib=library,
    )
    subject = Subject(torch.ops.recording.peak.default, tuple(Sample("", (torch.randn(n, 5),)) for n in (3, 4)))
    gradients = [name for name in checks() if "grad" in name or name == "second-derivative"]
    report = check_operator(subject, gradients)
    (finding,) = report.findings
    assert finding.check == "opcheck-autograd"
    assert finding.severity is Severity.broken
    assert "test_autograd_registration fails" in finding.message
    assert "torch.library.register_autograd" in finding.hint
    with pytest.raises(Exception, match="test_autograd_registration"):
        exec(finding.call, {"torch": torch})


@pytest.mark.parametrize(("atol", "said"), [(0.0, "1 of 3 elements differ, first [1]: 64 and 63"), (1.0, None)])
def test_a_tolerance_of_integers_counts(atol: float, said: str | None) -> None:
    actual, expected = torch.tensor([0, 64, 200], dtype=torch.uint8), torch.tensor([0, 63, 200], dtype=torch.uint8)
    assert difference(actual, expected, 0.0, atol) == said


@pytest.mark.cuda
def test_threads_launch_on_streams_of_their_own():
    """A lock orders what threads launch, and not what streams run."""
    lock, shared = threading.Lock(), torch.empty(1000, device="cuda")

    def late(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(100_000)  # cycles: a comparison that does not wait is too early
        return x * 2

    def through_a_buffer(x: torch.Tensor) -> torch.Tensor:
        with lock:
            shared[: x.numel()] = x.flatten()
            return late(shared[: x.numel()]).view(x.shape)

    calls = (Sample("7 rows", (torch.randn(7, 5, device="cuda"),)),)
    right, wrong = (
        Subject(operator(function.__name__, function, torch.empty_like, key="CUDA"), calls)
        for function in (late, through_a_buffer)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not check_operator(right, ["threads"]).findings
    assert [finding.check for finding in check_operator(wrong, ["threads"]).findings] == ["threads"]

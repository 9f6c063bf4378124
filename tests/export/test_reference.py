"""References are what exact arithmetic gives, whatever the model's code says about dtypes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.record import upcast
from exportkit.export.record.reference import AnsweredCall, References, session_references, wide_answers
from exportkit.package.manifest import OutputTolerance, TensorOutput


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., object], width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self.linear, x)


def described(name: str, dtype: torch.dtype, **tolerance: str) -> TensorOutput:
    limits = OutputTolerance(rtol=0, atol=0, **tolerance)
    return TensorOutput(name=name, dtype=str(dtype).removeprefix("torch."), shape=(), tolerance=limits)


def references(
    model: nn.Module,
    bound: BoundCall,
    eager: Sequence[Tensor],
    outputs: Sequence[TensorOutput],
    wanted: Sequence[str],
    *,
    tf32: bool = False,
) -> References | None:
    by_name = {output.name: tensor for output, tensor in zip(outputs, eager)}
    call = AnsweredCall(outputs, by_name, wanted, model=model, bound=bound)
    computed = wide_answers([call])
    found = session_references([call], computed, tf32=tf32) if computed else [None]
    return found[0]


def known(model: nn.Module, x: Tensor) -> References | None:
    """The references of a model with one output, `y`."""
    with torch.no_grad():
        eager = model(x)
        return references(model, describe_call(model, (x,), {}), [eager], [described("y", eager.dtype)], ["y"])


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def exact(model: Lambda, x: Tensor) -> Tensor:
    """The answer of a copy of the layer in float64."""
    linear = nn.Linear(16, 16, dtype=torch.float64)
    linear.load_state_dict({name: tensor.double() for name, tensor in model.linear.state_dict().items()})
    with torch.no_grad():
        return linear(x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("plain", lambda linear, x: linear(x)),
        ("casts", lambda linear, x: linear(x.to(torch.bfloat16).to(x.dtype))),
        ("in float32", lambda f, x: nn.functional.linear(x.float(), f.weight.float(), f.bias.float()).to(x.dtype)),
        ("factories", lambda linear, x: linear(x) + torch.zeros(16, dtype=x.dtype) * torch.ones(1)),
        ("copied", lambda linear, x: torch.empty_like(x).copy_(linear(x))),
        ("in place", lambda linear, x: linear(x).add_(x).sub_(x)),
        ("cond", lambda linear, x: torch.cond(x.sum() > 1e9, lambda y: y * 2, lambda y: y * 1, (linear(x),))),
    ],
)
def test_a_reference_is_exact_where_the_code_names_dtypes(
    name: str, function: Callable[..., object], dtype: torch.dtype
) -> None:
    model = Lambda(function).to(dtype)
    found = known(model, X.to(dtype))
    assert found is not None
    assert found.dtype == "float64"
    expected = exact(model, X.to(dtype))
    with torch.no_grad():
        stored = torch.float64 if model(X.to(dtype)).dtype is torch.float32 else torch.float32
    assert found.outputs["y"].dtype is stored
    atol = 1e-7 if stored is torch.float32 else 1e-14
    torch.testing.assert_close(found.outputs["y"].double(), expected, rtol=1e-6, atol=atol)
    accuracy = found.accuracy["y"]
    assert accuracy is not None
    assert 0 < accuracy.rms <= accuracy.greatest < 20 * torch.finfo(torch.bfloat16 if name == "casts" else dtype).eps


def test_the_model_and_its_inputs_stay_as_they_are() -> None:
    model, x = Lambda(lambda linear, x: linear(x.mul_(2))), X.clone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bound = describe_call(model, (x,), {})
    with torch.no_grad():
        eager = model(x.clone())
        assert references(model, bound, [eager], [described("y", torch.float32)], ["y"]) is not None
    assert torch.equal(x, X)
    assert torch.get_default_dtype() is torch.float32
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_parameters_of_a_large_model_are_upcast_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [(nn.Linear(1024, 1024, bias=False), nn.Tanh()) for _ in range(16)]
    model = nn.Sequential(*itertools.chain(*layers)).bfloat16()  # 34 MB, and 134 in float64
    x = torch.randn(2, 1024).bfloat16()
    small = known(model, x)
    monkeypatch.setattr(upcast, "LARGE_BYTES", 1 << 20)
    live = Live()
    monkeypatch.setattr(upcast, "cast", live.cast)
    large = known(model, x)
    assert 8 << 20 <= live.peak < 32 << 20
    assert small is not None
    assert large is not None
    assert torch.equal(small.outputs["y"], large.outputs["y"])


class Live:
    """Counts the bytes of upcast tensors that live at once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._cast = upcast.cast

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        made = self._cast(tensor, dtype)
        if made is not tensor:
            self._add(made.nbytes)
            weakref.finalize(made, self._add, -made.nbytes)
        return made

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


def compares_dtypes(linear: nn.Linear, x: Tensor) -> Tensor:
    assert x.dtype == linear.weight.dtype
    return linear(x)


def refuses_float64(linear: nn.Linear, x: Tensor) -> Tensor:
    assert x.dtype is not torch.float64
    return linear(x)


def dropped(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.dropout(linear(x), 0.3, training=True)


@pytest.mark.parametrize(
    ("function", "dtype", "wide"),
    [
        (compares_dtypes, torch.float32, "float64"),
        (refuses_float64, torch.bfloat16, "float32"),
        (refuses_float64, torch.float32, None),
        (lambda linear, x: linear(x), torch.float64, None),
        (lambda linear, x: linear(x) + torch.randn(x.shape, dtype=x.dtype), torch.float32, None),
        (dropped, torch.float32, None),
        (dropped, torch.bfloat16, None),
    ],
)
def test_a_reference_is_computed_in_the_widest_dtype_that_there_is(
    function: Callable[..., object], dtype: torch.dtype, wide: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for large in (1 << 40, 1):
        monkeypatch.setattr(upcast, "LARGE_BYTES", large)
        found = known(Lambda(function).to(dtype), X.to(dtype))
        assert (found and found.dtype) == wide


def test_an_operator_without_a_wide_kernel_runs_in_a_narrower_dtype() -> None:
    """The layer before it is computed in float64 all the same."""
    library = torch.library.Library("narrow_only", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    def twice(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("no kernel for float64")
        return x * 2

    library.impl("twice", twice, "CPU")
    model = Lambda(lambda linear, x: torch.ops.narrow_only.twice(linear(x)))
    found = known(model, X)
    assert found is not None
    assert found.dtype == "float64"
    assert torch.equal(found.outputs["y"], (exact(model, X).float() * 2).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_least_number_of_a_dtype_and_infinities_are_eagers(dtype: torch.dtype) -> None:
    def masked(linear: nn.Linear, x: Tensor) -> Tensor:
        y = linear(x).masked_fill(x > 1, torch.finfo(x.dtype).min)
        return y.masked_fill(x < -1, float("-inf"))

    found = known(Lambda(masked).to(dtype), X.to(dtype))
    assert found is not None
    assert found.outputs["y"].min() == float("-inf")
    assert found.outputs["y"][X.to(dtype) > 1].unique().tolist() == [torch.finfo(dtype).min]


def test_indices_come_with_the_values_that_they_rank_and_the_rows_that_they_select() -> None:
    def ranked(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = linear(x)
        indices = scores.topk(4).indices
        return scores, indices, scores.gather(1, indices)

    model = Lambda(ranked)
    bound = describe_call(model, (X,), {})
    outputs = [
        described("scores", torch.float32),
        described("indices", torch.int64, ranking_of="scores"),
        described("best", torch.float32, rows_of="indices"),
    ]
    with torch.no_grad():
        eager = model(X)
        found = references(model, bound, eager, outputs, ["scores", "best"])
        assert found is not None
        assert found.accuracy.keys() == {"scores", "indices", "best"}
        assert found.accuracy["indices"] is None
        assert found.outputs["indices"].dtype is torch.int64
        assert references(model, bound, eager, outputs, []) is None


def test_a_saved_program_has_references_too() -> None:
    model = Lambda(lambda linear, x: linear(x.to(torch.float32)).to(torch.bfloat16).to(torch.float32))
    program = torch.export.export(model, (X,))
    found = known(program.module(), X)
    assert found is not None
    torch.testing.assert_close(found.outputs["y"], exact(model, X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("error", "tf32", "is_known"), [(1e-3, False, False), (1e-3, True, True), (1.0, True, False)])
def test_eager_may_be_as_far_from_the_reference_as_what_it_computes_with(
    error: float, tf32: bool, is_known: bool
) -> None:
    """TF32 has the digits of float16. On a GPU eager is that far off; here its answer is changed by as much."""
    model = Lambda(lambda linear, x: linear(x))
    bound, output = describe_call(model, (X,), {}), described("y", torch.float32)
    with torch.no_grad():
        eager = model(X)
        eager += error * eager.abs().median() * torch.randn(eager.shape, generator=torch.Generator().manual_seed(2))
        found = references(model, bound, [eager], [output], ["y"], tf32=tf32)
    assert (found is not None) is is_known

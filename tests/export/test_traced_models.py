"""Kinds of models: with distributions, loops, slices that end at values, and quantized weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributions, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.torch_version import TorchVersion

from exportkit.errors import ExportError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import inductor_changes
from exportkit.export.compile.compile_failure import wrong_code
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.loader import load
from tests.export.function_models import exported, spec_of, traced

# --- distributions ---------------------------------------------------------------------------------------------------


def policy(mean: Tensor, width: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Densities of a bounded action, of one of several, and of two that belong together."""
    bounded = distributions.TransformedDistribution(
        distributions.Normal(mean, width.exp()), [distributions.TanhTransform(cache_size=1)]
    )
    chosen = distributions.Categorical(logits=logits)
    together = distributions.MultivariateNormal(mean, torch.eye(2))
    actions = bounded.log_prob(mean.tanh() * 0.9), chosen.log_prob(logits.argmax(-1))
    return *actions, chosen.entropy(), together.log_prob(mean * 2)


@pytest.mark.slow
def test_densities_of_any_batch_are_torchs() -> None:
    """torch reads the arguments of distributions to check them. `traced` compares with eager at other sizes."""
    shapes = {"mean": {0: "batch[1:8]"}, "width": {0: "batch"}, "logits": {0: "batch"}}
    assert traced(spec_of(policy, torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 4), shapes=shapes))


def checked(mean: Tensor, width: Tensor) -> Tensor:
    return distributions.Normal(mean, width, validate_args=True).log_prob(mean)


def test_a_check_that_the_model_asks_for_is_named_or_kept() -> None:
    inputs = torch.randn(3), torch.ones(3)
    if TorchVersion(torch.__version__) < "2.15":
        with pytest.raises(ExportError, match=r"branches on the value of a tensor at test_\w+.py:") as caught:
            traced(spec_of(checked, *inputs))
        assert "torch.where" in (caught.value.hint or "")
        return
    (method,) = traced(spec_of(checked, *inputs)).methods
    with pytest.raises(RuntimeError, match="to satisfy its distribution constraint"):
        method.program.module()(inputs[0], -inputs[1])


# --- loops; the gallery has more -------------------------------------------------------------------------------------


class BodyOfAnotherDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v.double()), (torch.tensor(0), x.clone()))[1]


class VmapInABody(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scan(lambda c, v: (torch.vmap(torch.mul)(c, v), c.sin()), x.new_ones(3), x)[1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (BodyOfAnotherDtype, "dtype: torch.float64 vs torch.float32"),
        (VmapInABody, "torch.vmap is called within scan at test_traced_models.py"),
    ],
)
def test_a_loop_is_refused_with_its_line(model: type[nn.Module], says: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"at test_traced_models\.py") as refused:
        exported(spec_of(model(), torch.rand(4, 3)), tmp_path)
    assert says in str(refused.value)


# --- slices ----------------------------------------------------------------------------------------------------------


def slices(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """One end, the other, both, a step, and a dimension that does not come first."""
    end = n.item()
    chosen = (x[:end], x[end:], x[1:end], x[end:3], x[:end:2], x[-end:], x[:, :end], x[None, :, end:])
    return tuple(part.sum(0).sum() for part in chosen)


@pytest.mark.slow
def test_a_slice_may_end_or_begin_at_a_value(tmp_path: Path) -> None:
    def draw(sizes: dict[str, int], generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], dict]:
        return (torch.rand(sizes["rows"], 3, generator=generator), torch.randint(-6, 7, (), generator=generator)), {}

    spec = spec_of(slices, torch.rand(4, 3), torch.tensor(2), shapes={"x": {0: "rows[3:9]"}}, draw_inputs=draw)
    export_aoti(spec, tmp_path / "slices.pt2", TraceOptions(cases=1, edge_cases=False))
    with load(tmp_path / "slices.pt2", device="cpu") as model:
        for rows in (3, 4, 9):
            x = torch.rand(rows, 3)
            for n in range(-10, 11):
                torch.testing.assert_close(model(x, torch.tensor(n)), slices(x, torch.tensor(n)))


class Slice(nn.Module):
    """The beginning of a tensor."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x[: n.item()].sum(0)


@pytest.mark.slow
def test_code_that_does_not_compile_names_the_operator_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_changes, "_slices_with_two_ends", lambda make, *given: make(*given))
    spec = spec_of(Slice(), torch.rand(4, 3), torch.tensor(2))
    with pytest.raises(ExportError) as caught:
        export_aoti(spec, tmp_path / "slice.pt2", TraceOptions(cases=1, edge_cases=False))
    assert re.fullmatch(
        r"AOTInductor could not compile the program at aten\.slice\.Tensor, test_traced_models\.py:\d+ in forward: "
        r"`return x\[: n\.item\(\)\]\.sum\(0\)`: torch \S+ wrote C\+\+ code that does not compile: .None. was not "
        r"declared in this scope\n    int64_t \w+_st_index = .*;",
        caught.value.message,
    )
    assert "--repair" in (caught.value.hint or "")


def test_what_the_compiler_lacks_is_not_taken_for_wrong_code(tmp_path: Path) -> None:
    source = tmp_path / "model.wrapper.cpp"
    source.write_text("#include <missing.h>\n")
    assert wrong_code("model.wrapper.cpp:1:10: fatal error: missing.h: No such file or directory", {}, tmp_path) is None
    assert wrong_code("/usr/bin/ld: cannot find -ltorch", {}, tmp_path) is None


# --- quantized weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_models_quantized_with_torchao_agree(tmp_path, name: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).bfloat16().eval()
    torchao.quantize_(model, getattr(torchao, name)())
    example = torch.randn(4, 32, dtype=torch.bfloat16)
    exported(spec_of(model, example, shapes={"input": {0: "batch[1:8]"}}), tmp_path)

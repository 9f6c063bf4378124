# ruff: noqa: D102 (the subclasses override documented methods)
"""Writes docs/evidence/verdicts.md, the injected errors that a verdict sees: `python -m tools.injected_errors`.

A small model is computed with an error injected in it, in eager mode, and judged like a package against the right one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from exportkit.export.models.call_signature import describe_call
from exportkit.export.record.reference import AnsweredCall, session_references, wide_answers
from exportkit.package.manifest import OutputTolerance, TensorOutput
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.comparisons import OutputComparison, OutputError
from exportkit.verify.outcomes import Match, Mismatch
from tools.generated import EVIDENCE

DOCUMENT = EVIDENCE / "verdicts.md"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS = 16


class Model(nn.Module):
    """Patches of an image, a normalised layer with an activation, attention, and the mean over the tokens."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 32)

    def forward(self, image: Tensor) -> Tensor:
        """Returns [batch, 32] scores."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = x + self.product(self.down, nn.functional.gelu(self.product(self.up, self.norm(x))))
        q, k, v = self.product(self.qkv, x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v
        return self.product(self.head, self.mean(x))

    def product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Applies a linear layer."""
        return layer(x)

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over the tokens."""
        return x.mean(1)


# --- what a right compiler does ---------------------------------------------------------------------------------------


class Blocks(Model):
    """Adds in another order: the products in four blocks, the mean from the last token to the first."""

    def product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        parts = zip(x.float().chunk(4, -1), layer.weight.float().chunk(4, -1))
        return (sum(linear(a, b) for a, b in parts) + layer.bias.float()).to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1)[:, -1] / x.shape[1] if x.dtype is torch.float32 else x.float().mean(1).to(x.dtype)


class Fused(Model):
    """Rounds once, at the end."""

    def forward(self, image: Tensor) -> Tensor:
        return copy.deepcopy(self).float()._exact(image.float()).to(image.dtype)

    def _exact(self, image: Tensor) -> Tensor:
        return Model.forward(self, image)


# --- what a wrong one does --------------------------------------------------------------------------------------------


class Accumulating(Model):
    """Adds the products one by one in 16 bits."""

    def product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        narrow = torch.float16 if x.dtype is torch.float32 else x.dtype
        total = torch.zeros(*x.shape[:-1], layer.out_features, dtype=narrow)
        for k in range(layer.in_features):
            total = (total + (x[..., k : k + 1] * layer.weight[:, k]).to(narrow)).to(narrow)
        return total.to(x.dtype) + layer.bias


class OffByOne(Model):
    """Leaves the last token out of the sum."""

    def mean(self, x: Tensor) -> Tensor:
        return x[:, :-1].sum(1) / x.shape[1]


class Swapped(Model):
    """Takes BGR for RGB."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.flip(1))


def _stale(model: Model) -> None:
    model.up.weight += 0.3 * model.up.weight.std() * torch.randn_like(model.up.weight)


def _no_bias(model: Model) -> None:
    model.down.bias.zero_()


def _eps(value: float) -> Callable[[Model], None]:
    return lambda model: setattr(model.norm, "eps", value)


def _other_seed(model: Model) -> None:
    model.load_state_dict(Model(seed=1).to(model.head.weight.dtype).state_dict())


class OneElement(Model):
    """Has one output element of another sign."""

    def forward(self, image: Tensor) -> Tensor:
        answer = super().forward(image)
        place = int(answer.abs().flatten().kthvalue(answer.numel() // 2).indices)
        answer.view(-1)[place] *= -1
        return answer


@dataclass(frozen=True)
class Injected:
    """One way to compute the model.

    Attributes:
        what: Its row in the table.
        kind: The class that computes it.
        change: What happens to its weights.
        gross: Whether it must be seen in every precision; None for what is right and must pass.
    """

    what: str
    kind: type[Model] = Model
    change: Callable[[Model], None] = lambda model: None
    gross: bool | None = True


INJECTED = (
    Injected("nothing: sums in another order", Blocks, gross=None),
    Injected("nothing: rounded once, at the end", Fused, gross=None),
    Injected("products summed in 16 bits", Accumulating, gross=False),
    Injected(f"the last of {TOKENS} tokens left out of a mean", OffByOne),
    Injected("two channels of the image swapped", Swapped),
    Injected("a stale weight, 30 % off in one layer", change=_stale),
    Injected("the bias of one layer missing", change=_no_bias),
    Injected("eps of a LayerNorm 1e-2 instead of 1e-5", change=_eps(1e-2), gross=False),
    Injected("eps of a LayerNorm 1e-6 instead of 1e-5", change=_eps(1e-6), gross=False),
    Injected("the sign of one output element", OneElement),
    Injected("the weights of another seed", change=_other_seed),
)


@dataclass(frozen=True)
class InjectedState:
    """An error of state, which tests/verify/test_injected_state.py plants in a package or in what runs it.

    Attributes:
        what: Its row in the table.
        where: What has the error.
        seen_as: The kind of the verdict on it.
    """

    what: str
    where: str
    seen_as: str


INJECTED_STATE = (
    InjectedState("one write to a cache dropped", "compiled code", "mismatch"),
    InjectedState("a position advanced by one too many", "compiled code", "mismatch"),
    InjectedState("an input that is not written", "compiled code", "mismatch"),
    InjectedState("the caches of two layers exchanged", "manifest", "mismatch"),
    InjectedState("another initial value", "record of the state", "mismatch"),
    InjectedState("state shared by two sessions", "runtime", "shared_state"),
    InjectedState("a fork that does not copy", "runtime", "fork_shares_state"),
    InjectedState("a fork that begins again", "runtime", "fork_without_state"),
    InjectedState("a reset that forgets one tensor", "runtime", "reset_incomplete"),
    InjectedState("a loaded state that lacks one tensor", "runtime", "saved_state_differs"),
)


def judged(injected: Injected, dtype: torch.dtype) -> OutputComparison:
    """Judges a wrong model like a package that was recorded from the right one."""
    right = Model().to(dtype).eval()
    wrong = injected.kind().to(dtype).eval()
    image = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    output = TensorOutput(
        name="scores",
        dtype=str(dtype).removeprefix("torch."),
        shape=(8, 32),
        tolerance=OutputTolerance(rtol=0, atol=0),
    )
    with torch.no_grad():
        torch.manual_seed(3)
        injected.change(wrong)
        eager = right(image)
        bound = describe_call(right, (image,), {})
        call = AnsweredCall([output], {"scores": eager}, ["scores"], model=right, bound=bound)
        computed = wide_answers([call])
        assert computed is not None
        (found,) = session_references([call], computed, tf32=False)
        assert found is not None
        reference = Reference(found.outputs, {}, fresh=True)
        verdict = compare_outputs([output], [eager], [wrong(image)], reference=reference)
    assert isinstance(verdict, (Match, Mismatch))
    return verdict.outputs[0]


def table(verdicts: Mapping[tuple[str, torch.dtype], OutputComparison]) -> str:
    """Returns the Markdown table: for each error and precision, whether it is seen, and its size in allowed errors."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = [f"| injected | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for injected in INJECTED:
        cells = [_cell(verdicts[injected.what, dtype]) for dtype in DTYPES]
        lines.append(f"| {injected.what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def state_table() -> str:
    """Returns the Markdown table of the errors of state."""
    rows = [f"| {each.what} | {each.where} | {each.seen_as} |" for each in INJECTED_STATE]
    return "\n".join(["| injected | in the | seen as |", "| --- | --- | --- |", *rows]) + "\n"


def _cell(result: OutputComparison) -> str:
    assert isinstance(result.error, OutputError)
    error = result.error
    share = max(error.rms / error.rms_allowed, error.greatest / error.greatest_allowed)
    return f"{'passes' if result.agrees else '**seen**'}, {share:.2g}"


TEXT = """# What the verdict sees

A package passes where it is as accurate as eager ([the rule](../../exportkit/package/FORMAT.md#verdicts), [its
reasons](../adr/0020-accuracy.md)). Here, errors are injected in a small model of a convolution, a LayerNorm, four
linear layers and attention. The number is the greater of its rms error and its greatest error, as a multiple of what
is allowed. `make docs` writes this page.

{table}
The first two rows are right and must pass. An error smaller than eager's own rounding cannot be seen in that
precision: export and verify the model in float32, too.

## State

A case is a sequence of calls. All results and the last state are judged, and sessions are compared with one another,
bit for bit. Each error is injected in a real package, or in what runs it:

{state}"""


def main() -> None:
    """Writes the document."""
    verdicts = {(injected.what, dtype): judged(injected, dtype) for injected in INJECTED for dtype in DTYPES}
    DOCUMENT.write_text(TEXT.format(table=table(verdicts), state=state_table()))


if __name__ == "__main__":
    main()

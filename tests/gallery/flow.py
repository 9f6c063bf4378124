"""Modules with torch's own loops and branches."""

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

_MEAN, _VARIANCE = torch.zeros(3), torch.ones(3)


class AssociativeScan(nn.Module):
    """associative_scan over a fixed number of rows of any batch (pytorch#186594)."""

    onnx = ""
    since = "2.13"
    inputs = ("x=float32[2,9,6]",)
    dynamic = ("x:0=batch[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        def both(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return associative_scan(both, (x.sigmoid(), x), dim=1, combine_mode="generic")[1]


class MapOverRows(nn.Module):
    """map over rows, with a weight (pytorch#183018)."""

    onnx = "torch.onnx does not translate map_impl"
    inputs = ("rows=float32[5,16]",)
    dynamic = ("rows:0=n[2:32]",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return torch_map(lambda row: self.linear(row).relu(), rows)


class InverseInALoop(nn.Module):
    """An inverse within while_loop (pytorch#190908)."""

    onnx = "torch.onnx fails within while_loop"
    inputs = ("x=float32[3,8]", "turns=int64[]")
    dynamic = ("x:0=batch[1:16]",)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        def body(value: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            square = value.T @ value
            return value @ torch.linalg.inv(square / square.abs().max() + torch.eye(8) * 2), at + 1

        return while_loop(lambda value, at: at < turns % 4, body, (x.clone(), torch.zeros_like(turns)))[0]


class StateSpaceScan(nn.Module):
    """scan with two carries and one result twice (executorch#8769)."""

    onnx = ""
    inputs = ("signal=float32[7,3]",)
    dynamic = ("signal:0=length[2:64]", "signal:1=batch[1:8]")

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: tuple[Tensor, Tensor], value: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            a, b = state
            real = a * self.real - b * self.imaginary + value[:, None]
            return (real, a * self.imaginary + b * self.real), real

        start = signal.new_zeros(signal.shape[1], 8)
        (last, _), answers = scan(step, (start, start + 1), signal)
        return last, answers


class BranchesAsTheyAre(nn.Module):
    """Branches with other strides, with an input as the result, and with a loop within."""

    inputs = ("x=float32[4,4]",)

    def forward(self, x: Tensor) -> Tensor:
        def loop(x: Tensor) -> Tensor:
            return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 1.5), (torch.tensor(0), x.clone()))[1]

        turned = torch.cond(x.sum() > 7, lambda x: x.T[1:3], lambda x: x[:2] * 2, (x,))
        return torch.cond(x.sum() > 8, lambda x: x, loop, (x,))[:2] + turned


class BranchUnderVmap(nn.Module):
    """A branch for each row, by torch.vmap."""

    since = "2.13"
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.cond(row.sum() > 1.5, torch.sin, torch.cos, (row,)))(x)


class BranchesOfOtherRanks(nn.Module):
    """Branches whose results have other ranks."""

    says = "torch.cond cannot be traced at flow.py"

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: x * 2, (x,))


class WritesInABranch(nn.Module):
    """A branch that writes into its argument."""

    since = "2.13"
    says = "the model writes into a tensor inside of a branch or a loop"

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.add_(1) * 2, lambda y: y.cos(), (x.clone(),))


class StatisticsOfAClosure(nn.Module):
    """Running statistics that are no buffers (pytorch#197096)."""

    onnx = "the model writes into a tensor that is no input"
    says = "the model writes into a tensor that is no input, no parameter and no buffer"
    inputs = ("image=float32[2,3,9,9]",)

    def forward(self, image: Tensor) -> Tensor:
        return nn.functional.instance_norm(image, _MEAN, _VARIANCE, use_input_stats=True)


class Jagged(nn.Module):
    """Attention over rows of different lengths (pytorch#149605)."""

    onnx = "torch.export cannot trace nested tensors"
    says = "torch.export cannot trace nested tensors, and the model makes one at flow.py"
    inputs = ("values=float32[11,8]", "lengths=int64[2]")

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.stack([lengths[0] * 0, lengths[0] * 0 + 5, lengths[0] * 0 + 11])
        rows = torch.nested.nested_tensor_from_jagged(values, offsets).unflatten(-1, [2, 4]).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return mixed.transpose(1, 2).flatten(-2).values()


class PaddedRows(nn.Module):
    """Attention over rows of different lengths, padded."""

    inputs = ("values=float32[11,8]", "lengths=int64[2]")

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.stack([lengths[0] * 0, lengths[0] * 0 + 5, lengths[0] * 0 + len(values)])
        longest = torch.arange(len(values))
        mask = longest < offsets.diff()[:, None]
        rows = values[(offsets[:-1, None] + longest).clamp(max=len(values) - 1)]
        rows = rows.unflatten(-1, [2, 4]).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask[:, None, None])
        return mixed.transpose(1, 2).flatten(-2)[mask]

"""Models that call CUDA kernels for images, sound, tables, graphs and sparse weights. Each function makes one model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exportkit import ExportSpec
from tools.libraries.support import Arguments, draw_rows, fake, fake_of_old, load, spec_of

FBGEMM = "fbgemm_gpu/fbgemm_gpu_py.so"
XFORMERS = "xformers/_C.so"
ROI_ALIGN = "Its roi_align reads outside where a box is not finite: the model clips boxes."
TORCH_CLUSTER = "torch_cluster/_knn_cuda.so"
TORCH_SPARSE = "torch_sparse/_spmm_cuda.so"


class _Detector(nn.Module):
    """The second half of Faster R-CNN, for one image: from its features and proposals to boxes, classes and scores."""

    classes, image = 3, 128

    def __init__(self) -> None:
        super().__init__()
        faster_rcnn = importlib.import_module("torchvision.models.detection.faster_rcnn")
        coder = importlib.import_module("torchvision.models.detection._utils").BoxCoder
        operators = importlib.import_module("torchvision.ops")
        self.align, self.clip, self.nms = operators.roi_align, operators.clip_boxes_to_image, operators.nms
        self.head = faster_rcnn.TwoMLPHead(8 * 7 * 7, 64)
        self.predictor = faster_rcnn.FastRCNNPredictor(64, self.classes)
        self.coder = coder((10.0, 10.0, 5.0, 5.0))
        with torch.no_grad():  # scores that lie apart
            self.predictor.cls_score.weight.mul_(20)

    def forward(self, features: Tensor, proposals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        proposals = self.clip(proposals.nan_to_num(), (self.image, self.image))  # as the first half does
        pooled = self.align(features, [proposals], 7, features.shape[-1] / self.image, 2)
        scores, changes = self.predictor(self.head(pooled))
        boxes = self.coder.decode_single(changes, proposals).reshape(-1, self.classes, 4)[:, 1:].reshape(-1, 4)
        boxes = self.clip(boxes, (self.image, self.image))
        labels = torch.arange(1, self.classes, device=boxes.device).repeat(proposals.shape[0])
        scores = scores.softmax(-1)[:, 1:].reshape(-1)
        likely = torch.where(scores > 0.05)[0]
        boxes, scores, labels = boxes[likely], scores[likely], labels[likely]
        apart = boxes + (labels * 2 * self.image)[:, None]  # boxes of different classes do not overlap then
        keep = self.nms(apart, scores, 0.5)
        return boxes[keep], scores[keep], labels[keep]


def _draw_boxes(sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    corner = torch.rand(sizes["n"], 2, generator=generator) * 90
    return torch.cat([corner, corner + 4 + torch.rand(sizes["n"], 2, generator=generator) * 30], 1)


def _draw_proposals(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    return (torch.randn(1, 8, 16, 16, generator=generator), _draw_boxes(sizes, generator)), {}


def torchvision_detector() -> ExportSpec:
    """Faster R-CNN's second half, of torchvision."""
    importlib.import_module("torchvision")
    return spec_of(_Detector, _draw_proposals, {"n": 9}, {"proposals": {0: "n[1:64]"}})


class _Kept(nn.Module):
    """The boxes that non-maximum suppression keeps."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return boxes[keep], scores[keep]


def _draw_scored_boxes(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    return (_draw_boxes(sizes, generator), torch.rand(sizes["n"], generator=generator)), {}


def torchvision_boxes() -> ExportSpec:
    """Non-maximum suppression of torchvision, of no boxes too."""
    importlib.import_module("torchvision")
    return spec_of(_Kept, _draw_scored_boxes, {"n": 9}, {"boxes": {0: "n[0:200]"}, "scores": {0: "n"}})


class _TransducerLoss(nn.Module):
    """The loss of a transducer, which aligns sound and text, and its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(16, 6)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> tuple[Tensor, Tensor]:
        loss = torch.ops.torchaudio.rnnt_loss_forward
        costs, gradients = loss(self.joint(x), targets, lengths, target_lengths, 0, -1.0, True)
        return costs, gradients


def _fake_transducer_loss(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0]), torch.empty_like(logits)


def _draw_transducer(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    b, t, u = sizes["b"], sizes["t"], sizes["u"]
    lengths, targets = (torch.randint(1, n + 1, (b,), generator=generator, dtype=torch.int32) for n in (t, u))
    lengths[0], targets[0] = t, u  # the greatest must be the tensors' sizes
    words = torch.randint(1, 6, (b, u), generator=generator, dtype=torch.int32)
    return (torch.randn(b, t, u + 1, 16, generator=generator), words, lengths, targets), {}


def torchaudio_transducer() -> ExportSpec:
    """The RNN-T loss of torchaudio, which has no fake kernel."""
    importlib.import_module("torchaudio")
    fake("torchaudio::rnnt_loss_forward", _fake_transducer_loss)
    shapes = {
        "x": {0: "b[1:8]", 1: "t[2:40]", 2: "u+1[1:12]"},
        "targets": {0: "b", 1: "u"},
        "lengths": {0: "b"},
        "target_lengths": {0: "b"},
    }
    return spec_of(_TransducerLoss, _draw_transducer, {"b": 3, "t": 9, "u": 4}, shapes)


class _Alignment(nn.Module):
    """Which part of a sound says which word: the best path, and how likely each step is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        likely = self.linear(x).log_softmax(-1)
        lengths = (torch.full((1,), n, dtype=torch.int64, device=x.device) for n in (x.shape[1], words.shape[1]))
        path, all_scores = torch.ops.torchaudio.forced_align(likely, words, *lengths, 0)
        return path, all_scores.gather(2, path[:, :, None])[:, :, 0]


def _fake_alignment(likely: Tensor, words: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return words.new_empty(likely.shape[:2]), torch.empty_like(likely)


def _draw_alignment(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    words = torch.randint(1, 8, (1, sizes["w"]), generator=generator)
    return (3 * torch.randn(1, sizes["t"], 16, generator=generator), words), {}


def torchaudio_alignment() -> ExportSpec:
    """The forced alignment of torchaudio, which has no fake kernel."""
    importlib.import_module("torchaudio")
    fake("torchaudio::forced_align", _fake_alignment)
    shapes = {"x": {1: "t[40:100]"}, "words": {1: "w[1:16]"}}  # each word takes at most two steps
    return spec_of(_Alignment, _draw_alignment, {"t": 50, "w": 5}, shapes)


class _Jagged(nn.Module):
    """Rows of several lengths in one padded tensor, by sums of the lengths: operators of two libraries of fbgemm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [4], 0.0)
        return self.linear(padded)


def _draw_jagged(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    lengths = torch.randint(0, 4, (sizes["batch"],), generator=generator)
    return (torch.randn(3 * sizes["batch"], 8, generator=generator), lengths), {}


def fbgemm_jagged() -> ExportSpec:
    """Jagged tensors of fbgemm-gpu. Its package would load 2.5 GB of libraries; these are two, with what they need."""
    load(FBGEMM, "fbgemm::jagged_to_padded_dense")
    shapes = {"values": {0: "3*batch[1:64]"}, "lengths": {0: "batch"}}
    return spec_of(_Jagged, _draw_jagged, {"batch": 5}, shapes)


class _SparseFloat8(nn.Module):
    """A linear layer in float8 of whose weights two of four are 0: torchao's CUTLASS kernel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs // 4, 4)
        weight[weight.abs().argsort(-1).argsort(-1) < 2] = 0
        rows, scale = _to_float8(weight.flatten(1))
        if torch.cuda.is_available():
            pack = torch.ops.torchao.to_sparse_semi_structured_cutlass_sm9x_f8
            packed, places = (part.cpu() for part in pack(rows.cuda()))
        else:
            packed, places = rows[:, : inputs // 2].contiguous(), torch.zeros(outputs, inputs // 8, dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("places", places)
        self.register_buffer("scale", scale[:, 0].clone())

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = _to_float8(x)
        multiply = torch.ops.torchao.rowwise_scaled_linear_sparse_cutlass_f8f8
        dtype = torch.bfloat16
        return multiply(rows, scale[:, 0], self.packed, self.places, self.scale, None, dtype)


def _to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def torchao_sparse() -> ExportSpec:
    """A sparse layer of torchao in float8, whose schema Python defines and whose kernel is C++."""
    importlib.import_module("torchao")
    draw = partial(draw_rows, 256, torch.bfloat16)
    return spec_of(partial(_SparseFloat8, 256, 512), draw, {"n": 5}, {"x": {0: "n[1:512]"}})


class _Pruned(nn.Module):
    """Activations of which xformers keeps the two greatest of four, in rows and in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        kept = x * torch.ops.xformers.sparse24_largest_mask_2d(x)
        return self.linear(kept)


def _draw_pruned(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    return (torch.randn(4 * sizes["n"], 64, generator=generator).half(),), {}


def xformers_pruned() -> ExportSpec:
    """Sparse activations of xformers."""
    load(XFORMERS, "xformers::sparse24_largest_mask_2d")
    fake("xformers::sparse24_largest_mask_2d", torch.empty_like)
    return spec_of(_Pruned, _draw_pruned, {"n": 3}, {"x": {0: "4*n[1:100]"}})


class _Segments(nn.Module):
    """Sums and greatest values over rows that torch_scatter finds by where they begin."""

    def forward(self, x: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        greatest, places = torch.ops.torch_scatter.segment_max_csr(x, begins, None)
        return torch.ops.torch_scatter.segment_sum_csr(x, begins, None), greatest, places


def _fake_segments(x: Tensor, begins: Tensor, out: Tensor | None) -> Tensor:
    return x.new_empty(begins.shape[0] - 1, *x.shape[1:])


def _fake_greatest(x: Tensor, begins: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    greatest = _fake_segments(x, begins, out)
    return greatest, torch.empty_like(greatest, dtype=torch.int64)


def _draw_segments(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    n, inner = sizes["n"], torch.randint(0, sizes["n"] + 1, (sizes["p"] - 1,), generator=generator).sort().values
    return (torch.randn(n, 8, generator=generator), torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])), {}


def torch_scatter_segments() -> ExportSpec:
    """Segments of torch_scatter, whose one kernel for all devices reads memory, and which has no fake kernels."""
    importlib.import_module("torch_scatter")
    fake_of_old(torch.ops.torch_scatter.segment_sum_csr.default, _fake_segments)
    fake_of_old(torch.ops.torch_scatter.segment_max_csr.default, _fake_greatest)
    shapes = {"x": {0: "n[2:100]"}, "begins": {0: "p+1[1:50]"}}
    return spec_of(_Segments, _draw_segments, {"n": 9, "p": 4}, shapes)


class _Neighbours(nn.Module):
    """The differences between points and their neighbours, which torch_cluster finds."""

    def forward(self, points: Tensor) -> Tensor:
        ones, others = torch.ops.torch_cluster.knn(points, points, None, None, 3, False, 1)
        return points[ones] - points[others]


def _fake_neighbours(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(2, torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def torch_cluster_neighbours() -> ExportSpec:
    """Neighbours of torch_cluster; how many there are depends on data."""
    load(TORCH_CLUSTER, "torch_cluster::knn")
    fake_of_old(torch.ops.torch_cluster.knn.default, _fake_neighbours)
    return spec_of(_Neighbours, partial(draw_rows, 3, torch.float32), {"n": 20}, {"points": {0: "n[5:100]"}})


class _GraphLayer(nn.Module):
    """A layer of a graph: the sums over neighbours are a product with torch_sparse's matrix in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, begins: Tensor, others: Tensor, weights: Tensor) -> Tensor:
        total = torch.ops.torch_sparse.spmm_sum(None, begins, others, weights, None, None, x)
        return self.linear(total)


def _fake_graph_layer(
    row: Any, begins: Tensor, others: Tensor, weights: Any, _ends: Any, _order: Any, x: Tensor
) -> Tensor:
    return x.new_empty(begins.shape[0] - 1, x.shape[1])


def _draw_graph(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    n, e = sizes["n"], sizes["e"]
    inner = torch.randint(0, e + 1, (n - 1,), generator=generator).sort().values
    begins = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), e)])
    others, weights = torch.randint(0, n, (e,), generator=generator), torch.randn(e, generator=generator)
    return (torch.randn(n, 8, generator=generator), begins, others, weights), {}


def torch_sparse_graph() -> ExportSpec:
    """A graph's layer with torch_sparse, which registers as torch_scatter does."""
    load(TORCH_SPARSE, "torch_sparse::spmm_sum")
    fake_of_old(torch.ops.torch_sparse.spmm_sum.default, _fake_graph_layer)
    shapes = {"x": {0: "n[2:100]"}, "begins": {0: "n+1"}, "others": {0: "e[2:500]"}, "weights": {0: "e"}}
    return spec_of(_GraphLayer, _draw_graph, {"n": 7, "e": 19}, shapes)

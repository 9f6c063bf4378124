"""Models for the catalogue that are not of transformers: plain PyTorch, other libraries, our own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exportkit import ExportSpec
from tools.model_catalogue import IMAGES, image, model, text_encoder

# --- plain PyTorch ----------------------------------------------------------------------------------------------------


class UNet(torch.nn.Module):
    """Two levels, each halving the image and widening the channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = torch.nn.ModuleList([_block(3, width), _block(width, 2 * width)])
        self.bottom = _block(2 * width, 4 * width)
        self.widen = torch.nn.ModuleList(
            [torch.nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), torch.nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = torch.nn.ModuleList([_block(4 * width, 2 * width), _block(2 * width, width)])
        self.head = torch.nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Returns two scores for each pixel."""
        kept = []
        for block in self.down:
            image = block(image)
            kept.append(image)
            image = functional.max_pool2d(image, 2)
        image = self.bottom(image)
        for widen, block in zip(self.widen, self.up):
            image = block(torch.cat([kept.pop(), widen(image)], 1))
        return self.head(image)


def _block(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()
    )


@model("U-Net", "convolutions")
def unet() -> ExportSpec:
    sizes = {"image": {0: "batch[1:8]", 2: "4*rows[2:24]", 3: "4*columns[2:24]"}}
    return ExportSpec(model=UNet(), example_inputs=(torch.rand(2, 3, 32, 48),), dynamic_shapes=sizes)


class Recurrent(torch.nn.Module):
    """Two layers in both directions."""

    def __init__(self, cell: type[torch.nn.LSTM] | type[torch.nn.GRU]) -> None:
        super().__init__()
        self.layers = cell(16, 24, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores for each step."""
        return self.head(self.layers(x)[0])


@model("LSTM", "recurrent")
def lstm() -> ExportSpec:
    return ExportSpec(Recurrent(torch.nn.LSTM), (torch.randn(2, 9, 16),), dynamic_shapes={"x": {0: "batch[1:8]"}})


@model("GRU", "recurrent")
def gru() -> ExportSpec:
    return ExportSpec(Recurrent(torch.nn.GRU), (torch.randn(2, 9, 16),), dynamic_shapes={"x": {0: "batch[1:8]"}})


@model("torch.nn.TransformerEncoder", "text encoder")
def transformer_encoder() -> ExportSpec:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sizes = {"src": {0: "batch[1:8]", 1: "sequence[2:64]"}}
    return ExportSpec(encoder, (torch.randn(2, 7, 32),), dynamic_shapes=sizes)


# --- control flow -----------------------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """Takes one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Chooses by the mean."""
        return torch.cond(x.mean() > 0, lambda x: self.large(x).relu(), lambda x: self.small(x).tanh(), (x,))


@model("torch.cond", "control flow")
def cond() -> ExportSpec:
    return ExportSpec(Branches(), (torch.randn(5, 16),), dynamic_shapes={"x": {0: "batch[1:32]"}})


class Loop(torch.nn.Module):
    """Iterates until a number of steps that the input decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Applies one layer `steps` times."""
        from torch._higher_order_ops.while_loop import while_loop

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        _, x = while_loop(lambda i, _: i < steps, lambda i, x: (i + 1, self.linear(x).tanh()), (start, x))
        return x


@model("while_loop", "control flow")
def loop() -> ExportSpec:
    return ExportSpec(Loop(), (torch.randn(5, 16), torch.tensor(3)), dynamic_shapes={"x": {0: "batch[1:32]"}})


class Scan(torch.nn.Module):
    """A linear recurrence along time."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = torch.nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the state after each step: [time, batch, 16]."""
        from torch._higher_order_ops.scan import scan

        def step(state: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
            state = state * self.keep + now
            return state, state.clone()

        return scan(step, torch.zeros_like(x[0]), x)[1]


@model("scan", "control flow")
def scan() -> ExportSpec:
    return ExportSpec(Scan(), (torch.randn(6, 5, 16),), dynamic_shapes={"x": {1: "batch[2:32]"}})


# --- diffusers --------------------------------------------------------------------------------------------------------


def diffuser(class_name: str, **settings: object) -> torch.nn.Module:
    """Returns a model of diffusers with random weights."""
    made: torch.nn.Module = getattr(importlib.import_module("diffusers"), class_name)(**settings)
    return made


_BLOCKS = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


@model("UNet2DModel", "diffusion", "diffusers")
def unet_2d() -> ExportSpec:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return ExportSpec(
        diffuser("UNet2DModel", **_BLOCKS, **blocks),
        (torch.randn(2, 3, 16, 16), torch.tensor([10, 500])),
        example_kwargs={"return_dict": False},
        dynamic_shapes={"sample": {0: "batch[1:8]"}, "timestep": {0: "batch"}},
    )


@model("UNet2DConditionModel", "diffusion", "diffusers")
def unet_2d_condition() -> ExportSpec:
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    }
    return ExportSpec(
        diffuser("UNet2DConditionModel", **_BLOCKS, **blocks),
        (torch.randn(2, 4, 16, 16), torch.tensor([10, 500]), torch.randn(2, 7, 32)),
        example_kwargs={"return_dict": False},
        dynamic_shapes={
            "sample": {0: "batch[1:8]"},
            "timestep": {0: "batch"},
            "encoder_hidden_states": {0: "batch", 1: "sequence[2:64]"},
        },
    )


@model("DiT", "diffusion", "diffusers")
def dit() -> ExportSpec:
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "num_layers": 2,
        "sample_size": 16,
    }
    return ExportSpec(
        diffuser("DiTTransformer2DModel", **settings, norm_num_groups=4),
        (torch.randn(2, 4, 16, 16), torch.tensor([10, 500]), torch.tensor([3, 700])),
        example_kwargs={"return_dict": False},
        dynamic_shapes={"hidden_states": {0: "batch[1:8]"}, "timestep": {0: "batch"}, "class_labels": {0: "batch"}},
    )


class Decoder(torch.nn.Module):
    """The half of an autoencoder that makes images."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: Tensor) -> Tensor:
        """Returns images."""
        images: Tensor = self.autoencoder.decode(latents, return_dict=False)[0]
        return images


@model("AutoencoderKL decoder", "diffusion", "diffusers")
def autoencoder() -> ExportSpec:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return ExportSpec(
        Decoder(diffuser("AutoencoderKL", **_BLOCKS, **blocks)),
        (torch.randn(2, 4, 8, 12),),
        dynamic_shapes={"latents": {0: "batch[1:8]", 2: "rows[2:32]", 3: "columns[2:32]"}},
    )


# --- timm and torchvision ---------------------------------------------------------------------------------------------


def timm_model(name: str, size: int, **settings: Any) -> ExportSpec:
    """Returns a model of timm for images of one size."""
    module = importlib.import_module("timm").create_model(name, pretrained=False, **settings)
    return ExportSpec(module, (image(size),), dynamic_shapes={"x": IMAGES})


@model("MobileNet v4", "convolutions", "timm", "torchvision")
def mobilenet_v4() -> ExportSpec:
    return timm_model("mobilenetv4_conv_small_035", 64)


@model("MaxViT", "vision", "timm", "torchvision")
def maxvit() -> ExportSpec:
    return timm_model("test_maxvit", 160)


@model("EVA-02", "vision", "timm", "torchvision")
def eva02() -> ExportSpec:
    return timm_model("eva02_tiny_patch14_224", 56, img_size=56, depth=2)


@model("RAFT", "optical flow", "torchvision")
def raft() -> ExportSpec:
    module = importlib.import_module("torchvision.models.optical_flow").raft_small(weights=None)
    sizes = {"image1": {0: "batch[1:4]"}, "image2": {0: "batch[1:4]"}}
    inputs = {"image1": image(128), "image2": image(128), "num_flow_updates": 2}
    return ExportSpec(module, example_kwargs=inputs, dynamic_shapes=sizes)


@model("LR-ASPP", "segmentation", "torchvision")
def lraspp() -> ExportSpec:
    segmentation = importlib.import_module("torchvision.models.segmentation")
    module = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    return ExportSpec(module, (image(64),), dynamic_shapes={"input": IMAGES})


# --- graphs -----------------------------------------------------------------------------------------------------------


def graph_network(name: str) -> ExportSpec:
    """Returns a model of torch_geometric for any number of nodes and of edges between them."""

    def draw(sizes: Mapping[str, int], generator: torch.Generator | None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        edges = torch.randint(sizes["nodes"], (2, sizes["edges"]), generator=generator)
        return (torch.randn(sizes["nodes"], 16, generator=generator), edges), {}

    return ExportSpec(
        getattr(importlib.import_module("torch_geometric.nn"), name)(16, 16, num_layers=2, out_channels=5),
        draw({"nodes": 7, "edges": 19}, None)[0],
        dynamic_shapes={"x": {0: "nodes[2:100]"}, "edge_index": {1: "edges[2:1000]"}},
        draw_inputs=draw,
    )


@model("GCN", "graphs", "torch_geometric")
def gcn() -> ExportSpec:
    return graph_network("GCN")


@model("GraphSAGE", "graphs", "torch_geometric")
def graph_sage() -> ExportSpec:
    return graph_network("GraphSAGE")


@model("GAT", "graphs", "torch_geometric")
def gat() -> ExportSpec:
    return graph_network("GAT")


# --- quantized --------------------------------------------------------------------------------------------------------


@model("BERT, int8 weights", "quantized", "transformers", "torchao")
def bert_int8() -> ExportSpec:
    quantization = importlib.import_module("torchao.quantization")
    spec = text_encoder("BertModel", "BertConfig")
    quantization.quantize_(spec.model.eval(), quantization.Int8WeightOnlyConfig())
    return spec


# --- exportkit's own --------------------------------------------------------------------------------------------------


@model("ARR-COC, ViT encoder", "vision, own operators")
def arr_coc() -> ExportSpec:
    from exportkit.arr_coc.model import export_spec

    return export_spec(encoder="vit-tiny")

"""A streaming detector of speech with the weights of PyPI's silero-vad (MIT).

    exportkit export speech -o speech_aoti.pt2

Each call takes the next 512 samples at 16 kHz of some streams, and answers how likely speech is in these 32 ms. What it
remembers of a stream is its state: the last 64 samples, and the two vectors of a recurrent cell.
"""

import importlib.util
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from exportkit import ExportSpec

SAMPLES, CONTEXT, WIDTH = 512, 64, 128

# silero-vad's ONNX and TorchScript files have the same weights. Its safetensors file is of another training: answers
# differ by up to 0.4.
_WEIGHTS = "silero_vad_16k_op15.onnx"
_LAYERS = {
    **{f"conv{number + 1}": f"encoder.{number}.reparam_conv" for number in range(4)},
    "lstm_cell": "decoder.rnn",
    "final_conv": "decoder.decoder.2",
}


class Network(nn.Module):
    """The published network as a function of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, WIDTH, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(WIDTH, WIDTH)
        self.final_conv = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, samples: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes samples [streams, 576] and h and c [streams, 128]; returns the probabilities [streams], h and c."""
        x = self.stft_conv(nn.functional.pad(samples.unsqueeze(1), (0, CONTEXT), "reflect"))
        x = (x[:, :129].square() + x[:, 129:].square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        return self.final_conv(h.unsqueeze(-1).relu()).sigmoid().mean((1, 2)), h, c


class Detector(nn.Module):
    """The network with its state in buffers.

    Args:
        streams: How many streams the module itself takes. A session of its package can have another number.
    """

    def __init__(self, streams: int = 1) -> None:
        super().__init__()
        self.network = Network()
        self.register_buffer("context", torch.zeros(streams, CONTEXT))
        self.register_buffer("h", torch.zeros(streams, WIDTH))
        self.register_buffer("c", torch.zeros(streams, WIDTH))

    def forward(self, chunk: Tensor) -> Tensor:
        """Takes the next samples [streams, 512], from -1 to 1; returns the probabilities of speech [streams]."""
        samples = torch.cat([self.context, chunk], dim=1)
        answer, h, c = self.network(samples, self.h, self.c)
        self.context.copy_(chunk[:, -CONTEXT:])
        self.h.copy_(h)
        self.c.copy_(c)
        return answer


def published(name: str) -> Path:
    """Returns a file of the installed silero-vad, which is not imported.

    Raises:
        ImportError: silero-vad is not installed.
    """
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        raise ImportError("silero-vad is not installed: pip install 'exportkit[examples]'")
    return Path(spec.origin).parent / "data" / name


def weights() -> dict[str, Tensor]:
    """Returns the published weights by the names of Network's parameters.

    Raises:
        ImportError: silero-vad is not installed.
    """
    theirs = {
        tensor.name.removeprefix("model."): torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in onnx.load(published(_WEIGHTS)).graph.initializer
    }
    named = {"stft_conv.weight": theirs.pop("stft.forward_basis_buffer")}
    for ours, layer in _LAYERS.items():
        named |= {f"{ours}.{name.removeprefix(f'{layer}.')}": theirs[name] for name in theirs if name.startswith(layer)}
    return named


def trained(streams: int = 1) -> Detector:
    """Returns the detector with the published weights.

    Raises:
        ImportError: silero-vad is not installed.
    """
    detector = Detector(streams)
    detector.network.load_state_dict(weights())
    return detector.eval()


def spec() -> ExportSpec:
    """A session of any number of streams up to 256."""
    return ExportSpec(
        model=trained(streams=2),
        name="speech",
        example_inputs=(torch.randn(2, SAMPLES) / 8,),
        dynamic_shapes={"chunk": {0: "streams[1:256]"}},
        state=dict.fromkeys(("context", "h", "c"), "streams"),
    )

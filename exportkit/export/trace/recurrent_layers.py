"""Keeps recurrent layers whole while a model is traced: torch.export would unroll them, which fixes their length.

`torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`, which `nn.LSTM`, `nn.GRU` and `nn.RNN` call, and what packs and unpacks
sequences become operators of ours (`exportkit.recurrent`) for as long as the block runs. torch's own functions stay
where a layer is trained, differentiated or under autocast: then its length is fixed.

tests/recurrent/test_canary.py fails as soon as torch.export keeps them whole by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase
from torch.nn.utils.rnn import PackedSequence

from exportkit.export.torch_patches.patched import Function, all_patched, instead
from exportkit.recurrent.fakes import registered

Size = int | torch.SymInt

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Keeps recurrent layers whole in what is traced in the block."""
    batches, torchs = _KnownBatches(), vars(torch._VF)["vf"]
    functions: dict[str, Function] = {
        "_pack_padded_sequence": partial(batches.pack, torchs._pack_padded_sequence),
        "_pad_packed_sequence": partial(batches.unpack, torchs._pad_packed_sequence),
        **{name: partial(_layer, name, getattr(torchs, name)) for name in _LAYERS},
    }
    for name, function in functions.items():
        vars(function)["__name__"] = name  # Dynamo, which traces torch.cond, asks every function of torch
    with all_patched(
        ("_VF.vf", lambda vf: _Instead(vf, functions)),
        *((f"torch.{name}", instead(function)) for name, function in functions.items()),
        ("RNNBase.get_expected_hidden_size", batches.expected_hidden_size),
        *((f"{layer}.forward", batches.with_first_state) for layer in ("LSTM", "GRU", "RNN")),
    ):
        yield


class _Instead:
    """Some functions in the place of torch's; the others are torch's."""

    def __init__(self, torchs: Any, functions: dict[str, Function]) -> None:
        self._torchs = torchs
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchs, name)


def _layer(name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls our operator with the arguments of torch's function: of sequences, or of packed ones."""
    if kwargs:  # nobody does, and torch's names are no promise
        return original(*args, **kwargs)
    packed = isinstance(args[1 if name == "lstm" else 2], Tensor)
    batch_sizes, batch_first = (args[1], False) if packed else (None, args[-1])
    input, hx, weights, biases, layers, dropout, train, bidirectional = (args[0], *args[2:]) if packed else args[:-1]
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if (train and dropout) or _is_changed(input, *states, *weights):
        return original(*args)
    operator = getattr(registered(), name)
    if batch_first:
        input = input.transpose(0, 1)
    output, *last = operator(
        input, batch_sizes, *states, list(weights), biases, layers, bidirectional, weights[0].requires_grad
    )
    return (output.transpose(0, 1) if batch_first else output, *last)


def _is_changed(*tensors: Tensor) -> bool:
    """Tells whether torch would cast the tensors, or keep what a gradient needs."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _KnownBatches:
    """Packs and unpacks sequences, and remembers their batch.

    It is a number in a tensor, `batch_sizes[0]`, and would be a size that depends on data. What is packed in the block
    has the batch of what it was packed from.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Size]] = {}  # by the id of batch_sizes, which is kept for it

    def of(self, batch_sizes: Tensor) -> Size | None:
        """Returns the batch of packed sequences, if they were packed in the block."""
        return self._known.get(id(batch_sizes), (None, None))[1]

    def pack(self, original: Function, input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Packs sequences, as torch's function does."""
        if _is_changed(input):
            return original(input, lengths, batch_first)
        data, batch_sizes = registered().pack(input, lengths, batch_first)
        self._known[id(batch_sizes)] = batch_sizes, input.shape[0 if batch_first else 1]
        return data, batch_sizes

    def unpack(
        self, original: Function, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, length: Size
    ) -> Any:
        """Unpacks sequences, as torch's function does."""
        batch = self.of(batch_sizes)
        if batch is None or _is_changed(data):
            return original(data, batch_sizes, batch_first, padding, length)
        padded, lengths = registered().unpack(data, batch_sizes, padding, length, batch)
        return padded.transpose(0, 1) if batch_first else padded, lengths

    def expected_hidden_size(
        self, original: Function, module: RNNBase, input: Tensor, batch_sizes: Tensor | None
    ) -> Any:
        """Does what torch's method does, without its `int(batch_sizes[0])`, which would fix the batch."""
        if batch_sizes is None or (batch := self.of(batch_sizes)) is None:
            return original(module, input, batch_sizes)
        return _states(module), batch, module.proj_size or module.hidden_size

    def with_first_state(
        self, forward: Function, module: RNNBase, input: Tensor | PackedSequence, hx: Any = None
    ) -> Any:
        """Gives a layer's forward the zeros which it would make of the batch in `batch_sizes`."""
        if hx is None and isinstance(input, PackedSequence) and (batch := self.of(input.batch_sizes)) is not None:
            hx = input.data.new_zeros(_states(module), batch, module.proj_size or module.hidden_size)
            if isinstance(module, nn.LSTM):
                hx = hx, input.data.new_zeros(_states(module), batch, module.hidden_size)
        return forward(module, input, hx)


def _states(module: RNNBase) -> int:
    return module.num_layers * (2 if module.bidirectional else 1)

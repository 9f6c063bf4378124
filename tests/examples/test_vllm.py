"""examples/vllm: a Llama of vLLM's operators, which is a Llama, and writes from C++ what eager writes.

The operators are those of vllm_on_cpu.cpp.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.errors import RefusedValueError
from exportkit.libraries import load_library
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported
from tests.subprocesses import output_of

TEXTS = ["Call me Ishmael.", "It was", "The sky above the port"]
COUNT = 20


@pytest.fixture(scope="module")
def decoder() -> ModuleType:
    load_library(example_packages.NAMED["vllm"].operators())
    return imported("example_vllm", example_packages.EXAMPLES / "vllm" / "decoder.py")


def rows(texts: list[str]) -> tuple[Tensor, Tensor]:
    """The tokens of texts, [batch, longest], and their lengths."""
    coded = [torch.tensor(list(text.encode())) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(coded, batch_first=True), torch.tensor([len(each) for each in coded])


def written(model, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The likeliest tokens after each text, [COUNT, batch]."""
    following = [model.prefill(tokens, lengths).argmax(-1, keepdim=True)]
    while len(following) < COUNT:
        following.append(model.decode(following[-1]).argmax(-1, keepdim=True))
    return torch.cat(following, dim=1).T


@torch.no_grad()
def test_it_is_a_llama(decoder: ModuleType) -> None:
    """examples/llama, in float32 and with these weights, has the same logits, for texts of different lengths."""
    llama = imported("example_llama_of_vllm", example_packages.EXAMPLES / "llama" / "llama.py")
    ours = decoder.make(decoder.Config(), batch=len(TEXTS))
    sizes = {name: getattr(ours.config, name) for name in llama.Config.__dataclass_fields__}
    theirs = llama.Llama(llama.Config(**sizes))
    given = {"embedding.weight": ours.embedding.weight, "head.weight": ours.head.weight, "norm.weight": ours.norm}
    for number, layer in enumerate(ours.layers):
        gate, up = layer.gate_up.weight.chunk(2)
        for name, weight in {
            "before_attention.weight": layer.before_attention,
            "before_mlp.weight": layer.before_mlp,
            "attention.qkv.weight": layer.qkv.weight,
            "attention.out.weight": layer.out.weight,
            "gate.weight": gate,
            "up.weight": up,
            "down.weight": layer.down.weight,
        }.items():
            given[f"layers.{number}.{name}"] = weight
    theirs.load_state_dict({name: weight.float() for name, weight in given.items()}, strict=False)
    clean = {name: buffer.clone() for name, buffer in theirs.named_buffers()}
    tokens, lengths = rows(TEXTS)
    found = [ours.prefill(tokens, lengths), ours.decode(tokens[:, :1])]
    for row, length in enumerate(lengths):
        theirs.load_state_dict(clean, strict=False)
        expected = [theirs.prefill(tokens[row : row + 1, :length]), theirs.decode(tokens[row : row + 1, :1])]
        for ones, others in zip(found, expected):
            torch.testing.assert_close(ones[row], others[0], atol=0.1, rtol=0.05)  # bfloat16, two layers


@torch.no_grad()
def test_cpp_writes_what_eager_writes(decoder: ModuleType, generator: Path) -> None:
    eager = written(decoder.make(decoder.Config(), batch=len(TEXTS)), *rows(TEXTS))
    said = output_of(generator, example_packages.made("vllm"), str(COUNT), *TEXTS)
    assert [list(map(int, line.split())) for line in said.splitlines()] == eager.tolist()


def test_a_sequence_has_pages_for_so_many_tokens(decoder: ModuleType) -> None:
    length = decoder.Config().length
    with exportkit.load(example_packages.made("vllm")) as model, model.session(batch=1) as session:
        tokens = torch.zeros(1, length // 2, dtype=torch.int64)
        for _ in range(2):
            session.prefill(tokens, torch.tensor([length // 2]))
        with pytest.raises(RefusedValueError, match="index 4 is out of range"):
            session.decode(tokens[:, :1])
        session.reset()
        session.decode(tokens[:, :1])

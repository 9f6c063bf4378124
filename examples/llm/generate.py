"""Generates with a package of llm.py, several texts at once: `python generate.py llm.pt2 "One text" "Another"`.

It needs torch and exportkit, not transformers. Tokens are bytes, or those of a tokenizer.json. What follows one text
is written as it comes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import exportkit

Choose = Callable[[Tensor], Tensor]


def greedy(logits: Tensor) -> Tensor:
    """Chooses the likeliest token of each row, [batch, 1]."""
    return logits.argmax(-1, keepdim=True)


def sampler(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Choose:
    """Returns a function that draws the next token of each row as transformers' `generate` does.

    Args:
        temperature: What the logits are divided by.
        top_k: Keeps the likeliest ones. 0 keeps all.
        top_p: Keeps the likeliest ones that have this probability together.
        generator: Draws. Default: torch's own.
    """

    def choose(logits: Tensor) -> Tensor:
        logits = logits / temperature
        if top_k:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if top_p < 1:
            rising, order = logits.sort()
            unlikely = rising.softmax(-1).cumsum(-1) <= 1 - top_p
            unlikely[:, -1] = False  # one is left
            logits = logits.masked_fill(unlikely.scatter(1, order, unlikely), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return choose


def read(session: Any, prompts: Sequence[Sequence[int]], most: int = 64, device: torch.device | str = "cpu") -> Tensor:
    """Reads a prompt into each row of a session, at most `most` tokens a call; returns the logits after each."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=device)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    logits = None
    for begin in range(0, padded.shape[1], most):
        part = padded[:, begin : begin + most].contiguous()
        count = (lengths - begin).clamp(0, part.shape[1])
        new = session.prefill(part, count)
        logits = new if logits is None else torch.where((count > 0)[:, None], new, logits)
    assert logits is not None
    return logits


def generate(session: Any, logits: Tensor, choose: Choose = greedy) -> Iterator[Tensor]:
    """Yields the next tokens, [batch, 1], for as long as the caller wants them."""
    while True:
        token = choose(logits)
        yield token
        logits = session.decode(token)


class Bytes:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return bytes(tokens).decode(errors="replace")


class Vocabulary:
    """The tokens of a tokenizer.json."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return str(self._tokenizer.decode(tokens))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--count", type=int, default=100, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=64, help="tokens that one call reads, as at export")
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--cuda-graphs", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Writes the texts, and how fast it was."""
    options = _arguments()
    tokens = Vocabulary(options.tokenizer) if options.tokenizer else Bytes()
    texts = [tokens.encode(text) for text in options.texts]
    with exportkit.load(options.package, cuda_graphs=options.cuda_graphs) as model:
        choose = greedy
        if options.temperature:
            generator = torch.Generator(model.device).manual_seed(options.seed)
            choose = sampler(options.temperature, options.top_k, options.top_p, generator)
        with model.session(batch=len(texts)) as session:
            begin = time.perf_counter()
            logits = read(session, texts, options.prompt, model.device)
            first = time.perf_counter()
            written: list[list[int]] = [[] for _ in texts]
            shown = ""
            for _, token in zip(range(options.count), generate(session, logits, choose)):
                for row, new in zip(written, token[:, 0].tolist()):
                    row.append(new)
                if len(texts) == 1:
                    whole = tokens.decode(written[0])
                    if not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may have several tokens
                        print(whole[len(shown) :], end="", flush=True)
                        shown = whole
            seconds = time.perf_counter() - first
            print(tokens.decode(written[0])[len(shown) :] if len(texts) == 1 else "")
            for text, row in zip(options.texts, written if len(texts) > 1 else ()):
                print(f"{text!r}: {tokens.decode(row)}")
            speed = f"{len(texts) * options.count / seconds:.0f} tokens/s, first after {1000 * (first - begin):.0f} ms"
            print(speed, file=sys.stderr)


if __name__ == "__main__":
    main()

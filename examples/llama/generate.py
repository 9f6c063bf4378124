"""Generates with a package of llama.py: `python generate.py llama.pt2`.

The likeliest token follows each time. Two sessions take turns; neither sees the other's cache.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import exportkit


def greedy(prefill: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor], prompt: Tensor) -> Iterator[Tensor]:
    """Yields the tokens [batch, 1] that follow a prompt [batch, n], for as long as the caller wants them."""
    token = prefill(prompt).argmax(-1, keepdim=True)
    while True:
        yield token
        token = decode(token).argmax(-1, keepdim=True)


def main() -> None:
    """Prints 16 tokens after each of two prompts."""
    with exportkit.load(sys.argv[1]) as model:
        prompts = [torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[2, 7, 1, 8]])]
        sessions = [model.session(batch=1) for _ in prompts]
        writers = [greedy(session.prefill, session.decode, prompt) for session, prompt in zip(sessions, prompts)]
        texts = [[int(next(writer)) for writer in writers] for _ in range(16)]
        for text in zip(*texts):
            print(*text)


if __name__ == "__main__":
    main()

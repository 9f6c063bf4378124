"""The kernels of examples/paged_cache on a GPU: microseconds, and the bytes a second that they read and write.

    python -m benchmarks.paged_cache

The operators are built as tests/examples builds them. Contexts are in scattered blocks of 16 tokens, bfloat16; 8 heads
of keys and values of 128. CUDA events time calls that follow one another; medians of seven rounds.
Keys and values do not fit the cache of a GPU but in the first row.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.cuda_graphs import microseconds
from tests.examples.paged_package import built_package

SIZE, KV_HEADS, WIDTH = 16, 8, 128


def main() -> None:
    sys.path.insert(0, str(built_package()))
    from tests.examples.paged_calls import paged_attention, read_call, reshape_and_cache, write_call

    on = {"device": "cuda", "dtype": torch.bfloat16}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| operator | sequences | tokens each | queries a head | µs | GB/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for batch, length, group in [
        (1, 4096, 4),
        (1, 131072, 4),
        (16, 8192, 1),
        (16, 8192, 4),
        (16, 8192, 8),
        (128, 2048, 4),
    ]:
        call = read_call([length] * batch, SIZE, KV_HEADS * group, KV_HEADS, WIDTH, **on)
        time = microseconds(lambda call=call: paged_attention(*call))
        moved = 2 * 2 * batch * length * KV_HEADS * WIDTH
        print(f"| paged_attention | {batch} | {length} | {group} | {time:.1f} | {moved / time / 1e3:.0f} |")
    for tokens in (1, 128, 65536):
        call = write_call(tokens, 8192, SIZE, KV_HEADS, WIDTH, **on)
        time = microseconds(lambda call=call: reshape_and_cache(*call))
        moved = 2 * 2 * 2 * tokens * KV_HEADS * WIDTH
        print(f"| reshape_and_cache | {tokens} | 1 | | {time:.1f} | {moved / time / 1e3:.0f} |")


if __name__ == "__main__":
    main()

"""What reading and writing a request's messages costs, without a server: `python -m benchmarks.serve.protocol_cost`.

Prints the best of many calls in one thread, and beside each its alternative in the same run.
docs/adr/0029-binary-tensors.md has the rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from exportkit.serve.http.infer_endpoint import encode_answer
from exportkit.serve.protocol.http_request import BodyRules, body_buffer, parse_body
from exportkit.serve.protocol.inference import InferAnswer, InferTiming, OutputTensor
from exportkit.serve.protocol.parameters import OutputForm, OutputForms
from exportkit.serve.protocol.tensors import aligned_bytes

SHAPE = [1, 3, 512, 512]
SIZE = 3 << 20  # bytes of a float32 image of this shape
CHUNK = 1 << 16  # what a server hands over at a time
RULES = BodyRules([], [], batched=True, max_bytes=SIZE)


def main() -> None:
    torch.set_num_threads(1)
    print("| 3 MB of float32 | ms |\n| --- | --: |")
    for what, call in (*_binary(), *_passes(), *_json(), *_answers()):
        _print(what, call)


def _print(what: str, call: Callable[[], object]) -> None:
    times, start = [], time.perf_counter()
    while len(times) < 30 or (len(times) < 500 and time.perf_counter() - start < 2):
        began = time.perf_counter()
        kept = call()
        times.append(time.perf_counter() - began)
        del kept
    print(f"| {what} | {min(times) * 1e3:.3f} |")


def _header(**more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "image", "shape": SHAPE, "datatype": "FP32", **more}]}).encode()


def _parse(body: memoryview, length: int | None) -> object:
    return parse_body(body, length, RULES)


def _binary() -> Iterator[tuple[str, Callable[[], object]]]:
    header = _header(parameters={"binary_data_size": SIZE})
    sent = header + bytes(SIZE)
    chunks = [sent[start : start + CHUNK] for start in range(0, len(sent), CHUNK)]
    aligned, misaligned = body_buffer(len(sent), len(header)), aligned_bytes(len(sent), len(header) + 4)
    aligned[:] = misaligned[:] = sent

    def receive() -> memoryview:
        body, start = body_buffer(len(sent), len(header)), 0
        for chunk in chunks:
            body[start : start + len(chunk)] = chunk
            start += len(chunk)
        return body

    yield "receive binary data into `body_buffer`", receive
    yield "join the same chunks, unaligned", lambda: b"".join(chunks)
    yield "read the request", lambda: _parse(aligned, len(header))
    yield "read the request where its tensor is not aligned", lambda: _parse(misaligned, len(header))


def _passes() -> Iterator[tuple[str, Callable[[], object]]]:
    for skipped in (0, 4):
        data = aligned_bytes(SIZE + 4)[skipped : SIZE + skipped]
        tensor = torch.frombuffer(data, dtype=torch.float32).fill_(1)
        result = torch.empty_like(tensor)
        start = "a multiple of 64 bytes" if not skipped else f"{skipped} bytes beyond"
        yield f"`torch.mul` of a tensor that starts at {start}", partial(torch.mul, tensor, 2, out=result)


def _json() -> Iterator[tuple[str, Callable[[], object]]]:
    sent = _header(data=np.random.default_rng(0).random(SHAPE, np.float32).tolist())
    body = memoryview(sent)
    yield f"read it as JSON ({len(sent) / 1e6:.0f} MB)", lambda: _parse(body, None)

    def naive() -> object:
        return np.array(json.loads(sent)["inputs"][0]["data"], np.float32)

    yield "the same with `json` and numpy alone", naive


def _answers() -> Iterator[tuple[str, Callable[[], object]]]:
    array = np.random.default_rng(0).random(SHAPE, np.float32)
    output = OutputTensor("y", "FP32", array.shape, array.reshape(-1).view(np.uint8).data)
    answer = InferAnswer("model", "1", "", (output,), InferTiming(0, 0, 0, 0, 1))
    for form, what in ((OutputForm(True), "binary data"), (OutputForm(False), "JSON")):
        forms = OutputForms(form, {})
        yield f"write an answer as {what}", partial(encode_answer, answer, forms)


if __name__ == "__main__":
    main()

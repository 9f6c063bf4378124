"""Models without state in Triton: each answer is the package's own, called in this process."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import tritonclient.http
from tritonclient.utils import InferenceServerException

import exportkit
from exportkit.package.structure import flatten
from tests.runtime import tiny
from tests.serve.engine import rows
from tests.serve.engine.asking import equal as same
from tests.triton_backend.triton_server import Tensors, Triton, infer


def direct(package: Path) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """Calls the package in this process."""
    model = exportkit.load(package)
    names = [output.name for output in model.manifest.call.outputs]

    def answer(inputs: Tensors) -> dict[str, torch.Tensor]:
        return dict(zip(names, flatten(model(*inputs.values()), torch.is_tensor)[1], strict=True))

    return answer


def test_what_triton_serves_is_completed_from_the_package(triton: Triton, rows_package: Path) -> None:
    config = triton.config(triton.add("completed", rows_package))
    assert config["max_batch_size"] == 32
    assert "dynamic_batching" in config
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
        ("x", "TYPE_FP32", [3]),
        ("coupling", "TYPE_FP32", [1]),
        ("label", "TYPE_INT64", [1]),
        ("flag", "TYPE_BOOL", [2]),
        ("half", "TYPE_BF16", [2, 2]),
    ]
    assert [each["name"] for each in config["output"]] == list(rows.OUTPUTS)
    assert [each["kind"] for each in config["instance_group"]] == ["KIND_MODEL"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_each_dtype_is_answered(triton: Triton, rows_package: Path, protocol: str) -> None:
    name, inputs = triton.add("dtypes", rows_package), rows.example(5)
    answer = infer(getattr(triton, protocol), name, inputs | {"label": inputs["label"][:, None]})
    wanted = rows.answer(inputs)
    assert answer["next"].shape == (5, 1)  # Triton's protocol has no scalar for each row
    assert same(answer, wanted | {"next": wanted["next"][:, None]})


@pytest.fixture(scope="module")
def arr_coc(triton: Triton, arr_coc_package: Path) -> str:
    return triton.add("arr_coc", arr_coc_package)


def picture(rows: int, high: int, wide: int) -> dict[str, torch.Tensor]:
    return {"image": torch.rand(rows, 3, 16 * high, 16 * wide), "query": torch.randn(rows, 64)}


def test_sizes_vary_and_only_outputs_that_are_asked_for_are_sent(
    triton: Triton, arr_coc: str, arr_coc_package: Path
) -> None:
    wanted = direct(arr_coc_package)
    for sizes in ((1, 14, 14), (3, 15, 17), (2, 4, 60)):
        inputs = picture(*sizes)
        assert same(infer(triton.grpc, arr_coc, inputs), wanted(inputs)), sizes
    outputs = [tritonclient.http.InferRequestedOutput("scores")]
    assert list(infer(triton.http, arr_coc, inputs, outputs=outputs)) == ["scores"]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Calls it with each number, in so many threads."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def test_requests_are_joined_and_a_wrong_one_fails_alone(triton: Triton, arr_coc: str, arr_coc_package: Path) -> None:
    """Mixed sizes and mixed rows at the same time; each third one has an image that is too low."""
    asked = [picture(1 + number % 3, 4 + number % 2, 4) for number in range(48)]
    for number in range(0, 48, 3):
        asked[number]["image"] = asked[number]["image"][:, :, :40]
    direct_call = direct(arr_coc_package)
    wanted = [direct_call(inputs) if number % 3 else None for number, inputs in enumerate(asked)]
    before = triton.statistics(arr_coc)
    refused = []

    def work(thread: int) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton.http_port}") as client:
            for number in range(thread, 48, 8):
                if number % 3:
                    assert same(infer(client, arr_coc, asked[number]), wanted[number])
                    continue
                with pytest.raises(InferenceServerException, match=r"InputError: .*image") as error:
                    infer(client, arr_coc, asked[number])
                refused.append(error.value.status())

    def more(*path: str) -> int:
        one, other = before, triton.statistics(arr_coc)
        for key in path:
            one, other = one.get(key, {}), other[key]
        return int(other) - int(one or 0)

    answered = [inputs for number, inputs in enumerate(asked) if number % 3]
    for times in range(1, 11):  # on a busy machine, no two may be there at one time
        in_threads(8, work)
        end = time.monotonic() + 30
        while more("inference_stats", "success", "count") < times * len(answered) and time.monotonic() < end:
            time.sleep(0.05)  # Triton counts a request after it has answered
        if more("execution_count") < times * len(answered):
            break
    assert refused == ["400"] * 16 * times
    assert more("inference_count") == times * sum(len(inputs["image"]) for inputs in answered)
    assert more("inference_stats", "success", "count") == times * len(answered)
    assert more("inference_stats", "fail", "count") == 16 * times
    assert more("execution_count") < times * len(answered)
    assert triton.metric("nv_inference_request_failure", arr_coc, reason="BACKEND") == 16 * times
    for part in ("compute_input", "compute_infer", "compute_output"):
        assert 0 < more("inference_stats", part, "ns") < 100e9
    assert more("inference_stats", "compute_infer", "ns") > more("inference_stats", "compute_output", "ns")


def test_a_value_that_is_refused_fails_alone(triton: Triton, words_package: Path) -> None:
    name = triton.add("words", words_package)
    wanted = direct(words_package)

    def work(thread: int) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton.http_port}") as client:
            for number in range(10):
                ids = {"ids": torch.tensor([[thread, number]])}
                if thread != 3:
                    assert same(infer(client, name, ids), wanted(ids))
                    continue
                with pytest.raises(InferenceServerException, match="RefusedValueError") as error:
                    infer(client, name, {"ids": torch.tensor([[1, 77]])})
                assert error.value.status() == "400"

    in_threads(6, work)


def test_rows_that_influence_one_another_are_not_joined(triton: Triton, coupled_package: Path) -> None:
    """Clients' shapes are the same as with batches, and a request may have several rows."""
    name = triton.add("coupled", coupled_package)
    assert triton.config(name)["max_batch_size"] == 0
    assert "each request by itself: rows influence one another" in triton.log
    inputs = rows.example(3, 1.0)
    answer, wanted = infer(triton.http, name, inputs), rows.answer(inputs)
    torch.testing.assert_close(answer.pop("sum"), wanted.pop("sum"))
    assert same(answer, wanted)


def test_a_model_without_rows_of_its_own(triton: Triton, tiny_package: Path) -> None:
    """One of its inputs has no rows; another one's name has a point."""
    name = triton.add("tiny", tiny_package)
    args, kwargs = tiny.example(2, 3)
    inputs = {"image": args[0], "query.features": args[1]["features"], "offset": kwargs["offset"]}
    wanted = tiny.Flat()(*inputs.values())
    answer = infer(triton.grpc, name, inputs)
    assert list(answer) == ["regions.mean", "regions.doubled", "rest.0"]
    assert all(torch.allclose(one, other) for one, other in zip(answer.values(), wanted, strict=True))


@pytest.mark.parametrize("count", [3, 0])
def test_scalars_and_sizes_that_depend_on_values(triton: Triton, lookups_package: Path, count: int) -> None:
    """Triton's protocol has no scalar: [1] is one. An output may have no elements."""
    name = triton.add("lookups", lookups_package)
    inputs = {
        "ids": torch.randint(0, 10, (6,)),
        "x": torch.rand(6, 12),
        "divisor": torch.randint(1, 5, (6,)),
        "row": torch.tensor(1),
        "count": torch.tensor(count),
    }
    wanted = direct(lookups_package)(inputs)
    answer = infer(triton.grpc, name, inputs | {"row": inputs["row"][None], "count": inputs["count"][None]})
    assert answer["new"].shape == (count,)
    assert same(answer, wanted)


def test_a_reload_under_load_leaves_no_request_without_an_answer(triton: Triton, rows_package: Path) -> None:
    name, ends, count = triton.add("reloaded", rows_package), threading.Event(), [0]
    inputs = rows.example(2)
    inputs["label"] = inputs["label"][:, None]
    wanted = rows.answer(inputs)

    def work(thread: int) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton.http_port}") as client:
            while not ends.is_set():
                assert same(infer(client, name, inputs), wanted)
                count[0] += 1

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        try:
            working = [pool.submit(work, number) for number in range(3)]
            for _ in range(3):
                before = count[0]
                triton.load(triton.put("reloaded", rows_package))
                while count[0] == before and not any(each.done() for each in working):
                    time.sleep(0.01)
            package = triton.repository / name / "1" / "rows.pt2"
            package.unlink()  # the model has it mapped
            package.write_bytes(b"no package")
            with pytest.raises(InferenceServerException, match="NotAnArchiveError"):
                triton.load(name)
        finally:
            ends.set()
        for each in working:
            each.result()
    assert same(infer(triton.http, name, inputs), wanted)  # the bad package left the old one
    triton.http.unload_model(name)

"""What a config.pbtxt may say beside the package, and what it may not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.runtime import stateful
from tests.serve.engine import rows
from tests.triton_backend.triton_server import Triton, infer, parameter

INPUTS = [
    'name: "x" data_type: TYPE_FP32 dims: [ 3 ]',
    'name: "coupling" data_type: TYPE_FP32 dims: [ 1 ]',
    'name: "label" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] }',
    'name: "flag" data_type: TYPE_BOOL dims: [ 2 ]',
    'name: "half" data_type: TYPE_BF16 dims: [ -1, 2 ]',
]


def listed(inputs: list[str]) -> str:
    return "".join(f"input {{ {each} }}\n" for each in inputs)


def changed(index: int, old: str, new: str) -> str:
    return listed([each.replace(old, new) if place == index else each for place, each in enumerate(INPUTS)])


def test_what_it_says_more_wins(triton: Triton, rows_package: Path) -> None:
    given = (
        "max_batch_size: 4\n"
        + listed(INPUTS)
        + "dynamic_batching { max_queue_delay_microseconds: 100 }\n"
        + "instance_group { kind: KIND_CPU count: 2 }\n"
        + parameter("threads", "1")
    )
    name = triton.add("more", rows_package, given)
    config = triton.config(name)
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert config["input"][4]["dims"] == [-1, 2]
    assert [each["name"] for each in config["output"]] == list(rows.OUTPUTS)
    inputs = rows.example(4)
    answer = infer(triton.http, name, inputs | {"label": inputs["label"][:, None]})
    assert torch.equal(answer["sum"], rows.answer(inputs)["sum"])
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4"):
        infer(triton.http, name, rows.example(5) | {"label": torch.zeros(5, 1, dtype=torch.int64)})


def test_all_sizes_and_no_batch(triton: Triton, recorder_package: Path) -> None:
    """Without max_batch_size, sizes that have the rows say that requests are not joined."""
    given = parameter("method", "embed") + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    name = triton.add("whole", recorder_package, given)
    assert triton.config(name)["max_batch_size"] == 0
    x = torch.randn(2, stateful.WIDTH)
    assert torch.allclose(infer(triton.http, name, {"x": x})["0"], torch.tanh(x) * 2)


@pytest.mark.parametrize(
    ("config", "said"),
    {
        "max_batch_size: 33": "config.pbtxt has max_batch_size: 33, and the package allows at most 32 rows in a call.",
        changed(0, "FP32", "FP16"): "`x` is TYPE_FP16, the package has float32. Without `input` it is completed",
        changed(0, "[ 3 ]", "[ 4 ]"): "`x` has the dims [4], the package [3]",
        changed(4, "[ -1, 2 ]", "[ 2 ]"): "`half` has the dims [2], the package [2, 2]",
        changed(1, "coupling", "copling"): "there is no input `copling`",
        listed(INPUTS[:4]): "it does not have the input `half`",
        'output { name: "sum" data_type: TYPE_BF16 dims: [ 3 ] }': "`sum` is TYPE_BF16, the package has float32",
        "sequence_batching { }": "config.pbtxt has sequence_batching, and the method `forward` has no state.",
        parameter("thread", "1"): "config.pbtxt has the parameter `thread` with the value `1`. There are `method`",
        parameter("threads", "many"): "config.pbtxt has the parameter `threads` with the value `many`.",
        parameter("cuda_graphs", "yes"): "config.pbtxt has the parameter `cuda_graphs` with the value `yes`.",
        parameter("cuda_graphs", "true"): "CUDA graphs",
        parameter("method", "decode"): "the package has no method `decode` but forward.",
        'default_model_filename: "other.pt2"': "other.pt2",
    }.items(),
)
def test_what_contradicts_the_package_is_refused(triton: Triton, rows_package: Path, config: str, said: str) -> None:
    if config.startswith("input"):
        config = "max_batch_size: 8\n" + config
    assert said in triton.refusal("refused", rows_package, config)


def test_requests_that_cannot_be_joined_have_no_batch(triton: Triton, coupled_package: Path) -> None:
    said = "and the package allows no requests in one call: rows influence one another"
    for config in ("max_batch_size: 8", "dynamic_batching { }"):
        assert said in triton.refusal("refused", coupled_package, config)


@pytest.mark.parametrize(
    ("config", "said"),
    {
        "": r"the package has several methods: push, peek, embed, fill. Name one in config.pbtxt: parameters \{",
        parameter("method", "fill"): "the method writes into its input `out`",
        parameter("method", "push") + "dynamic_batching { }": "has state, which needs sequence_batching. Leave it out.",
        parameter("method", "push") + "sequence_batching { }": r"must have oldest \{ \} and state \[ \{ input_name",
    }.items(),
)
def test_what_does_not_fit_a_method_is_refused(triton: Triton, recorder_package: Path, config: str, said: str) -> None:
    assert re.search(said, triton.refusal("refused", recorder_package, config))


def test_a_folder_with_two_packages_does_not_say_which(triton: Triton, rows_package: Path) -> None:
    name = triton.put("two", rows_package)
    (triton.repository / name / "1" / "other.pt2").write_bytes(b"")
    with pytest.raises(InferenceServerException, match=r"must have one \.pt2 file, it has .*other\.pt2, .*rows\.pt2\."):
        triton.load(name)

"""A request is checked before it waits: what the model does not take is refused in the package's words."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest
import torch

from exportkit.package import manifest as m
from exportkit.serve.engine.checked_request import RequestPlan, bytes_of, tensor_of
from exportkit.serve.protocol.datatypes import DATATYPES
from exportkit.serve.protocol.inference import InferRequest, InputTensor
from exportkit.serve.statuses import BackendError, BadRequestError
from tests.runtime import tiny
from tests.serve.engine import rows
from tests.serve.engine.asking import given, request

TINY = RequestPlan(tiny.call(), batched=False)


def tiny_inputs(batch: int = 2, gh: int = 3) -> dict[str, torch.Tensor]:
    args, kwargs = tiny.example(batch, gh)
    return {"image": args[0], "query.features": args[1]["features"], "offset": kwargs["offset"]}


def test_inputs_come_in_any_order_and_leave_in_the_models():
    inputs = tiny_inputs()
    checked = TINY.check(request(dict(reversed(inputs.items()))))
    assert all(map(torch.equal, checked.inputs, inputs.values()))
    assert checked.size == sum(tensor.nbytes for tensor in inputs.values())
    assert list(checked.outputs) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("offset"), "the input `offset` is missing"),
        (lambda i: i.update(mode=torch.zeros(1)), "the model has no input `mode`"),
        (lambda i: i.update(image=i["image"].double()), "`image` must be FP32, got FP64"),
        (lambda i: i.update(image=i["image"][0]), "`image` must have 4 dimensions, got shape [3, 48, 8]"),
        (lambda i: i.update(offset=torch.zeros(6)), "`offset` must have size 5 in dimension 0, got shape [6]"),
        (lambda i: i.update(image=i["image"][:, :, :20]), "from 16 to 96, in steps of 16 in dimension 2"),
        (lambda i: i.update(image=i["image"][:1]), "but `image` has batch = 1: they must agree"),
        (lambda i: i.update(tiny_inputs(5)), "must have a size from 1 to 4 in dimension 0 (batch), got shape [5"),
    ],
)
def test_a_request_that_the_package_does_not_allow_is_refused(change, message):
    inputs = tiny_inputs()
    change(inputs)
    with pytest.raises(BadRequestError) as refusal:
        TINY.check(request(inputs))
    assert message in refusal.value.message


def test_unknown_names_are_answered_with_those_there_are():
    with pytest.raises(BadRequestError, match=r"no output `other`: its outputs are `regions.mean`, `regions.doubled`"):
        TINY.check(request(tiny_inputs(), outputs=("other",)))
    with pytest.raises(BadRequestError, match=r"image: float32\[batch, 3, 16\*gh, 8\]; query.features"):
        TINY.check(InferRequest(()))


def test_a_dtype_that_the_protocol_does_not_have_is_refused_before_serving():
    inputs = tuple(msgspec.structs.replace(each, dtype="complex64") for each in tiny.call().inputs)
    with pytest.raises(
        BackendError, match="`image` cannot be served: the Open Inference Protocol has no datatype for complex64"
    ):
        RequestPlan(msgspec.structs.replace(tiny.call(), inputs=inputs), batched=False)


def test_a_request_without_rows_runs_alone():
    dimensions = (m.Dimension(name="batch", min=0, max=32),)
    plan = RequestPlan(msgspec.structs.replace(rows.call(), dimensions=dimensions), batched=True)
    one, other = (plan.check(request(rows.example(0))) for _ in range(2))
    assert one.rows == other.rows == 1
    assert one.shape != other.shape
    assert [tuple(tensor.shape) for tensor in one.inputs] == [(0, *rows.SHAPES[name]) for name in rows.DTYPES]


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DATATYPES)
def test_every_dtype_goes_to_bytes_and_back_without_a_copy(dtype):
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (3, 2, kind.itemsize), dtype=torch.uint8)
    tensor = raw.view(kind).reshape(3, 2)
    content = bytes_of(tensor)
    assert content.nbytes == tensor.nbytes
    assert bytes(content) == raw.numpy().tobytes()
    back = tensor_of(given("x", tensor), kind)
    assert back.dtype is kind
    assert back.shape == tensor.shape
    assert bytes(bytes_of(back)) == bytes(content)
    assert (back.data_ptr() == tensor.data_ptr()) == (dtype != "bool")


def test_a_boolean_is_true_for_every_byte_but_0():
    found = tensor_of(InputTensor("flag", "BOOL", (4,), memoryview(b"\x00\x01\x02\xff")), torch.bool)
    assert found.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_read_only_bytes_are_taken(recwarn):
    content = np.arange(6, dtype=np.float32).tobytes()
    tensor = tensor_of(InputTensor("x", "FP32", (2, 3), memoryview(content)), torch.float32)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor_of(InputTensor("x", "FP32", (1,), memoryview(bytes(4))), torch.float32)
    assert not [each for each in recwarn if each.category is UserWarning]  # others are of what other tests left


def test_a_tensor_keeps_its_bytes_alive():
    class Held(bytearray):
        pass

    held = Held(64)
    gone = weakref.ref(held)
    inputs = TINY.check(request(tiny_inputs())).inputs
    tensor = tensor_of(InputTensor("x", "UINT8", (64,), memoryview(held)), torch.uint8)
    answer = bytes_of(tensor[32:])
    del held, tensor, inputs
    gc.collect()
    assert gone() is not None
    assert bytes(answer) == bytes(32)
    del answer
    gc.collect()
    assert gone() is None

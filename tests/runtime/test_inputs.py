"""What a call may look like, and what is refused before compiled code could read beyond a tensor."""

from __future__ import annotations

import math
import re
import subprocess
from collections import namedtuple
from dataclasses import make_dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from exportkit.errors import InputError
from exportkit.package import manifest as m
from exportkit.runtime.inputs import InputPlan
from exportkit.runtime.native import library_path
from exportkit.verify.layouts import LAYOUTS, laid_out
from tests.runtime import c_interface, exportkit_run, runtime_parts, tiny
from tests.runtime.c_interface import view

CPU = torch.device("cpu")
CUT_STORAGE = Path(__file__).with_name("cut_storage.cpp")


@pytest.fixture
def plan() -> InputPlan:
    return InputPlan(tiny.call(), CPU)


def prepare(plan: InputPlan, **changes: object) -> list[torch.Tensor]:
    """A good call, with some of its values exchanged."""
    (image, query), kwargs = tiny.example()
    values = {"image": image, "query": query, **kwargs, **changes}
    return plan.prepare((), values)


def plan_of(
    node: m.Node, *inputs: m.TensorInput, name: str = "x", kind: Literal["positional", "keyword"] = "positional"
) -> InputPlan:
    """A plan for a call with one parameter, whose inputs may have the size `batch`."""
    parameter = m.Parameter(name=name, kind=kind, value=node)
    batch = m.Dimension(name="batch", min=2, max=5)
    return InputPlan(
        msgspec.structs.replace(tiny.call(), parameters=(parameter,), inputs=inputs, dimensions=(batch,)), CPU
    )


def tensor(
    dtype: str = "float32", shape: tuple[int | m.Size, ...] = (2, 3), written: m.OutputTolerance | None = None
) -> m.TensorInput:
    return m.TensorInput(name="x", dtype=dtype, shape=shape, written=written)


def one_tensor(dtype: str = "float32", shape: tuple[int | m.Size, ...] = (2, 3)) -> InputPlan:
    """A plan for a call with one tensor, `x`."""
    return plan_of(m.TensorNode(index=0), tensor(dtype, shape))


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_tensors_arrive_untouched_and_in_order(plan):
    (image, query), kwargs = tiny.example()
    by_position = plan.prepare((image, query), kwargs)
    by_name = plan.prepare((), {"offset": kwargs["offset"], "query": query, "image": image})
    assert [id(tensor) for tensor in by_position] == [id(image), id(query["features"]), id(kwargs["offset"])]
    assert [id(tensor) for tensor in by_name] == [id(tensor) for tensor in by_position]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_arrives_contiguous_aligned_and_with_the_same_bits(dtype, layout):
    for shape in ((2, 3, 4), (3,), (2, 1), (1, 2, 3, 2)):
        values = torch.arange(24)[: math.prod(shape)].reshape(shape).to(dtype)
        given = laid_out(values, layout)
        (taken,) = one_tensor(str(dtype).removeprefix("torch."), shape).prepare((given,), {})
        assert taken.is_contiguous()
        assert taken.data_ptr() % taken.itemsize == 0
        assert taken.storage_offset() * taken.itemsize % 16 == 0  # torch may see its elements as larger ones
        assert torch.equal(taken, values)


def test_a_written_input_whose_elements_are_not_aligned_is_refused():
    plan = plan_of(m.TensorNode(index=0), tensor(written=tiny.EXACT))
    with pytest.raises(InputError, match="`x` must begin at a multiple of 4 bytes"):
        plan.prepare((laid_out(torch.zeros(2, 3), "from the second byte"),), {})


@pytest.mark.parametrize(
    "cut",
    [lambda x: x, lambda x: x[1:], lambda x: x.T, lambda x: x[:, ::2], lambda x: x[:1].expand(3, 5), torch.conj],
    ids=["whole", "end", "transposed", "strided", "expanded", "conjugated"],
)
def test_a_tensor_that_is_longer_than_its_storage_is_refused(cut):
    """Its shape stays when the storage is resized; compiled code, and a copy, would read beyond the end."""
    whole = torch.zeros(3, 5, dtype=torch.complex64)
    x = cut(whole)
    plan = one_tensor("complex64", tuple(x.shape))
    assert plan.prepare((x,), {})[0].shape == x.shape
    needed = 8 * (x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1)
    x.untyped_storage().resize_(needed)
    assert plan.prepare((x,), {})[0].shape == x.shape
    x.untyped_storage().resize_(needed - 1)
    with pytest.raises(InputError, match=rf"`x` needs {needed} bytes of its storage, which has {needed - 1}"):
        plan.prepare((x,), {})


@pytest.mark.slow
def test_a_program_in_cpp_is_refused_such_a_tensor_as_well(tiny_package, tmp_path):
    exportkit_run.require_built()
    folder = library_path().parent
    links = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lexportkit_runtime", "-Wl,--no-as-needed", "-ltorch_cpu"]
    built = runtime_parts.build(tmp_path / "cut_storage", CUT_STORAGE, flags=["-O0", *links])
    assert subprocess.run([built, tiny_package], env={"EXPORTKIT_CACHE": str(tmp_path)}, check=False).returncode == 0


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        ("float32", lambda: torch.view_as_complex(torch.randn(2, 3, 2)).conj().imag),
        ("complex64", lambda: torch.randn(2, 3, dtype=torch.complex64).conj()),
    ],
    ids=["negative", "conjugate"],
)
def test_a_lazy_view_is_resolved(dtype, make):
    lazy = make()
    assert lazy.is_neg() or lazy.is_conj()
    (prepared,) = one_tensor(dtype).prepare((lazy,), {})
    assert not prepared.is_neg()
    assert not prepared.is_conj()
    assert torch.equal(prepared, lazy)


def test_parameters_and_tensors_that_require_grad_are_taken():
    plan = one_tensor()
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    assert torch.equal(plan.prepare((parameter,), {})[0], parameter)
    assert type(plan.prepare((parameter,), {})[0]) is torch.Tensor
    assert plan.prepare((torch.randn(2, 3, requires_grad=True),), {})[0].shape == (2, 3)


def test_a_dict_may_come_in_another_order(plan):
    (image, query), kwargs = tiny.example()
    assert plan.prepare((image, dict(reversed(query.items()))), kwargs)[1] is query["features"]


def test_a_named_tuple_or_dataclass_of_any_class_with_the_fields_is_taken():
    nodes = (m.TensorNode(index=0), m.ConstantNode(value=2))
    pair = m.NamedTupleNode(class_name="Pair", fields=("x", "n"), items=nodes)
    plan = plan_of(pair, tensor(shape=(2,)), name="pair")
    x = torch.randn(2)
    assert plan.prepare((namedtuple("Another", ["x", "n"])(x, 2),), {}) == [x]
    assert plan.prepare((make_dataclass("Another", ["x", "n"])(x, 2),), {}) == [x]
    for wrong in [namedtuple("Pair", ["n", "x"])(2, x), make_dataclass("Pair", ["n", "x"])(2, x), (x, 2), [x, 2]]:
        with pytest.raises(
            InputError, match=r"`pair` must be a named tuple or a dataclass with the fields 'x', 'n', got"
        ):
            plan.prepare((wrong,), {})


# --- the call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"`image` was not given: \(image, query, offset\)"),
        ((1, 2), {}, r"`offset` was not given"),
        ((1, 2, 3), {}, r"3 positional arguments were given; the package takes 2: \(image, query, offset\)"),
        ((), {"imgae": 1}, r"no parameter `imgae`.*\n.*Did you mean `image`\?"),
        ((1, 2), {"image": 1, "offset": 3}, r"`image` was given twice, by position and by name"),
        (
            (1, 2),
            {"temperature": 1.0, "offset": 3},
            r"the package has no parameter `temperature`.*(?s:.*)Export again",
        ),
    ],
)
def test_a_call_of_another_signature_is_refused(plan, args, kwargs, message):
    with pytest.raises(InputError, match=message):
        plan.prepare(args, kwargs)


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2, 3), {}), ((), {}), ((), {"features": 1})])
def test_a_call_of_another_signature_is_told_one_that_works(plan, args, kwargs):
    """Such as parts of a dict that are given beside one another."""
    told = "(image=image, query={'features': features, 'mode': 'scaled'}, offset=offset)"
    with pytest.raises(InputError, match=re.escape(f"Call it as {told}.")):
        plan.prepare(args, kwargs)
    (image, query), more = tiny.example()
    features = query["features"]
    plan.prepare((), dict(image=image, query={"features": features, "mode": "scaled"}, **more))


@pytest.mark.parametrize(
    ("mode", "shown"), [("plain", "'plain'"), (None, "None"), (1, "1"), (torch.ones(1), r"torch\.Tensor")]
)
def test_a_constant_must_be_what_it_was_at_export(plan, mode, shown):
    with pytest.raises(
        InputError, match=rf"`query`\['mode'\] was fixed at export: it must be 'scaled', got {shown}(?s:.*)Export again"
    ):
        prepare(plan, query={"features": torch.randn(3, 5), "mode": mode})


def test_what_was_fixed_at_export_may_be_left_out():
    x, parts = m.TensorNode(index=0), (m.ConstantNode(value=None), m.ConstantNode(value=2))
    values = {"scale": m.ConstantNode(value=2.5), "x": x, "pair": m.SequenceNode(kind="list", items=parts)}
    positional = tuple(m.Parameter(name=name, kind="positional", value=value) for name, value in values.items())
    keyword = m.Parameter(name="use_cache", kind="keyword", value=m.ConstantNode(value=False))
    parameters, given = (*positional, keyword), torch.ones(2)
    call = msgspec.structs.replace(tiny.call(), parameters=parameters, inputs=(tensor(shape=(2,)),), dimensions=())
    plan = InputPlan(call, CPU)
    for args, kwargs in (((), {"x": given}), ((2.5, given), {}), ((2.5, given, [None, 2]), {"use_cache": False})):
        assert plan.prepare(args, kwargs)[0] is given
    with pytest.raises(InputError, match="`use_cache` was fixed at export"):
        plan.prepare((2.5, given), {"use_cache": True})
    assert str(plan.signature) == "(scale, x, pair=[None, 2], *, use_cache=False)"


@pytest.mark.parametrize(
    ("constant", "good", "wrong"),
    [
        (1, [1], [True, 1.0, 2, "1", None, np.ones(3)]),
        (True, [True], [1, False]),
        (2.5, [2.5], [2, "2.5"]),
        (None, [None], [0, False, ""]),
    ],
)
def test_constants_of_another_type_are_another_value(constant, good, wrong):
    plan = plan_of(m.ConstantNode(value=constant), name="n", kind="keyword")
    for value in good:
        assert plan.prepare((), {"n": value}) == []
    for value in wrong:
        with pytest.raises(InputError, match="`n` was fixed at export"):
            plan.prepare((), {"n": value})


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.randn(3, 5), r"`query` must be a dict with the keys 'features', 'mode', got torch\.Tensor"),
        ({"features": torch.randn(3, 5)}, r"`query` must have the keys 'features', 'mode', got 'features'"),
        ({}, r"`query` must have the keys 'features', 'mode', got none"),
        ({"features": [1.0], "mode": "scaled"}, r"`query.features` must be a tensor, got list"),
        ({"features": None, "mode": "scaled"}, r"`query.features` must be a tensor, got None"),
        ({"features": np.ones((3, 5)), "mode": "scaled"}, r"must be a tensor, got numpy.ndarray\n  .*from_numpy"),
    ],
)
def test_a_value_of_another_structure_is_refused(plan, query, message):
    with pytest.raises(InputError, match=message):
        prepare(plan, query=query)


def test_lists_and_tuples_are_told_apart():
    def pair_in(kind: Literal["list", "tuple"]) -> InputPlan:
        items = (m.TensorNode(index=0), m.ConstantNode(value=1))
        return plan_of(m.SequenceNode(kind=kind, items=items), tensor(shape=(2,)), name="pair")

    x = torch.randn(2)
    assert pair_in("list").prepare(([x, 1],), {}) == pair_in("tuple").prepare(((x, 1),), {}) == [x]
    with pytest.raises(InputError, match="`pair` must be a list of 2, got tuple"):
        pair_in("list").prepare(((x, 1),), {})
    with pytest.raises(InputError, match="`pair` must be a tuple of 2, got one of 3"):
        pair_in("tuple").prepare(((x, 1, 1),), {})


# --- tensors ----------------------------------------------------------------------------------------------------------


SCALED = "must have a size from 16 to 96, in steps of 16 in dimension 2 (16*gh)"
WRONG = [
    ({"offset": torch.ones(5).to(dtype)}, f"`offset` must be float32, got {str(dtype)[6:]}")
    for dtype in (torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64)
] + [
    ({"image": torch.zeros(shape)}, f"`image` {message}, got shape {list(shape)}")
    for shape, message in (
        ((0, 3, 32, 8), "must have a size from 1 to 4 in dimension 0 (batch)"),
        ((5, 3, 32, 8), "must have a size from 1 to 4 in dimension 0 (batch)"),
        ((3, 3, 33, 8), SCALED),
        ((3, 3, 112, 8), SCALED),
        ((3, 3, 0, 8), SCALED),
        ((3, 4, 32, 8), "must have size 3 in dimension 1"),
        ((3, 3, 32), "must have 4 dimensions"),
        ((1, 3, 3, 32, 8), "must have 4 dimensions"),
        ((), "must have 4 dimensions"),
    )
] + [
    (
        {"features": torch.zeros(2, 5)},
        "`query.features` has batch = 2 by dimension 0 of shape [2, 5], but `image` has batch = 3: they must agree",
    )
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_a_tensor_that_the_package_does_not_take_is_refused_by_python_and_c(plan, c_model, changed, message):
    (image, query), kwargs = tiny.example()
    given = {"image": image, "features": query["features"], **kwargs, **changed}
    with pytest.raises(InputError) as error:
        plan.prepare((given["image"], {**query, "features": given["features"]}), {"offset": given["offset"]})
    assert error.value.message == message
    assert ("`.to(torch.float32)` converts it" in str(error.value)) is ("must be float32" in message)
    assert c_interface.refused(c_model, *(view(tensor.numpy()) for tensor in given.values())).message == message


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (torch.ones(5).double(), r"got float64\n  `.to\(torch.float32\)` converts it"),
        (torch.ones(5, 1), r"got shape \[5, 1\]\n  It takes \[5\]"),
        (torch.ones(6), r"got shape \[6\]\n  It takes \[5\]"),
        ([torch.ones(1)] * 5, r"got list\n  `torch.stack` makes one of several"),
    ],
    ids=["dtype", "dimensions", "size", "list"],
)
def test_what_is_refused_is_told_with_what_is_taken(plan, offset, said: str):
    with pytest.raises(InputError, match=said):
        prepare(plan, offset=offset)


@given(st.lists(st.integers(0, 120), min_size=4, max_size=4), st.integers(0, 6), st.data())
@settings(deadline=None, max_examples=60)
def test_shapes_are_taken_exactly_when_the_manifest_allows_them(image, batch, data):
    if data.draw(st.booleans()):  # most random shapes are wrong in every way
        image = [batch, 3, 16 * data.draw(st.integers(0, 7)), 8]
    plan = InputPlan(tiny.call(), CPU)
    allowed = image[0] == batch and 1 <= batch <= 4 and image[1] == 3 and image[3] == 8
    allowed = allowed and image[2] in range(16, 97, 16)
    # Zero strides: these have no memory of their own to speak of.
    inputs = torch.zeros(1).expand(image), {"features": torch.zeros(1).expand(batch, 5), "mode": "scaled"}
    try:
        plan.prepare(inputs, {"offset": torch.zeros(5)})
    except InputError:
        assert not allowed
    else:
        assert allowed


def test_sizes_with_an_offset_are_solved_for_the_dimension():
    plan = one_tensor(shape=(m.Size(dimension="batch", scale=2, offset=-1),))
    for size in range(12):
        if size in (3, 5, 7, 9):
            assert plan.prepare((torch.zeros(size),), {})
        else:
            with pytest.raises(InputError, match=r"from 3 to 9, in steps of 2 in dimension 0 \(2\*batch-1\)"):
                plan.prepare((torch.zeros(size),), {})


def test_known_shapes_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("exportkit.runtime.inputs.REMEMBERED_SHAPES", 2)
    plan = one_tensor(shape=(m.Size(dimension="batch"),))
    for size in (2, 3, 4, 5, 2):
        assert plan.prepare((torch.zeros(size),), {})
    assert len(plan._allowed_shapes) <= 2


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(2, 3)


def freed() -> torch.Tensor:
    tensor = torch.randn(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Logged(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing of it may be run")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fake, "must be a plain tensor, got torch._subclasses.fake_tensor.FakeTensor, which has no data"),
        (lambda: torch.randn(2, 3).as_subclass(Logged), "must be a plain tensor, got .*Logged"),
        (freed, "has no data: its storage was freed"),
        (lambda: torch.randn(2, 3).to_sparse(), "must be a dense .* of the layout torch.sparse_coo\n.*to_dense"),
        (lambda: torch.randn(2, 3).to_sparse_csr(), "must be a dense tensor .* got one of the layout torch.sparse_csr"),
        (lambda: torch.randn(2, 3).to_mkldnn(), "must be a dense tensor .* got one of the layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.randn(3), torch.randn(2)]), "must be a dense .* got a nested one\n"),
        (lambda: torch.randn(2, 3, device="meta"), r"must be on cpu, where the model is; got one on meta"),
        (lambda: torch._to_functional_tensor(torch.randn(2, 3)), "has no data"),
        (lambda: torch._efficientzerotensor((2, 3)), "has no data"),
    ],
    ids=["fake", "subclass", "freed", "coo", "csr", "mkldnn", "nested", "meta", "functional", "zero"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_a_tensor_without_data_of_its_own_is_refused(make, message):
    with pytest.raises(InputError, match=rf"`x` {message}"):
        one_tensor().prepare((make(),), {})


def test_torch_func_transforms_are_refused():
    plan = one_tensor()
    with pytest.raises(InputError, match=r"`x` must be a dense (.|\n)*call the model outside of it"):
        torch.vmap(lambda x: plan.prepare((x,), {})[0])(torch.randn(4, 2, 3))
    with pytest.raises(InputError, match=r"`x` must be a dense (.|\n)*call the model outside of it"):
        torch.func.grad(lambda x: plan.prepare((x,), {})[0].sum())(torch.randn(2, 3))


@pytest.mark.cuda
def test_inputs_must_be_on_the_models_device_and_aligned():
    call = tiny.call()
    (image, query), kwargs = tiny.example()
    plan = InputPlan(call, torch.device("cuda:0"))
    with pytest.raises(InputError, match=r"`image` must be on cuda:0.*got one on cpu\n  `.to\('cuda:0'\)` moves it"):
        plan.prepare((image, query), kwargs)
    odd = torch.randn(6, device="cuda")[1:]
    features = {"features": query["features"].cuda(), "mode": "scaled"}
    prepared = plan.prepare((image.cuda(), features), {"offset": odd})[2]
    assert prepared.data_ptr() % 16 == 0
    assert torch.equal(prepared, odd)

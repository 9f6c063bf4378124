"""Nested values and their description in the manifest."""

from __future__ import annotations

import enum
import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.errors import ManifestConsistencyError, UsageError
from exportkit.export.models.call_signature import describe_call
from exportkit.package.manifest import Node, SequenceNode, TensorNode
from exportkit.package.structure import MAX_DEPTH, builder, check_name, flatten, named_tuple_class, names, unflatten

Boxes = namedtuple("Boxes", ["corners", "scores"])


class Leaf:
    pass


@dataclass
class Output(OrderedDict):
    """A dict and a dataclass, as transformers' ModelOutput is."""

    logits: object = None


@dataclass
class Derived:
    value: object
    twice: object = field(init=False, default=2)


def is_leaf(value: object) -> bool:
    return isinstance(value, Leaf)


constants = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    constants.filter(lambda c: c not in (float("inf"), float("-inf"))) | st.builds(Leaf),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Boxes, inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(values)
def test_a_value_comes_back_as_it_was_also_through_json(value):
    node, leaves = flatten(value, is_leaf)
    node = msgspec.json.decode(msgspec.json.encode(node), type=Node)
    back = unflatten(node, leaves)
    assert back == value
    assert repr(back) == repr(value)  # True is not 1 and 1 is not 1.0
    assert flatten(back, is_leaf)[1] == leaves


def test_a_dict_that_is_a_dataclass_too_stays_a_dict():
    leaf = Leaf()
    output = Output()
    output["logits"] = leaf
    node, leaves = flatten(output, is_leaf)
    assert unflatten(node, leaves) == {"logits": leaf}


@settings(deadline=None)
@given(values)
def test_leaves_come_in_the_order_of_torchs_pytrees(value):
    tensors = torch.utils._pytree.tree_flatten(value, is_leaf=is_leaf)[0]
    assert flatten(value, is_leaf)[1] == [leaf for leaf in tensors if is_leaf(leaf)]


def test_leaves_are_named_by_their_place():
    leaf = Leaf()
    value = {"boxes": Boxes(leaf, [leaf, 3, leaf]), "mask": leaf}
    node, _ = flatten(value, is_leaf)
    assert names(node) == ["boxes.corners", "boxes.scores.0", "boxes.scores.2", "mask"]
    assert names(node, "batch")[0] == "batch.boxes.corners"
    assert names(flatten((leaf, leaf), is_leaf)[0]) == ["0", "1"]
    assert names(flatten(leaf, is_leaf)[0]) == ["0"]
    assert names(flatten(leaf, is_leaf)[0], "image") == ["image"]


def test_indices_start_where_the_caller_says_and_a_named_tuple_has_one_class():
    node, leaves = flatten(Boxes(Leaf(), Leaf()), is_leaf, start=5)
    assert [item.index for item in node.items] == [5, 6]
    assert len(leaves) == 2
    node, _ = flatten(Boxes(1, 2), is_leaf)
    assert type(unflatten(node, [])) is type(builder(node)([])) is named_tuple_class("Boxes", ("corners", "scores"))


def test_results_of_torch_are_named_tuples_and_subclasses_become_plain():
    node, leaves = flatten(torch.max(torch.eye(2), 1), lambda v: isinstance(v, torch.Tensor))
    assert names(node) == ["values", "indices"]
    assert unflatten(node, leaves).indices is leaves[1]
    kind = enum.Enum("Kind", {"A": "aa"}, type=str)
    value = unflatten(flatten(OrderedDict(kind=kind.A), is_leaf)[0], [])
    assert type(value) is dict
    assert type(value["kind"]) is str
    assert value == {"kind": "aa"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Derived(1), r"parameter `x` is a .*Derived, which a package cannot describe"),
        ({"a": [1, {2, 3}]}, r"parameter `x`\['a'\]\[1\] is a builtins.set, which a package cannot describe"),
        ({"a": {1: 2}}, r"parameter `x`\['a'\] is a dict with the key 1; keys must be strings"),
        (Boxes(float("nan"), 0), r"parameter `x`.corners is nan, which JSON cannot hold"),
        ([float("inf")], r"parameter `x`\[0\] is inf"),
        (2**63, r"does not fit in 64 bits"),
        (
            namedtuple("Odd", ["a", "def"], rename=True)(1, 2),
            r"a field of parameter `x` is named '_1'; it cannot start with an underscore",
        ),
        (1j, r"is a builtins.complex"),
    ],
)
def test_what_a_manifest_cannot_hold_is_refused_with_its_place(value, message):
    with pytest.raises(UsageError, match=message):
        flatten(value, is_leaf, where="parameter `x`")


def test_a_value_without_an_end_and_leaves_of_one_name_or_too_few_are_refused():
    value: list = []
    value.append(value)
    with pytest.raises(UsageError, match=f"nested deeper than {MAX_DEPTH}"):
        flatten(value, is_leaf)
    with pytest.raises(UsageError, match=r"'a\.b'"):
        names(flatten({"a.b": Leaf(), "a": {"b": Leaf()}}, is_leaf)[0])
    with pytest.raises(ManifestConsistencyError, match="needs more than the 1 tensors given"):
        unflatten(SequenceNode(kind="list", items=(TensorNode(index=1),)), [Leaf()])


@pytest.mark.parametrize(("class_name", "fields"), [("class", ["a"]), ("A", ["d\u00e9"]), ("A", ["x", "\ufb01"])])
def test_a_named_tuple_whose_names_a_package_cannot_have_is_refused_at_export(class_name, fields):
    kind = namedtuple("Fine", [f"f{i}" for i in range(len(fields))])
    kind.__name__, kind._fields = class_name, tuple(fields)
    with pytest.raises(UsageError, match=r"ASCII letters(?s:.*)Rename it"):
        flatten(kind(*fields), is_leaf)


def test_a_model_with_such_a_parameter_is_refused_before_it_is_traced():
    class Model(torch.nn.Module):
        def forward(self, größe):
            return größe

    with pytest.raises(UsageError, match=r"a parameter of Model\.forward is named 'größe'"):
        describe_call(Model(), (torch.zeros(1),), {})
    for name in ("a\0b", "\ud800", ""):
        with pytest.raises(UsageError, match="a parameter is named"):
            check_name(name, "a parameter")


def test_leaves_live_no_longer_than_they_are_used():
    leaf = Leaf()
    seen = weakref.ref(leaf)
    gc.disable()
    try:
        flatten({"one": [leaf]}, lambda value: isinstance(value, Leaf))
        del leaf
        assert seen() is None
    finally:
        gc.enable()

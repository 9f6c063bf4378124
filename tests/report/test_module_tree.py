"""Nodes are grouped by module, and the groups never change their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exportkit.report import module_tree
from exportkit.report.graph_data import frames_of
from exportkit.report.module_tree import Stack, tree_of
from tests.report.written import inside

PATHS = st.lists(st.one_of(st.none(), st.sampled_from(["", "a", "a.b", "a.b.c", "d", "a.e"])), max_size=60)


def leaves(group: dict[str, Any]) -> Iterator[int]:
    for item in group["items"]:
        if isinstance(item, int):
            yield item
        else:
            yield from leaves(item)


def groups(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield group
    for item in group["items"]:
        if not isinstance(item, int):
            yield from groups(item)


@given(PATHS)
def test_every_node_is_in_one_group_in_the_program_s_order(paths: list[str | None]):
    tree = tree_of([None if path is None else Stack.parse(inside(path)) for path in paths])
    assert list(leaves(tree)) == list(range(len(paths)))
    for group in groups(tree):
        for number in leaves(group):
            path = paths[number]
            assert path is None or not group["path"] or path == group["path"] or path.startswith(f"{group['path']}.")


def test_a_module_that_is_called_twice_is_two_groups():
    stacks = [Stack.parse(inside(path)) for path in ("a", "", "a.b", "a.b")]
    tree = tree_of(stacks)
    assert [item if isinstance(item, int) else item["name"] for item in tree["items"]] == ["a", 1, "a"]
    (inner,) = tree["items"][2]["items"]
    assert (inner["name"], inner["path"], inner["class"], inner["items"]) == ("b", "a.b", "Block", [2, 3])


def test_a_node_that_no_module_made_does_not_divide_its_neighbours_module():
    hook = "_empty_nn_module_stack_from_metadata_hook"
    stacks = [Stack.parse(inside("a.b")), Stack.parse(f"{hook},{hook},{hook}"), Stack.parse(inside("a.c"))]
    (group,) = tree_of(stacks)["items"]
    assert [item if isinstance(item, int) else item["name"] for item in group["items"]] == ["b", 1, "c"]


@given(st.integers(0, 4000))
def test_no_group_is_too_wide_to_draw(count: int):
    tree = tree_of([Stack.parse(inside(""))] * count)
    assert list(leaves(tree)) == list(range(count))
    assert all(len(group["items"]) <= module_tree._WIDEST for group in groups(tree))


def test_a_stack_in_another_form_is_no_more_than_a_name():
    assert Stack.parse("") is None
    assert Stack.parse("only a key") == Stack((), ())
    assert Stack.parse("k,path,with,commas,Kind") == Stack(("path,with,commas",), ("Kind",))
    assert len((Stack.parse(";".join(["k,p,C"] * 10_000)) or Stack((), ())).paths) == 40


def test_frames_are_innermost_first_and_the_model_s_own_are_told_apart():
    trace = (
        'File "/home/me/model.py", line 7, in forward\n    return self.block(x)\n'
        'File "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 3, in forward\n    F.linear(x)\n'
        'File "torch/fx/passes/runtime_assert.py", line 24, in insert'
    )
    assert frames_of(trace) == [
        ["torch/fx/passes/runtime_assert.py", 24, "insert", "", False],
        ["/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3, "forward", "F.linear(x)", False],
        ["/home/me/model.py", 7, "forward", "return self.block(x)", True],
    ]
    only = 'File "/x/site-packages/timm/vit.py", line 9, in forward\n    x'
    assert frames_of(only) == [["/x/site-packages/timm/vit.py", 9, "forward", "x", True]]
    assert frames_of("no trace") == frames_of("") == []
    assert len(frames_of('File "a", line 1, in f\n' * 1000)) == 12

"""Private functions of torch are replaced in one place, for a while, and not silently where they are gone."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.codegen.cpp import CppKernel
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.errors import ExportError
from exportkit.export.within_torch.torch_internals import replaced


class Owner:
    def number(self) -> int:
        return 1


class Heir(Owner):
    pass


def failing_while_replaced() -> None:
    with replaced(Owner, "number", lambda number: lambda self: number(self) + 1):
        assert Owner().number() == 2
        raise RuntimeError("inside")


def test_the_original_is_back_after_an_error() -> None:
    original = Owner.number
    with pytest.raises(RuntimeError, match="inside"):
        failing_while_replaced()
    assert Owner.number is original


@pytest.mark.parametrize(("owner", "name"), [(Owner, "gone"), (Heir, "number"), (cpp_builder, "gone")])
def test_an_attribute_that_torch_no_longer_defines_is_an_error(owner: type, name: str) -> None:
    message = (
        rf"torch {torch.__version__.replace('+', '.')} has no \S+\.{name}, which exportkit needs to replace\n.*2\.13"
    )
    with pytest.raises(ExportError, match=message), replaced(owner, name, lambda original: original):
        raise AssertionError("the block ran")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GraphLowering, "get_attr"),
        (cpu_vec_isa, "valid_vec_isa_list"),
        (cpp_builder.CppBuilder, "build"),
        (CppKernel, "decide_parallel_depth"),
        (ShapeEnv, "_log_guard"),
    ],
)
def test_this_torch_defines_what_export_replaces(owner: type, name: str) -> None:
    with replaced(owner, name, lambda original: original):
        pass

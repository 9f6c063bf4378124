"""The compiler calls the operators that a model calls, and nothing in their place."""

from __future__ import annotations

import pytest
import torch

from exportkit.export.compile.inductor_changes import changed_inductor

_LIBRARY = torch.library.Library("exportkit_test_outs", "DEF")


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch has no such tag before 2.13")
def test_an_overload_with_the_tag_out_is_not_called_in_its_place() -> None:
    variants = pytest.importorskip("torch._library._out_variant")
    _LIBRARY.define("twice(Tensor x) -> Tensor")
    _LIBRARY.define("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    operator = torch.ops.exportkit_test_outs.twice
    assert variants.to_out_variant(operator.default) is operator.out
    with changed_inductor():
        assert variants.to_out_variant(operator.default) is None
    assert variants.to_out_variant(operator.default) is operator.out


def test_what_a_library_taught_inductor_to_write_in_its_place_is_not_written() -> None:
    from torch._inductor import lowering  # imported late: it takes seconds

    _LIBRARY.define("thrice(Tensor x) -> Tensor")
    operator = torch.ops.exportkit_test_outs.thrice.default
    lowering.register_lowering(operator)(lambda x: x)
    taught = lowering.lowerings[operator]
    with changed_inductor():
        assert operator not in lowering.lowerings
        lowering.make_fallback(operator)  # as Inductor does where there is nothing
    assert lowering.lowerings.pop(operator) is taught
    assert operator not in lowering.fallbacks

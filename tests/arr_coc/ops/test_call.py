import pytest
import torch

from exportkit.arr_coc.ops import SPECS, muladd
from exportkit.arr_coc.ops._operator import operator


@pytest.fixture
def seen(monkeypatch):
    """What a probe operator's kernel, and the autograd rule above it, were entered with."""
    entered = []
    with torch.library._scoped_library("exportkit_call_probe", "FRAGMENT") as library:
        library.define("identity(Tensor x) -> Tensor")
        library.impl("identity", lambda x: entered.append("kernel") or x.clone(), "CPU")

        def rule(keys, x):
            entered.append("rule")
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.exportkit_call_probe.identity.default.redispatch(
                    keys & torch._C._after_autograd_keyset, x
                )

        library.impl("identity", rule, "Autograd", with_keyset=True)
        yield entered


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_autograd_rule_is_passed_over_where_gradients_are_off(seen, mode):
    with mode():
        result = operator("identity", "exportkit_call_probe")(torch.ones(2))
    assert seen == ["kernel"]
    assert result.tolist() == [1, 1]


def test_the_autograd_rule_runs_where_gradients_are_on(seen):
    operator("identity", "exportkit_call_probe")(torch.ones(2))
    assert seen == ["rule", "kernel"]


def test_gradients_come_back_after_a_call_without():
    a = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert not muladd(a, a, 1.0).requires_grad
    muladd(a, a, 1.0).sum().backward()
    torch.testing.assert_close(a.grad, 2 * a.detach())


def test_autocast_holds_where_gradients_are_off():
    a = torch.randn(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert muladd(a.bfloat16(), a, 1.0).dtype == torch.float32
        assert SPECS["muladd"].autocast == "widest"

"""Whether a kernel for all devices is a composite of other operators is found out, not assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exportkit import load
from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.artifact import export_aoti
from exportkit.export.models.resolve import resolve
from exportkit.export.models.source_lines import users_code
from exportkit.export.torch_patches.opaque import opaque_operators, reads_memory
from exportkit.export.trace.preflight import check_composites, check_model
from exportkit.libraries import load_library
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from tests.export.function_models import CPU, exported, spec_of
from tests.fixtures import stable_library


def library() -> Path:
    return stable_library.build(Path(__file__).with_name("opaque_ops.cpp"))


@pytest.fixture
def ops() -> torch._ops._OpNamespace:
    load_library(library(), defines=["exportkit_opaque"])
    return torch.ops.exportkit_opaque


@pytest.fixture
def fakes(ops):
    """Fake kernels, in the form that torch takes for such operators."""

    def positive(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(min=0))

    given = {ops.twice.default: torch.empty_like, ops.halve_.default: lambda x: None, ops.positive.default: positive}
    for operator, fake in given.items():
        operator.py_impl(torch._C.DispatchKey.Meta)(fake)
    yield
    for operator in given:
        del operator.py_kernels[torch._C.DispatchKey.Meta]


def test_a_kernel_that_reads_memory_is_found_out(ops) -> None:
    x = torch.rand(3)
    names = ("twice", "positive", "filled_with_first", "parts")
    assert [name for name in names if reads_memory(getattr(ops, name).default, (x,), {})] == list(names[:3])


def test_the_fake_kernel_to_write_is_shown_in_a_form_that_torch_takes(ops) -> None:
    form = "@torch.ops.exportkit_opaque.twice.default.py_impl(torch._C.DispatchKey.Meta)"
    with pytest.raises(ExportError) as refused, users_code("importing net.py"):
        torch.library.register_fake("exportkit_opaque::twice", torch.empty_like)
    with pytest.raises(OperatorNotExportableError, match=r"twice \(called at .*test_opaque.py") as caught:
        check_composites(torch.nn.Identity(), lambda _: ops.twice(torch.rand(3)), CPU)
    assert form in (caught.value.hint or "")
    assert form in (refused.value.hint or "")


def test_a_kernel_that_calls_other_operators_needs_none_and_keeps_its_gradient(ops) -> None:
    x = torch.rand(3, requires_grad=True)

    gradients = []
    check_composites(torch.nn.Identity(), lambda _: gradients.extend(torch.autograd.grad(ops.parts(x), x)), CPU)
    assert torch.equal(gradients[0], torch.ones(3))


def test_a_wrong_fake_kernel_is_found(ops, fakes) -> None:
    ops.twice.default.py_kernels[torch._C.DispatchKey.Meta] = lambda x: x.new_empty(2)
    with pytest.raises(OperatorNotExportableError, match=r"wrong about output 0: it says \[2\]"):
        check_model(lambda: ops.twice(torch.rand(3)), CPU)


def test_nothing_of_it_stays_in_the_process(ops, fakes) -> None:
    before = torch._C._dispatch_dump("exportkit_opaque::twice")
    with opaque_operators(), opaque_operators():
        assert torch._C._dispatch_dump("exportkit_opaque::twice") != before
    assert torch._C._dispatch_dump("exportkit_opaque::twice") == before


class Net(nn.Module):
    """Calls each, on what depends on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        ops, y = torch.ops.exportkit_opaque, x * self.scale
        halved = y.clone()
        ops.halve_(halved)
        return {"twice": ops.twice(y), "halved": halved, "positive": ops.positive(y).sum(), "parts": ops.parts(y)}


def test_they_go_into_a_package_that_answers(fakes, tmp_path) -> None:
    manifest = export_aoti(spec_of(Net(), torch.randn(4, 3), shapes={"x": {0: "n[1:9]"}}), tmp_path / "net.pt2")
    called = [each.name.removeprefix("exportkit_opaque::") for each in manifest.operators]
    assert sorted(called) == ["halve_", "positive", "twice"]
    options = VerifyOptions(against="cases", device="cpu", eager=ReferenceModel(op_libraries=[library()]))
    build_package([tmp_path / "net.pt2"], tmp_path / "packed.pt2", PackOptions(options, verify=True))
    x = torch.randn(7, 3)
    with load(tmp_path / "packed.pt2") as model:
        torch.testing.assert_close(model(x), Net()(x))


def test_a_saved_program_is_not_compiled_without_a_fake_kernel(ops, tmp_path) -> None:
    meta = torch._C.DispatchKey.Meta
    ops.twice.default.py_impl(meta)(torch.empty_like)
    try:
        exported(spec_of(lambda x: ops.twice(x), torch.randn(4)), tmp_path)
    finally:
        del ops.twice.default.py_kernels[meta]
    saved = resolve(str(tmp_path / "x.pt2"))
    with pytest.raises(OperatorNotExportableError, match="exportkit_opaque::twice has no fake kernel"):
        export_aoti(saved, tmp_path / "code.pt2")


class Counted(torch.nn.Module):
    """Calls an operator that only a call tells about, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return torch.ops.exportkit_opaque.parts(x)


def test_the_call_that_tells_changes_nothing_of_the_model(ops) -> None:
    counted = Counted()
    check_composites(counted, lambda own: own(torch.rand(3)), CPU)
    assert (counted.calls, counted.seen.item()) == (0, 0)
    counted(torch.rand(3))
    assert (counted.calls, counted.seen.item()) == (1, 1)

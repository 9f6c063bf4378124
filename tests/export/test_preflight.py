"""Operators that cannot travel are named before anything is compiled; tests/gallery/operators.py has more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exportkit import load
from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.artifact import export_aoti
from exportkit.export.models.resolve import resolve
from exportkit.export.models.source_lines import users_code
from exportkit.export.torch_patches.opaque import opaque_operators, reads_memory
from exportkit.export.trace.preflight import (
    check_composites,
    check_model,
    check_operators,
    graph_operators,
)
from exportkit.libraries import load_library
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from tests.artifacts import PASSES_DTYPES
from tests.conftest import DEVICES
from tests.export import argument_models
from tests.export.argument_models import SIZE, Calls
from tests.export.function_models import CPU, FunctionModel, exported, spec_of, traced
from tests.fixtures import stable_library
from tests.subprocesses import run_exportkit


@pytest.fixture(scope="session")
def ops() -> torch._ops._OpNamespace:
    """The operators of probe_ops.cpp, with what Python adds to them."""
    library = stable_library.build(Path(__file__).with_name("probe_ops.cpp"))
    load_library(library, defines=["exportkit_probe"])
    fakes: dict[str, Callable[..., Tensor]] = {
        "good": torch.empty_like,
        "wrong_dtype": lambda x: torch.empty_like(x, dtype=torch.float64),
        "wrong_strides": lambda x: x.new_empty(x.shape[::-1]).T,
        "wrong_batch": lambda x: x.new_empty(2, *x.shape[1:]),
        "python_kernel": torch.empty_like,
        "count": lambda x: torch.library.get_ctx().new_dynamic_size(),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"exportkit_probe::{name}", fake)
    torch.library.impl("exportkit_probe::python_kernel", "CPU", torch.clone)
    return torch.ops.exportkit_probe


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_strides", r"it says strides \[1, 3\], the kernel returned \[4, 1\]"),
        ("twice_", r"::twice_ .* returns memory of an argument.*\n.*twice_\(Tensor\(a!\) x\) -> \(\)`"),
        ("view", r"exportkit_probe::view .* returns memory of an argument.*\n.*Return a copy"),
        ("split_", r"exportkit_probe::split_ .* a list beside other results.*\n.*one list of all of them"),
        ("largest", r"exportkit_probe::largest .* returns float, of which"),
    ],
)
def test_an_operator_that_cannot_travel_is_named_with_what_to_do(ops, name: str, message: str) -> None:
    with pytest.raises(OperatorNotExportableError, match=message) as caught:
        check_model(lambda: getattr(ops, name)(torch.rand(3, 4)), CPU)
    assert "test_preflight.py" in caught.value.message


@pytest.mark.parametrize("use", [lambda x, y: x + y, lambda x, y: y.view(x.shape[0], 2, 2), lambda x, y: y])
def test_a_fake_that_knows_one_size_is_named_and_not_the_models_line(ops, use: Callable[..., Tensor], tmp_path) -> None:
    x = torch.rand(2, 4)
    spec = spec_of(lambda x: use(x, ops.wrong_batch(x)), x, shapes={"x": {0: "batch[1:8]"}})
    with pytest.raises(ExportError, match=r"the fake kernel of exportkit_probe::wrong_batch is wrong about output 0"):
        exported(spec, tmp_path)


def test_an_operator_that_only_writes_into_an_argument_needs_no_fake_kernel(ops) -> None:
    x, out = torch.rand(3, 4), torch.empty(3, 4)
    check_model(lambda: ops.write(x, out), CPU)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("count", "count returns SymInt, and AOTInductor cannot compile that"),
        ("python_kernel", r"::python_kernel is implemented in Python.*\n.*model itself"),
        ("without_fake", "::without_fake has no fake kernel"),
    ],
)
def test_an_operator_of_a_traced_graph_that_cannot_travel_is_refused(ops, name: str, message: str) -> None:
    with pytest.raises(OperatorNotExportableError, match=message):
        check_operators({f"exportkit_probe::{name}": getattr(ops, name).default}, CPU)


def test_an_operator_whose_schema_alone_is_in_python_passes(ops) -> None:
    torch.library.define("exportkit_probe::schema_in_python", "(Tensor x) -> Tensor")
    torch.library.register_fake("exportkit_probe::schema_in_python", torch.empty_like)
    x = torch.rand(3, 4)
    assert torch.equal(check_model(lambda: ops.schema_in_python(x), CPU), x)


def flow(name: str, body: Callable[[Tensor], Tensor], x: Tensor) -> object:
    """Runs `body` inside one of torch's operators for control flow."""
    from torch._higher_order_ops.map import map as map_rows
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    if name == "cond":
        return torch.cond(x.sum() > 0, body, torch.neg, (x,))
    if name == "while_loop":
        return while_loop(lambda n, _: n < 2, lambda n, x: (n + 1, body(x)), (torch.tensor(0), x))
    if name == "scan":
        return scan(lambda carry, row: (carry + row, body(row)), torch.zeros_like(x[0]), x)
    return map_rows(body, x)


@pytest.mark.parametrize("name", ["cond", "while_loop", "scan", "map"])
def test_operators_inside_control_flow_are_checked_like_others(ops, name: str) -> None:
    x = torch.rand(3, 4)
    answer = check_model(lambda: flow(name, ops.good, x), CPU)
    torch.testing.assert_close(answer, flow(name, ops.good, x))
    with pytest.raises(OperatorNotExportableError, match=r"exportkit_probe::wrong_dtype.* is wrong about output 0"):
        check_model(lambda: flow(name, ops.wrong_dtype, x), CPU)


def test_the_operators_of_a_graph_are_found_and_checked(ops) -> None:
    program = torch.export.export(FunctionModel(lambda x: ops.good(x) + 1), (torch.rand(3),))
    found = graph_operators(program.graph_module)
    assert list(found) == ["exportkit_probe::good"]
    check_operators(found, CPU)


# --- kinds of arguments ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def library() -> Path:
    return stable_library.build_with_aten(Path(__file__).with_name("argument_kinds.cpp"))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_value_that_is_taken_arrives(library: Path, device: str, tmp_path: Path) -> None:
    export = ["export", f"{argument_models.__file__}:everything", "--device", device, "-o", "out.pt2"]
    package = ["package", "out.pt2", "-o", "package.pt2"]
    exported, packed = (run_exportkit(*each, "--op-library", str(library), cwd=tmp_path) for each in (export, package))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert packed.returncode == (0 if PASSES_DTYPES else 4), packed.stdout + packed.stderr
    assert ("it needs torch 2.12 or newer" in packed.stdout) == (not PASSES_DTYPES)


@pytest.fixture(scope="session")
def loaded(library: Path) -> None:
    load_library(library)
    argument_models.register_fakes()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("Scalar", 1 + 2j, "is (1+2j), and"),
        ("Scalar?", math.inf, "is the Scalar inf in a call with"),
        ("Layout", torch.jagged, "is torch.jagged, and"),
        ("Generator?", torch.default_generator, "is a Generator, and"),
        ("SymInt[]", [], "is [] in a call with an empty list"),
        ("SymInt[]?", [], "is [] in a call with an empty list"),
    ],
)
def test_a_value_that_cannot_be_passed_is_refused(kind: str, value: Any, said: str) -> None:
    spec = spec_of(Calls({kind: [value]}), torch.randn(4, 3), shapes={"x": {0: "rows[2:9]"}})
    with pytest.raises(OperatorNotExportableError, match=re.escape(f": argument value {said}")) as caught:
        traced(spec)
    assert "argument_models.py" in caught.value.message
    assert caught.value.hint


CANNOT_PASS = {
    "Scalar[]": "a list of Scalar",
    "Device[]": "a list of Device",
    "ScalarType?[]": "a list of ScalarType",
    "Layout[]?": "a list of Layout",
    "MemoryFormat[]": "a list of MemoryFormat",
    "int[][]": "a list of lists",
    "Tensor[][]": "a list of lists",
    "Tensor[]?[]": "a list of lists",
    "int?[]": "a list of optional int",
    "str?[]": "a list of optional str",
    "complex[]": "complex",
    "complex": "complex",
    "Storage": "Storage",
    "Stream": "Stream",
    "QScheme": "QScheme",
    "SymBool": "SymBool",
    "Dict(str, Tensor)[]": "Dict",
    "(Tensor, Tensor)?": "a tuple",
    "Any": "Any",
}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        *(
            (f"(Tensor x, {kind} value) -> Tensor", f": argument value is {what},")
            for kind, what in CANNOT_PASS.items()
        ),
        ("(Tensor(a|b) x) -> Tensor", " says of x that its memory may be that of several"),
        ("(Tensor(a -> *) x) -> Tensor", " says of x that its memory may be that of several"),
        ("(Tensor x) -> Tensor?", " may return None"),
        ("(Tensor x) -> (Tensor, Tensor?)", " may return None"),
    ],
)
def test_a_schema_that_no_compiled_code_can_call_is_refused_by_name(schema: str, said: str) -> None:
    name = f"refused_kinds::f{abs(hash(schema))}"
    torch.library.define(name, schema)
    operator = getattr(torch.ops.refused_kinds, name.partition("::")[2]).default
    with pytest.raises(OperatorNotExportableError, match=re.escape(f"{name}{said}")) as caught:
        check_operators({name: operator}, CPU)
    assert caught.value.hint


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_device_among_the_arguments_is_not_where_a_call_computes() -> None:
    traced(spec_of(Calls({"Device": [torch.device("meta")], "SymInt": [SIZE]}), torch.randn(4, 3)))


# --- whether a kernel for all devices is a composite of others is found out, not assumed -----------------------------


def opaque_library() -> Path:
    return stable_library.build(Path(__file__).with_name("opaque_ops.cpp"))


@pytest.fixture
def opaque() -> torch._ops._OpNamespace:
    load_library(opaque_library(), defines=["exportkit_opaque"])
    return torch.ops.exportkit_opaque


@pytest.fixture
def fakes(opaque):
    """Fake kernels, in the form that torch takes for such operators."""

    def positive(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(min=0))

    given = {
        opaque.twice.default: torch.empty_like,
        opaque.halve_.default: lambda x: None,
        opaque.positive.default: positive,
    }
    for operator, fake in given.items():
        operator.py_impl(torch._C.DispatchKey.Meta)(fake)
    yield
    for operator in given:
        del operator.py_kernels[torch._C.DispatchKey.Meta]


def test_a_kernel_that_reads_memory_is_found_out(opaque) -> None:
    x = torch.rand(3)
    names = ("twice", "positive", "filled_with_first", "parts")
    assert [name for name in names if reads_memory(getattr(opaque, name).default, (x,), {})] == list(names[:3])


def test_the_fake_kernel_to_write_is_shown_in_a_form_that_torch_takes(opaque) -> None:
    form = "@torch.ops.exportkit_opaque.twice.default.py_impl(torch._C.DispatchKey.Meta)"
    with pytest.raises(ExportError) as refused, users_code("importing net.py"):
        torch.library.register_fake("exportkit_opaque::twice", torch.empty_like)
    with pytest.raises(OperatorNotExportableError, match=r"twice \(called at .*test_preflight.py") as caught:
        check_composites(torch.nn.Identity(), lambda _: opaque.twice(torch.rand(3)), CPU)
    assert form in (caught.value.hint or "")
    assert form in (refused.value.hint or "")


def test_a_kernel_that_calls_other_operators_needs_none_and_keeps_its_gradient(opaque) -> None:
    x = torch.rand(3, requires_grad=True)

    gradients = []
    check_composites(torch.nn.Identity(), lambda _: gradients.extend(torch.autograd.grad(opaque.parts(x), x)), CPU)
    assert torch.equal(gradients[0], torch.ones(3))


def test_a_wrong_fake_kernel_is_found(opaque, fakes) -> None:
    opaque.twice.default.py_kernels[torch._C.DispatchKey.Meta] = lambda x: x.new_empty(2)
    with pytest.raises(OperatorNotExportableError, match=r"wrong about output 0: it says \[2\]"):
        check_model(lambda: opaque.twice(torch.rand(3)), CPU)


def test_nothing_of_it_stays_in_the_process(opaque, fakes) -> None:
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
        opaque, y = torch.ops.exportkit_opaque, x * self.scale
        halved = y.clone()
        opaque.halve_(halved)
        return {
            "twice": opaque.twice(y),
            "halved": halved,
            "positive": opaque.positive(y).sum(),
            "parts": opaque.parts(y),
        }


@pytest.mark.slow
def test_they_go_into_a_package_that_answers(fakes, tmp_path) -> None:
    manifest = export_aoti(spec_of(Net(), torch.randn(4, 3), shapes={"x": {0: "n[1:9]"}}), tmp_path / "net.pt2")
    called = [each.name.removeprefix("exportkit_opaque::") for each in manifest.operators]
    assert sorted(called) == ["halve_", "positive", "twice"]
    options = VerifyOptions(against="cases", device="cpu", eager=ReferenceModel(op_libraries=[opaque_library()]))
    build_package([tmp_path / "net.pt2"], tmp_path / "packed.pt2", PackOptions(options, verify=True))
    x = torch.randn(7, 3)
    with load(tmp_path / "packed.pt2") as model:
        torch.testing.assert_close(model(x), Net()(x))


def test_a_saved_program_is_not_compiled_without_a_fake_kernel(opaque, tmp_path) -> None:
    meta = torch._C.DispatchKey.Meta
    opaque.twice.default.py_impl(meta)(torch.empty_like)
    try:
        exported(spec_of(lambda x: opaque.twice(x), torch.randn(4)), tmp_path)
    finally:
        del opaque.twice.default.py_kernels[meta]
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


def test_the_call_that_tells_changes_nothing_of_the_model(opaque) -> None:
    counted = Counted()
    check_composites(counted, lambda own: own(torch.rand(3)), CPU)
    assert (counted.calls, counted.seen.item()) == (0, 0)
    counted(torch.rand(3))
    assert (counted.calls, counted.seen.item()) == (1, 1)

"""What the schema rules refuse is seen to fail, and what they accept is seen to work."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exportkit.errors import UsageError
from exportkit.libraries import load_library
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.schema_rules import schema_findings
from tests.package.c_library import PRELUDE, build

ONE = torch.ones(2)
ACCEPTED = {
    "Tensor": ONE,
    "float": 0.5,
    "bool": True,
    "SymInt": 3,
    "str": "mean",
    "Device": torch.device("cpu"),
    "ScalarType": torch.float64,
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
    "Tensor?": None,
    "float?": None,
    "SymInt?": 3,
    "bool?": True,
    "str?": "sum",
    "Device?": None,
    "ScalarType?": torch.int64,
    "Layout?": None,
    "MemoryFormat?": None,
    "Tensor[]": [ONE],
    "Tensor?[]": [ONE, None],
    "Tensor[]?": [ONE],
    "float[]": [0.5],
    "bool[]": [True],
    "str[]": ["a", "b"],
    "SymInt[]": [1, 2],
    "SymInt[2]": [1, 2],
    "SymInt[]?": None,
}
DOUBTFUL = {"int": 3, "int?": 3, "int[]": [1, 2], "int[2]?": [1, 2], "Generator?": None}
REFUSED_BY_CALL = {
    "Scalar": 2.5,
    "Scalar?": 2.5,
    "Scalar[]": [1.5],
    "complex": 1j,
    "Dict(str, Tensor)": {"a": ONE},
    "(int, int)": (1, 2),
    "Any": 3,
    "SymBool": True,
}
REFUSED_BY_EXPORT = {
    "ScalarType[]": [torch.int64],
    "Device[]": [torch.device("cpu")],
    "Layout[]": [torch.strided],
    "MemoryFormat[]": [torch.contiguous_format],
    "int[][]": [[1], [2]],
}
VALUES = ACCEPTED | DOUBTFUL | REFUSED_BY_CALL | REFUSED_BY_EXPORT


def schema(kind: str) -> str:
    return f"schema_rules::f{list(VALUES).index(kind)}(Tensor x, {kind} y) -> Tensor"


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Operators that return a copy of their first argument, by the type of the second."""
    source = PRELUDE + "extern int32_t aoti_torch_clone(void*, void**);\n"
    source += "static void copy(uint64_t* stack, uint64_t arguments, uint64_t results) {\n"
    source += "  void* out;\n  if (aoti_torch_clone((void*)stack[0], &out)) abort();\n  stack[0] = (uint64_t)out;\n}\n"
    source += "__attribute__((constructor)) static void start(void) {\n  void *defined, *kernels;\n"
    source += '  aoti_torch_library_init_def("schema_rules", "toy.c", 1, &defined);\n'
    source += '  aoti_torch_library_init_impl("schema_rules", "CPU", "toy.c", 1, &kernels);\n'
    for index, kind in enumerate(VALUES):
        source += f'  aoti_torch_library_def(defined, "{schema(kind).partition("::")[2]}");\n'
        source += f'  aoti_torch_library_impl(kernels, "f{index}", copy);\n'
    load_library(build(tmp_path_factory.mktemp("schemas"), source + "}\n", name="libschemas.so"))
    for index in range(len(VALUES)):
        torch.library.register_fake(f"schema_rules::f{index}", lambda x, y: torch.empty_like(x))
    return lambda kind: getattr(torch.ops.schema_rules, f"f{list(VALUES).index(kind)}").default


def save_export(operator: Any, value: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return operator(x, value)

    torch.export.save(torch.export.export(Model(), (torch.ones(3),)), io.BytesIO())


@pytest.mark.parametrize("kind", [*ACCEPTED, *DOUBTFUL])
def test_what_is_accepted_is_called_and_exported(kind: str, operators: Callable[[str], Any]) -> None:
    torch.testing.assert_close(operators(kind)(torch.ones(3), VALUES[kind]), torch.ones(3))
    save_export(operators(kind), VALUES[kind])
    findings = schema_findings(schema(kind))
    assert [finding.severity for finding in findings] == [Severity.doubtful] * (kind in DOUBTFUL)


@pytest.mark.parametrize("kind", REFUSED_BY_CALL)
def test_a_type_that_is_refused_cannot_be_passed(kind: str, operators: Callable[[str], Any]) -> None:
    with pytest.raises(RuntimeError, match="Not yet supported conversion from IValue to StableIValue"):
        operators(kind)(torch.ones(3), VALUES[kind])
    (finding,) = schema_findings(schema(kind))
    assert finding.severity is Severity.broken
    assert finding.message.startswith("Argument y is ")
    assert "stable ABI" in finding.message
    assert finding.hint


@pytest.mark.parametrize("kind", REFUSED_BY_EXPORT)
def test_a_list_that_is_refused_cannot_be_saved(kind: str, operators: Callable[[str], Any]) -> None:
    operators(kind)(torch.ones(3), VALUES[kind])
    # torch 2.14 saves lists of lists; compiled code with one does not load ("Unsupported list type").
    if not (kind == "int[][]" and torch.__version__ >= (2, 14)):
        with pytest.raises(Exception, match="Failed serializing node"):
            save_export(operators(kind), VALUES[kind])
    (finding,) = schema_findings(schema(kind))
    assert (finding.severity, finding.message) == (
        Severity.broken,
        f"Argument y is {kind}, and AOTInductor cannot compile a call with such a list.",
    )


# torch.export saves these calls; that AOTInductor refuses them was seen with torch 2.13.
@pytest.mark.parametrize("kind", ["Tensor[][]", "Generator"])
def test_what_only_the_compiler_refuses_is_refused(kind: str) -> None:
    (finding,) = schema_findings(f"f(Tensor x, {kind} y) -> Tensor")
    assert finding.severity is Severity.broken
    assert "AOTInductor cannot compile a call with" in finding.message


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("f(Tensor(a!) x) -> Tensor(a!)", "returns memory of an argument", "`f(Tensor(a!) x) -> ()`"),
        ("f(Tensor(a) x) -> Tensor(a)", "returns memory of an argument", "Return a copy"),
        ("f(Tensor x) -> int", "returns int", "a tensor without dimensions"),
        ("f(Tensor x) -> (Tensor, SymInt)", "returns SymInt", "a tensor without dimensions"),
        ("f(Tensor x) -> Tensor?", "returns Tensor?", "an empty tensor"),
        ("f(Tensor x) -> Tensor?[]", "returns Tensor?[]", "without holes"),
        ("f(Tensor(a!) x) -> (Tensor, Tensor[])", "returns a list beside others", "one list of all"),
    ],
)
def test_results_that_cannot_be_exported_are_refused(text: str, message: str, hint: str) -> None:
    (finding,) = schema_findings(text)
    assert finding.severity is Severity.broken
    assert message in finding.message
    assert finding.hint is not None
    assert hint in finding.hint


@pytest.mark.parametrize(
    "text",
    [
        "f(Tensor(a!) x) -> ()",
        "f(Tensor(a!)[] xs, Tensor(b!)? y) -> ()",
        "f(Tensor(a!) x) -> (Tensor, Tensor)",
        "f(Tensor(a!) x, Tensor(b!)? y) -> Tensor[]",
        "f(Tensor x) -> (Tensor, Tensor[])",
        "f(Tensor a, Tensor b, *, Tensor(a!) out) -> ()",
    ],
)
def test_writing_and_several_results_are_accepted(text: str) -> None:
    assert schema_findings(text) == ()


@pytest.mark.parametrize("text", ["", "f", "f(Tensor x)", "f(Tensor x float y) -> Tensor", "f(Foo x) -> Tensor"])
def test_what_is_not_a_schema_is_an_error_that_says_what_torch_said(text: str) -> None:
    with pytest.raises(UsageError, match="is not a schema: ") as error:
        schema_findings(text)
    assert error.value.hint is not None


def test_every_argument_gets_its_finding() -> None:
    findings = schema_findings("f(Scalar a, Tensor b, int c, complex[] d) -> int")
    assert [finding.message.split(",")[0] for finding in findings] == [
        "Argument a is Scalar",
        "Argument c is int",
        "Argument d is complex[]",
        "It returns int",
    ]

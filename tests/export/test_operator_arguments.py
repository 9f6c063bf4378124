"""Operators of every kind of argument agree with eager when compiled, or are refused at export by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.errors import OperatorNotExportableError
from exportkit.export.trace.preflight import check_operators
from exportkit.libraries import load_library
from tests.export import argument_models
from tests.export.argument_models import SIZE, Calls
from tests.export.function_models import CPU, spec_of, traced
from tests.fixtures import stable_library
from tests.subprocesses import run_exportkit


@pytest.fixture(scope="session")
def library() -> Path:
    return stable_library.build_with_aten(Path(__file__).with_name("argument_kinds.cpp"))


@pytest.mark.slow
def test_every_value_that_is_taken_arrives(library: Path, tmp_path: Path) -> None:
    model = f"{argument_models.__file__}:everything"
    for words in (["export", model, "-o", "out.pt2"], ["package", "out.pt2", "-o", "package.pt2"]):
        done = run_exportkit(*words, "--op-library", str(library), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.usefixtures("loaded")
def test_a_device_among_the_arguments_is_not_where_a_call_computes() -> None:
    traced(spec_of(Calls({"Device": [torch.device("meta")], "SymInt": [SIZE]}), torch.randn(4, 3)))

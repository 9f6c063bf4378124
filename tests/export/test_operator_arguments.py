"""Operators of every kind of argument agree with eager when compiled, or are refused at export by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit import ExportSpec
from exportkit.errors import OperatorNotExportableError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.preflight import check_operators
from exportkit.export.trace.trace import trace
from exportkit.libraries import load_library
from exportkit.progress import silent
from tests.conftest import DEVICES
from tests.export import argument_models
from tests.export.argument_models import SIZE, Calls
from tests.fixtures import stable_library
from tests.subprocesses import run_exportkit

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def library() -> Path:
    return stable_library.build_with_aten(Path(__file__).with_name("argument_kinds.cpp"))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_value_that_is_taken_arrives(library: Path, device: str, tmp_path: Path) -> None:
    export = ["export", f"{argument_models.__file__}:everything", "--device", device, "-o", "out.pt2"]
    for words in (export, ["package", "out.pt2", "-o", "package.pt2"]):
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
    spec = ExportSpec(Calls({kind: [value]}), (torch.randn(4, 3),), dynamic_shapes={"x": {0: "rows[2:9]"}})
    with pytest.raises(OperatorNotExportableError, match=re.escape(f": argument value {said}")) as caught:
        trace(EagerModel(spec), TraceOptions(), CPU, silent)
    assert "argument_models.py" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Scalar[]", "a list of Scalar"),
        ("Device[]", "a list of Device"),
        ("ScalarType?[]", "a list of ScalarType"),
        ("Layout[]?", "a list of Layout"),
        ("MemoryFormat[]", "a list of MemoryFormat"),
        ("int[][]", "a list of lists"),
        ("Tensor[][]", "a list of lists"),
        ("Tensor[]?[]", "a list of lists"),
        ("int?[]", "a list of optional int"),
        ("str?[]", "a list of optional str"),
        ("complex[]", "complex"),
        ("Storage", "Storage"),
        ("Stream", "Stream"),
        ("QScheme", "QScheme"),
        ("SymBool", "SymBool"),
    ],
)
def test_a_kind_that_cannot_be_passed_is_refused(kind: str, said: str) -> None:
    name = f"refused_kinds::f{abs(hash(kind))}"
    torch.library.define(name, f"(Tensor x, {kind} value) -> Tensor")
    operator = getattr(torch.ops.refused_kinds, name.partition("::")[2]).default
    message = f"{name}: argument value is {said}, and AOTInductor cannot pass that"
    with pytest.raises(OperatorNotExportableError, match=re.escape(message)) as caught:
        check_operators({name: operator}, CPU)
    assert caught.value.hint


@pytest.mark.usefixtures("loaded")
def test_a_device_among_the_arguments_is_not_where_a_call_computes() -> None:
    spec = ExportSpec(Calls({"Device": [torch.device("meta")], "SymInt": [SIZE]}), (torch.randn(4, 3),))
    trace(EagerModel(spec), TraceOptions(), CPU, silent)

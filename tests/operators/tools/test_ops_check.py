"""`exportkit ops check`: what is found is found with its call, and nothing that an operator does stops the others."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main
from exportkit.operators.tools.checking import _finding
from exportkit.operators.tools.journal import Step
from tests.fixtures import stable_library
from tests.operators.tools.conftest import INJECTED, misbehaving


def by_name(document: Any) -> dict[str, Any]:
    return {each["report"]["operator"]: each for each in document["operators"]}


def findings(checked: Any) -> dict[str, Any]:
    return {finding["check"]: finding for finding in checked["report"]["findings"]}


@pytest.mark.slow
def test_crash_hang_and_exhausted_memory_are_findings_and_the_others_are_checked(ops):
    options = ["--only", "fake-shape", "--timeout", 8, "--max-memory", "4GB"]
    code, document = ops("check", INJECTED, *options)
    checked = by_name(document)
    assert code == 1
    assert not document["ok"]

    crash = findings(checked["injected::crashes"])["crash"]
    assert "SIGSEGV" in crash["message"]
    assert "torch.ops.injected.crashes(torch.randn(7, 5))" in crash["call"]
    hang = findings(checked["injected::hangs"])["hang"]
    assert "within 8 s" in hang["message"]
    assert "torch.float64" in hang["call"]
    memory = findings(checked["injected::devours"])["memory"]
    assert "torch.bfloat16" in memory["call"]
    for name in ("crashes", "hangs", "devours"):
        assert "fake-shape" in checked[f"injected::{name}"]["report"]["passed"], "what did not fail is checked"

    lie = findings(checked["injected::padded"])["fake-shape"]
    assert lie["severity"] == "broken"
    assert "has shape [12], the kernel returns [9]" in lie["message"]
    assert not findings(checked["injected::good"])
    assert checked["injected::good"]["origin"] == "drawn"
    assert checked["injected::unheard"]["not_checked"] is None, "the word was learned from the refusal"
    never = checked["injected::never"]
    assert "not today" in never["not_checked"]
    assert "--calls 'injected::never=" in never["hint"]
    assert never["report"]["calls"] > 100


def test_given_calls_are_used_and_the_reference_is_compared(ops):
    library = misbehaving()
    only = ["--only", "reference", "--timeout", 8, "--dtype", "float32"]
    code, document = ops(
        "check", library, *only, "--calls", f"misbehaving::act={INJECTED}:calls_of_act",
        "--reference", f"misbehaving::act={INJECTED}:double",
    )  # fmt: skip
    (checked,) = document["operators"]
    assert code == 1
    assert checked["origin"] == "drawn and given"
    assert set(findings(checked)) == {"crash", "hang"}
    assert "torch.tensor([1.0, 5.0])" in findings(checked)["crash"]["call"]
    assert checked["report"]["passed"] == ["reference"]

    function = f"{INJECTED}:wrong"
    code, document = ops("check", library, "--only", "reference", "--operator", "act", "--reference", f"act={function}")
    assert code == 1
    assert "must equal the reference" in findings(document["operators"][0])["reference"]["message"]


def test_given_calls_are_checked_beside_the_drawn_ones(ops):
    code, document = ops(
        "check", INJECTED, "--operator", "narrow", "--only", "fake-shape", "--only", "fake-dtype",
        "--calls", f"narrow={INJECTED}:calls_of_narrow",
    )  # fmt: skip
    (checked,) = document["operators"]
    assert code == 1
    assert checked["origin"] == "drawn and given"
    assert ", 1)" in findings(checked)["fake-shape"]["call"], "the given calls have two dimensions"
    assert ", 41)" in findings(checked)["fake-dtype"]["call"], "nobody draws 41"


def test_the_calls_of_a_model_are_recorded_and_varied(ops):
    code, document = ops("check", f"{INJECTED}:Net", "--input", "x=float32[2,3,4]", "--only", "fake-shape")
    checked = by_name(document)
    assert code == 1
    assert set(checked) == {"injected::good", "injected::padded"}, "only what the model calls"
    assert {each["origin"] for each in checked.values()} == {"model"}
    assert set(findings(checked["injected::padded"])) == {"fake-shape"}, "the model's own size shows no fault"


def test_the_text_names_what_is_broken_and_how_to_see_it(capsys):
    assert main(["ops", "check", str(INJECTED), "--operator", "padded", "--only", "fake-shape"]) == 1
    said = capsys.readouterr()
    assert "  broken  fake-shape: The fake kernel says" in said.out
    assert "    >>> torch.ops.injected.padded(torch.randn(1))" in said.out
    assert said.out.endswith("1 operator: 1 broken, 0 not checked\n")
    assert "checking injected::padded (1 of 1) ..." in said.err
    checks = ["--only", "fake-shape", "--only", "schema"]
    assert main(["ops", "check", str(INJECTED), "--operator", "narrow", *checks]) == 1
    said = capsys.readouterr()
    assert "  doubtful  schema: " in said.out
    assert "BROKEN: fake-shape\n" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["there_is_no.so"], "no file 'there_is_no.so'"),
        (["model.pt2"], "`exportkit inspect model.pt2`"),
        ([INJECTED, "--input", "x=float32[2]"], "--input is for a model, such as my_model.py:Net"),
        ([INJECTED, "--calls", "a.py:calls"], "--calls NS::OP=a.py:calls"),
        ([INJECTED, "--reference", "injected::good=a.py"], "name a function"),
        ([INJECTED, "--max-memory", "much"], "not a number with a unit"),
    ],
)
def test_what_cannot_be_is_a_usage_error(arguments, said, capsys):
    assert main(["ops", "check", *map(str, arguments)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "fake-shapes"], "fake-shape,"),
        (["--operator", "best"], "injected::good"),
        (["--calls", f"injected::never={INJECTED}:nothing"], "yields no calls"),
        (["--spec", "json:dumps"], "names no OpSpec"),
        (["--dtype", "float99"], "float99"),
    ],
)
def test_what_only_the_library_tells_is_a_usage_error(arguments, said, capsys):
    assert main(["ops", "check", str(INJECTED), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_process_that_ends_without_a_word_is_a_finding_too():
    found = _finding(-signal.SIGKILL, None, 60)
    assert found.check == "crash"
    assert "memory runs out" in found.message
    found = _finding(-signal.SIGALRM, Step("compiles"), 60)
    assert "in the check compiles" in found.message


def test_a_float_parameter_of_cpp_is_found_in_a_library_and_a_double_is_not(ops):
    code, document = ops(
        "check", stable_library.build(Path(__file__).with_name("floats.cpp")), "--only", "float-parameter"
    )
    broken = {name for name, checked in by_name(document).items() if findings(checked)}
    assert code == 1
    assert broken == {"floats::as_float", "floats::as_optional", "floats::as_list"}


@pytest.mark.slow
def test_a_kernel_for_all_devices_is_tried_for_its_parts(ops, tmp_path):
    library = stable_library.build(Path(__file__).parents[2] / "export" / "opaque_ops.cpp")
    model = tmp_path / "composites.py"
    model.write_text(
        "import torch\n"
        f"torch.ops.load_library({str(library)!r})\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.ops.exportkit_opaque.twice(x), torch.ops.exportkit_opaque.parts(x)\n"
    )
    listed = {operator["name"]: operator["fake"] for operator in ops("list", library)[1]["operators"]}
    assert set(listed.values()) == {"its parts, or none"}
    _, document = ops("check", f"{model}:Net", "--input", "x=float32[3,2]", "--only", "fake-runs")
    checked = by_name(document)
    finding = findings(checked["exportkit_opaque::twice"])["fake-runs"]
    assert "torch.ops.exportkit_opaque.twice.default.py_impl" in finding["hint"]
    assert checked["exportkit_opaque::parts"]["report"]["passed"] == ["fake-runs"]

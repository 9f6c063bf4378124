"""Outputs that eager itself answers otherwise when it rounds otherwise: not wrong, not right, and still compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit import ExportSpec
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import describe_call
from exportkit.libraries import load_library
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in, explains, moves_of
from exportkit.package.manifest import Accuracy, OutputTolerance, TensorOutput
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.cut_program import cut_after, cut_points, values_after
from exportkit.verify.eager_decisions import EagerDecisions
from exportkit.verify.outcomes import Match, Mismatch, Unjudged
from tests.commands import run
from tests.fixtures import stable_library

FOLDER = Path(__file__).parent
MODEL = f"{FOLDER / 'bisect_models.py'}:Routed"

# --- what is recorded -------------------------------------------------------------------------------------------------


class Gated(torch.nn.Module):
    """Thresholds and ranks values that lie close together in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        near = self.first(x)
        score = self.second(near.softmax(-1))
        return {"mask": score > score.mean(), "best": score.argmax(-1), "near": near, "count": (near > -99).sum(-1)}


class Steady(Gated):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        near = self.first(x)
        return {"near": near, "places": torch.arange(x.shape[0])}


def recorded_moves(model: torch.nn.Module, path: Path, dtype: str) -> list[dict[str, Accuracy]]:
    """Returns how far eager moves in each drawn case of an export, by output."""
    spec = ExportSpec(model.eval(), (torch.randn(32, 64),), dynamic_shapes={"x": {0: "n[2:64]"}})
    export_program(spec, path, TraceOptions(cases=3, dtype=dtype, edge_cases=False))
    with PackageReader(path) as reader:
        manifest = reader.manifest
        cases = [reader.read(case.record) for case in manifest.cases if not edge_case_in(reader, case)]
    names = {f"0.output.{place}": output.name for place, output in enumerate(manifest.call.outputs)}
    return [{names[key]: moved for key, moved in moves_of(content).items()} for content in cases]


def test_a_case_keeps_how_far_eager_moves_where_rounding_decides_and_no_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moves = recorded_moves(Gated(), tmp_path / "gated.pt2", "bfloat16")
    assert set().union(*moves) == {"mask", "best"}  # neither values that only round, nor decisions far from the border
    assert all(0 < each.rms < 0.5 and each.greatest == 1 for case in moves for each in case.values())
    assert recorded_moves(Steady(), tmp_path / "steady.pt2", "bfloat16") == [{}, {}, {}]


@pytest.mark.parametrize("said", ["", "{", "[1]", '{"0.output.0": {"rms": "far"}}', '{"0.output.0": 3}'])
def test_a_strangers_file_may_say_anything(said: str) -> None:
    header = json.dumps({"__metadata__": {"moves": said}}).encode()
    assert moves_of(len(header).to_bytes(8, "little") + header) == {}


# --- what is judged ---------------------------------------------------------------------------------------------------

OUTPUTS = tuple(
    TensorOutput(name=name, dtype=dtype, shape=(100,), tolerance=OutputTolerance(rtol=0.0, atol=atol))
    for name, dtype, atol in (("mask", "bool", 0.0), ("y", "float32", 1e-3))
)
EAGER = [torch.arange(100) % 3 == 0, torch.linspace(-1, 1, 100)]
MOVES = {"mask": Accuracy(rms=0.2, greatest=1.0)}  # 4 of 100


def flipped(count: int, shift: float = 0.0) -> Any:
    mask = EAGER[0].clone()
    mask[:count] ^= True
    return compare_outputs(OUTPUTS, EAGER, [mask, EAGER[1] + shift], reference=Reference({}, {}, moves=MOVES))


def test_what_moves_no_further_than_eager_cannot_be_judged_and_the_others_can() -> None:
    assert isinstance(flipped(0), Match)
    verdict = flipped(10)
    assert isinstance(verdict, Unjudged)
    assert (verdict.exit_code, verdict.wrong) == (21, False)
    assert verdict.message.startswith("mask: 10 of 100 elements differ (10.00%)")
    assert verdict.message.endswith(
        "cannot be judged: eager moves by as much when it rounds otherwise\n1 more that agree"
    )
    assert isinstance(flipped(30), Mismatch)  # eager's movement does not explain so many
    wrong = flipped(10, shift=0.1)
    assert isinstance(wrong, Mismatch)
    assert "y: 100 of 100 elements differ" in wrong.message
    assert "cannot be judged" in wrong.message


def test_what_becomes_nan_is_explained_only_where_eager_does_too() -> None:
    finite, never = Accuracy(rms=1.0, greatest=3.0), Accuracy(rms=float("inf"), greatest=float("inf"))
    assert not explains(finite, never)
    assert explains(Accuracy(rms=1.7e308, greatest=1.7e308), never)


# --- node by node -----------------------------------------------------------------------------------------------------


def test_a_graph_that_takes_decisions_computes_all_else_and_the_decisions_too() -> None:
    model, x = Gated().eval(), torch.randn(5, 64)
    rows = torch.export.Dim("rows", min=1, max=8)
    program = torch.export.export(model, (torch.randn(3, 64),), dynamic_shapes={"x": {0: rows}})
    decisions = EagerDecisions(program)
    bound = decisions.bind(describe_call(model, (x,), {}))
    assert bound.names == ("x", "exportkit_decisions.0")  # the threshold that a sum reads; the others are results
    points = cut_points(decisions.program)
    assert [point.name for point in points] == [point.name for point in cut_points(program)]
    inverted = ~bound.tensors[1]
    with torch.no_grad():
        expected = program.module()(x)
        for point in points:
            cut = cut_after(decisions.program, point)
            answers = cut.module(check_guards=False)(*bound.args, **bound.kwargs)
            assert list(answers) == [value.name for value in values_after(decisions.program, point)]
        assert torch.equal(answers["gt_1"], torch.ones_like(inverted))  # as the graph computes it
        given = {"exportkit_decisions": (inverted,)}
        assert not cut_after(decisions.program, points[-1]).module(check_guards=False)(x, **given)["sum_1"].any()
    assert torch.equal(answers["sum_1"], expected["count"])


@pytest.mark.slow
def test_a_wrong_node_is_found_where_the_output_cannot_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, path = stable_library.build(FOLDER / "doubling.cpp"), tmp_path / "routed.pt2"
    monkeypatch.setenv("DOUBLING_LIBRARY", str(library))
    load_library(library, defines=["doubling"])
    options = ["--input", "x=float32[16,8]", "--dynamic", "x:0=rows[2:32]", "--format", "program", "--cases", "2"]
    assert run(capsys, "export", MODEL, *options, "--op-library", library, "-o", path)[0] == 0
    wrong = stable_library.build(FOLDER / "doubling.cpp", None, "-DFACTOR=2.02f", name="doubling_wrong")
    options = ["--against", "cases", "--json", "--bisect", "--model", MODEL]
    code, out, _ = run(capsys, "verify", path, "--op-library", wrong, *options)
    said = json.loads(out)
    assert code == said["exit_code"] == 21
    unjudged = {o["name"] for o in said["checks"][0]["verdict"]["outputs"] if o["moves"]}
    assert unjudged == {"routed"}
    found = said["bisection"]
    assert (found["node"]["operator"], found["exact"]) == ("doubling.twice.default", True)
    assert {error["name"] for error in found["errors"]} == {found["node"]["name"]}

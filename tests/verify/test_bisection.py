"""`verify --bisect`: the search, the cuts of a graph, and an operator that is wrong in the middle of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit.cli import main
from exportkit.libraries import load_library
from exportkit.package import manifest as m
from exportkit.verify.bisect_commands import CutPoint
from exportkit.verify.cut_program import cut_after, cut_points, own_values, values_after
from exportkit.verify.located import Located, NodeError, Outcome, bisect
from tests.export.function_models import FunctionModel
from tests.fixtures import stable_library
from tests.verify.verify_artifacts import write_artifact
from tests.verify.verify_models import STATE

FOLDER = Path(__file__).parent
MODEL = f"{FOLDER / 'bisect_models.py'}:Chain"
SCHEMA = "doubling::twice(Tensor x) -> Tensor"

# --- the search -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_the_first_failing_cut_is_found_wherever_it_is(case: tuple[int, int]) -> None:
    count, first = case
    found = bisect(count, lambda cut: cut >= first)
    assert (found.fails, found.passes) == (first, first - 1 if first else None)
    assert not found.undecided
    assert len(found.tested) <= 2 + math.ceil(math.log2(count))


@given(st.lists(st.sampled_from([True, False, "no code"]), min_size=1, max_size=40))
def test_whatever_fails_the_result_is_what_was_tested(outcomes: list[Outcome]) -> None:
    """Errors that come and go, and cuts that cannot be tested, are told as they are."""
    asked: list[int] = []

    def fails(cut: int) -> Outcome:
        asked.append(cut)
        return outcomes[cut]

    found = bisect(len(outcomes), fails)
    assert dict(found.tested) == {cut: outcomes[cut] for cut in asked}
    if outcomes[-1] is not True:
        assert (found.fails, asked) == (None, [len(outcomes) - 1])
        return
    assert len(asked) == len(set(asked))
    assert found.fails is not None
    assert outcomes[found.fails] is True
    assert found.passes is None or outcomes[found.passes] is False
    assert all(found.tested[cut] == "no code" for cut in found.undecided)


# --- cuts -------------------------------------------------------------------------------------------------------------


class Busy(torch.nn.Module):
    """Several results of one node, a branch, a value that is written into, sizes, and a result that is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        early = x @ self.weight
        values, places = early.topk(2)
        written = values.clone()
        written.mul_(2)
        chosen = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t + 1, (written,))
        return chosen + x.shape[0], places, (early + self.shift).sum(1)


def _values_over_time(program: torch.export.ExportedProgram, x: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """What torch's interpreter has for each node once a node has run: later ones may write into earlier values."""
    known: dict[str, torch.Tensor] = {}
    found: dict[str, dict[str, torch.Tensor]] = {}

    class Recording(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                known[node.name] = result
            found[node.name] = {name: tensor.clone() for name, tensor in known.items()}
            return result

    with torch.no_grad():
        Recording(program.module()).run(x)
    return found


def test_a_cut_computes_what_the_whole_graph_does_up_to_there() -> None:
    rows = torch.export.Dim("rows", min=1, max=8)
    program = torch.export.export(Busy(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: rows}})
    x = torch.linspace(-1, 2, 6).reshape(2, 3)
    expected = _values_over_time(program, x)
    points = cut_points(program)
    assert [point.name for point in points] == list(dict.fromkeys(point.name for point in points))
    assert len(points) >= 8
    for point in points:
        cut, values = cut_after(program, point), values_after(program, point)
        with torch.no_grad():
            result = cut.module()(x)
        assert list(result) == [value.name for value in values]
        assert set(result) & set(own_values(point))
        last = [name for name in own_values(point) if name in expected][-1]
        for name, tensor in result.items():
            assert torch.equal(tensor, expected[last][name]), (point.name, name)
        later = {node.name for node in points[points.index(point) + 1 :]}
        assert not later & {node.name for node in cut.graph.nodes}


def test_a_graph_is_not_cut_inside_of_vmap() -> None:
    mapped = FunctionModel(lambda x: torch.vmap(lambda row: row.exp() / row.sum())(x * 2) + 1)
    program = torch.export.export(mapped, (torch.ones(4, 3),))
    points = cut_points(program)
    inside = {"exp", "sum_1"} & {node.name for node in program.graph.nodes}
    assert {point.name for point in points} >= {"mul", "add"}
    assert len(inside) == 2
    assert not inside & {point.name for point in points}
    for point in points:
        with torch.no_grad():
            cut_after(program, point).module()(torch.ones(4, 3))
        torch.rand(1)  # torch refuses this where vmap has not ended


# --- an operator in the middle of a graph -----------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose model loads the right build of the operator, with two cases that it recorded."""
    library = stable_library.build(FOLDER / "doubling.cpp")
    monkeypatch.setenv("DOUBLING_LIBRARY", str(library))
    load_library(library, defines=["doubling"])
    from tests.verify.bisect_models import Chain

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    operators = [m.Operator(name="doubling::twice", schema=SCHEMA)]
    cases = [(each, Chain()(each)) for each in (x.flip(0), x)]
    return write_artifact(tmp_path / "chain.pt2", Chain(), cases, source=MODEL, state_sha256=STATE, operators=operators)


def test_a_wrong_kernel_is_found_at_its_node(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = stable_library.build(FOLDER / "doubling.cpp", None, "-DFACTOR=2.02f", name="doubling_wrong")
    arguments = ["verify", str(chain), "--against", "cases", "--op-library", str(wrong), "--bisect", "--json"]
    arguments += ["--model", MODEL, "--case", "1"]
    code = main(arguments)
    said = json.loads(capsys.readouterr().out)
    found = said["bisection"]
    assert code == said["exit_code"] == 1
    assert found["exact"]
    assert (found["node"]["name"], found["node"]["operator"]) == ("twice", "doubling.twice.default")
    assert found["node"]["where"].startswith("bisect_models.py:")
    (error,) = found["errors"]
    assert error["name"] == "twice"
    # One percent, beside what eager has against float64.
    assert 0.005 < error["compiled"]["greatest"] < 0.02
    assert error["eager"]["greatest"] < 1e-6
    assert found["case"] == {"label": "case 1 (rows=2)", "sizes": {"rows": 2}, "target": "program"}
    assert found["tested"]["twice"] is True
    assert found["tested"]["sigmoid"] is False
    for part in ("first difference: node 3 of 8, twice", "for case 1 (rows=2)", "what the compiler fuses"):
        assert part in found["message"]


@pytest.mark.parametrize(("options", "code"), [(["--against", "cases"], 0), (["--model", f"{MODEL[:-5]}Other"], 17)])
def test_nothing_is_searched_for_where_no_call_fails(
    options: list[str], code: int, chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = str(stable_library.build(FOLDER / "doubling.cpp"))
    assert main(["verify", str(chain), *options, "--op-library", right, "--bisect"]) == code
    assert capsys.readouterr().out.endswith(" no call of chain.pt2 fails, so that there is nothing to search for\n")


def _located(fails: Callable[[int], Outcome], errors: tuple[NodeError, ...] = ()) -> str:
    points = tuple(CutPoint(f"n{cut}", "aten.relu.default", "", (f"n{cut}",), "") for cut in range(4))
    return Located("case 1", {}, "cpu", points, bisect(4, fails), None, errors).message


def test_a_finding_that_is_not_certain_says_so() -> None:
    assert "compiled again, agrees with eager" in _located(lambda cut: False)
    untested = _located(lambda cut: "g++ is missing")
    assert "could not be compiled again for case 1 of cpu: g++ is missing" in untested
    between = _located(lambda cut: "no kernel" if cut == 1 else cut > 1)
    assert "first difference: node 3 of 4, n2" in between
    assert "nodes before it that were not decided: 1; one of them" in between
    assert "n1: no kernel" in between
    assert "fusion decides" in _located(lambda cut: cut >= 2, (NodeError("n0", "n0: differs", None, None),))

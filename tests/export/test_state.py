"""State and written inputs: what is traced, recorded and refused. Programs are run here without compiling them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from exportkit import ExportSpec, Method
from exportkit.cli import main
from exportkit.errors import ExportError, UsageError
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.program_file import load_program
from exportkit.export.models.program_model import state_of
from exportkit.export.models.resolve import resolve
from exportkit.export.models.resolved import EagerModel
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.trace.draft import draft_of
from exportkit.export.trace.lifted import run_program
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Size, StateUse
from tests.artifacts import artifact
from tests.export import state_models as models
from tests.export.function_models import exported
from tests.export.state_models import Decoder, Detector, Tied, Writes
from tests.verify.told_worker import replayed

export = partial(exported, edge_cases=False)


# --- what works -------------------------------------------------------------------------------------------------------


def test_written_buffers_become_state_and_cases_are_sessions(tmp_path: Path) -> None:
    manifest = export(models.detector(), tmp_path)
    assert [(s.name, s.shape, s.initial) for s in manifest.state] == [("h", (1, 6), None), ("c", (1, 6), None)]
    (method,) = manifest.methods
    assert method.state == (StateUse(index=0, written=True), StateUse(index=1, written=True))
    assert [tensor.name for tensor in method.call.inputs] == ["chunk"]
    assert [len(case.calls) for case in manifest.cases] == [4]
    (case,) = manifest.cases
    assert case.reference_dtype == "float64"
    assert case.state_accuracy.keys() == {"h", "c"}
    assert all(call.accuracy.keys() == {"0"} for call in case.calls)
    assert replayed(tmp_path / "x.pt2") == 4


def test_a_session_has_any_number_of_rows_where_the_first_axis_is_a_dimension(tmp_path: Path) -> None:
    manifest = export(models.streams(), tmp_path)
    assert {state.shape for state in manifest.state} == {(Size(dimension="streams"), 6)}
    assert [case.calls[0].sizes["streams"] for case in manifest.cases][:3] == [3, 1, 8]
    assert replayed(tmp_path / "x.pt2") == 16


def test_methods_share_nested_state_and_take_only_what_they_use(tmp_path: Path) -> None:
    spec = models.decoder()
    before = {name: tensor.clone() for name, tensor in spec.model.named_buffers()}
    manifest = export(spec, tmp_path)
    now = dict(spec.model.named_buffers())  # the model's own stay as they are, and in their order
    assert list(now) == list(before)
    torch.testing.assert_close(now, before, rtol=0, atol=0)
    assert [state.name for state in manifest.state] == ["position", "cache.k", "cache.v"]
    assert manifest.state[0].dtype == "int64"
    assert manifest.state[0].tolerance.atol == 0
    used = {method.name: method.state for method in manifest.methods}
    assert used["embed"] == ()
    assert used["prefill"] == used["decode"] == tuple(StateUse(index=i, written=True) for i in range(3))
    assert [[call.method for call in case.calls] for case in manifest.cases][-1] == ["prefill", *["decode"] * 4]
    assert [len(case.calls) for case in manifest.cases].count(1) == 4  # of embed, which has no state
    assert replayed(tmp_path / "x.pt2") == 4 * (1 + 5)


def test_assigned_buffers_are_written_and_results_are_not_the_state_itself(tmp_path: Path) -> None:
    exported(models.assigned(), tmp_path)
    saved = load_program(tmp_path / "x.pt2")
    module = saved.programs["forward"].module()
    new, old = torch.full((3,), 2.0), torch.zeros(3)
    part, before = run_program(module, (torch.ones(3),), {}, [new, old])
    assert (new.tolist(), old.tolist(), part.tolist(), before.tolist()) == ([2.0] * 3, [2.0] * 3, [2.0] * 2, [2.0] * 3)
    run_program(module, (torch.zeros(3),), {}, [new, old])
    assert (new.tolist(), part.tolist(), before.tolist()) == ([1.0] * 3, [2.0] * 2, [2.0] * 3)
    # A result that is what a buffer was before is not what the buffer becomes.
    _, before = run_program(module, (torch.zeros(3),), {}, [new, old])
    assert (new.tolist(), before.tolist()) == ([0.5] * 3, [1.0] * 3)
    assert replayed(tmp_path / "x.pt2") > 4


def test_an_initial_value_is_a_record_with_one_row_and_zeros_are_none(tmp_path: Path) -> None:
    spec = models.streams()
    spec.model.h.fill_(0.5)
    manifest = export(spec, tmp_path)
    record, none = (state.initial for state in manifest.state)
    assert none is None
    with PackageReader(tmp_path / "x.pt2") as reader:
        assert state_of(manifest, reader.read)["h"].tolist() == [[0.5] * 6]
        assert len(reader.read(str(record))) == 6 * 4


def test_tied_buffers_are_one_state_with_aliases(tmp_path: Path) -> None:
    manifest = export(ExportSpec(model=Tied(), example_inputs=(torch.ones(2),), state=("one.count",)), tmp_path)
    (state,) = manifest.state
    assert (state.name, state.aliases, state.dtype) == ("one.count", ("two.count",), "int32")
    assert replayed(tmp_path / "x.pt2") == 4


def test_a_cast_keeps_tied_buffers_tied_and_casts_the_state(tmp_path: Path) -> None:
    manifest = export(ExportSpec(Tied().double(), (torch.ones(2),), state=("*",)), tmp_path, dtype="float32")
    assert manifest.state[0].aliases == ("two.count",)
    cast = export(models.detector(), tmp_path, dtype="bfloat16")
    assert {state.dtype for state in cast.state} == {"bfloat16"}
    assert cast.cases[0].state_accuracy.keys() == {"h", "c"}


def test_written_inputs_are_results(tmp_path: Path) -> None:
    manifest = export(models.in_place(), tmp_path)
    written = {tensor.name: tensor.written is not None for tensor in manifest.call.inputs}
    assert written == {"x": False, "cache.0": True, "cache.1": True, "position": False}
    assert manifest.cases[0].calls[0].accuracy.keys() == {"0", "written.cache.0", "written.cache.1"}
    assert replayed(tmp_path / "x.pt2") == 1


def test_the_command_declares_state_and_written_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('h', torch.zeros(3))\n    def forward(self, x, out):\n"
        "        self.h += x\n        out.copy_(self.h * 2)\n        return self.h.sum()\n"
    )
    command = ["export", f"{tmp_path}/m.py:M", "--input", "x=float32[3]", "--input", "out=float32[3]"]
    command += ["--format", "program", "--no-edge-cases", "-o", str(tmp_path / "m.pt2")]
    assert main([*command, "--state", "h"]) == 5
    assert "--writes NAME" in capsys.readouterr().err
    assert main([*command, "--writes", "out"]) == 5
    assert "--state NAME" in capsys.readouterr().err
    assert main([*command, "--state", "h", "--writes", "out"]) == 0
    assert replayed(tmp_path / "m.pt2") == 4


@pytest.mark.slow
def test_sequences_are_drawn_by_the_spec(tmp_path: Path) -> None:
    def draw(sizes: dict[str, int], generator: torch.Generator) -> list[Any]:
        rows = sizes["batch"]
        return [
            ("prefill", (torch.randint(11, (rows, 3), generator=generator),), {}),
            ("decode", (), {"token": torch.randint(11, (rows, 1), generator=generator)}),
            ("prefill", (torch.randint(11, (rows, sizes["length"]), generator=generator),), {}),
        ]

    with pytest.raises(UsageError, match=r"call 1 \(decode\), returned another structure"):  # `token` was positional
        export(replace(models.decoder(), draw_sequence=draw), tmp_path)

    def by_place(sizes: dict[str, int], generator: torch.Generator) -> list[Any]:
        return [(name, (*args, *kwargs.values()), {}) for name, args, kwargs in draw(sizes, generator)]

    manifest = export(replace(models.decoder(), draw_sequence=by_place), tmp_path)
    (first, *_) = [case for case in manifest.cases if len(case.calls) > 1]
    assert [(call.method, call.sizes) for call in first.calls] == [
        ("prefill", {"batch": 2, "length": 3}),
        ("decode", {"batch": 2}),
        ("prefill", {"batch": 2, "length": 5}),
    ]
    replayed(tmp_path / "x.pt2")


@pytest.mark.slow_but("answer3*")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "returned no calls, but a list"),
        (None, "returned no calls, but a NoneType"),
        ([("embed", (torch.ones(1, 1, dtype=torch.long),), {})], "as call 0"),
        ([(torch.ones(1),)], "as call 0"),
        ([("decode", (torch.ones(rows, 1, dtype=torch.long),), {}) for rows in (1, 2)], "`batch` is 1 and 2"),
    ],
)
def test_a_drawn_sequence_that_is_none_is_refused(answer: Any, message: str, tmp_path: Path) -> None:
    spec = replace(models.decoder(), draw_sequence=lambda sizes, generator: answer)
    with pytest.raises(UsageError, match=message):
        export(spec, tmp_path, cases=1)


def test_eager_sessions_are_independent_fork_and_reset() -> None:
    eager = EagerMethods(models.detector())
    calls = [eager.bind("forward", (torch.randn(1, 8),), {}) for _ in range(3)]
    with torch.no_grad():
        straight = eager.session()
        expected = [straight.call("forward", call).outputs[0] for call in calls]
        session, other = eager.session(), eager.session()
        assert torch.equal(session.call("forward", calls[0]).outputs[0], expected[0])
        other.call("forward", calls[2])
        fork = session.fork()
        assert torch.equal(session.call("forward", calls[1]).outputs[0], expected[1])
        assert torch.equal(fork.call("forward", calls[1]).outputs[0], expected[1])
        fork.call("forward", calls[0])
        assert torch.equal(session.call("forward", calls[2]).outputs[0], expected[2])
        session.reset()
        assert torch.equal(session.call("forward", calls[0]).outputs[0], expected[0])
        assert not torch.equal(session.state["h"], fork.state["h"])


def test_what_a_session_answered_does_not_change_with_the_next_call() -> None:
    eager = EagerMethods(models.assigned())
    session, call = eager.session(), eager.bind("forward", (torch.ones(3),), {})
    part, before = session.call("forward", call).outputs
    session.state["old"].fill_(7)
    session.state["new"].fill_(7)
    assert (part.tolist(), before.tolist()) == ([2.0, 2.0], [2.0, 2.0, 2.0])


# --- saved programs and options ---------------------------------------------------------------------------------------


def foreign(model: torch.nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Path:
    """A program of torch.export.save."""
    path = folder / "foreign.pt2"
    torch.export.save(torch.export.export(model, inputs, strict=False), path)
    return path


def test_a_program_of_torch_may_write_inputs_that_are_declared(tmp_path: Path) -> None:
    writes = foreign(Writes(lambda m, x: x.add_(1).sum()), (torch.rand(2, 3),), tmp_path)
    with pytest.raises(ExportError, match=r"writes into its inputs x(?s:.*)--writes NAME"):
        export_program(resolve(str(writes), trusted=True), tmp_path / "x.pt2")
    manifest = export_program(resolve(str(writes), trusted=True), tmp_path / "x.pt2", TraceOptions(writes=["x"]))
    assert manifest.call.inputs[0].written is not None
    assert replayed(tmp_path / "x.pt2") == len(manifest.cases) > 1


class Listener(torch.nn.Module):
    """Counts rows in a buffer, and sums them in another one of a module inside, which is not in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(3, 3)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("sum", torch.full((3,), 0.5), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor, out: Tensor) -> dict[str, Tensor]:
        self.count += x.shape[0]
        self.inner.sum.add_(self.project(x).sum(0) * torch.tensor([1.0, 2.0, 3.0]))
        out.add_(self.inner.sum)
        return {"sum": self.inner.sum + self.table, "count": self.count.clone()}


@pytest.mark.slow
def test_buffers_of_a_program_of_torch_become_state_where_they_are_declared(tmp_path: Path) -> None:
    inputs, path, out = (torch.rand(4, 3), torch.rand(3)), tmp_path / "foreign.pt2", tmp_path / "y.pt2"
    shapes = {"x": {0: torch.export.Dim("rows", min=1, max=9)}, "out": None}
    torch.export.save(torch.export.export(Listener(), inputs, dynamic_shapes=shapes, strict=False), path)
    with pytest.raises(ExportError, match=r"changes its buffers count, inner\.sum(?s:.*)--state NAME"):
        export_program(resolve(str(path), trusted=True), out, TraceOptions(writes=["out"]))
    options = TraceOptions(state=["inner.sum", "count"], writes=["out"])
    manifest = export_program(resolve(str(path), trusted=True), out, options)
    assert [(state.name, state.initial is None) for state in manifest.state] == [("count", True), ("inner.sum", False)]
    assert manifest.methods[0].state == (StateUse(index=0, written=True), StateUse(index=1, written=True))
    assert sorted(weight.name for weight in manifest.weights if weight.state) == []  # a program has its weights inside
    assert [(each.min, each.max) for each in manifest.call.dimensions] == [(1, 9)]
    assert manifest.call.inputs[1].written is not None
    assert replayed(out) == sum(len(case.calls) for case in manifest.cases) > 4
    # The same model, traced from its source: the same answers.
    spec = ExportSpec(model=Listener(), example_inputs=inputs, dynamic_shapes={"x": {0: "rows[1:9]"}})
    own = export_program(spec, tmp_path / "own.pt2", options)
    with PackageReader(out) as one, PackageReader(tmp_path / "own.pt2") as other:
        for mine, theirs in zip(one.manifest.cases, own.cases, strict=True):
            found, wanted = load(one.read(mine.record)), load(other.read(theirs.record))
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                torch.testing.assert_close(found[name], tensor, equal_nan=True)


def test_what_a_program_of_torch_cannot_have_as_state_is_named(tmp_path: Path) -> None:
    path = foreign(Writes(lambda m, x: x + m.h.add_(x)), (torch.rand(2, 3),), tmp_path)
    with pytest.raises(UsageError, match=r"--state cache matches no buffer or parameter(?s:.*)It has h"):
        export_program(resolve(str(path), trusted=True), tmp_path / "y.pt2", TraceOptions(state=["cache"]))
    with pytest.raises(UsageError, match="was traced with that size fixed"):
        export_program(
            resolve(str(path), trusted=True), tmp_path / "y.pt2", TraceOptions(state=["h"], dynamic=["x:0=b[1:4]"])
        )


@pytest.mark.slow
def test_a_saved_program_keeps_its_state_and_cannot_get_other_state(tmp_path: Path) -> None:
    export(models.decoder(), tmp_path)
    again = export_program(resolve(str(tmp_path / "x.pt2")), tmp_path / "y.pt2")
    with PackageReader(tmp_path / "x.pt2") as reader:
        assert (again.methods, again.state, again.cases) == (
            reader.manifest.methods,
            reader.manifest.state,
            reader.manifest.cases,
        )
    assert replayed(tmp_path / "y.pt2") == 24
    with pytest.raises(UsageError, match="its state and what it writes cannot change"):
        export_program(resolve(str(tmp_path / "x.pt2")), tmp_path / "y.pt2", TraceOptions(state=["position"]))


@pytest.mark.slow
def test_programs_answer_as_one_model_over_the_weights_that_it_has(tmp_path: Path) -> None:
    spec = models.decoder()
    export(spec, tmp_path)
    saved = load_program(tmp_path / "x.pt2").spec
    with torch.no_grad():
        for model in (spec.model, saved.model):
            model.get_parameter("embedding.weight").mul_(2)
        sessions = [EagerMethods(each).session({"batch": 2}) for each in (spec, saved)]
        answers = []
        for session, eager in zip(sessions, map(EagerMethods, (spec, saved))):
            ids = torch.arange(6).reshape(2, 3)
            calls = [("prefill", ids), ("decode", ids[:, :1]), ("embed", ids)]
            answers.append([session.call(name, eager.bind(name, (x,), {})).outputs[0] for name, x in calls])
    for one, other in zip(*answers):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(dict(sessions[0].state), dict(sessions[1].state))


@pytest.mark.slow
def test_a_draft_says_what_a_method_writes_without_declaring_it(tmp_path: Path) -> None:
    assert not draft_of(EagerModel(models.decoder()), TraceOptions()).findings
    spec = replace(models.decoder(), state={"cache.*": "batch"})
    found = [finding.message for finding in draft_of(EagerModel(spec), TraceOptions()).findings]
    assert [text.partition(" while")[0] for text in found] == [
        "prefill: the model changes its buffers position",
        "decode: the model changes its buffers position",
    ]


def test_an_option_for_a_size_is_for_each_method_that_has_the_input(tmp_path: Path) -> None:
    manifest = export(models.decoder(), tmp_path, dynamic=["ids:1=length[1:6]"], cases=1)
    ranges = {method.name: {d.name: d.max for d in method.call.dimensions} for method in manifest.methods}
    assert ranges == {"prefill": {"batch": 4, "length": 6}, "decode": {"batch": 4}, "embed": {"batch": 4, "length": 6}}
    with pytest.raises(UsageError, match=r"--dynamic image:...: no method has a tensor input 'image'"):
        export(models.decoder(), tmp_path, dynamic=["image:1=length[1:4]"])
    with pytest.raises(UsageError, match="--writes image: no method has an input of that name"):
        export(models.decoder(), tmp_path, writes=["image"])


@pytest.mark.slow
def test_compiled_code_writes_its_state_and_shares_one_record_of_each_weight() -> None:
    assert replayed(artifact("decoder")) > 10
    with PackageReader(artifact("decoder")) as reader:
        manifest, names = reader.manifest, reader.names
    (target,) = manifest.targets
    taken = {name: set(constants.values()) for name, constants in target.constants.items()}
    assert taken["prefill"] == taken["decode"] > taken["similar"] == {"head.weight", "head.bias"}
    weights = {weight.name for weight in manifest.weights}
    assert not weights & {state.name for state in manifest.state}
    assert len([name for name in names if name.startswith("data/weights/")]) == len(weights)


# --- what is no state, and what must not be written ------------------------------------------------------------------


def grown(m: Writes, x: Tensor) -> Tensor:
    m.h = torch.cat([m.h, x])
    return m.h.sum(0)


def counted(m: Writes, x: Tensor) -> Tensor:
    m.h += x
    m.calls = getattr(m, "calls", 0) + 1
    return x * m.calls


@pytest.mark.parametrize(
    ("function", "state", "message"),
    [
        (lambda m, x: x + m.h.add_(x), ("seen",), "changes its buffers h(?s:.*)--state NAME"),
        (lambda m, x: x + m.h.mul_(1), (), "changes its buffers h (?s:.*)--state NAME"),
        (lambda m, x: x + m.linear.weight[:2].data.mul_(2), ("h",), "changes its parameters linear.weight"),
        (lambda m, x: x.add_(m.h.add_(x)), ("h",), "writes into its inputs x(?s:.*)--writes NAME"),
        (lambda m, x: x + m.h.add_(x), ("h", "unused"), "unused is declared .* no method writes it"),
        (lambda m, x: x + m.h.add_(x), ("g*",), r"--state g\* matches no buffer or parameter(?s:.*)h, seen, unused"),
        (lambda m, x: x + m.h.add_(x), ("linear.*", "h"), "linear.weight is declared to be state, and no method"),
        (grown, ("h",), r"assigns float32\[4, 3\] on cpu to the buffer h, which is float32\[2, 3\] on cpu"),
        (counted, ("h",), "is given the number 2 and then 3"),
    ],
)
def test_what_is_no_state_is_refused_by_name(
    function: Callable[..., Tensor], state: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    spec = ExportSpec(model=Writes(function), example_inputs=(torch.rand(2, 3),), state=state)
    with pytest.raises((ExportError, UsageError), match=message):
        exported(spec, tmp_path)
    assert not (tmp_path / "x.pt2").exists()


def test_an_input_that_is_declared_and_not_written_is_refused(tmp_path: Path) -> None:
    spec = ExportSpec(model=Writes(lambda m, x: x * 2), example_inputs=(torch.rand(2, 3),), writes=("x",))
    with pytest.raises(ExportError, match="the inputs x are declared to be written, and the model does not"):
        exported(spec, tmp_path)
    with pytest.raises(UsageError, match="y is declared to be written, and there is no such input"):
        exported(ExportSpec(model=Writes(lambda m, x: x), example_inputs=(torch.rand(2, 3),), writes=("y",)), tmp_path)


def test_a_view_of_a_weight_or_of_other_state_is_no_state(tmp_path: Path) -> None:
    for view in (lambda m: m.linear.weight.data[:2], lambda m: m.h[:1]):
        model = Writes(lambda m, x: x + m.part.add_(1).sum())
        model.register_buffer("part", view(model))
        with pytest.raises(UsageError, match=r"the state of buffer part shares memory with the (parameter|buffer)"):
            exported(ExportSpec(model=model, example_inputs=(torch.rand(2, 3),), state=("part",)), tmp_path)


def test_one_of_two_tied_buffers_cannot_be_assigned(tmp_path: Path) -> None:
    model = Writes(lambda m, x: setattr(m, "h", m.h + x) or x * 2)
    model.register_buffer("twin", model.h)
    with pytest.raises(UsageError, match="assigns a new tensor to the buffer h, which is also twin"):
        exported(ExportSpec(model=model, example_inputs=(torch.rand(2, 3),), state=("h",)), tmp_path)


def test_rows_that_begin_differently_are_refused_where_their_number_varies(tmp_path: Path) -> None:
    spec = models.streams()
    spec.model.h = torch.arange(12.0).reshape(2, 6)
    with pytest.raises(UsageError, match="the rows of the state h differ"):
        exported(spec, tmp_path)


def test_a_dimension_of_state_must_be_one_of_each_method_that_uses_it(tmp_path: Path) -> None:
    spec = ExportSpec(model=Detector(), example_inputs=(torch.randn(1, 8),), state={"?": "streams"})
    with pytest.raises(UsageError, match="forward takes the state h with a first axis of 1, not of any `streams`"):
        exported(spec, tmp_path)
    with pytest.raises(UsageError, match="--static fixes every size, and the first axis of the state h"):
        exported(models.streams(), tmp_path, static=True)


def test_a_method_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    spec = ExportSpec(model=Decoder(), methods={"speak": Method(example_inputs=(torch.ones(1),))})
    with pytest.raises(UsageError, match=r"the method speak calls Decoder.speak, which does not exist"):
        exported(spec, tmp_path)

"""What a verification does with what the child processes answer; the processes are scripted."""

from __future__ import annotations

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from exportkit.child.messages import Failed
from exportkit.errors import UsageError
from exportkit.export.models.eager_model import input_texts
from exportkit.installed import declared_modules
from exportkit.libraries import host_platform
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.reference_model import ReferenceModel
from exportkit.runtime.targets import Host
from exportkit.verify import eager as eager_module
from exportkit.verify import outcomes, replay, run_plan
from exportkit.verify.commands import (
    ArtifactLoaded,
    CallModel,
    CallsDrawn,
    DrawCalls,
    EagerMade,
    LoadArtifact,
    MakeEager,
    ModelCalled,
)
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.runtime import tiny
from tests.verify.told_worker import Told
from tests.verify.verify_artifacts import Affine, affine_call, right, write_artifact

X = torch.arange(6.0).reshape(2, 3)
STRUCTURE = msgspec.json.encode(affine_call().result).decode()
LOADED = ArtifactLoaded("cpu", "2.13.0", 0.01)
CASES = VerifyOptions(against="cases")
CRASH = outcomes.Crashed(11, None, "doing", "")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decisions")
    return write_artifact(folder / "a.pt2", Affine(), [(X, right(X))], source="models:affine")


@pytest.fixture(scope="module")
def without_cases(tmp_path_factory):
    return write_artifact(tmp_path_factory.mktemp("decisions") / "b.pt2", Affine(), [], source="models:affine")


COMMANDS = {LoadArtifact: "replay_load", CallModel: "replay_call", MakeEager: "eager_make", DrawCalls: "eager_draw"}


class Script:
    """Stands in for VerifyWorker: `answers` by (process, what it is asked to do); a callable gets the command."""

    def __init__(self, **answers):
        self.answers = answers
        self.commands = []
        self.started = []

    def __call__(self, module, *, search_path, with_torch=True):
        name = module.rpartition(".")[2].removesuffix("_worker")
        assert search_path == {"replay": "installed", "eager": "caller"}[name]
        assert with_torch
        self.started.append(name)
        return _Process(self, name)


class _Process(Told):
    def __init__(self, script, name):
        self.script, self.name, self.alive = script, name, True

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        self.alive = False

    def printed(self):
        return ""

    def ask(self, command, expected, *, doing, timeout):
        self.script.commands.append(command)
        answer = self.script.answers[COMMANDS[type(command)]]
        answer = answer(command) if callable(answer) else answer
        if isinstance(answer, (outcomes.Crashed, outcomes.TimedOut)):
            self.alive = False
        return answer


def replays(command, structure=STRUCTURE):
    x = load_file(command.inputs)["0.input.0"]
    save_file({f"0.output.{i}": t for i, t in enumerate(right(x).values())}, command.outputs)
    return ModelCalled(0.001, structure)


def drawn_case(command):
    return m.Case(record="", calls=(m.CaseCall(method="forward", sizes=command.sizes),))


def answers(command, off=0.0):
    """Draws inputs, and answers for these plus `off`."""
    x = torch.arange(3.0 * command.sizes["rows"]).reshape(-1, 3)
    save_file({"0.input.0": x} | {f"0.output.{i}": t for i, t in enumerate(right(x + off).values())}, command.file)
    return CallsDrawn(drawn_case(command), (STRUCTURE,))


@pytest.fixture
def run(monkeypatch, path):
    def go(artifact=path, options=None, **script):
        monkeypatch.setattr("exportkit.reference_model.installed_models", lambda: {"models:affine": "models:affine"})
        good = {"replay_load": LOADED, "replay_call": replays}
        good |= {"eager_make": EagerMade("0" * 64), "eager_draw": answers}
        worker = Script(**(good | script))
        monkeypatch.setattr(replay, "VerifyWorker", worker)
        monkeypatch.setattr(eager_module, "VerifyWorker", worker)
        go.worker = worker
        return verify(artifact, options or VerifyOptions(shapes=2))

    return go


def eager(report):
    return [check.verdict for check in report.checks if check.against == "eager"]


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ({"y": X * 2}, "has no 0.output.1 (n)"),
        ({**right(X), "n": torch.full((2,), 3, dtype=torch.int32)}, "0.output.1 (n) is int32[2]"),
        ({**right(X), "y": X[:1] * 2}, "0.output.0 (y) is float32[1, 3]"),
        ({**right(X), "z": torch.ones(1)}, "unexpected tensor: 0.output.2"),
    ],
)
def test_a_case_that_does_not_fit_is_a_bad_package_and_the_others_are_compared(run, tmp_path, outputs, says):
    bad = write_artifact(tmp_path / "a.pt2", Affine(), [(X, outputs), (X, right(X))])
    report = run(bad, CASES)
    first, second = (check.verdict for check in report.checks)
    assert isinstance(first, outcomes.LoadFailed)
    assert first.error == "CaseError"
    assert says in first.detail
    assert isinstance(second, outcomes.Match)
    assert report.exit_code == 3


@pytest.mark.parametrize(
    ("against", "compared", "started"),
    [
        ("cases", ["cases"], ["replay"]),
        ("eager", ["eager", "eager"], ["replay", "eager"]),
        ("both", ["cases", "eager", "eager"], ["replay", "eager"]),
    ],
)
def test_only_what_was_asked_for_is_done(run, against, compared, started):
    report = run(options=VerifyOptions(against=against, shapes=2))
    assert [check.against for check in report.checks] == compared
    assert {type(check.verdict) for check in report.checks} == {outcomes.Match}
    assert report.exit_code == 0
    assert run.worker.started == started


NOT_FOUND = Failed("ModelNotFoundError", "there is no module", None, 2)
OTHERWISE = {"eager_draw": lambda command: answers(command, off=1.0)}
FLAT = {"replay_call": lambda command: replays(command, '{"type":"tensor","index":0}')}


@pytest.mark.parametrize(
    ("script", "verdict", "says", "code"),
    [
        # What does not load has the exit code of its error.
        ({"replay_load": Failed("NoTargetError", "no", None, 4)}, outcomes.LoadFailed, "no", 4),
        ({"replay_load": Failed("SchemaChangedError", "no", None, 3)}, outcomes.LoadFailed, "no", 3),
        ({"replay_load": Failed("RuntimeError", "no")}, outcomes.LoadFailed, "no", 3),
        (
            {"replay_load": Failed("ModelLoadError", "operator ns::op is not loaded", None, 3)},
            outcomes.MissingOperator,
            "ns::op",
            15,
        ),
        (
            {"replay_load": Failed("E", "Could not find schema for ns::op.\nMore", None, 3)},
            outcomes.MissingOperator,
            "ns::op",
            15,
        ),
        (FLAT, outcomes.WrongStructure, "mapping", 11),
        (OTHERWISE, outcomes.Mismatch, "differ", 1),
        ({"eager_make": EagerMade("1" * 64)}, outcomes.EagerDiffers, "--weights", 17),
        # Eager that is not there is skipped where cases spoke; one that raises when it is made is there.
        ({"eager_make": NOT_FOUND}, outcomes.EagerUnavailable, "there is no module", 0),
        ({"eager_make": Failed("RuntimeError", "boom")}, outcomes.EagerFailed, "boom", 18),
        ({"eager_draw": CRASH}, outcomes.Crashed, "SIGSEGV", 13),
    ],
)
def test_each_answer_has_its_verdict_and_its_exit_code(run, script, verdict, says, code):
    report = run(**script)
    found = next(each.verdict for each in report.checks if not isinstance(each.verdict, outcomes.Match))
    assert isinstance(found, verdict)
    assert says in found.message
    assert report.exit_code == code


def test_eager_that_is_not_there_fails_where_it_is_all_or_the_caller_named_it(run, without_cases):
    assert run(options=VerifyOptions(against="eager"), eager_make=NOT_FOUND).exit_code == 16
    assert run(without_cases, eager_make=NOT_FOUND).exit_code == 16
    named = VerifyOptions(eager=ReferenceModel("models:misspelt"))
    assert run(options=named, eager_make=NOT_FOUND).exit_code == 16


def test_an_artifact_that_names_no_model_says_how_to_name_one(run, tmp_path):
    unnamed = write_artifact(tmp_path / "c.pt2", Affine(), [(X, right(X))])
    (verdict,) = eager(run(unnamed))
    assert "--model" in verdict.message
    assert eager(run(unnamed, options=VerifyOptions(eager=ReferenceModel("models:other"), shapes=1)))[0].kind == "match"
    made = [each for each in run.worker.commands if isinstance(each, MakeEager)]
    assert made[-1].eager.model == "models:other"


def test_sizes_beyond_the_budget_are_named(run):
    report = run(options=VerifyOptions(against="eager", shapes=3, max_input_bytes=48))
    assert report.skipped == ("rows=8: its inputs take 96 bytes, more than the limit of 48 bytes",)
    assert max(check.sizes["rows"] for check in report.checks) == 4


def test_where_every_size_is_beyond_the_budget_eager_was_not_compared(run, without_cases):
    for options, artifact, code in (
        (VerifyOptions(against="eager", max_input_bytes=1), None, 16),
        (VerifyOptions(max_input_bytes=1), without_cases, 16),
        (VerifyOptions(max_input_bytes=1), None, 0),
    ):
        report = run(**({"artifact": artifact} if artifact else {}), options=options)
        (verdict,) = eager(report)
        assert isinstance(verdict, outcomes.EagerUnavailable)
        assert "even at the smallest" in verdict.message
        assert report.exit_code == code
        assert "eager" not in run.worker.started


HOST = Host(host_platform(), "x86-64-v4", "2.13.0+cu130", "13.0", ((9, 0), (9, 0)), current_cuda=1)
GPU = {"device": "cuda", "cuda_architecture": "sm_90", "built_with_cuda": "13.0"}


@pytest.fixture
def several(path, tmp_path, monkeypatch):
    """An artifact of four targets, on a machine that runs three of them."""
    monkeypatch.setattr(run_plan, "host_for", lambda targets, device: HOST)
    targets = (
        tiny.target(name="old", cpu_isa="x86-64-v3"),
        tiny.target(name="arm", platform="linux-aarch64"),
        tiny.target(name="gpu", **GPU),
        tiny.target(name="new", cpu_isa="x86-64-v4"),
    )
    with PackageReader(path) as reader:
        records = {name: reader.read(name) for name in reader.names}
        records |= {f"data/aotinductor/{each.name}/model.so": b"\x7fELF" for each in targets}
        changed = msgspec.structs.replace(reader.manifest, targets=targets)
        write_package(tmp_path / "several.pt2", changed, records)
    return tmp_path / "several.pt2"


def loads(command):
    return ArtifactLoaded(command.device, "2.13.0", 0.01)


def ran(report):
    return [(target.name, target.device) for target in report.targets if target.left_out is None]


def test_every_target_that_runs_here_is_checked_and_the_others_have_a_reason(run, several):
    report = run(several, replay_load=loads)
    assert ran(report) == [("gpu", "cuda:1"), ("new", "cpu"), ("old", "cpu")]
    assert [target.left_out for target in report.targets[3:]] == [f"it is for linux-aarch64, this is {host_platform()}"]
    assert [(check.target, check.against) for check in report.checks] == [
        (name, against) for name in ("gpu", "new", "old") for against in ("cases", "eager", "eager")
    ]
    loaded = [(command.target, command.device) for command in run.worker.commands if isinstance(command, LoadArtifact)]
    assert loaded == ran(report)
    # Targets of one device share one eager model.
    assert run.worker.started == ["replay", "eager", "replay", "eager", "replay"]
    assert [c.device for c in run.worker.commands if isinstance(c, MakeEager)] == ["cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"device": "cpu"}, ["new", "old"]),
        ({"device": "cuda"}, ["gpu"]),
        ({"device": "cuda:0"}, ["gpu"]),
        ({"target": "old"}, ["old"]),
    ],
)
def test_a_device_or_a_name_says_which_are_run(run, several, options, names):
    report = run(several, VerifyOptions(against="cases", **options), replay_load=loads)
    assert [name for name, _ in ran(report)] == names
    if options.get("device") == "cpu":
        left_out = [t.left_out for t in report.targets if t.name == "gpu"]
        assert left_out == ["it is for cuda, but device cpu was requested"]


def test_a_target_that_there_is_not_is_the_caller_s_mistake(run, several):
    with pytest.raises(UsageError, match=r"no target 'olde'(?s:.*)old, arm, gpu, new"):
        run(several, VerifyOptions(target="olde"))


def test_that_no_target_runs_here_is_a_failure_with_the_reasons(run, several):
    for options in (VerifyOptions(target="arm"), VerifyOptions(device="cuda:2")):
        report = run(several, options)
        assert report.exit_code == 4
        assert "NoTargetError" in report.checks[0].verdict.message
        assert "arm: it is for" in report.checks[0].verdict.message
        assert run.worker.started == []


def test_one_target_that_fails_does_not_keep_the_others_from_being_checked(run, several):
    def crashes(command):
        return CRASH if command.target == "new" else loads(command)

    report = run(several, VerifyOptions(against="cases"), replay_load=crashes)
    assert [(check.target, type(check.verdict)) for check in report.checks] == [
        ("gpu", outcomes.Match),
        ("new", outcomes.Crashed),
        ("old", outcomes.Match),
    ]
    assert report.exit_code == 13
    assert [target.load_seconds for target in report.targets[:3]] == [0.01, None, 0.01]


def test_given_tolerances_replace_the_recorded_ones(run, tmp_path):
    off = {name: tensor + 0.1 if name == "y" else tensor for name, tensor in right(X).items()}
    path = write_artifact(tmp_path / "d.pt2", Affine(), [(X, off)])
    assert run(path, VerifyOptions(against="cases")).exit_code == 1
    assert run(path, VerifyOptions(against="cases", rtol=0.0, atol=0.2)).exit_code == 0


@pytest.mark.parametrize(
    ("model", "blocked"),
    [
        ("mypackage.net:build", ("mypackage",)),
        ("net.py:Net", ()),
        ("torch.nn:Linear", ()),
        ("arr-coc", ()),
        ("program.pt2", ()),
        (None, ()),
    ],
)
def test_the_model_s_own_package_is_refused_to_the_replay_process(model, blocked):
    assert replay.blocked(model) == (*declared_modules(), *blocked)


def test_inputs_for_a_bare_module_are_written_as_the_command_line_has_them():
    doubled = ("int64", (m.Size(dimension="rows", scale=2), 3))
    call = tiny.tensors_call({"x": doubled}, doubled, rows=(1, 8))
    assert input_texts(call) == ["x=int64[16, 3]"]

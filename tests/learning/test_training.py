"""A step of training in a package: it updates as torch.optim does, and verify finds one that does not."""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import exportkit
from exportkit import Method, training
from exportkit.errors import StateError, UsageError, WeightsError
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.packaging import PackOptions, build_package
from exportkit.runtime.native import library_path
from exportkit.verify.options import VerifyOptions
from tests.artifacts import artifact
from tests.learning.learning_models import Regression, SelfTaught, batch, mean_square
from tests.runtime import c_interface, exportkit_run
from tests.runtime.c_interface import view
from tests.subprocesses import run_exportkit

MODELS = Path(__file__).with_name("learning_models.py")
Parameters = list[torch.nn.Parameter]

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": functools.partial(SGD, lr=0.01),
    "momentum": functools.partial(SGD, lr=0.01, momentum=0.9, weight_decay=1e-3, maximize=True),
    "nesterov": functools.partial(SGD, lr=0.01, momentum=0.9, nesterov=True),
    "dampening": functools.partial(SGD, lr=0.01, momentum=0.9, dampening=0.2),
    "adam": functools.partial(ADAM, lr=0.01, weight_decay=1e-3),
    "amsgrad": functools.partial(ADAM, lr=0.01, amsgrad=True, betas=(0.8, 0.99), eps=1e-6),
    "adamw": functools.partial(ADAMW, lr=0.01, weight_decay=0.1, maximize=True),
}


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> torch.nn.Module:
    """The methods of training, in eager mode."""
    spec = training.spec(model, optimizer, mean_square, step=Method(example_inputs=batch()), **options)
    return spec.model.get_submodule("optimizer")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range, clip: float | None = None) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        mean_square(model, *batch(seed=seed)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_an_update_has_the_bits_of_torch_optim(name: str, before: int) -> None:
    wanted, ours = Regression(), Regression()
    theirs, optimizer = (OPTIMIZERS[name](list(each.parameters())) for each in (wanted, ours))
    train(wanted, theirs, range(20))
    train(ours, optimizer, range(before))  # what the optimizer remembers goes along
    steps = step_of(ours, optimizer)
    for seed in range(before, 20):
        steps.step(*batch(seed=seed))
    assert same_parameters(wanted, ours)


def test_gradients_of_several_batches_make_one_update_of_a_limited_norm() -> None:
    wanted, ours = Regression(), Regression()
    theirs, optimizer = (ADAMW(each.parameters(), lr=0.25) for each in (wanted, ours))
    steps = step_of(ours, optimizer, accumulates=True, clip_norm=0.5, lr_input=True)
    for turn in range(5):
        theirs.zero_grad()
        for seed in (2 * turn, 2 * turn + 1):
            mean_square(wanted, *batch(seed=seed)).backward()
            steps.accumulate(*batch(seed=seed))
        norm = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(steps.update(lr=torch.tensor(0.25)), norm)
    for name, tensor in wanted.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), tensor)


def test_a_copy_on_another_device_trains_itself() -> None:
    model = Regression()
    step_of(model, SGD(model.parameters(), lr=0.1))
    copied = copy.deepcopy(model)
    copied.get_submodule("optimizer").step(*batch())
    assert same_parameters(Regression(), model)
    assert not same_parameters(Regression(), copied)


def grouped(model: Regression) -> torch.optim.Optimizer:
    return SGD([{"params": model.a.parameters(), "lr": 0.5}, {"params": model.b.parameters()}], lr=0.25)


def frozen(model: Regression) -> torch.optim.Optimizer:
    model.a.weight.requires_grad_(False)
    return SGD(model.parameters())


def unequal(model: Regression) -> torch.optim.Optimizer:
    optimizer = ADAM(model.b.parameters())
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": model.a.parameters()})
    train(model, optimizer, range(1))
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda model: torch.optim.RMSprop(model.parameters()),
            r"RMSprop cannot be a method(?s:.*)SGD, Adam and AdamW",
        ),
        (lambda model: SGD(Regression().parameters()), r"updates 4 tensors that are no parameters of Regression"),
        (grouped, r"the rates \[0.25, 0.5\], and `lr` would be one for all"),
        (frozen, r"updates a.weight, which requires no gradient"),
        (unequal, r"some parameters 1 times and others 4 times"),
    ],
)
def test_what_cannot_be_a_step_is_refused(optimizer: Callable[..., torch.optim.Optimizer], message: str) -> None:
    model = Regression()
    with pytest.raises(UsageError, match=message):
        step_of(model, optimizer(model), lr_input=True)
    assert not hasattr(model, "optimizer")
    step_of(model, SGD(model.b.parameters()))
    with pytest.raises(UsageError, match=r"has an attribute `optimizer`(?s:.*)make the model again"):
        step_of(model, SGD(model.b.parameters()))


# --- packages ---------------------------------------------------------------------------------------------------------


def far(parameters: dict[str, Tensor], exact: SelfTaught) -> float:
    """The greatest error of a parameter, relative to its rms value."""
    errors = []
    for name, tensor in exact.named_parameters():
        errors.append(((parameters[name].double() - tensor).norm() / tensor.norm()).item())
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["cpp", "python"])
def test_a_thousand_steps_end_as_near_to_float64_as_those_of_eager(
    runtime: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    eager, exact = SelfTaught(), SelfTaught().double()
    with exportkit.load(artifact("self-taught")) as model, model.session() as session, model.session() as other:
        first = session.step(*batch())
        session.reset()
        for seed in range(1000):
            x, y = batch(8, seed)
            loss = session.step(x, y)
            eager.step(x, y)
            exact.step(x.double(), y.double())
        assert loss < 0.1 * first
        learnt = far(dict(session.state), exact)
        assert learnt <= 3 * far(dict(eager.named_parameters()), exact)
        x, y = batch(8)
        torch.testing.assert_close(session.predict(x), eager.predict(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.predict(x), SelfTaught().predict(x))
        session.save(tmp_path / "learnt.safetensors")
        answer = session.predict(x)
    with exportkit.load(artifact("self-taught")) as model, model.session() as session:
        session.load_state(tmp_path / "learnt.safetensors")
        assert torch.equal(session.predict(x), answer)


def held(session: c_interface.Session) -> int:
    """The bytes that a session has for itself."""
    size = ctypes.c_uint64()
    session.library.call("session_bytes", session.handle, ctypes.byref(size))
    return size.value


def test_steps_by_the_c_interface_have_the_bits_of_those_by_python() -> None:
    exportkit_run.require_built()
    package = artifact("self-taught")
    with (
        exportkit.load(package) as model,
        model.session() as python,
        c_interface.Library(str(library_path())).open(package) as opened,
    ):
        session = opened.session()
        rows = batch(8)[0].numpy()
        answer = torch.from_dlpack(session.run("predict", view(rows))[0])
        assert torch.equal(answer, python.predict(torch.from_numpy(rows)))
        assert held(session) == 0  # what it has not written is shared
        for seed in range(50):
            x, y = batch(8, seed)
            loss = torch.from_dlpack(session.run("step", view(x.numpy()), view(y.numpy()))[0])
            assert torch.equal(loss, python.step(x, y))
        assert held(session) == 2 * sum(each.nbytes for each in SelfTaught().parameters())
        fork = session.fork()
        session.reset()
        assert torch.equal(torch.from_dlpack(session.run("predict", view(rows))[0]), answer)
        state = fork.state()
        assert all(torch.equal(torch.from_numpy(state[name]), tensor) for name, tensor in python.state.items())
        session.close()
        fork.close()


def test_a_session_that_sets_a_part_of_its_state_has_that_part_alone(tmp_path: Path) -> None:
    exportkit_run.require_built()
    part, wrong = tmp_path / "part.safetensors", tmp_path / "wrong.safetensors"
    weight = torch.arange(128.0).reshape(16, 8)
    save_file({"a.weight": weight}, part)
    save_file({"a.weight": weight, "c.weight": weight.clone()}, wrong)
    with (
        exportkit.load(artifact("self-taught")) as model,
        model.session() as python,
        c_interface.Library(str(library_path())).open(artifact("self-taught")) as opened,
    ):
        session = opened.session()
        for load_part in (functools.partial(python.load_state, partial=True), session.load_partial_state):
            with pytest.raises((StateError, c_interface.Refused), match=r"'c\.weight', which is not in the state"):
                load_part(wrong)
            assert load_part(part) == ("a.weight",)
        assert held(session) == weight.nbytes
        expected = Regression()
        with torch.no_grad():
            expected.a.weight.copy_(weight)
            x, _ = batch(8)
            torch.testing.assert_close(python.predict(x), expected(x))
        answer = torch.from_dlpack(session.run("predict", view(x.numpy()))[0])
        assert torch.equal(answer, python.predict(x))


def test_what_a_session_learnt_is_what_a_new_package_begins_with(tmp_path: Path) -> None:
    """It is verified with eager, whose parameters and moments are those of the file."""
    old, new, saved = artifact("self-taught"), tmp_path / "new.pt2", tmp_path / "learnt.safetensors"
    x, y = batch(8)
    with exportkit.load(old) as model, model.session() as session:
        for seed in range(5):
            session.step(*batch(8, seed))
        session.save(saved)
        learnt = {name: tensor.clone() for name, tensor in session.state.items()}
        loss = session.step(x, y)
    name = f"{MODELS}:self_taught"
    done = run_exportkit("package", old, "--weights", saved, "--model", name, "-o", new)
    assert done.returncode == 0, done.stdout + done.stderr
    with exportkit.load(new) as model, model.session() as session:
        assert all(torch.equal(session.state[name], tensor) for name, tensor in learnt.items())
        assert torch.equal(session.step(x, y), loss)
    save_file(learnt, saved, {"exportkit.model": "another", "exportkit.state": "0" * 64})
    done = run_exportkit("package", old, "--weights", saved, "--model", name, "-o", new)
    assert done.returncode != 0
    assert "has the state of the model 'another'" in done.stderr


def test_parameters_that_are_state_are_no_weights_to_swap() -> None:
    with (
        exportkit.load(artifact("self-taught")) as model,
        pytest.raises(WeightsError, match="sessions, which load_state"),
    ):
        model.swap_weights(Regression().state_dict())


def test_who_looks_at_the_state_meanwhile_costs_a_step_nothing() -> None:
    x, y = batch()
    with exportkit.load(artifact("self-taught")) as model, model.session() as alone:
        alone.step(x, y)
        for _ in range(50):
            with model.session() as session, ThreadPoolExecutor(1) as other:
                looked = other.submit(lambda session=session: session.state)
                session.step(x, y)
                looked.result()
                assert all(torch.equal(session.state[name], tensor) for name, tensor in alone.state.items())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["adam", "sgd"])
def test_a_package_with_an_optimizer_agrees_with_eager(model: str, tmp_path: Path) -> None:
    exported, package = tmp_path / "exported.pt2", tmp_path / "package.pt2"
    name = f"{MODELS}:{model}"
    export_aoti(resolve(name), exported, TraceOptions())
    build_package([exported], package, PackOptions(verify=VerifyOptions()))
    done = run_exportkit("verify", package, "--model", name)
    assert done.returncode == 0, done.stdout + done.stderr
    with exportkit.load(package) as loaded:
        written = {each.name for each in loaded.manifest.state}
    assert {"b.weight", "b.bias"} <= written
    assert ("a.weight" in written) == (model == "adam")


@pytest.mark.slow
def test_verify_finds_a_step_that_eager_does_not_make() -> None:
    done = run_exportkit("verify", artifact("self-taught"), "--model", f"{MODELS}:stale_moment")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "state momentum_a_weight" in done.stdout

"""Sessions answer as the eager module with buffers of its own, and refuse what would spoil their state."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exportkit
from exportkit.errors import (
    InputError,
    ModelClosedError,
    ModelRunError,
    SessionBrokenError,
    SessionBusyError,
    SessionClosedError,
    UsageError,
)
from exportkit.runtime.isolated_messages import AccessState
from tests.runtime.stateful import ROWS, WIDTH, Recorder, bits
from tests.runtime.threads import together
from tests.subprocesses import run_python


@pytest.fixture
def model(recorder: exportkit.Model) -> exportkit.Model:
    """For what only Python promises."""
    return recorder


def x(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, WIDTH)


def agree(session: Any, eager: Recorder) -> None:
    for name, tensor in session.state.items():
        torch.testing.assert_close(tensor, getattr(eager, name), rtol=1e-5, atol=1e-5)


# --- answers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["push", "peek", "embed", "fork", "reset"])), max_size=24))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_interleaved_sessions_are_each_as_an_eager_module_of_its_own(every_recorder, steps):
    made = [(every_recorder.session(batch=1 + n), Recorder(1 + n)) for n in range(3)]
    for number, step in steps:
        session, eager = made[number]
        batch = session.sizes["batch"]
        if step == "push" and int(eager.position) < ROWS:
            row = x(batch)
            torch.testing.assert_close(session.push(row), eager.push(row))
        elif step == "peek":
            torch.testing.assert_close(session.peek(torch.ones(batch, 1)), eager.peek(torch.ones(batch, 1)))
        elif step == "embed":
            torch.testing.assert_close(session.embed(row := x(batch)), eager.embed(row))
        elif step == "fork":  # the copy goes on in its place, and what becomes of the first one is nothing to it
            copied = Recorder(batch)
            copied.load_state_dict(eager.state_dict())
            made[number] = (session.fork(), copied)
            if int(eager.position) < ROWS:
                session.push(x(batch))
            session.close()
        elif step == "reset":
            session.reset()
            made[number] = (session, Recorder(batch))
    for session, eager in made:
        agree(session, eager)
        session.close()


def test_a_fork_diverges_and_a_reset_session_has_the_bits_of_a_fresh_one(every_recorder):
    first, second, rows = x(), x(), [x() for _ in range(3)]
    with every_recorder.session(batch=2) as one, every_recorder.session(batch=2) as fresh:
        one.push(first)
        other = one.fork()
        assert bits(one.state) == bits(other.state)
        one.push(first)
        other.push(second)
        assert bits(one.state) != bits(other.state)
        other.close()
        one.reset()
        assert bits(one.state) == bits(fresh.state)
        for row in rows:
            assert torch.equal(one.push(row), fresh.push(row))
        assert bits(one.state) == bits(fresh.state)


def test_threads_have_a_session_each(every_recorder):
    rows = [x() for _ in range(ROWS)]
    with every_recorder.session(batch=2) as session:
        expected = [session.push(row) for row in rows]

    def work(_: int) -> None:
        with every_recorder.session(batch=2) as session:
            for _ in range(5):
                session.reset()
                assert all(torch.equal(session.push(row), answer) for row, answer in zip(rows, expected))

    together(work, range(6))


# --- methods ----------------------------------------------------------------------------------------------------------


def test_methods_are_attributes_of_the_model_and_those_with_state_ask_for_a_session(model):
    assert list(model.methods) == ["push", "peek", "embed", "fill"]
    assert [name for name, method in model.methods.items() if method.stateful] == ["push", "peek"]
    assert str(inspect.signature(model.fill)) == "(x, out)"
    assert {"push", "embed", "session"} <= set(dir(model))
    row = x()
    torch.testing.assert_close(model.embed(row), Recorder().embed(row))
    assert torch.equal(model.methods["embed"](x=row), model.embed(row))
    with pytest.raises(UsageError, match=r"push of recorder has state \(cache, position, gain\)(?s:.*)model.session"):
        model.push(row)
    for call in (model, model.session(batch=2)):
        with pytest.raises(UsageError, match=r"several methods\n  Name one of its methods: push, peek, embed, fill"):
            call(row)
        with pytest.raises(AttributeError, match="methods are push, peek, embed, fill"):
            getattr(call, "pull")  # noqa: B009 (neither has the attribute, which mypy would say)
    assert "push(x: float32[batch, 4]), peek(" in repr(model)


def test_requests_are_joined_for_a_method_without_state_and_for_no_other(model):
    one, other = x(1), x(2)
    (together,) = model.run_requests([[one], [other]], [0], "embed").outputs
    assert torch.equal(together, model.embed(torch.cat([one, other])))
    for method, why in (("push", "has state"), ("fill", "writes into its inputs")):
        with pytest.raises(UsageError, match=f"{method} of recorder {why}"):
            model.run_requests([[one]], [0], method)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "batch must be from 1 to 8, got nothing"),
        ({"batch": 0}, "batch must be from 1 to 8, got 0"),
        ({"batch": 9}, "batch must be from 1 to 8, got 9"),
        ({"batch": 2, "rows": 3}, "the state of recorder has no dimension rows"),
    ],
)
def test_a_session_of_other_sizes_is_refused(every_recorder, sizes, message):
    with pytest.raises(UsageError) as error:
        every_recorder.session(**sizes)
    assert error.value.message == message


def test_a_size_is_a_number_and_the_hint_lists_what_is_needed(model):
    with pytest.raises(UsageError, match=r"got True\n  Give batch \(from 1 to 8\)\."):
        model.session(batch=True)


# --- what is refused leaves the state as it was -----------------------------------------------------------------------


def test_refused_inputs_leave_the_bits_of_the_state(every_recorder):
    wrong = [x(3), x().double(), x()[:, :3], torch.zeros(2, WIDTH, 1)]
    if isinstance(every_recorder, exportkit.Model):
        wrong += [x().to("meta"), None]
    with every_recorder.session(batch=2) as session:
        session.push(x())
        before = bits(session.state)
        for each in wrong:
            with pytest.raises(InputError):
                session.push(each)
        with pytest.raises(InputError, match=r"`x` has batch = 3 .*, but the session has batch = 2: they must agree"):
            session.push(x(3))
        assert bits(session.state) == before
        session.push(x())
        session.embed(x(3))  # has no state, so any batch


def test_a_call_that_fails_breaks_the_session_until_it_is_reset_or_loaded(every_recorder, tmp_path):
    with every_recorder.session(batch=2) as session, every_recorder.session(batch=2) as beside:
        session.save(tmp_path / "good.safetensors")
        for repair in (session.reset, lambda: session.load_state(tmp_path / "good.safetensors")):
            for _ in range(ROWS):
                session.push(x())
            with pytest.raises(ModelRunError, match=r"the compiled method push failed on \(float32\[2, 4\]\)"):
                session.push(x())  # there is no room: an index is out of bounds
            for call in (
                lambda: session.push(x()),
                lambda: session.peek(torch.ones(2, 1)),
                session.fork,
                lambda: session.save(tmp_path / "bad.safetensors"),
            ):
                with pytest.raises(SessionBrokenError, match=r"half written: a call of push failed: (?s:.*)[Rr]eset"):
                    call()
            assert not (tmp_path / "bad.safetensors").exists()
            assert set(session.state) == {"cache", "position", "gain"}  # may be looked at
            repair()
            assert bits(session.state) == bits(beside.state)
        beside.push(x())


def test_a_method_that_writes_no_state_breaks_nothing(model, monkeypatch):
    with model.session(batch=2) as session:
        session.push(x())
        with monkeypatch.context() as patch:
            patch.setattr(model._code, "runners", dict.fromkeys(model.methods, Failing()))
            patch.setattr(session._state, "run", lambda plan, inputs: model._code.run(plan, Failing().run, inputs))
            with pytest.raises(ModelRunError):
                session.peek(torch.ones(2, 1))
            with pytest.raises(ModelRunError):
                session.embed(x())
            assert not session.broken
            with pytest.raises(ModelRunError):
                session.push(x())
        assert session.broken
        assert "broken" in repr(session)
        session.reset()
        assert not session.broken


class Failing:
    def run(self, inputs):
        raise RuntimeError("run_func_(...) API call failed")


def test_a_session_has_one_caller_at_a_time(model, monkeypatch, tmp_path):
    with model.session(batch=2) as session:
        inside, go_on = threading.Event(), threading.Event()
        run = session._state.run

        def waiting(plan, inputs):
            inside.set()
            go_on.wait(30)
            return run(plan, inputs)

        monkeypatch.setattr(session._state, "run", waiting)
        caller = threading.Thread(target=session.push, args=(x(),))
        caller.start()
        inside.wait(30)
        session.save, row = session.save, x()
        for call in (
            lambda: session.push(row),
            lambda: session.embed(row),
            session.fork,
            session.reset,
            lambda: session.save(tmp_path / "busy.safetensors"),
            lambda: session.load_state(tmp_path / "busy.safetensors"),
        ):
            with pytest.raises(SessionBusyError, match=r"running another call\n  A session has one caller at a time"):
                call()
        go_on.set()
        caller.join()
        assert int(session.state["position"]) == 1


# --- closing ----------------------------------------------------------------------------------------------------------


def test_a_closed_session_says_so(every_recorder, tmp_path):
    session = every_recorder.session(batch=2)
    session.push(x())
    session.close()
    for call in (
        lambda: session.push(x()),
        lambda: session.state,
        session.fork,
        session.reset,
        lambda: session.save(tmp_path / "closed.safetensors"),
        lambda: session.load_state(tmp_path / "closed.safetensors"),
    ):
        with pytest.raises(SessionClosedError):
            call()
    if isinstance(every_recorder, exportkit.Model):
        session.close()  # once more does no harm
        assert "closed" in repr(session)
        assert not session.broken


@pytest.mark.parametrize("isolate", [False, True])
def test_sessions_of_a_closed_model_say_that_the_model_was_closed(recorder_package, isolate, tmp_path):
    model = exportkit.load(recorder_package, isolate=isolate)
    session = model.session(batch=2)
    session.push(x())
    session.save(tmp_path / "state.safetensors")
    model.close()
    for call in (
        lambda: session.push(x()),
        lambda: session.embed(x()),
        session.fork,
        session.reset,
        lambda: session.load_state(tmp_path / "state.safetensors"),
        lambda: model.session(batch=2),
    ):
        with pytest.raises(ModelClosedError, match="the model recorder was closed"):
            call()
    if not isolate:  # the tensors outlive the code
        assert int(session.state["position"]) == 1
    session.close()


def test_nothing_keeps_a_model_or_a_session_that_is_no_more_used(recorder_package, runtime):
    model = exportkit.load(recorder_package)
    session = model.session(batch=2)
    session.push(x())
    gone = [weakref.ref(each) for each in (session, session.state["cache"], model, model._code.runner("push"))]
    gc.disable()
    try:
        del session
        assert [each() is None for each in gone] == [True, True, False, False]
        del model
        assert [each() is None for each in gone] == [True] * 4
    finally:
        gc.enable()


def test_a_worker_frees_the_sessions_that_ended_here(recorder_package):
    with exportkit.load(recorder_package, isolate=True) as model:
        kept = [model.session(batch=1) for _ in range(3)]
        numbers = [session._state._number for session in kept]
        kept[0].close()
        del kept[1]
        gc.collect()
        kept[-1].push(x(1))  # tells the worker
        for number in numbers[:2]:
            with pytest.raises(RuntimeError, match="KeyError"):
                model._worker.ask(AccessState(number, "read"), [])


def test_a_worker_that_dies_breaks_its_sessions_and_they_say_so(recorder_package):
    with exportkit.load(recorder_package, isolate=True) as model:
        session = model.session(batch=2)
        session.push(x())
        os.kill(model.pid, signal.SIGKILL)
        killed = r"worker process, which was killed by SIGKILL \(signal 9: the kernel does so when memory runs out\)"
        for call in (lambda: session.push(x()), session.reset, lambda: session.state):
            with pytest.raises((ModelRunError, ModelClosedError), match=killed):
                call()
        assert session.broken
        session.close()


def test_a_session_of_another_process_is_refused_where_the_state_is_not_in_this_one(recorder_package, tmp_path):
    code = """
import os, sys, torch, exportkit
from exportkit.errors import UsageError
for isolate in (True, False):
    model = exportkit.load(sys.argv[1], isolate=isolate)
    session = model.session(batch=2)
    session.push(torch.ones(2, 4))
    if os.fork() == 0:
        try:
            session.push(torch.ones(2, 4))
            print(isolate, "goes on with a copy", int(session.state["position"]), flush=True)
        except UsageError as error:
            print(isolate, error.message, flush=True)
        session.close()
        os._exit(0)
    os.wait()
    print(isolate, "here", int(session.state["position"]), flush=True)
"""
    assert run_python(code, recorder_package, cwd=tmp_path).splitlines() == [
        "True the model recorder belongs to the process that loaded it; this process is a fork of it",
        "True here 1",
        "False goes on with a copy 2",
        "False here 1",
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_recorder", ["here", "C"], indirect=True)
def test_the_state_is_live_where_the_session_is_and_no_input_of_it(every_recorder):
    with every_recorder.session(batch=2) as session:
        before = session.state
        session.push(torch.ones(2, WIDTH))
        assert torch.equal(before["cache"][:, 0], torch.ones(2, WIDTH))
        live = bits(session.state)
        end = session.state["cache"].view(-1)[-2 * WIDTH :].view(2, WIDTH)
        for name, shared in (("gain", session.state["gain"]), ("cache", end)):
            with pytest.raises(InputError, match=rf"`x` shares memory with the session's {name}") as error:
                session.push(shared)
            assert "clone()" in error.value.hint
        assert bits(session.state) == live
        session.reset()
        assert not before["cache"].any()
        assert [t.data_ptr() for t in session.state.values()] == [t.data_ptr() for t in before.values()]


def test_the_state_is_no_place_for_other_tensors_and_its_bytes_are_known(recorder_package):
    with exportkit.load(recorder_package) as model, model.session(batch=2) as session:
        assert session.state_bytes == sum(tensor.nbytes for tensor in session.state.values())
        assert "batch=2" in repr(session)
        with pytest.raises(TypeError):
            session.state["cache"] = torch.zeros(1)


def test_sessions_work_in_inference_mode_and_beside_autograd(recorder_package):
    with exportkit.load(recorder_package) as model:
        with torch.inference_mode():
            session = model.session(batch=2)
            session.push(x())
            other = session.fork()
        session.reset()
        other.push(x())
        weight = torch.ones(WIDTH, requires_grad=True)
        loss = (session.state["gain"] * weight).sum()
        session.push(x())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # the gain that it saved is gone

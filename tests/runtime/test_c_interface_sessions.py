"""exportkit.h with state: what only a program in C is promised. test_sessions.py holds it to what Python is as well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import exportkit
from tests.runtime import c_interface, c_structures, stateful
from tests.runtime.c_interface import Refused, view
from tests.runtime.stateful import WIDTH, Recorder

BUSY, CLOSED = 104, 106
USAGE, INPUT, STATE = 200, 201, 203


@pytest.fixture(scope="module")
def model(
    c_library: c_interface.Library, recorder_package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[c_interface.Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPORTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        opened = c_library.open(recorder_package, runners=2)
    with opened:
        yield opened


def x(batch: int = 2) -> np.ndarray:
    return torch.randn(batch, WIDTH).numpy()


def push(session: c_interface.Session, row: np.ndarray) -> torch.Tensor:
    return torch.from_dlpack(session.run("push", view(row))[0])


def contents(session: c_interface.Session) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in session.state().items()}


def refused(call: object, *arguments: object, **named: object) -> Refused:
    with pytest.raises(Refused) as found:
        call(*arguments, **named)
    return found.value


def attempt(call: Callable[[], object]) -> Refused | None:
    try:
        call()
    except Refused as error:
        return error
    return None


def test_a_model_without_state_has_no_session(c_model):
    error = refused(c_model.session)
    assert (error.code, error.message) == (USAGE, "tiny has no state")


def test_a_method_is_named_and_one_with_state_needs_a_session(model):
    row = x()
    (embedded,) = model.run_method("embed", view(row))
    torch.testing.assert_close(torch.from_dlpack(embedded), Recorder().embed(torch.from_numpy(row)))
    error = refused(model.run_method, "push", view(row))
    assert (error.code, error.message) == (USAGE, "push of recorder has state, which belongs to a session")
    assert "session" in error.hint
    for name in ("forward", "", "PUSH"):
        error = refused(model.library.call, "run_method", model.handle, name.encode(), None, 0, None, 0, None)
        assert (error.code, error.hint) == (USAGE, "It has push, peek, embed, fill.")
    error = refused(model.run, view(row))
    assert error.code == USAGE
    assert "name one" in error.message


def test_state_that_python_saves_is_loaded_and_the_reverse(model, recorder_package, tmp_path):
    session, rows = model.session(batch=2), [torch.from_numpy(x()) for _ in range(2)]
    with exportkit.load(recorder_package) as loaded, loaded.session(batch=2) as python:
        python.push(rows[0])
        python.save(tmp_path / "python.safetensors")
        session.load_state(tmp_path / "python.safetensors")
        assert contents(session) == stateful.bits(python.state)
        push(session, rows[1].numpy())
        session.save(tmp_path / "c.safetensors")
        python.load_state(tmp_path / "c.safetensors")
        assert contents(session) == stateful.bits(python.state)


def test_a_reset_leaves_the_tensors_where_they_are(model):
    session = model.session(batch=2)
    before = session.state()
    push(session, x())
    session.reset()
    assert [array.ctypes.data for array in session.state().values()] == [each.ctypes.data for each in before.values()]


def test_an_input_of_a_session_is_not_its_state(model):
    session = model.session(batch=2)
    push(session, x())
    before = contents(session)
    error = refused(session.run, "push", view(session.state()["gain"]))
    assert (error.code, error.message) == (INPUT, "`x` shares memory with the session's gain")
    assert contents(session) == before


def test_what_cannot_be_written_is_an_error_and_leaves_no_file(model, tmp_path):
    session = model.session(batch=2)
    for path in (tmp_path / "nowhere" / "state", tmp_path):
        error = refused(session.save, path)
        assert (error.code, error.name) == (STATE, "StateError")
        assert error.message.startswith(f"cannot write the state to {path}: ")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "exportkit-cache"])
    push(session, x())


def test_a_second_caller_is_told_that_the_session_is_busy(model, tmp_path):
    session, stop, codes = model.session(batch=2), threading.Event(), set()

    def save() -> None:  # it waits for the disk
        while not stop.is_set():
            error = attempt(lambda: session.save(tmp_path / "state.safetensors"))
            codes.update({error.code} if error else ())

    saver = threading.Thread(target=save)
    saver.start()
    one = np.ones((2, 1), np.float32)
    for call in (lambda: session.run("peek", view(one)), session.reset, session.fork):
        found = next(error for error in (attempt(call) for _ in range(100_000)) if error)
        assert (found.code, found.name) == (BUSY, "SessionBusyError")
        assert found.message == "the session of recorder is running another call"
    stop.set()
    saver.join()
    assert codes <= {BUSY}
    assert contents(session) == contents(model.session(batch=2))


def test_a_closed_session_is_an_error(c_library, recorder_package, model):
    session = model.session(batch=1)
    session.close()
    error = refused(session.close)
    assert (error.code, error.name) == (CLOSED, "SessionClosedError")
    for handle in (0, 2**63, 2**64 - 1):
        assert refused(c_interface.Session(model, handle).reset).code == CLOSED
    with c_library.open(recorder_package) as other:
        left = other.session(batch=1)
        state = left.state()
    assert refused(left.reset).code == CLOSED  # with its model
    assert int(state["position"]) == 0  # tensors that were lent stay
    assert refused(other.session, batch=1).code == 103
    push(model.session(batch=1), x(1))


def test_null_pointers_are_refused(model):
    call, session = model.library.call, model.session(batch=1)
    for name, arguments in {
        "open_session": (model.handle, None, 1, None),
        "session_fork": (session.handle, None),
        "session_save": (session.handle, None),
        "session_load_state": (session.handle, None),
        "session_state": (session.handle, None, 3),
        "session_run": (session.handle, b"push", None, 1, None, 1, None),
    }.items():
        assert refused(call, name, *arguments).code == USAGE, name
    twice = (c_structures.Size * 2)(c_structures.Size(b"batch", 1), c_structures.Size(b"batch", 2))
    error = refused(call, "open_session", model.handle, twice, 2, c_interface.c.byref(c_interface.c.c_uint64()))
    assert error.message == "sizes must name each dimension once, got batch twice"

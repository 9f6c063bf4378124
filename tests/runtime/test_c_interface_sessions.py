"""exportkit.h with state, and requests of several sessions in one call: each has the answers and state of its own.

test_sessions.py holds the interface to what Python promises as well.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.artifacts import artifact
from tests.runtime import c_interface, c_structures, labelled, stateful
from tests.runtime.c_interface import CUDA_GRAPHS, HOST_TENSORS, OWN_STREAM, Refused, view
from tests.runtime.c_requests import Ask, Gathered, codes, equal, run_requests, try_rows
from tests.runtime.stateful import WIDTH, Recorder
from tests.runtime.threads import together

MODEL_RUN, BUSY, BROKEN, CLOSED, REFUSED_VALUE = 102, 104, 105, 106, 107
USAGE, INPUT, STATE = 200, 201, 203


@pytest.fixture(scope="module")
def recorder(c_library: c_interface.Library, recorder_package: Path) -> Iterator[c_interface.Model]:
    with c_library.open(recorder_package, runners=2) as opened:
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


def test_a_method_is_named_and_one_with_state_needs_a_session(recorder):
    row = x()
    (embedded,) = recorder.run_method("embed", view(row))
    torch.testing.assert_close(torch.from_dlpack(embedded), Recorder().embed(torch.from_numpy(row)))
    error = refused(recorder.run_method, "push", view(row))
    assert (error.code, error.message) == (USAGE, "push of recorder has state, which belongs to a session")
    assert "session" in error.hint
    for name in ("forward", "", "PUSH"):
        error = refused(recorder.library.call, "run_method", recorder.handle, name.encode(), None, 0, None, 0, None)
        assert (error.code, error.hint) == (USAGE, "It has push, peek, embed, fill.")
    error = refused(recorder.run, view(row))
    assert error.code == USAGE
    assert "name one" in error.message


def test_what_cannot_be_written_is_an_error_and_leaves_no_file(recorder, tmp_path):
    session = recorder.session(batch=2)
    for path in (tmp_path / "nowhere" / "state", tmp_path):
        error = refused(session.save, path)
        assert (error.code, error.name) == (STATE, "StateError")
        assert error.message.startswith(f"cannot write the state to {path}: ")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "exportkit-cache"])
    push(session, x())


def test_a_second_caller_is_told_that_the_session_is_busy(recorder, tmp_path):
    session, stop, codes = recorder.session(batch=2), threading.Event(), set()

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
    assert contents(session) == contents(recorder.session(batch=2))


def test_a_closed_session_is_an_error(c_library, recorder_package, recorder):
    session = recorder.session(batch=1)
    session.close()
    error = refused(session.close)
    assert (error.code, error.name) == (CLOSED, "SessionClosedError")
    for handle in (0, 2**63, 2**64 - 1):
        assert refused(c_interface.Session(recorder, handle).reset).code == CLOSED
    with c_library.open(recorder_package) as other:
        left = other.session(batch=1)
        state = left.state()
    assert refused(left.reset).code == CLOSED  # with its model
    assert int(state["position"]) == 0  # tensors that were lent stay
    assert refused(other.session, batch=1).code == 103
    push(recorder.session(batch=1), x(1))


def test_null_pointers_are_refused(recorder):
    call, session = recorder.library.call, recorder.session(batch=1)
    for name, arguments in {
        "open_session": (recorder.handle, None, 1, None),
        "session_fork": (session.handle, None),
        "session_save": (session.handle, None),
        "session_load_state": (session.handle, None),
        "session_state": (session.handle, None, 3),
        "session_run": (session.handle, b"push", None, 1, None, 1, None),
    }.items():
        assert refused(call, name, *arguments).code == USAGE, name
    twice = (c_structures.Size * 2)(c_structures.Size(b"batch", 1), c_structures.Size(b"batch", 2))
    error = refused(call, "open_session", recorder.handle, twice, 2, c_interface.c.byref(c_interface.c.c_uint64()))
    assert error.message == "sizes must name each dimension once, got batch twice"


# --- several sessions in one call -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(c_library: c_interface.Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[c_interface.Model]:
    package = labelled.write_counting(tmp_path_factory.mktemp("counting") / "counting.pt2")
    with c_library.open(package, runners=4) as opened:
        yield opened


@pytest.fixture
def sessions(model: c_interface.Model) -> Iterator[list[c_interface.Session]]:
    """Of 1, 2, 3 and 1 rows."""
    opened = [model.session(batch=rows) for rows in (1, 2, 3, 1)]
    yield opened
    for session in opened:
        session.close()


def given(rows: int, label: int = 2) -> list[np.ndarray]:
    return [np.random.rand(rows, labelled.WIDTH).astype(np.float32), np.full(rows, label)]


def rows_of(session: c_interface.Session) -> int:
    return len(session.state()["seen"])


def stepped(session: c_interface.Session, inputs: list[np.ndarray]) -> list[np.ndarray]:
    return [np.from_dlpack(output).copy() for output in session.run("forward", *map(view, inputs))]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_run_together_have_the_bits_of_their_own_calls(model, sessions, seed):
    source, alone = random.Random(seed), [session.fork() for session in sessions]
    for _ in range(25):
        chosen = [source.randrange(4) for _ in range(source.randint(1, 7))]  # some twice: one step after the other
        inputs = [given(rows_of(sessions[which]), source.randint(0, 9)) for which in chosen]
        asks = [
            Ask(each, [[4], []] if source.random() < 0.3 else (), sessions[which].handle)
            for which, each in zip(chosen, inputs)
        ]
        results = run_requests(model, asks, source.choice([0, 2, 4, 16]))
        for which, each, result in zip(chosen, inputs, results):
            assert equal(result, stepped(alone[which], each))
    assert [contents(each) for each in sessions] == [contents(each) for each in alone]


def test_one_that_fails_breaks_its_own_session_alone(model, sessions):
    before = [session.fork() for session in sessions]
    inputs = [given(1), given(2, labelled.REFUSED), given(3), given(1)]
    results = run_requests(model, [Ask(each, (), s.handle) for each, s in zip(inputs, sessions)], 16)
    assert codes(results) == [0, MODEL_RUN, 0, 0]
    for which in (0, 2, 3):
        assert equal(results[which], stepped(before[which], inputs[which]))
        assert contents(sessions[which]) == contents(before[which])
    inputs = [given(1), given(2), given(3), given(1)]
    results = run_requests(model, [Ask(each, (), s.handle) for each, s in zip(inputs, sessions)], 16)
    assert codes(results) == [0, BROKEN, 0, 0]
    assert equal(results[3], stepped(before[3], inputs[3]))
    sessions[1].reset()
    assert codes(run_requests(model, [Ask(given(2), (), sessions[1].handle)], 16)) == [0]


def test_wrong_sessions_and_inputs_leave_the_others_and_their_own_state(model, sessions, recorder):
    closed = model.session(batch=1)
    closed.close()
    foreign = recorder.session(batch=1)
    asks = [
        (given(1), sessions[0].handle, 0, ""),
        (given(1), 0, USAGE, "forward has state: session must not be 0"),
        (given(1), closed.handle, CLOSED, "does not belong to an open session"),
        (given(1), foreign.handle, USAGE, "session belongs to another model"),
        (given(1), sessions[1].handle, INPUT, "has batch = 1 by dimension 0 of shape [1, 8], but the session has"),
        ([given(3)[0], given(2)[1]], sessions[2].handle, INPUT, "they must agree"),
        (given(1), sessions[3].handle, 0, ""),
    ]
    before = [contents(sessions[which]) for which in (1, 2)]
    results = run_requests(model, [Ask(inputs, (), session) for inputs, session, _, _ in asks], 16)
    assert codes(results) == [code for _, _, code, _ in asks]
    for result, (_, _, code, message) in zip(results, asks):
        assert code == 0 or message in result.message
    assert [contents(sessions[which]) for which in (1, 2)] == before


def test_a_session_is_free_when_its_request_ends(model, sessions):
    reset: list[int] = []

    class Resets(Gathered):
        def _ended(self, request: int, context: object) -> None:
            super()._ended(request, context)
            sessions[request].reset()
            reset.append(request)

    asks = [Ask(given(rows_of(session)), (), session.handle) for session in sessions]
    assert codes(run_requests(model, asks, 16, answers=Resets())) == [0] * 4
    assert reset == [0, 1, 2, 3]
    assert all(not session.state()["seen"].any() for session in sessions)


def test_who_comes_while_another_has_the_session_is_told_so(model, sessions):
    """Each step that was answered was counted, and no other."""
    answered, others = [0] * 3, set()

    def step(which: int) -> None:
        for _ in range(300):
            asks = [Ask(given(1), (), session.handle) for session in (sessions[0], sessions[3])]
            for result in run_requests(model, asks, 16):
                if isinstance(result, Refused):
                    others.add(result.code)
                else:
                    answered[which] += 1

    together(step, range(3))
    assert others <= {BUSY}
    assert sum(answered) == sum(int(session.state()["seen"][0]) for session in (sessions[0], sessions[3]))


def test_state_without_rows_runs_by_itself(recorder):
    sessions = [recorder.session(batch=2) for _ in range(3)]
    eager = [stateful.Recorder() for _ in sessions]
    for _ in range(4):
        rows = [torch.randn(2, stateful.WIDTH) for _ in sessions]
        asks = [Ask([row.numpy()], (), session.handle) for row, session in zip(rows, sessions)]
        for row, own, (output,) in zip(rows, eager, run_requests(recorder, asks, 8, "push")):
            torch.testing.assert_close(torch.from_numpy(output), own.push(row), rtol=1e-5, atol=1e-5)
        scales = [torch.rand(2, 1) for _ in sessions]
        asks = [Ask([scale.numpy()], (), session.handle) for scale, session in zip(scales, sessions)]
        for scale, own, (output,) in zip(scales, eager, run_requests(recorder, asks, 8, "peek")):
            torch.testing.assert_close(torch.from_numpy(output), own.peek(scale))
    assert [int(session.state()["position"]) for session in sessions] == [4] * 3


ON_GPU = {"device": b"cuda:0", "runners": 2}


@pytest.mark.parametrize(
    ("package", "options"),
    [
        pytest.param("diary", {}, marks=pytest.mark.slow),
        pytest.param("diary-cuda", ON_GPU, marks=pytest.mark.cuda),
        pytest.param("diary-cuda", {**ON_GPU, "flags": CUDA_GRAPHS}, marks=pytest.mark.cuda),
    ],
)
def test_outputs_that_are_state_are_those_of_the_sessions_own_calls(c_library, package, options):
    with c_library.open(artifact(package), **options) as model:
        assert try_rows(model, 1 << 40) == (32, None)
        sessions = [model.session(batch=rows) for rows in (1, 3, 2)]
        alone = [session.fork() for session in sessions]
        for number in range(6):
            inputs = [[np.full(rows, number), np.random.rand(rows, 8).astype(np.float32)] for rows in (1, 3, 2)]
            if number == 4:
                inputs[1][0][2] = 99
            asks = [Ask(each, (), session.handle) for each, session in zip(inputs, sessions)]
            results = run_requests(model, asks, 32, flags=number % 2 and OWN_STREAM)  # one stream after the other
            assert codes(results) == [0, {4: REFUSED_VALUE, 5: BROKEN}.get(number, 0), 0]
            for each, session, result in zip(inputs, alone, results):
                if isinstance(result, Refused):
                    continue
                wanted = session.run("forward", *map(view, each), flags=HOST_TENSORS)
                for one, other in zip(result, map(np.from_dlpack, wanted), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
                    assert options or one.tobytes() == other.tobytes()


def test_memory_of_the_session_is_no_input(model, sessions):
    memory, label = sessions[0].state()["memory"], np.array([1])
    before = contents(sessions[0])
    (result,) = run_requests(model, [Ask([memory, label], (), sessions[0].handle)], 16)
    assert (result.code, result.message) == (INPUT, "`x` shares memory with the session's memory")
    assert contents(sessions[0]) == before

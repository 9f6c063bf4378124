"""exportkit.h with state: sessions that a program in C is promised, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import exportkit
from exportkit.runtime.native import library_path
from tests.runtime import c_interface, c_structures, stateful
from tests.runtime.c_interface import Refused, view
from tests.runtime.stateful import ROWS, WIDTH, Recorder

BUSY, BROKEN, CLOSED = 104, 105, 106
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


def agree(session: c_interface.Session, eager: Recorder) -> None:
    for name, array in session.state().items():
        torch.testing.assert_close(torch.from_numpy(array), getattr(eager, name), rtol=1e-5, atol=1e-5)


# --- what a model is --------------------------------------------------------------------------------------------------


def test_methods_and_state_are_described(model):
    about = model.about
    methods = [about.methods[i].contents for i in range(about.method_count)]
    assert [(method.name, bool(method.stateful)) for method in methods] == [
        (b"push", True), (b"peek", True), (b"embed", False), (b"fill", False),
    ]  # fmt: skip
    fill = model.method("fill")
    assert [bool(fill.inputs[i].contents.written) for i in range(fill.input_count)] == [False, True]
    state = [about.state[i].contents for i in range(about.state_count)]
    shapes = [[tensor.shape[axis].contents.text for axis in range(tensor.ndim)] for tensor in state]
    assert [tensor.name for tensor in state] == [b"cache", b"position", b"gain"]
    assert shapes == [[b"batch", b"6", b"4"], [], [b"batch", b"4"]]
    (batch,) = (about.state_dimensions[i].contents for i in range(about.state_dimension_count))
    assert (batch.name, batch.min, batch.max) == (b"batch", 1, 8)
    # exportkit_run means none of these methods.
    assert (about.input_count, about.output_count, about.dimension_count) == (0, 0, 0)


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


def test_a_session_needs_the_sizes_of_the_state(model, c_model):
    for sizes, message in (
        ({}, "batch must be from 1 to 8, got nothing"),
        ({"batch": 0}, "batch must be from 1 to 8, got 0"),
        ({"batch": 9}, "batch must be from 1 to 8, got 9"),
        ({"batch": 2, "gh": 1}, "the state of recorder has no dimension gh"),
    ):
        error = refused(model.session, **sizes)
        assert (error.code, error.message) == (USAGE, message)
    assert refused(c_model.session).message == "tiny has no state"


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_session_goes_on_from_call_to_call_as_the_eager_module_does(model):
    session, eager = model.session(batch=3), Recorder(3)
    agree(session, eager)
    for _ in range(ROWS):
        row = x(3)
        torch.testing.assert_close(push(session, row), eager.push(torch.from_numpy(row)))
        scale = np.random.default_rng(0).random((3, 1), np.float32)
        (peeked,) = session.run("peek", view(scale))
        torch.testing.assert_close(torch.from_dlpack(peeked), eager.peek(torch.from_numpy(scale)))
        (embedded,) = session.run("embed", view(row))
        torch.testing.assert_close(torch.from_dlpack(embedded), eager.embed(torch.from_numpy(row)))
        agree(session, eager)
    session.close()


def test_sessions_in_turns_and_copies_do_not_change_one_another(model):
    sessions, eagers = [model.session(batch=n) for n in (1, 2)], [Recorder(n) for n in (1, 2)]
    for _ in range(2):
        for number, (session, eager) in enumerate(zip(sessions, eagers, strict=True)):
            row = x(number + 1)
            torch.testing.assert_close(push(session, row), eager.push(torch.from_numpy(row)))
    copy, copied = sessions[1].fork(), Recorder(2)
    copied.load_state_dict(eagers[1].state_dict())
    assert contents(copy) == contents(sessions[1])
    for session, eager in ((sessions[1], eagers[1]), (copy, copied)):
        row = x()
        torch.testing.assert_close(push(session, row), eager.push(torch.from_numpy(row)))
    for session, eager in ((sessions[0], eagers[0]), (sessions[1], eagers[1]), (copy, copied)):
        agree(session, eager)
        session.close()


def test_reset_makes_a_session_like_a_new_one(model):
    session, fresh = model.session(batch=2), model.session(batch=2)
    addresses = {name: array.ctypes.data for name, array in session.state().items()}
    for _ in range(2):
        push(session, x())
    assert contents(session) != contents(fresh)
    session.reset()
    assert contents(session) == contents(fresh)
    row = x()
    assert torch.equal(push(session, row), push(fresh, row))
    assert addresses == {name: array.ctypes.data for name, array in session.state().items()}


def test_threads_run_with_a_session_each(model):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            generator = torch.Generator().manual_seed(number)
            for _ in range(20):
                session, eager = model.session(batch=number + 1), Recorder(number + 1)
                for _ in range(ROWS):
                    row = torch.randn(number + 1, WIDTH, generator=generator)
                    torch.testing.assert_close(push(session, row.numpy()), eager.push(row))
                session.close()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


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


def test_a_saved_state_goes_on_in_another_process(model, recorder_package, tmp_path):
    session, path, row = model.session(batch=2), tmp_path / "state.safetensors", x()
    push(session, x())
    session.save(path)
    np.save(tmp_path / "row.npy", row)
    program = (
        "import sys, numpy\n"
        "from tests.runtime import c_interface as c\n"
        "session = c.Library(sys.argv[1]).open(sys.argv[2]).session(batch=2)\n"
        "session.load_state(sys.argv[3])\n"
        "session.run('push', c.view(numpy.load(sys.argv[4])))\n"
        "print(b''.join(a.tobytes() for a in session.state().values()).hex())\n"
    )
    command = [sys.executable, "-c", program, str(library_path()), recorder_package, path, tmp_path / "row.npy"]
    done = subprocess.run(
        command, env=os.environ, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    push(session, row)
    assert done.stdout.strip() == b"".join(contents(session).values()).hex()
    assert path.stat().st_mode & 0o777 == 0o600  # what a model remembers may be private
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")] == []


# --- inputs that are written ------------------------------------------------------------------------------------------


def test_a_written_input_is_written_where_it_is(model):
    row, out = x(), x()
    eager = torch.from_numpy(out.copy())
    wanted = Recorder().fill(torch.from_numpy(row), eager)
    (got,) = model.run_method("fill", view(row), view(out))
    torch.testing.assert_close(torch.from_dlpack(got), wanted)
    torch.testing.assert_close(torch.from_numpy(out), eager)


def test_a_written_input_must_be_dense_and_share_no_memory(model):
    memory = np.zeros((4, 2 * WIDTH), np.float32)
    for out, strides in ((memory[:2, :WIDTH], [8, 1]), (np.zeros((WIDTH, 2), np.float32).T, [1, 2])):
        error = refused(model.run_method, "fill", view(x()), view(out))
        wanted = f"`out` must be contiguous, got strides {strides}, because the call writes into it"
        assert (error.code, error.message) == (INPUT, wanted)
    flat = np.zeros(4 * WIDTH, np.float32)
    for start in range(-2, 3):
        row, out = flat[4 : 4 + 2 * WIDTH], flat[4 + start : 4 + start + 2 * WIDTH]
        error = refused(model.run_method, "fill", view(row.reshape(2, WIDTH)), view(out.reshape(2, WIDTH)))
        assert (error.code, error.message) == (INPUT, "`out` shares memory with `x`, and the call writes into `out`")
    assert not flat.any()
    halves = flat.reshape(2, 2, WIDTH)  # beside one another is not shared
    model.run_method("fill", view(halves[0]), view(halves[1]))


def test_an_input_of_a_session_is_not_its_state(model):
    session = model.session(batch=2)
    push(session, x())
    before = contents(session)
    error = refused(session.run, "push", view(session.state()["gain"]))
    assert (error.code, error.message) == (INPUT, "`x` shares memory with the session's gain")
    assert contents(session) == before


# --- refused ----------------------------------------------------------------------------------------------------------


def test_inputs_that_are_refused_leave_the_session_as_it_was(model):
    session = model.session(batch=2)
    push(session, x())
    before = contents(session)
    error = refused(session.run, "push", view(x(3)))
    assert (error.code, error.message) == (
        INPUT, "`x` has batch = 3 by dimension 0 of shape [3, 4], but the session has batch = 2: they must agree",
    )  # fmt: skip
    assert refused(session.run, "push", view(np.zeros((2, WIDTH)))).code == INPUT
    assert refused(session.run, "push").code == INPUT
    assert contents(session) == before
    push(session, x())


def test_a_call_that_fails_breaks_the_session_until_it_is_reset_or_loads_a_state(model, tmp_path):
    session, path = model.session(batch=2), tmp_path / "state.safetensors"
    session.save(path)
    for repair in (session.reset, lambda: session.load_state(path)):
        for _ in range(ROWS):
            push(session, x())
        error = refused(push, session, x())  # there is no row any longer
        assert (error.code, error.name) == (102, "ModelRunError")
        for use in (lambda: push(session, x()), session.fork, lambda: session.save(tmp_path / "no")):
            broken = refused(use)
            assert broken.code == BROKEN
            assert "state may be half written: a call of push failed: the compiled method push" in broken.message
        assert not (tmp_path / "no").exists()
        repair()
        assert contents(session) == contents(model.session(batch=2))
        push(session, x())
        session.reset()


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
    uses = [
        session.close, session.fork, session.reset, session.state, lambda: push(session, x(1)),
        lambda: session.save("x"), lambda: session.load_state("x"),
    ]  # fmt: skip
    for use in uses:
        error = refused(use)
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


# --- files of state ---------------------------------------------------------------------------------------------------


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("truncated", "is not a safetensors file"),
        ("longer", "is not a safetensors file"),
        ("header", "is not a safetensors file"),
        ("folder", "cannot read the state"),
        ("absent", "cannot read the state"),
        ("no metadata", "does not say which model's state it has"),
        ("model", "has the state of the model 'other'; this is recorder"),
        ("digest", "has the state of another recorder: the names, dtypes or shapes differ"),
        ("dtype", "position is int32[]; the session's is int64[]"),
        ("shape", "gain is float32[3, 4]; the session's is float32[2, 4]"),
        ("extra", "has the tensor 'gain2', which is not in the state of recorder"),
        ("missing", "has no tensor gain"),
        ("alias", "has no tensor position"),
    ],
)
def test_a_file_that_is_no_state_of_the_model_is_refused(model, tmp_path, change, message):
    session, path = model.session(batch=2), tmp_path / "state.safetensors"
    push(session, x())
    session.save(path)
    push(session, x())
    before, tensors, about, content = contents(session), load_file(path), metadata(path), path.read_bytes()
    if change == "dtype":
        tensors["position"] = tensors["position"].to(torch.int32)
    elif change == "shape":
        tensors["gain"] = torch.ones(3, WIDTH)
    elif change == "extra":
        tensors["gain2"] = torch.ones(1)
    elif change in ("missing", "alias"):
        moved = tensors.pop("gain" if change == "missing" else "position")
        tensors |= {"counter": moved} if change == "alias" else {}
    elif change == "model":
        about["exportkit.model"] = "other"
    elif change == "digest":
        about["exportkit.state"] = "0" * 64
    save_file(tensors, path, None if change == "no metadata" else about)
    if change in ("truncated", "longer", "header"):
        path.write_bytes({"truncated": content[:-1], "longer": content + b"\0", "header": b"\xff" * 64}[change])
    elif change in ("folder", "absent"):
        path.unlink()
        if change == "folder":
            path.mkdir()
    error = refused(session.load_state, path)
    assert (error.code, error.name) == (STATE, "StateError")
    assert message in error.message or change == "folder"
    assert contents(session) == before
    push(session, x())


def test_what_cannot_be_written_is_an_error_and_leaves_no_file(model, tmp_path):
    session = model.session(batch=2)
    for path in (tmp_path / "nowhere" / "state", tmp_path):
        error = refused(session.save, path)
        assert (error.code, error.name) == (STATE, "StateError")
        assert error.message.startswith(f"cannot write the state to {path}: ")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "exportkit-cache"])
    push(session, x())

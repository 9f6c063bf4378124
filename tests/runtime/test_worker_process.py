"""A worker process answers as this one does. However it or its parent ends, the other knows, and nothing is left."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.child.process import ChildProcess
from exportkit.errors import (
    DigestMismatchError,
    ExportkitError,
    ModelClosedError,
    ModelLoadError,
    ModelRunError,
    UsageError,
)
from exportkit.runtime import isolated
from exportkit.runtime.isolated import IsolatedModel
from tests.fixtures.softpool_library import ABORT, EXIT, RAISE, SEGFAULT, SLEEP
from tests.package import c_library
from tests.package.signers import signer
from tests.runtime import tiny
from tests.runtime.isolation import SEARCH, eventually, leaves, runs, softpool_call
from tests.runtime.threads import beside
from tests.subprocesses import ROOT, mounted, run_python


@pytest.fixture
def model(misbehaving_package: Path) -> Iterator[IsolatedModel]:
    """One whose operators do as they are told."""
    with exportkit.load(misbehaving_package, isolate=True) as model:
        yield model


# --- the worker's end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "end"),
    [
        (ABORT, r"was killed by SIGABRT \(signal 6: often a failed assertion\)"),
        (SEGFAULT, r"was killed by SIGSEGV \(signal 11\)"),
        (EXIT, "exited with status 5"),
    ],
)
def test_a_crash_of_an_operator_is_an_error_that_names_it(model, deed, end):
    tokens, bias = softpool_call(deed)
    with pytest.raises(ModelRunError, match=f"the model Classifier lost its worker process, which {end}"):
        model(tokens, bias=bias)
    assert not runs(model.pid)
    tokens, bias = softpool_call()
    with pytest.raises(ModelClosedError, match=rf"(?s)lost its worker process, which {end}.*Load the package again"):
        model(tokens, bias=bias)
    assert len(model.cases) > 0  # the package is open still


def test_a_crash_ends_every_call_and_leaves_nothing(misbehaving_package, temporary):
    before = set(os.listdir("/proc/self/fd"))
    model = exportkit.load(misbehaving_package, isolate=True, runners=3)
    said: list[str] = []

    def call(deed: float) -> None:
        tokens, bias = softpool_call(deed)
        try:
            model(tokens, bias=bias)
        except (ModelRunError, ModelClosedError) as error:
            said.append(type(error).__name__)

    with beside(call, (SLEEP, SLEEP)):
        assert eventually(lambda: model._worker._running == 2)
        os.kill(model.pid, signal.SIGSEGV)
    call(0.0)
    assert said == ["ModelRunError", "ModelRunError", "ModelClosedError"]
    model.close()
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_worker_that_answers_nonsense_is_ended(model, monkeypatch):
    def nonsense(self: object) -> object:
        raise ValueError("invalid message")

    monkeypatch.setattr(isolated.TensorSocket, "receive", nonsense)
    tokens, bias = softpool_call()
    with pytest.raises(ModelRunError, match="gave an unreadable answer"):
        model(tokens, bias=bias)
    assert not runs(model.pid)


def test_a_library_that_ends_the_process_it_is_loaded_into_is_an_error(tiny_files, tmp_path):
    crash = "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }"
    content = c_library.build(tmp_path, crash).read_bytes()
    library = tiny.library(content, "toy::op(Tensor x) -> Tensor")
    package = tiny.write(tmp_path / "crash.pt2", tiny_files, extra={library.record: content}, libraries=(library,))
    with pytest.raises(ModelLoadError, match=r"the worker process was killed by SIGABRT .* while it loaded crash\.pt2"):
        exportkit.load(package, isolate=True)


def test_a_package_that_is_replaced_while_it_loads_is_refused(tiny_package, tiny_files, tmp_path, monkeypatch):
    path = tmp_path / "tiny.pt2"
    path.write_bytes(tiny_package.read_bytes())
    other = tiny.write(tmp_path / "other.pt2", tiny_files)

    class Meanwhile(ChildProcess):
        def __init__(self, module: str) -> None:
            other.replace(path)
            super().__init__(module)

    monkeypatch.setattr(isolated, "ChildProcess", Meanwhile)
    with pytest.raises(DigestMismatchError, match=r"tiny\.pt2 was replaced by another package while it was loaded"):
        exportkit.load(path, isolate=True)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_does_not_wait_for_ever(model):
    def stall(_: int) -> None:
        tokens, bias = softpool_call(SLEEP)
        with pytest.raises(ModelRunError, match=r"Classifier was closed, and this call did not finish within 0\.5 s"):
            model(tokens, bias=bias)

    with beside(stall, range(2)):  # one runs, one waits for the runner
        assert eventually(lambda: model._worker._running == 2)
        model.close(timeout=0.5)
    assert not runs(model.pid)


def test_a_model_that_nobody_closed_takes_its_worker_along(tiny_package):
    model = exportkit.load(tiny_package, isolate=True)
    pid = model.pid
    del model
    gc.collect()
    assert eventually(lambda: not runs(pid))


def test_a_call_that_was_interrupted_leaves_its_answer_to_nobody(misbehaving_package, tmp_path):
    code = """
import signal, sys, torch, exportkit
model = exportkit.load(sys.argv[1], isolate=True)
tokens, bias = torch.randn(2, 4, 8), torch.zeros(2, 4)
expected = model(tokens, bias=bias)
interrupted = 0
for delay in (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 1e-3) * 10:
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        while True:
            model(torch.randn(3, 5, 8), bias=torch.zeros(3, 5))
    except ZeroDivisionError:
        interrupted += 1
    assert all(map(torch.equal, model(tokens, bias=bias), expected))
print(interrupted)
"""
    prelude = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\n"
    assert run_python(prelude + code, misbehaving_package, cwd=tmp_path) == "60\n"


# --- processes --------------------------------------------------------------------------------------------------------


def test_the_thread_that_loaded_may_end(tiny_package):
    """The kernel's PR_SET_PDEATHSIG means the thread that started a process, not the process it belongs to."""
    loaded: list[IsolatedModel] = []
    thread = threading.Thread(target=lambda: loaded.append(exportkit.load(tiny_package, isolate=True)))
    thread.start()
    thread.join()
    time.sleep(0.5)
    args, kwargs = tiny.example()
    with loaded[0] as model:
        assert leaves(model(*args, **kwargs))


@pytest.mark.slow_but("0.0")
@pytest.mark.parametrize("deed", [0.0, SLEEP])
def test_a_parent_that_is_killed_takes_the_worker_along(misbehaving_package, tmp_path, deed):
    """Also one that has forked, and so left its sockets open in another process; also from within a call."""
    code = f"""
import os, sys, time, threading, torch, exportkit
model = exportkit.load(sys.argv[1], isolate=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
tokens = torch.full((2, 4, 8), {deed})
threading.Thread(target=lambda: model(tokens, bias=torch.zeros(2, 4))).start()
time.sleep(0.5)
print(model.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(misbehaving_package)],
        stdout=subprocess.PIPE,
        env={**os.environ, **SEARCH},
        cwd=tmp_path,
        process_group=0,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert runs(pid)
        parent.kill()
        parent.wait()
        assert eventually(lambda: not runs(pid))
    finally:
        parent.stdout.close()
        os.killpg(parent.pid, signal.SIGKILL)


def test_a_fork_says_whose_the_model_is_and_leaves_the_worker_alone(tiny_package, tmp_path):
    code = """
import os, sys, torch, exportkit
sys.path.insert(0, sys.argv[2])
from tests.runtime import tiny
from exportkit.child.process import ChildProcess
from exportkit.errors import UsageError
model = exportkit.load(sys.argv[1], isolate=True)
args, kwargs = tiny.example()
model(*args, **kwargs)
child = os.fork()
if child == 0:
    try:
        model(*args, **kwargs)
    except UsageError as error:
        print(error.message, flush=True)
    model.close()
    del model
    sys.exit()  # and everything that Python does at its end
assert os.waitpid(child, 0)[1] == 0
for _ in range(3):
    model(*args, **kwargs)
model.close()
print("goes on")
"""
    said = run_python(code, tiny_package, ROOT, cwd=tmp_path)
    assert said == "the model tiny belongs to the process that loaded it; this process is a fork of it\ngoes on\n"


def test_neither_main_nor_the_models_source_is_imported_again(softpool_package, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
import exportkit
print("main")  # without a guard
with exportkit.load({str(softpool_package)!r}, isolate=True) as model:
    case = model.cases[0]
    print(type(model(*case.args, **case.kwargs)).__name__)
""")
    # Whoever imports one of these fails.
    for name in ("softpool", "tests", "json"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / f"{name}.py").write_text(f"raise ImportError({name!r})")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path / "elsewhere",
        env={**os.environ, **SEARCH},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "main\nAnswer\n"), done.stderr


def test_ctrl_c_in_a_terminal_is_the_parents_to_handle(tiny_package):
    with exportkit.load(tiny_package, isolate=True) as model:
        assert os.getpgid(model.pid) != os.getpgid(0)


# --- it answers, and refuses, as a model of this process --------------------------------------------------------------


def test_what_an_operator_raises_is_the_same_error_with_the_same_words(misbehaving_package, tmp_path):
    code = """
import sys, torch, exportkit
from exportkit.errors import ModelRunError
try:
    tokens = torch.full((2, 4, 8), 444.0)
    exportkit.load(sys.argv[1])(tokens, bias=torch.zeros(2, 4))
except ModelRunError as error:
    print(error)
"""
    tokens, bias = torch.full((2, 4, 8), RAISE), torch.zeros(2, 4)
    with exportkit.load(misbehaving_package, isolate=True) as model:
        with pytest.raises(ModelRunError) as error:
            model(tokens, bias=bias)
        tokens, bias = softpool_call()
        assert model(tokens, bias=bias).logits.shape == (2, 3)  # it goes on
    assert f"{error.value}\n" == run_python(code, misbehaving_package, cwd=tmp_path)


def failure(source: Path, **arguments: object) -> tuple[type, str]:
    with pytest.raises(ExportkitError) as error:
        exportkit.load(source, **arguments)
    return type(error.value), str(error.value)


def test_what_load_refuses_it_refuses_alike(tiny_package, tiny_files, tmp_path):
    text = tmp_path / "text.pt2"
    text.write_text("no archive")
    changed = tmp_path / "changed.pt2"
    content = bytearray(tiny_package.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    elsewhere = tiny.write(tmp_path / "arm.pt2", tiny_files, targets=(tiny.target(platform="linux-aarch64"),))
    for arguments in (
        {"source": tmp_path / "nothing.pt2"},
        {"source": text},
        {"source": changed},
        {"source": elsewhere},
        {"source": tiny_package, "device": "gpu"},
        {"source": tiny_package, "runners": 0},
        {"source": tiny_package, "verify": "never"},
        {"source": tiny_package, "public_key": tmp_path / "nothing.pem"},
        {"source": tiny_package, "public_key": signer(tmp_path).public},
    ):
        assert failure(**arguments, isolate=True) == failure(**arguments), arguments


def test_an_argument_that_cannot_travel_is_named(tiny_package):
    with pytest.raises(UsageError, match="`target` is a bytes, which cannot be passed on to a worker process"):
        exportkit.load(tiny_package, target=b"cpu", isolate=True)


# --- two builds of one namespace --------------------------------------------------------------------------------------


def test_two_builds_of_a_namespace_run_side_by_side(softpool_package, misbehaving_package, tmp_path):
    code = """
import sys, torch, exportkit
from exportkit.errors import LibraryConflictError
here = exportkit.load(sys.argv[1])
try:
    exportkit.load(sys.argv[2])
except LibraryConflictError as error:
    print(error.hint)
there = exportkit.load(sys.argv[2], isolate=True)
for case in here.cases:
    one, other = (model(*case.args, **case.kwargs) for model in (here, there))
    assert all(map(torch.equal, one, other))
print("both")
"""
    said = run_python(code, softpool_package, misbehaving_package, cwd=tmp_path)
    assert "isolate=True" in said
    assert said.endswith("both\n")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_tiny_dev_shm_does_not_matter(tiny_package, tmp_path):
    code = """
import os, sys, torch, exportkit
sys.path.insert(0, sys.argv[2])
from tests.runtime import tiny
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 4096
with exportkit.load(sys.argv[1], isolate=True) as model:
    args, kwargs = tiny.example(4, 6)
    model(*args, **kwargs)
print("ran")
"""
    code = mounted(Path("/dev/shm"), "4k") + code
    assert run_python(code, tiny_package, ROOT, cwd=tmp_path) == "ran\n"


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
def test_what_cannot_be_shared_is_an_error_and_the_next_call_works(tiny_package, limit):
    args, kwargs = tiny.example(4, 6)
    with exportkit.load(tiny_package, isolate=True) as model:
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (1, hard))
        try:
            with pytest.raises(ModelRunError, match="the tensors of a call cannot be shared with the worker process"):
                model(*args, **kwargs)
        finally:
            resource.setrlimit(limit, (soft, hard))
        assert model(*args, **kwargs)["regions"].mean.shape == (4, 3)


def test_loading_and_closing_leaves_nothing_behind(tiny_package, temporary):
    args, kwargs = tiny.example()

    def cycle() -> tuple[int, int, int]:
        with exportkit.load(tiny_package, isolate=True) as model:
            model(*args, **kwargs)
        memory = len(re.findall("exportkit-tensors", Path("/proc/self/maps").read_text()))
        return len(os.listdir("/proc/self/fd")), memory, threading.active_count()

    first = cycle()
    assert [cycle() for _ in range(3)] == [first] * 3
    assert list(temporary.iterdir()) == []

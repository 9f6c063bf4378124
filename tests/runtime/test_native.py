"""What runs compiled code, and what goes on meanwhile without the GIL."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import HostError, ModelRunError, UsageError
from exportkit.libraries import load_library
from exportkit.package.archive import PackageReader
from exportkit.runtime import native
from exportkit.runtime.native import NativeRunner
from exportkit.runtime.runner import ContainerRunner
from tests.artifacts import artifact
from tests.package import c_library
from tests.runtime import exportkit_run, tiny, ways
from tests.runtime.isolation import equal, leaves


def runner_of(model: exportkit.Model) -> object:
    return model._code.runners["forward"]


def guests(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the meeting model that wait for this many calls."""
    x = torch.rand(2, 8)
    x[0, 0] = count
    return x, torch.rand(2, 8, 2)


# --- which runner -----------------------------------------------------------------------------------------------------


def test_the_variable_chooses_the_runner(tiny_package, monkeypatch):
    exportkit_run.require_built()
    for value, kind in (("", NativeRunner), ("auto", NativeRunner), ("cpp", NativeRunner), ("python", ContainerRunner)):
        monkeypatch.setenv("EXPORTKIT_RUNTIME", value)
        with exportkit.load(tiny_package) as model:
            assert type(runner_of(model)) is kind
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "rust")
    with pytest.raises(UsageError, match="EXPORTKIT_RUNTIME must be auto, cpp or python, got 'rust'"):
        exportkit.load(tiny_package)


@pytest.mark.parametrize("content", [None, b"no ELF file" * 100])
def test_where_it_is_missing_or_does_not_load_python_takes_its_place(tiny_package, tmp_path, monkeypatch, content):
    library = tmp_path / "libexportkit_runtime.so"
    if content:
        library.write_bytes(content)
    monkeypatch.setattr(native, "library_path", lambda: library)
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "auto")
    native._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"holds the GIL during a call.*no CUDA graphs.*make build") as said:
        models = [exportkit.load(tiny_package) for _ in range(2)]
    for model in models:
        assert type(runner_of(model)) is ContainerRunner
        model.close()
    assert [warning.filename for warning in said] == [__file__]  # once
    assert f"torch {torch.__version__}: " in str(said[0].message)
    assert str(library) in str(said[0].message)
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python")  # who chose it is told nothing
    native._warn.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exportkit.load(tiny_package).close()
        monkeypatch.setenv("EXPORTKIT_RUNTIME", "auto")
        monkeypatch.setattr(torch, "__version__", "2.10.0")  # which loads no package, and the error says so
        native.say_what_is_lost()
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    with pytest.raises(
        HostError, match=r"EXPORTKIT_RUNTIME is cpp, and .*(does not exist|invalid ELF).*(?s:.*)make build"
    ):
        exportkit.load(tiny_package)


def test_a_library_of_another_torch_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.1+cpu")
    assert native.library_path().parent.name == "torch9.9"


# --- without the GIL --------------------------------------------------------------------------------------------------


@pytest.fixture
def meeting_model(meeting_package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[exportkit.Model]:
    exportkit_run.require_built()
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    with exportkit.load(meeting_package, runners=2) as model:
        yield model


def doubled(call: Future[dict[str, torch.Tensor]], inputs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether a call ends, and answers rightly."""
    return torch.equal(call.result(timeout=600)["doubled"], inputs[0] * 2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_python_goes_on_while_a_model_runs(meeting_model, pool):
    inputs = guests(2)
    call = pool.submit(meeting_model, *inputs)
    # The model waits in its operator for this call, which needs the GIL to begin.
    torch.ops.meeting.meet(inputs[0])
    assert doubled(call, inputs)


def test_as_many_calls_run_at_a_time_as_there_are_runners(meeting_model, pool):
    inputs = guests(2)
    pair = [pool.submit(meeting_model, *inputs) for _ in range(2)]
    assert all(doubled(call, inputs) for call in pair)


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")), reason="before torch 2.13, code goes on when an operator failed"
)
def test_a_failure_in_an_operator_is_an_error_and_the_model_goes_on(meeting_model):
    said = r"the compiled model failed on \(float32\[2, 8\], float32\[2, 8, 2\]\)"
    with pytest.raises(ModelRunError, match=said) as error:
        meeting_model(*guests(-1))
    assert "\n" not in error.value.message  # and no page of C++ frames
    inputs = guests(0)
    assert torch.equal(meeting_model(*inputs)["doubled"], inputs[0] * 2)


@pytest.mark.slow_but("here-*", "isolated-4", "without*-1")
@pytest.mark.parametrize("runners", [1, 4])
@pytest.mark.parametrize("way", ways.PYTHON)
def test_many_threads_with_mixed_shapes_get_the_answers_of_one(tiny_package, monkeypatch, way, runners):
    """In this process, in a worker, and by torch's own binding: every shape several times, no two values alike."""
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python" if way == ways.PYTHON[-1] else "cpp")
    calls = [tiny.example(batch, gh) for batch in range(1, 5) for gh in range(1, 7) for _ in range(2)]
    inputs = [[tensor.clone() for tensor in leaves([list(args), kwargs])] for args, kwargs in calls]
    with exportkit.load(tiny_package, runners=runners, isolate=way == "isolated") as model:
        serial = [leaves(model(*args, **kwargs)) for args, kwargs in calls]
        assert len({answer[0].sum().item() for answer in serial}) == len(calls), "answers must tell calls apart"
        start = threading.Barrier(16)

        def soak(number: int) -> bool:
            order = random.Random(number).choices(range(len(calls)), k=60)
            start.wait()
            answers = [leaves(model(*calls[index][0], **calls[index][1])) for index in order]
            # Compared at the end: an answer that a later call overwrote would be found out.
            return all(all(map(torch.equal, answer, serial[index])) for answer, index in zip(answers, order))

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(soak, range(16)))
    for (args, kwargs), before in zip(calls, inputs):
        assert all(map(torch.equal, leaves([list(args), kwargs]), before))


@pytest.fixture
def counting() -> Iterator[Callable[[], int]]:
    """How often another thread was run so far. This one is never made to yield: it must let go of the GIL itself."""
    count, over = 0, threading.Event()

    def work() -> None:
        nonlocal count
        while not over.wait(0.0002):
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield lambda: count
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()


def test_python_goes_on_while_a_package_is_hashed(tiny_files, tmp_path, counting):
    extra = {"data/weights/large.bin": bytes(1 << 27)}
    with PackageReader(tiny.write(tmp_path / "large.pt2", tiny_files, extra=extra, cases=())) as reader:
        before = counting()
        reader.verify_once(always=False)
        assert counting() > before
    before = counting()
    ctypes.PyDLL(None).usleep(50_000)  # the control: it keeps the GIL
    assert counting() == before


def test_python_goes_on_while_an_operator_library_is_searched_and_loaded(tmp_path, counting):
    slow = "#include <unistd.h>\n__attribute__((constructor)) static void start() { usleep(50000); }"
    library = c_library.build(tmp_path, slow, name="libslow.so")
    with open(library, "ab") as file:
        file.write(bytes(1 << 25))  # of what is searched for names that a linker does not look at
    before = counting()
    load_library(library)
    assert counting() - before > 50


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("runtime", ["cpp", "python"])
def test_a_call_runs_on_the_callers_current_stream(runtime, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    with exportkit.load(artifact("triton-cuda"), device="cuda") as model:
        case = model.cases[0]
        expected = model(*case.args, **case.kwargs)
        torch.cuda.synchronize()
        late = [torch.zeros_like(tensor) for tensor in case.args]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)  # cycles: on any other stream, the model would see zeros
            for tensor, value in zip(late, case.args):
                tensor.copy_(value)
            outputs = model(*late, **case.kwargs)
        stream.synchronize()
        assert equal(outputs, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [False, True])
def test_exportkit_run_replays_on_cuda_in_threads_that_never_used_it(graphs):
    how = ["--device", "cuda", "--bench", "0.2", "--threads", "2"]
    document = exportkit_run.load(artifact("triton-cuda"), *how, *(["--cuda-graphs"] if graphs else []))
    assert (document["ok"], document["device"]) == (True, "cuda:0")
    assert document["bench"]["calls"] > 0
    if graphs:
        assert len(document["cuda_graphs"]["forward"]["graphs"]) >= 1
        assert document["cuda_graphs"]["forward"]["refused"] == []

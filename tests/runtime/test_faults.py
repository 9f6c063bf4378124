"""What goes wrong in production, and what happens then."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.packaging import PackOptions, build_package
from tests.artifacts import artifact
from tests.subprocesses import killed_in_the_middle, mounted, run_python

LOAD = """
import sys, warnings
import torch, exportkit
from exportkit.errors import CacheError
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        model = exportkit.load(sys.argv[1])
    except CacheError as error:
        print(f"refused with {error.exit_code}: {error}")
    else:
        case = model.cases[0]
        mean = model(*case.args, **case.kwargs)["regions"].mean
        torch.testing.assert_close(mean, case.outputs["regions"].mean, rtol=1e-5, atol=1e-5)
        print("loaded")
for warning in warned:
    if issubclass(warning.category, RuntimeWarning):
        print(f"warned: {warning.message}")
"""

# A child's task answers with true or false, and says so by how it ends; an alarm ends one that waits forever.
FORKED = """
import os, signal, sys, threading, time
import torch, exportkit
def forked(task):
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        status = 1
        try:
            status = 0 if task() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
def forked_beside(work, task, pause):
    # Whether the task ends well in twenty forks, while other threads do some work.
    stop = threading.Event()
    def work_on():
        while not stop.is_set():
            work()
    threads = [threading.Thread(target=work_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    ends = []
    while len(ends) < 20 and all(ends):
        time.sleep(pause * len(ends))
        ends.append(forked(task))
    stop.set()
    for thread in threads:
        thread.join()
    return ends == [True] * 20
"""

# Every child answers a case as the parent does.
FORK = """
model = exportkit.load(sys.argv[1])
threads, ways = int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
case = model.cases[1]
def right(model=model):
    with torch.no_grad():
        answer = model(*case.args, **case.kwargs)["regions"]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(answer, case.outputs["regions"]))
def in_a_thread():
    answers = []
    thread = threading.Thread(target=lambda: answers.append(right()))
    thread.start()
    thread.join()
    return answers == [True]
def eager():
    return bool(torch.ones(4_000_000).add_(1).sum() == 8_000_000)
if ways != "not used before":
    assert right() and eager()
tasks = {
    "same thread": right,
    "new thread": in_a_thread,
    "loaded again": lambda: right(exportkit.load(sys.argv[1])),
    "eager torch": eager,
    "fork of the fork": lambda: right() and forked(right) and right(),
}
print({name: forked(task) for name, task in tasks.items()})
print(right(), in_a_thread())
"""

# Forks while other threads are in the middle of calls that have the only runner.
BUSY = """
torch.set_num_threads(1)
model = exportkit.load(sys.argv[1])
case = model.cases[1]
def call():
    return model(*case.args, **case.kwargs)["regions"].mean
expected = call()
print(forked_beside(call, lambda: torch.equal(call(), expected), 0), torch.equal(call(), expected))
"""

# CUDA works in no fork of a process that used it: the child must say so, and not hang or crash.
CUDA_FORK = """
import os, sys
import torch, exportkit
from exportkit.errors import ExportkitError
model = exportkit.load(sys.argv[1], device="cuda")
case = model.cases[0]
before = model(*case.args, **case.kwargs)
child = os.fork()
if child == 0:
    try:
        model(*case.args, **case.kwargs)
        print("it answered", flush=True)
    except ExportkitError as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
    finally:
        os._exit(0)
_, status = os.waitpid(child, 0)
after = model(*case.args, **case.kwargs)
leaves = [torch.utils._pytree.tree_leaves(answer) for answer in (before, after)]
print(status, all(torch.equal(*pair) for pair in zip(*leaves)))
"""

# Forks while other threads are in the middle of a load; each child loads as well.
LOADING = """
torch.set_num_threads(1)
def right():
    with exportkit.load(sys.argv[1]) as model:
        case = model.cases[0]
        return torch.allclose(model(*case.args, **case.kwargs)[0], case.outputs[0], rtol=1e-4, atol=1e-5)
assert right()
print(forked_beside(right, right, 0.0007))
"""

# --- no room ----------------------------------------------------------------------------------------------------------


def small_disk(size: str, folder: Path, code: str, package: Path, **environment: str) -> str:
    """What the code printed with a file system of this size mounted at `folder`, in a namespace of its own."""
    folder.mkdir()
    return run_python(mounted(folder, size) + code, package, cwd=folder.parent, **environment)


def test_a_full_cache_is_replaced_by_a_temporary_directory(tiny_package, tmp_path):
    said = small_disk("100k", tmp_path / "full", LOAD, tiny_package, EXPORTKIT_CACHE=str(tmp_path / "full" / "cache"))
    assert said.startswith("loaded\nwarned: exportkit cannot use its cache")
    assert "(No space left on device" in said


def test_files_that_may_not_grow_are_an_error_too(tiny_package, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))"
    said = run_python(f"{limit}\n{LOAD}", tiny_package, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert re.match(
        r"refused with 4: cannot unpack tiny\.pt2 \(0\.\d MB\), neither to the cache .* nor to the temporary directory "
        r".*\n  Make room, or set EXPORTKIT_CACHE to",
        said,
    )
    assert said.count("(File too large") == 3  # the cache and the temporary directory, and the warning
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_cache_that_can_only_be_read_serves_what_is_in_it(tiny_package, tmp_path):
    cache = tmp_path / "disk" / "cache"
    code = f"""
import os, subprocess
{LOAD}
subprocess.run(["mount", "-o", "remount,ro", {str(cache.parent)!r}], check=True)
{LOAD}
model = exportkit.load(sys.argv[1], verify="always")
assert open("/proc/self/maps").read().count({str(cache)!r}) > 0
"""
    said = small_disk("100m", cache.parent, code, tiny_package, EXPORTKIT_CACHE=str(cache))
    assert said == "loaded\nloaded\n"


def test_a_disk_that_is_full_while_a_package_is_written_leaves_the_old_one(tiny_package, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    out = tmp_path / "out"
    out.mkdir()
    (out / "new.pt2").write_bytes(b"the old one")
    code = "import sys; from exportkit.cli import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", code, "package", str(tiny_package), "-o", str(out / "new.pt2")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert result.returncode == 4, result.stderr
    assert re.search(r"/new.pt2: File too large, it needs \d+ bytes", result.stderr)
    assert "Traceback" not in result.stderr
    assert [path.name for path in out.iterdir()] == ["new.pt2"]
    assert (out / "new.pt2").read_bytes() == b"the old one"


# --- killed in the middle ---------------------------------------------------------------------------------------------

EXPORT_WRITING = """
import os, signal, threading, torch
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.spec import ExportSpec
out = Path(sys.argv[1])
def watch():
    while not list(out.parent.glob(".*.tmp")): pass
    print("now", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
threading.Thread(target=watch, daemon=True).start()
model = torch.nn.Linear(4096, 4096)  # 64 MB are not written at once
export_program(ExportSpec(model=model, example_inputs=(torch.ones(1, 4096),)), out, TraceOptions(cases=1))
"""
BUILD = """
import exportkit.packaging as packaging
packaging.verify = lambda *args, **options: pause()
packaging.build_package([Path(sys.argv[1])], Path(sys.argv[2]))
"""


def test_an_export_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path):
    out = tmp_path / "out.pt2"
    out.write_bytes(b"the old one")
    killed_in_the_middle(EXPORT_WRITING, out)
    assert out.read_bytes() == b"the old one"
    (left,) = tmp_path.glob(".*.tmp")
    write_whole(out, b"the next one")
    assert not left.exists()


def test_a_packaging_that_is_killed_leaves_what_the_next_one_removes(tiny_package, tmp_path):
    out = tmp_path / "out.pt2"
    killed_in_the_middle(BUILD, tiny_package, out)
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    assert [path.name for path in left.iterdir()] == ["out.pt2"]
    build_package([tiny_package], out, PackOptions(verify=False))
    assert list(tmp_path.iterdir()) == [out]
    with PackageReader(out) as reader:
        reader.verify()


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["used before", "not used before"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_loaded_model_works_in_forks_and_in_the_parent_after_them(tiny_package, tmp_path, threads, before):
    said = run_python(FORKED + FORK, tiny_package, threads, before, cwd=tmp_path, OMP_WAIT_POLICY="PASSIVE")
    ways = ("same thread", "new thread", "loaded again", "eager torch", "fork of the fork")
    assert said == f"{dict.fromkeys(ways, True)}\nTrue True\n"


def test_a_fork_while_other_threads_are_in_calls_finds_a_model_that_is_free(tiny_package, tmp_path):
    assert run_python(FORKED + BUSY, tiny_package, cwd=tmp_path) == "True True\n"


@pytest.mark.cuda
@pytest.mark.parametrize("runtime", ["cpp", "python"])
def test_a_fork_of_a_process_that_used_cuda_is_told_to_spawn_and_the_parent_goes_on(runtime, tmp_path):
    said = run_python(CUDA_FORK, artifact("weighted-cuda"), cwd=tmp_path, EXPORTKIT_RUNTIME=runtime)
    child, parent = said.splitlines()
    assert child.startswith("ModelRunError")
    assert "use the start method spawn" in child
    assert parent == "0 True"


def test_a_fork_while_other_threads_load_can_load(softpool_package, tmp_path):
    assert run_python(FORKED + LOADING, softpool_package, cwd=tmp_path) == "True\n"

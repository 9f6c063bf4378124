"""`exportkit ops build`: what it says of a build, of one that fails and of one that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exportkit.cli import main
from exportkit.errors import BuildError
from exportkit.operators.scaffold.build_library import build_folder, changes
from tests.operators.scaffold.scaffolded import OPERATORS, PACKAGE
from tests.package.c_library import PRELUDE, TORCH_LIB

# Builds with ninja, as torch's BuildExtension and our own setup.py do, but C without torch's headers.
SETUP = """
import subprocess
from pathlib import Path
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

class Build(build_ext):
    def get_ext_filename(self, name):
        return name.replace(".", "/") + ".so"

    def run(self):
        Path("build/build.ninja").write_text(
            "rule cc\\n  command = sh compile.sh $in $out\\nbuild ../pkg/_toy.so: cc ../toy.c\\n"
        )
        subprocess.run([NINJA, "-C", "build"], check=True)

setup(name="pkg", ext_modules=[Extension("pkg._toy", ["toy.c"])], cmdclass={"build_ext": Build})
""".replace("NINJA", repr(str(Path(sys.executable).with_name("ninja"))))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a setup.py that compiles toy.c with compile.sh."""
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "compile.sh").write_text('exec gcc -shared -fPIC "$1" -o "$2"\n')
    (tmp_path / "toy.c").write_text("int f(void) { return 1; }\n")
    return tmp_path


@pytest.mark.slow
def test_a_build_says_what_a_fresh_process_finds(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "build", str(package)]) == 0
    first, *schemas = capsys.readouterr().out.splitlines()
    assert first == f"{package / PACKAGE / '_cpu.abi3.so'}  kernels for CPU"
    if (cuda := package / PACKAGE / "_cuda.abi3.so").exists():  # where nvcc and a CUDA build of torch are
        assert schemas.pop() == f"{cuda}  kernels for CUDA"
    assert [schema.split("(")[0].strip() for schema in schemas] == [f"{PACKAGE}::{name}" for name in sorted(OPERATORS)]


@pytest.mark.process
def test_a_library_without_operators_is_none(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "build", str(toy)]) == 0
    assert capsys.readouterr().out.strip() == f"{toy}: built, but no library registers an operator"
    assert (toy / "pkg" / "_toy.so").exists()


@pytest.mark.process
def test_a_schema_that_export_cannot_take_is_named(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = 'define("odd_schemas", "f(Tensor x, Scalar by) -> Tensor"); '
    body += 'define("odder_schemas", "g(Tensor! x, complex by, Device at=\\"cpu\\") -> ()"); '  # torch cannot read it
    (toy / "toy.c").write_text(PRELUDE + f"__attribute__((constructor)) static void start(void) {{ {body}}}\n")
    (toy / "build" / "compile.sh").write_text(f'exec gcc -shared -fPIC "$1" -o "$2" -L{TORCH_LIB} -ltorch_cpu\n')
    assert main(["ops", "build", str(toy)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "  odd_schemas::f(Tensor x, Scalar by) -> Tensor",
        "    broken: Argument by is Scalar, and the stable ABI cannot pass that. Write float; for an operator that "
        "computes with integers, an overload with SymInt.",
        "  odder_schemas::g(Tensor! x, complex by, Device at=cpu) -> ()",
        "    broken: Argument by is complex, and the stable ABI cannot pass that. Write two floats, the real and the "
        "imaginary part, or a tensor.",
    ]


@pytest.mark.process
def test_what_the_compiler_says_is_shown_and_nothing_else(toy: Path) -> None:
    (toy / "toy.c").write_text("int f(void) { return unknown; }\n")
    with pytest.raises(BuildError) as error:
        build_folder(toy)
    assert error.value.message.splitlines()[0] == f"{toy.name} does not build"
    assert "toy.c:1:" in error.value.message
    assert re.search("error: .unknown. undeclared", error.value.message)
    assert not [word for word in ("Traceback", "ninja:", "FAILED", "compile.sh") if word in error.value.message]
    assert error.value.hint == f"{toy / 'build' / 'exportkit.log'} has all that the compilers said."


@pytest.mark.process
@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ("import nothing_of_the_kind", "No module named 'nothing_of_the_kind'"),
        ("import sys\nsys.exit('no compiler here')", "no compiler here"),
        ("print('building', flush=True)\n[][-1]", "building\nIndexError: list index out of range"),
        ("import os\nos._exit(3)", "3"),
    ],
)
def test_a_setup_that_fails_is_an_error_that_says_why(setup: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(setup)
    with pytest.raises(BuildError, match=said):
        build_folder(tmp_path)


def test_a_build_that_is_killed_leaves_no_compiler_and_nothing_that_waits(toy: Path) -> None:
    (toy / "build" / "compile.sh").write_text('echo $$ > "$1.pid"\nexec sleep 600\n')
    code = "import sys; from pathlib import Path; from exportkit.operators.scaffold.build_library import build_folder; "
    child = subprocess.Popen([sys.executable, "-c", code + f"build_folder(Path({str(toy)!r}))"])
    started = toy / "toy.c.pid"
    while not (started.exists() and started.read_text().endswith("\n")):
        assert child.poll() is None
        time.sleep(0.05)
    compiler = Path("/proc", started.read_text().strip())
    assert compiler.exists()
    child.send_signal(signal.SIGKILL)
    child.wait()
    while _runs(compiler):
        time.sleep(0.05)
    (toy / "build" / "compile.sh").write_text('exec gcc -shared -fPIC "$1" -o "$2"\n')
    assert build_folder(toy) == ()
    assert (toy / "pkg" / "_toy.so").exists()


def _runs(process: Path) -> bool:
    """Whether a process runs; who should have waited for it may be gone."""
    try:
        return ") Z " not in (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_means_nothing_is_a_usage_error(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([package, "--json", "--watch"], "Leave one out"), ([tmp_path], "has no setup.py")):
        assert main(["ops", "build", *map(str, arguments)]) == 2
        assert said in "".join(capsys.readouterr())


def test_changes_are_those_of_sources(tmp_path: Path) -> None:
    for name in ("csrc", "build", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.cpp").write_text("1")
    watched = changes(tmp_path, seconds=0.01)
    for name in ("build/a.cpp", ".git/a.cpp", "notes.txt"):
        (tmp_path / name).write_text("22")
    (tmp_path / "csrc" / "a.cpp").write_text("22")
    (tmp_path / "new.py").write_text("")
    assert next(watched) == ["csrc/a.cpp", "new.py"]
    (tmp_path / "csrc" / "a.cpp").unlink()
    assert next(watched) == ["csrc/a.cpp"]


def test_a_change_while_the_caller_works_is_not_lost(tmp_path: Path) -> None:
    source = tmp_path / "a.h"
    source.write_text("1")
    watched = changes(tmp_path, seconds=0.01)
    source.write_text("22")
    assert next(watched) == ["a.h"]
    source.write_text("333")
    os.utime(source, ns=(1, 1))
    assert next(watched) == ["a.h"]


@pytest.mark.process
def test_watching_goes_on_after_an_error_until_ctrl_c(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def three_changes(folder: Path) -> object:
        (folder / "toy.c").write_text("int f(void) { return unknown; }\n")
        yield ["toy.c"]
        (folder / "toy.c").write_text("int f(void) { return 2; }\n")
        yield ["toy.c"]
        raise KeyboardInterrupt

    monkeypatch.setattr("exportkit.operators.scaffold.build_library.changes", three_changes)
    assert main(["ops", "build", str(toy), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("changed: toy.c") == 2
    assert printed.out.count("no library registers an operator") == 2
    assert printed.err.count("does not build") == 1
    assert printed.err.count("waits for changes; Ctrl-C ends") == 3

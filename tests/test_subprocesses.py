"""A command in a forked process is what it is in an interpreter of its own, but for the time that it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subprocesses import commands, compiler_in_forkservers, run_python


def bash(script: str, folder: Path, *names: str) -> str:
    with commands(*names) as programs:
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "GIVEN": "yes"}
        ran = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, check=False)
    return ran.stdout.decode() + ran.stderr.decode()


def test_a_command_has_the_callers_files_folder_environment_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("WORD = 'imported'")
    (tmp_path / "program.py").write_text("import own, sys; print(own.WORD, sys.argv, __name__, __file__)")
    script = """
    python program.py 'two words'
    echo 'in' | python -c "import os, sys; print(input(), os.environ['GIVEN'], os.getcwd(), sys.argv)" three
    python - <<'EOF'
import own, sys
print(own.WORD, file=sys.stderr)
EOF
    python --version
    """
    lines = bash(script, tmp_path, "python").splitlines()
    assert lines == [
        "imported ['program.py', 'two words'] __main__ program.py",
        f"in yes {tmp_path} ['-c', 'three']",
        f"Python {sys.version.split()[0]}",
        "imported",
    ]


@pytest.mark.parametrize("compiler", [False, True])
def test_torch_is_there_and_nothing_of_ours(compiler: bool, tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'torch._inductor.compile_fx' in sys.modules, *sys.path[:2])"
    there = run_python(code, cwd=tmp_path, compiler=compiler).split()
    assert there == ["True", str(compiler), str(Path(__file__).parents[1])]


def test_who_wants_torch_alone_gets_no_process_whose_template_had_more(tmp_path: Path) -> None:
    with compiler_in_forkservers():
        run_python("pass", cwd=tmp_path)
    test_torch_is_there_and_nothing_of_ours(False, tmp_path)

"""A test's process of its own has torch, and nothing of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.subprocesses import run_python


@pytest.mark.parametrize("compiler", [False, True])
def test_torch_is_there_and_nothing_of_ours(compiler: bool, tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'torch._inductor.compile_fx' in sys.modules, *sys.path[:2])"
    there = run_python(code, cwd=tmp_path, compiler=compiler).split()
    assert there == ["True", str(compiler), str(Path(__file__).parents[1])]

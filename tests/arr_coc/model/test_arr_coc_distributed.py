"""Several processes train the sharded model as one does, here two of them on the CPU.

On GPUs: `python -m tests.arr_coc.model.training_processes --device cuda`.
"""

from __future__ import annotations

import pytest

from tests.arr_coc.model import training_processes
from tests.subprocesses import run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What held in two processes, forked once from one that has done nothing yet."""
    code = "from tests.arr_coc.model import training_processes as t; print(*t.run('cpu', 2), sep=chr(10))"
    return run_python(code, cwd=tmp_path_factory.mktemp("training")).splitlines()


@pytest.mark.parametrize("name", training_processes.CHECKS)
def test_two_processes_have_the_gradients_and_parameters_of_one(name: str, held: list[str]):
    assert name in held

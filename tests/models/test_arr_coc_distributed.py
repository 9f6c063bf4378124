"""Several processes train the model as one does: DDP and FSDP2, here two of them on the CPU.

On GPUs: `python -m tests.models.training_processes --device cuda`.
"""

from __future__ import annotations

import pytest

from tests.models import training_processes


@pytest.fixture(scope="module")
def held() -> list[str]:
    """What held in two processes, which are started once: most of the time is theirs to start."""
    return training_processes.run("cpu", 2)


@pytest.mark.parametrize("name", training_processes.CHECKS)
def test_two_processes_have_the_gradients_and_parameters_of_one(name: str, held: list[str]):
    assert name in held

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.export.weights_models import Weighted


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """The weights of seed 1 as a file, tied ones under one name."""
    state = {name: tensor.detach().contiguous() for name, tensor in Weighted(1).state_dict().items()}
    del state["tied"]
    save_file(state, tmp_path / "tuned.safetensors")
    return tmp_path / "tuned.safetensors"

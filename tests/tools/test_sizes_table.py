"""The table of real sizes: its models, and the page."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from exportkit.export.artifact import traced_model
from exportkit.export.export_options import TraceOptions
from exportkit.progress import silent
from tools import size_catalogue
from tools.size_catalogue import SIZED
from tools.size_page import page

ROOT = Path(__file__).parents[2]


def test_the_catalogue_has_twelve_models_of_real_size_and_two_with_own_attention() -> None:
    assert len(SIZED) >= 12
    assert max(Counter(model.title for model in SIZED.values()).values()) == 1
    assert all(0.3 <= model.billions <= 8 for model in SIZED.values())
    assert sum(model.library is not None for model in SIZED.values()) == 2
    for name, model in SIZED.items():
        assert model.source == f"tools.size_catalogue:{name}"
        assert "small" in inspect.signature(getattr(size_catalogue, name)).parameters


@pytest.mark.slow
def test_a_small_model_goes_the_way_of_the_large_ones(tmp_path: Path) -> None:
    spec = size_catalogue.dit_xl(small=True)
    assert {tensor.dtype for tensor in spec.model.parameters()} == {torch.bfloat16}
    options = TraceOptions(cases=2, edge_cases=False)
    traced = traced_model(spec, tmp_path / "dit.pt2", options, torch.device("cpu"), silent)
    assert [case.calls[0].sizes for case in traced.cases] == [{"images": 2}, {"images": 1}]


def test_the_page_of_real_sizes_is_that_of_the_recorded_run() -> None:
    (results,) = (ROOT / "benchmarks" / "sizes").glob("*.json")
    assert page(json.loads(results.read_text())) == (ROOT / "docs" / "models.md").read_text()

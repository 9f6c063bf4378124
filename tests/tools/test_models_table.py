"""The table of models: each can be made, and the page has what was run."""

from __future__ import annotations

import importlib
import inspect
import json
from collections import Counter
from pathlib import Path

import pytest

from exportkit import ExportSpec
from tools import models_table, more_models
from tools.model_catalogue import CATALOGUE


def test_every_model_of_the_catalogue_has_its_own_title_and_a_function_that_makes_it() -> None:
    assert len(CATALOGUE) >= 72
    assert max(Counter(model.title for model in CATALOGUE.values()).values()) == 1
    for name, model in CATALOGUE.items():
        module, _, function = model.source.partition(":")
        maker = getattr(importlib.import_module(module), function)
        assert function == name
        assert inspect.signature(maker).return_annotation == "ExportSpec"


@pytest.mark.slow_but("unet", "lstm", "gru", "transformer_encoder")
@pytest.mark.parametrize("name", [name for name, model in CATALOGUE.items() if not model.needs and name != "arr_coc"])
def test_a_model_without_dependencies_runs_on_its_own_inputs(name: str) -> None:
    spec = getattr(more_models, name)()
    assert isinstance(spec, ExportSpec)
    spec.model.eval()(*spec.example_inputs, **spec.example_kwargs)


def test_the_page_is_that_of_the_recorded_results() -> None:
    root = Path(__file__).parents[2]
    results = sorted((root / "benchmarks" / "models").glob("*.json"))
    assert (
        models_table.page(json.loads(path.read_text()) for path in results)
        == (root / "docs" / "evidence" / "models.md").read_text()
    )

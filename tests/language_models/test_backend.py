"""exportkit as a backend of transformers.exporters: two lines give a package, which transformers saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import exportkit.transformers as ours
from exportkit import ExportSpec
from exportkit.errors import UsageError
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported

exporters = pytest.importorskip("transformers.exporters", reason="transformers 5.24 has exporters")
if not hasattr(exporters, "register_backend"):
    pytest.skip("transformers 5.24 takes exporters from outside", allow_module_level=True)

from exportkit.transformers import ExportkitConfig, ExportkitExporter, backend  # noqa: E402 (only where there are some)

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def model() -> Any:
    return imported("example_llm", example_packages.EXAMPLES / "llm" / "llm.py").small()


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[ExportSpec]:
    """The specs that were to be packed. In their place comes the package of examples/llm."""
    specs: list[ExportSpec] = []

    def stand_in(spec: ExportSpec, *_: object) -> Path:
        specs.append(spec)
        file = backend.WrittenPackage()
        file.path.write_bytes(example_packages.made("llm").read_bytes())
        return file

    monkeypatch.setattr(backend, "_packaged", stand_in)
    return specs


def test_transformers_finds_it_by_its_name() -> None:
    exporter = exporters.AutoHfExporter.from_config({"export_format": "exportkit"})
    assert isinstance(exporter, ExportkitExporter)
    config = exporters.AutoExportConfig.from_dict({"export_format": "exportkit", "cache_length": 64})
    assert config == ExportkitConfig(cache_length=64)


def test_a_package_is_saved_and_loaded_and_answers(model: Any, packed: list[ExportSpec], tmp_path: Path) -> None:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    exported = ExportkitExporter().export_for_generation(model, inputs, ExportkitConfig(cache_length=512, prompt=64))
    assert list(packed[0].entries) == ["prefill", "decode"]
    exported.save_pretrained(tmp_path)
    assert {"model.pt2", "export.json", "config.json"} <= {file.name for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="trust_remote_code"):
        exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=False)
    loaded = exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert loaded.device == torch.device("cpu")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits[:, -1:]
        torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
        left = torch.nn.functional.pad(IDS, (2, 0))  # padded as `generate` wants it
        mask = torch.nn.functional.pad(torch.ones_like(IDS), (2, 0))
        answer = loaded(input_ids=left, attention_mask=mask).logits
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)
    with loaded.runners["model"].session(batch=2) as session:
        torch.testing.assert_close(session.prefill(IDS, torch.tensor([4, 4])), expected[:, 0], rtol=1e-4, atol=1e-4)


def test_the_defaults_are_the_model_s(model: Any, packed: list[ExportSpec]) -> None:
    ExportkitExporter().export_for_generation(model, {"input_ids": IDS}, {"export_format": "exportkit"})
    generation = transformers.GenerationConfig(max_cache_len=128)
    ExportkitExporter().export_for_generation(
        model, {"input_ids": IDS}, ExportkitConfig(), generation_config=generation
    )
    assert [each.model.length for each in packed] == [512, 128]


def test_other_inputs_are_refused(model: Any, packed: list[ExportSpec]) -> None:
    with pytest.raises(UsageError, match=r"to generate from pixel_values(?s:.*)encoders"):
        ExportkitExporter().export_for_generation(model, {"pixel_values": IDS}, ExportkitConfig())
    with pytest.raises(UsageError, match="the inputs cache are no tensors"):
        ExportkitExporter().export(model, {"input_ids": IDS, "cache": object()}, ExportkitConfig())
    assert not packed


def test_one_call_is_exported_without_a_cache(model: Any, packed: list[ExportSpec]) -> None:
    shapes = {"input_ids": {0: "batch[1:8]"}}
    ExportkitExporter().export(model, {"input_ids": IDS}, ExportkitConfig(dynamic_shapes=shapes))
    assert packed[0].model is model
    assert packed[0].dynamic_shapes == shapes


def test_a_version_without_exporters_is_told_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_takes_exporters", lambda: False)
    with pytest.raises(ImportError, match=r"needs 5\.24(?s:.*)exportkit\.transformers\.spec"):
        _ = ours.__getattr__("ExportkitExporter")

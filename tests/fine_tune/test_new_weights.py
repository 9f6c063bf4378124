"""Another fine-tune's weights in a package of the same compiled code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import exportkit
from exportkit.errors import WeightsError
from exportkit.fine_tune.new_weights import replace_weights
from exportkit.package.archive import STOCK_RECORDS, Content, PackageReader, StoredRecord, write_package
from exportkit.package.manifest import Manifest
from exportkit.spec import FORWARD
from tests.artifacts import artifact
from tests.export.weights_models import Weighted

X = torch.linspace(-1, 1, 48).reshape(3, 16)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "exportkit-cache"))


def with_weights(package: Path, weights: Path, out: Path) -> Manifest:
    """Writes a package with other weights and without cases."""
    with PackageReader(package) as reader:
        records: dict[str, Content] = {n: StoredRecord(reader, n) for n in reader.names if n not in STOCK_RECORDS}
        return write_package(out, replace_weights(reader, reader.manifest, records, weights), records)


def test_it_answers_as_the_model_with_those_weights(tuned: Path, tmp_path: Path) -> None:
    with_weights(artifact("weighted"), tuned, tmp_path / "tuned.pt2")
    with exportkit.load(tmp_path / "tuned.pt2", device="cpu") as model, torch.no_grad():
        torch.testing.assert_close(model(X), Weighted(1).eval()(X))
        answer = model(X)
        model.swap_weights(Weighted(0).state_dict())
        torch.testing.assert_close(model(X), Weighted(0).eval()(X))
    with exportkit.load(artifact("weighted"), device="cpu") as model:
        model.swap_weights(tuned)
        assert torch.equal(model(X), answer)


def test_a_weight_that_is_built_into_some_target_can_be_given_with_its_value_only(tuned: Path, tmp_path: Path) -> None:
    with PackageReader(artifact("weighted")) as reader:
        first, second = reader.manifest.targets
        outside = {constant: name for constant, name in second.constants[FORWARD].items() if name != "few"}
        targets = (first, msgspec.structs.replace(second, constants={FORWARD: outside}))
        records = {name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS}
        write_package(tmp_path / "x.pt2", msgspec.structs.replace(reader.manifest, targets=targets), records)
    with pytest.raises(WeightsError, match="few differs from the package's, which is built into the code of target"):
        with_weights(tmp_path / "x.pt2", tuned, tmp_path / "tuned.pt2")
    state = {name: tensor.detach().contiguous().clone() for name, tensor in Weighted(1).state_dict().items()}
    save_file({**state, "few": Weighted(0).few.detach()}, tuned)
    with_weights(tmp_path / "x.pt2", tuned, tmp_path / "tuned.pt2")

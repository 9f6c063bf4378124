"""A package is a PT2 archive that stock PyTorch loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.package

from tests.runtime import tiny


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = tuple(tiny.target(name=name) for name in ("model", "other"))
    return tiny.write(tmp_path_factory.mktemp("stock") / "tiny.pt2", tiny.tiny_files(), targets=targets)


def inputs() -> list[torch.Tensor]:
    (image, query), kwargs = tiny.example()
    return [image, query["features"], kwargs["offset"]]


@pytest.mark.parametrize("target", ["model", "other"])
def test_torchs_package_loader_takes_any_target(package: Path, target: str) -> None:
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), target, False, 1, -1)
    given = inputs()
    torch.testing.assert_close(loader.run(list(given)), tiny.Flat()(*given))


def test_the_loader_does_not_mind_what_the_file_is_called(package: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed by somebody.bin"
    renamed.write_bytes(package.read_bytes())
    torch._C._aoti.AOTIModelPackageLoader(str(renamed), "model", False, 1, -1)


def test_the_metadata_can_be_read_without_loading(package: Path) -> None:
    metadata = torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(str(package), "model")
    assert metadata["AOTI_DEVICE_KEY"] == "cpu"


def test_aoti_load_package_takes_the_target_called_model(package: Path) -> None:
    given = inputs()
    torch.testing.assert_close(list(torch._inductor.aoti_load_package(str(package))(*given)), tiny.Flat()(*given))


def test_load_package_takes_a_target_by_name(package: Path) -> None:
    given = inputs()
    model = torch._inductor.package.load_package(str(package), "other")
    torch.testing.assert_close(list(model(*given)), tiny.Flat()(*given))

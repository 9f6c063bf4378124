"""A package is a PT2 archive that stock PyTorch loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.package

from exportkit.package.archive import PackageReader, write_package
from tests.artifacts import ROOT, packaged
from tests.fixtures import stable_library
from tests.runtime import tiny
from tests.subprocesses import run_python


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = tuple(tiny.target(name=name) for name in ("model", "other"))
    return tiny.write(tmp_path_factory.mktemp("stock") / "tiny.pt2", tiny.tiny_files(), targets=targets)


def inputs() -> list[torch.Tensor]:
    (image, query), kwargs = tiny.example()
    return [image, query["features"], kwargs["offset"]]


@pytest.mark.parametrize("target", ["model", "other"])
def test_torchs_loaders_take_any_target_by_its_name(package: Path, tmp_path: Path, target: str) -> None:
    renamed = tmp_path / "renamed by somebody.bin"
    renamed.write_bytes(package.read_bytes())
    given = inputs()
    for path in (package, renamed):
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), target, False, 1, -1)
        torch.testing.assert_close(loader.run(list(given)), tiny.Flat()(*given))
    metadata = torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(str(package), target)
    assert metadata["AOTI_DEVICE_KEY"] == "cpu"
    model = torch._inductor.package.load_package(str(package), target)
    torch.testing.assert_close(list(model(*given)), tiny.Flat()(*given))


def test_aoti_load_package_takes_the_target_called_model(package: Path) -> None:
    given = inputs()
    torch.testing.assert_close(list(torch._inductor.aoti_load_package(str(package))(*given)), tiny.Flat()(*given))


def test_a_target_that_cannot_be_built_here_keeps_no_other_from_loading(package: Path, tmp_path: Path) -> None:
    with PackageReader(package) as reader:
        records: dict[str, bytes | Path] = {name: reader.read(name) for name in reader.names}
        for name in records:
            if name.startswith("data/aotinductor/other/") and name.endswith(".so"):
                records[name] = b"no code for this machine"
        write_package(tmp_path / "half.pt2", reader.manifest, records)
    given = inputs()
    model = torch._inductor.package.load_package(str(tmp_path / "half.pt2"), "model")
    torch.testing.assert_close(list(model(*given)), tiny.Flat()(*given))


@pytest.mark.slow
def test_a_package_with_operators_wants_their_library_first(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import torch
from torch._inductor import aoti_load_package
from torch._inductor.package import load_package
from exportkit.package.archive import PackageReader

path, library = sys.argv[1], Path("libops.so").absolute()
def refused(load, *args):
    try:
        load(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it loaded")

with PackageReader(Path(path)) as reader:
    (target,), (ours,) = reader.manifest.targets, reader.manifest.libraries
    reader.extract(ours.record, library)
assert "op_shapes" in refused(load_package, path, target.name)
torch.ops.load_library(library)
refused(aoti_load_package, path)  # no target is called `model`
x = torch.randn(5, 3)
answer = load_package(path, target.name)(x, exportkit_refused=torch.zeros(129, dtype=torch.int64))
assert torch.equal(answer["doubled"], 2 * x) and torch.equal(answer["minus"], -x)
"""
    ours = stable_library.build(ROOT / "tests/export/op_shapes.cpp")
    packaged("op-shapes", tmp_path / "package.pt2", ours)
    run_python(code, tmp_path / "package.pt2", cwd=tmp_path)

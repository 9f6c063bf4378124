"""Bad packages: refused for the right reason, and before anything of them is executed, with Python and without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import exportkit
from exportkit.errors import (
    ArchiveLayoutError,
    DigestMismatchError,
    ExportkitError,
    FormatVersionError,
    ManifestSyntaxError,
    MissingLibraryError,
    NotAnArchiveError,
    NoTargetError,
    TorchVersionError,
    UnlistedRecordError,
)
from exportkit.libraries import host_platform
from exportkit.package.manifest import FORMAT_VERSION
from exportkit.runtime import loader, native
from tests.adversarial.forge import Document, changed, document, package, records
from tests.package import samples
from tests.runtime import exportkit_run

Load = Callable[[Path], object]


@pytest.fixture(params=["exportkit.load", "exportkit-run"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads a package, or raises the error class."""
    if request.param == "exportkit.load":
        return exportkit.load
    exportkit_run.require_built()
    return exportkit_run.load


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What of a package was handed to the dynamic linker or to torch's loader."""
    calls: list[str] = []
    native.use_native()  # the C++ runtime is loaded by now: that is no package's library

    def refuse(name: str) -> Callable[..., NoReturn]:
        def call(*args: Any, **kwargs: Any) -> NoReturn:
            calls.append(name)
            raise AssertionError(f"{name} was called for a package that must be refused")

        return call

    monkeypatch.setattr(torch.ops, "load_library", refuse("load_library"))
    for runner in ("AOTIModelContainerRunnerCpu", "AOTIModelContainerRunnerCuda", "AOTIModelPackageLoader"):
        monkeypatch.setattr(torch._C._aoti, runner, refuse(runner), raising=False)
    monkeypatch.setattr(native.NativeRunner, "__init__", refuse("NativeRunner"))
    monkeypatch.setattr(loader, "load_verified", refuse("load_verified"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    return calls


def runnable() -> Document:
    """A manifest whose target would run on any host."""
    whole = document()
    whole["targets"][0] |= {"platform": host_platform(), "cpu_isa": None}
    return whole


def flipped(data: bytes, content: bytes) -> bytes:
    damaged = bytearray(data)
    damaged[data.index(content)] ^= 1
    return bytes(damaged)


WHOLE = package(runnable())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (WHOLE[:-1], NotAnArchiveError),
        (WHOLE[: len(WHOLE) // 2], NotAnArchiveError),
        (flipped(WHOLE, samples.RECORDS[samples.LIBRARY]), DigestMismatchError),
        (flipped(WHOLE, samples.RECORDS[samples.CODE]), DigestMismatchError),
        (flipped(WHOLE, b"FB"), ArchiveLayoutError),
        (package(runnable(), records({"exportkit/ops/libevil.so": b"evil"})), UnlistedRecordError),
        (package(changed("surprise", 1, runnable())), ManifestSyntaxError),
        (package(changed("format_version", FORMAT_VERSION + 1, runnable())), FormatVersionError),
        (package(changed("targets.0.platform", "plan9-vax", runnable())), NoTargetError),
        (package(changed("libraries.0.torch_bound", "1.13", runnable())), TorchVersionError),
    ],
)
def test_a_bad_package_is_refused_before_anything_of_it_runs(
    load: Load, file: Path, executed: list[str], tmp_path: Path, data: bytes, error: type[ExportkitError]
) -> None:
    file.write_bytes(data)
    with pytest.raises(error) as caught:
        load(file)
    assert type(caught.value) is error
    assert executed == []
    cache = tmp_path / "cache"
    assert not cache.exists() or set(os.listdir(cache)) <= {"packages"}  # nothing was unpacked


def test_an_operator_that_no_library_gives_is_named(load: Load, file: Path, executed: list[str]) -> None:
    file.write_bytes(package(changed("libraries", [], runnable())))
    with pytest.raises(MissingLibraryError, match="toy::twice"):
        load(file)
    assert executed == []

"""What setup.py builds: CUDA kernels for the GPU that is here, for a release, or only to see that they compile."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

ROOT = Path(__file__).parents[2]
VARIABLES = ("EXPORTKIT_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "DEBUG")


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py, on a machine with nvcc and without a GPU."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


EVERYTHING = "8.0;8.6;8.9;9.0+PTX;10.0;12.0"  # of a release, whatever GPU is here
CHOICES: list[tuple[str | None, str | None, list[tuple[int, int]], tuple[str, bool] | str | None]] = [
    (None, None, [], "torch sees no GPU; EXPORTKIT_CUDA=1 builds for others"),
    (None, None, [(9, 0), (8, 0), (9, 0)], ("8.0;9.0", True)),
    ("1", None, [], (EVERYTHING, True)),
    ("1", None, [(8, 6)], (EVERYTHING, True)),
    ("check", None, [], ("9.0", False)),  # compiled, and nothing of it installed
    ("check", None, [(8, 0)], ("8.0", True)),
    ("auto", "8.9+PTX", [(9, 0)], ("8.9+PTX", True)),
    ("1", "8.9+PTX", [(9, 0)], ("8.9+PTX", True)),
    ("check", "8.9+PTX", [(9, 0)], ("8.9+PTX", True)),
    ("0", None, [(9, 0)], "EXPORTKIT_CUDA=0"),
]
"""EXPORTKIT_CUDA, TORCH_CUDA_ARCH_LIST and the GPUs; then the architectures and if they are installed, or why not."""


@pytest.mark.parametrize(("wanted", "named", "gpus", "expected"), CHOICES)
def test_kernels_are_built_for_what_is_wanted_named_or_here(
    setup: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    wanted: str | None,
    named: str | None,
    gpus: list[tuple[int, int]],
    expected: tuple[str, bool] | str | None,
) -> None:
    for variable, value in (("EXPORTKIT_CUDA", wanted), ("TORCH_CUDA_ARCH_LIST", named)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: gpus[gpu])
    cuda, reason = setup["choose_cuda"]()
    assert (reason if cuda is None else (cuda.architectures, cuda.installed)) == expected


def test_without_nvcc_only_a_demand_for_it_stops_the_build(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvcc").unlink()
    for wanted in ("auto", "check"):
        monkeypatch.setenv("EXPORTKIT_CUDA", wanted)
        assert setup["choose_cuda"]()[0] is None
    for wanted, said in (("1", "EXPORTKIT_CUDA=1, but nvcc was not found"), ("yes", "0, 1, auto or check, got 'yes'")):
        monkeypatch.setenv("EXPORTKIT_CUDA", wanted)
        with pytest.raises(SystemExit, match=said):
            setup["choose_cuda"]()


def test_libraries_may_look_for_this_pythons_torch_and_not_into_an_isolated_build(
    setup: dict[str, Any], tmp_path: Path
) -> None:
    """pip removes that folder after the build, and anybody may make it again."""
    overlay = tmp_path / "pip-build-env-x" / "overlay" / "site-packages" / "torch"
    overlay.mkdir(parents=True)
    assert setup["torch_stays"](Path(torch.__file__).parent)
    assert not setup["torch_stays"](overlay)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_libraries_look_into_no_folder_below_one_in_which_all_may_write(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    site, shared = tmp_path / "shared" / "venv" / "site", tmp_path / "shared"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$1" "$2" "import sys; sys.path.insert(0, \'{site}\'); $3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    own = setup["torch_stays"].__globals__
    monkeypatch.setitem(own, "ROOT", tmp_path / "checkout")
    assert setup["torch_stays"](site / "torch")
    shared.chmod(mode)
    assert not setup["torch_stays"](site / "torch")
    monkeypatch.setitem(own, "ROOT", shared / "venv" / "checkout")  # goes when the venv goes
    assert setup["torch_stays"](site / "torch")


@pytest.mark.parametrize(("torch_is", "absolute"), [("ours", "ON"), ("of an isolated build", "OFF")])
def test_an_in_place_build_says_that_the_torch_of_an_isolated_build_goes(
    setup: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    torch_is: str,
    absolute: str,
) -> None:
    for tool in ("cmake", "ninja"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{tool}.said\n')
        (tmp_path / tool).chmod(0o755)
    build = setup["BuildLibraries"](setuptools.Distribution())
    build.inplace = True
    own = build.build_runtime.__func__.__globals__
    monkeypatch.setitem(own, "ROOT", tmp_path)
    monkeypatch.setitem(own, "ninja", lambda: str(tmp_path / "ninja"))
    monkeypatch.setitem(own, "torch_stays", lambda folder: torch_is == "ours")
    build.build_runtime(tmp_path / "exportkit", [])
    assert f"-DEXPORTKIT_ABSOLUTE_RPATH={absolute}" in (tmp_path / "cmake.said").read_text()
    assert "install" in (tmp_path / "ninja.said").read_text()  # the runtime is built all the same
    assert ("--no-build-isolation" in capfd.readouterr().err) == (absolute == "OFF")


def test_the_runtime_is_built_for_other_torches_that_are_named(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ".".join(torch.__version__.split(".")[:2])
    folders = []
    for minor in ("9.10", here, "9.9"):
        folders.append(tmp_path / minor / "torch")
        header = folders[-1] / "include" / "torch" / "headeronly" / "version.h"
        header.parent.mkdir(parents=True)
        major, _, number = minor.partition(".")
        header.write_text(f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {number}\n")
    monkeypatch.setenv("EXPORTKIT_RUNTIME_TORCHES", ":".join(map(str, folders)))
    assert setup["other_torches"]() == [folders[0], folders[2]]  # this build's own minor version is built anyway
    monkeypatch.setenv("EXPORTKIT_RUNTIME_TORCHES", str(tmp_path))
    with pytest.raises(SystemExit, match=r"there is no torch in .*`make torches`"):
        setup["other_torches"]()

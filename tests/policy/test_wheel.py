"""What is distributed: a wheel has all of the package and nothing else, a source distribution what builds it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from exportkit.support import PYTHONS
from tests.artifacts import ROOT
from tests.built import builds_alone
from tests.made_once import one_maker
from tests.subprocesses import output_of

SITE = Path(torch.__file__).parents[1]
WITHOUT_TORCH = ("click", "rich", "msgspec", "pyelftools")


def files(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern) if path.is_file()}


DATA = {
    f"exportkit/{name}"
    for name in ("py.typed", "package/FORMAT.md", "package/stable_abi_2.11.txt", "serve/rpc/messages.binpb")
}
DATA |= files("exportkit/serve/page/static", "*")
DATA |= files("exportkit/arr_coc/page/static", "*")
DATA |= files("exportkit/web/static", "*")
DATA |= files("exportkit/operators/scaffold/templates", "*")


def setup(*arguments: str) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=ROOT, check=True, capture_output=True)


def run(*command: str | Path, **environment: str) -> str:
    """What a program printed that finds no compiler and no CMake."""
    return output_of(*command, env=environment, cwd="/")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` makes, without CUDA kernels."""
    if shutil.which("make") is None or importlib.util.find_spec("auditwheel") is None:
        pytest.skip("the wheel is made by make and auditwheel, and one is not installed")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with builds_alone(), one_maker(folder) as ours:
        if ours:
            settings = ["EXPORTKIT_CUDA=0", f"BIN={Path(sys.executable).parent}", "READY=", f"WHEELS={folder}"]
            output_of("make", "wheel", *settings, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


def install(wheel: Path, interpreter: str, venv: Path) -> tuple[Path, dict[str, str]]:
    """The wheel in a new venv: the venv's folder of programs, and the environment in which they run."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", venv], check=True)
    pip(venv, "--no-index", "--no-deps", str(wheel))
    home = venv / "home"
    return venv / "bin", {"PATH": str(venv / "bin"), "HOME": str(home), "EXPORTKIT_CACHE": str(home / "cache")}


def pip(venv: Path, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin" / "python"),
        "install",
        "-q",
        "--no-compile",
        *arguments,
    ]
    # Neither the working directory nor PYTHONPATH counts as a place where something is installed already.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", env=environment)


def other_pythons() -> dict[str, str]:
    """The interpreters of this machine that are not the version of this one, by version."""
    names = [f"python3.{minor}" for minor in range(11, 20) if minor != sys.version_info.minor]
    versions = Path(os.environ.get("PYENV_ROOT", "/nonexistent")) / "versions"
    candidates = [shutil.which(name) for name in names]
    candidates += [str(path) for name in names for path in sorted(versions.glob(f"*/bin/{name}"))]
    found: dict[str, str] = {}
    for candidate in filter(None, candidates):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        asked = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if asked.returncode == 0:  # pyenv has a python3.12 on PATH that only says which versions there are
            found.setdefault(asked.stdout.strip(), candidate)
    return found


def test_a_wheel_has_sources_and_data_and_nothing_that_an_earlier_build_left(tmp_path: Path) -> None:
    setup("build_py", "--build-lib", str(tmp_path))  # what the build of the libraries adds its own to
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == files("exportkit", "*.py") | DATA


def test_a_source_distribution_has_all_that_its_build_compiles(tmp_path: Path) -> None:
    setup("egg_info", "--egg-base", str(tmp_path))
    listed = set((tmp_path / "exportkit.egg-info" / "SOURCES.txt").read_text().splitlines())
    needed = files("csrc", "*") | files("exportkit", "*.py") | DATA
    assert needed | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= listed
    assert not [name for name in listed if name.endswith(".so") or name.startswith(("build/", ".cache/"))]


@pytest.mark.slow
def test_one_wheel_serves_every_python_and_names_the_hosts_it_needs(wheel: Path) -> None:
    tag = rf"py3-none-manylinux_2_(\d+)_{platform.machine()}"
    match = re.fullmatch(rf"exportkit-[\d.]+-{tag}\.whl", wheel.name)
    assert match, wheel.name
    assert int(match[1]) <= 38  # Ubuntu 24.04 has 2.39; tests/policy/test_stable_abi.py has the same for each library
    names = set(zipfile.ZipFile(wheel).namelist())
    archive = zipfile.ZipFile(wheel)
    (sbom,) = (name for name in names if name.endswith(".dist-info/sboms/exportkit.spdx.json"))
    said = {part["packageFileName"]: part["checksums"][0]["checksumValue"]
            for part in json.loads(archive.read(sbom))["packages"] if "packageFileName" in part}  # fmt: skip
    libraries = {name for name in names if archive.read(name)[:4] == b"\x7fELF"}
    assert said == {name: hashlib.sha256(archive.read(name)).hexdigest() for name in libraries}
    assert {"exportkit/arr_coc/lib/libarr_coc_cpu.so", "exportkit/lib/libexportkit_package.so"} | DATA <= names
    assert files("exportkit", "*.py") <= names
    (man_page,) = (name for name in names if name.endswith("/share/man/man1/exportkit.1"))
    beside = [name for name in names if not re.match(r"exportkit(-[\d.]+\.dist-info)?/", name)]
    assert [name for name in beside if not man_page.startswith(name)] == []
    assert not [name for name in names if "libtorch" in name or "libc10" in name]  # the host's torch has them


@pytest.mark.slow
def test_the_wheel_loads_an_unsigned_package_without_compiler_and_cmake(
    wheel: Path, patches_package: Path, tmp_path: Path
) -> None:
    """In a new venv, with torch where pip would put it, and this one's other dependencies behind."""
    bin_, environment = install(wheel, sys.executable, tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "torch").symlink_to(SITE / "torch")
    (site / "dependencies.pth").write_text(f"{SITE}\n")
    code = (
        "import exportkit, exportkit.arr_coc.ops, shutil; "
        "print(exportkit.__file__, shutil.which('g++'), shutil.which('cmake'))"
    )
    assert run(bin_ / "python", "-c", code, **environment) == f"{site}/exportkit/__init__.py None None\n"
    run(bin_ / "exportkit", "verify", patches_package, "--against", "cases", **environment)
    if "exportkit/bin/exportkit-run" in zipfile.ZipFile(wheel).namelist():
        run(site / "exportkit" / "bin" / "exportkit-run", patches_package, **environment)


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted({*PYTHONS, "3.14"} - {"{}.{}".format(*sys.version_info)}))
def test_the_wheel_reads_a_package_under_another_python(
    version: str, wheel: Path, patches_package: Path, tmp_path: Path
) -> None:
    """All that needs no torch: the command line and the library that reads and checks packages."""
    interpreter = other_pythons().get(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not installed: that the wheel serves it was not seen")
    bin_, environment = install(wheel, interpreter, tmp_path / "venv")
    try:
        pip(tmp_path / "venv", "--only-binary", ":all:", *WITHOUT_TORCH)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"that the wheel serves Python {version} was not seen: {error.stderr.strip().splitlines()[-1]}")
    assert run(bin_ / "python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip() == version
    assert "patches" in run(bin_ / "exportkit", "inspect", patches_package, **environment)
    content = bytearray(patches_package.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(content)
    refused = [bin_ / "exportkit", "inspect", damaged]
    assert subprocess.run(refused, env=environment, capture_output=True, check=False).returncode == 3

"""Somebody else's package is found by its entry points, also where exportkit was built without ARR-COC."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.artifacts import ROOT, THIRD_PARTY
from tests.built import builds_alone
from tests.fixtures import softpool_library
from tests.subprocesses import output_of

_FILES = ("pyproject.toml", "README.md", "docs/exportkit.1", "tools/wheel_sbom.py")
MODELS = """
import torch
import exportkit
from softpool.model import Classifier

def classifier():
    rows = {0: "batch[1:16]", 1: "length[2:64]"}
    inputs = {"bias": torch.zeros(3, 6)}
    shapes = {"tokens": rows, "bias": {0: "batch", 1: "length"}}
    return exportkit.ExportSpec(Classifier(), (torch.rand(3, 6, 8),), inputs, dynamic_shapes=shapes)
"""
ENTRY_POINTS = """[exportkit.operators]
softpool = softpool

[exportkit.models]
softpool-classifier = softpool_models:classifier
"""
LOAD = """
import sys, torch, exportkit
model = exportkit.load(sys.argv[1])
answer = model(torch.rand(2, 5, 8), bias=torch.zeros(2, 5))
print(tuple(answer.logits.shape))
print([name for name in sys.modules if name.startswith("softpool")])
"""


def install_softpool(site: Path) -> None:
    """Installs the third party's package as pip does: modules, the library beside them, metadata."""
    shutil.copytree(THIRD_PARTY / "softpool", site / "softpool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(softpool_library.build(), site / "softpool" / "libsoftpool.so")
    (site / "softpool_models.py").write_text(MODELS)
    information = site / "softpool-0.3.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: softpool\nVersion: 0.3.1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)


def install_exportkit(site: Path) -> None:
    """Builds exportkit without ARR-COC and without the C++ runtime, from a copy of its files, and installs it.

    The setup.py there runs the checkout's, which takes the objects that are compiled in its build folder already.
    """
    copy = ROOT / ".cache" / "plugins"
    copy.mkdir(parents=True, exist_ok=True)
    with builds_alone():
        shutil.rmtree(copy / "exportkit", ignore_errors=True)
        (copy / "setup.py").write_text(f"import runpy\n\nrunpy.run_path({str(ROOT / 'setup.py')!r})\n")
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(_is_built, tracked.split("\0")):
            old, new = ROOT / name, copy / name
            if not new.is_file() or new.read_bytes() != old.read_bytes():
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(old, new)
        for stale in (copy / "build").glob("[lb]*.*"):  # lib.* and bdist.*, which may have files that are gone
            shutil.rmtree(stale)
        flags = {"EXPORTKIT_ARR_COC": "0", "EXPORTKIT_CPP_RUNTIME": "0", "EXPORTKIT_CUDA": "0"}
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | flags
        output_of(*command, "--target", site, copy, cwd="/", env=environment)


def _is_built(name: str) -> bool:
    wanted = name.startswith(("exportkit/", "csrc/package/", "csrc/recurrent/")) or name in _FILES
    return wanted and "arr_coc" not in Path(name).parts and (ROOT / name).is_file()


class Machine:
    """Where both packages are installed, and nothing of this checkout is.

    An interpreter of its own sees the others of this environment, but not the hook that finds the checkout's modules.
    """

    def __init__(self, site: Path, home: Path) -> None:
        self.home = home
        venv = home / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (own,) = venv.glob("lib/*/site-packages")
        (own / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        self.interpreter = venv / "bin" / "python"
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("EXPORTKIT", "SOFTPOOL"))
        }
        self.environment = inherited | {
            "PYTHONPATH": str(site),
            "HOME": str(home),
            "EXPORTKIT_CACHE": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
        }

    def python(self, *arguments: str) -> str:
        return output_of(self.interpreter, *arguments, cwd=self.home, env=self.environment)

    def exportkit(self, *arguments: str) -> str:
        return self.python("-m", "exportkit", *arguments)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("plugins")
    site, home = folder / "site", folder / "home"
    home.mkdir()
    install_exportkit(site)
    install_softpool(site)
    return Machine(site, home)


@pytest.mark.slow
def test_a_third_partys_model_goes_all_the_way_beside_an_exportkit_without_arr_coc(machine: Machine) -> None:
    found = machine.python(
        "-c",
        "import exportkit, importlib.util as u; from exportkit import installed as i; "
        "print(exportkit.__file__, u.find_spec('exportkit.arr_coc'), "
        "{'arr_coc', 'softpool'} & {*i.operator_namespaces()}, "  # other packages may be installed as well
        "[i.installed_models().get(name) for name in ('arr-coc', 'softpool-classifier')])",
    )
    assert "/site/exportkit/" in found
    assert "None {'softpool'} [None, 'softpool_models:classifier']" in found

    machine.exportkit("export", "softpool-classifier", "-o", "made.pt2")
    machine.exportkit("package", "made.pt2", "-o", "packed.pt2")  # whose library the declared module loads
    verified = machine.exportkit("verify", "packed.pt2", "--shapes", "2")
    assert "ok  eager" in verified, verified

    shape, modules = machine.python("-c", LOAD, "packed.pt2").splitlines()
    assert (shape, modules) == ("(2, 3)", "[]")

    command = [machine.interpreter, "-m", "exportkit", "serve", "packed.pt2", "--port", "0", "--no-grpc", "--json"]
    with subprocess.Popen(
        command, cwd=machine.home, env=machine.environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            said = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")
            tensors = {"tokens": [1, 3, 8], "bias": [1, 3]}
            inputs = [
                {"name": name, "shape": shape, "datatype": "FP32", "data": [0.5] * (24 if name == "tokens" else 3)}
                for name, shape in tensors.items()
            ]
            (name,) = (model["name"] for model in said["models"])
            request = urllib.request.Request(
                f"{said['http']}/v2/models/{name}/infer",
                data=json.dumps({"inputs": inputs}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                outputs = {output["name"]: output["shape"] for output in json.load(answer)["outputs"]}
        finally:
            server.terminate()
    assert outputs["logits"] == [1, 3]

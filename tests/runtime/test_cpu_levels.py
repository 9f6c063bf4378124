"""A package with code for several CPUs runs what the CPU has, shown on an emulated one without AVX-512."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from exportkit.package.archive import PackageReader
from exportkit.runtime.targets import host_cpu_isa
from tests.artifacts import ROOT, artifact
from tests.subprocesses import output_of, run_python

EMULATOR = shutil.which("qemu-x86_64")
HASWELL = "x86-64-v3"  # of 2013: AVX2, and no AVX-512

REPLAY = """
import os, sys, torch, exportkit
from exportkit.runtime import targets
if sys.argv[2:]:  # as if the CPU had it; Python's own runtime asks this function
    os.environ["EXPORTKIT_RUNTIME"] = "python"
    targets.host_cpu_isa = lambda: sys.argv[2]
print(targets.host_cpu_isa())
model = exportkit.load(sys.argv[1], device="cpu")
print(model.target.name)
for case in model.cases:
    torch.testing.assert_close(model(*case.args, **case.kwargs), case.outputs, rtol=1e-4, atol=1e-5)
print(len(model.cases))
"""


@pytest.mark.skipif(EMULATOR is None, reason="there is no qemu-x86_64 (Debian: qemu-user)")
@pytest.mark.skipif(host_cpu_isa() not in ("x86-64-v3", "x86-64-v4"), reason="not an x86-64 with AVX2")
def test_a_cpu_without_avx_512_gets_the_target_without_it() -> None:
    with PackageReader(artifact("weighted")) as reader:
        assert [target.cpu_isa for target in reader.manifest.targets] == ["x86-64-v3", "x86-64-v4"]
    command = [str(EMULATOR), "-cpu", "Haswell", sys.executable, "-c", REPLAY, artifact("weighted")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = output_of(*command, env=environment, timeout=600)
    assert said.split() == [HASWELL, "cpu_x86_64_v3", "4"]


@pytest.mark.parametrize("isa", ["x86-64-v3", "x86-64-v4"])
def test_every_targets_code_gives_the_recorded_answers(isa: str, tmp_path: Path) -> None:
    if isa > host_cpu_isa():
        pytest.skip(f"this CPU has no {isa}")
    said = run_python(REPLAY, artifact("weighted"), isa, cwd=tmp_path)
    assert said.split() == [isa, f"cpu_{isa.replace('-', '_')}", "4"]


def test_no_code_beyond_its_level_is_in_a_target(tmp_path: Path) -> None:
    """Registers that only AVX-512 has."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump (binutils)")
    with PackageReader(artifact("weighted")) as reader:
        counts = {}
        for target in reader.manifest.targets:
            (name,) = [
                n for n in reader.names if n.startswith(f"data/aotinductor/{target.name}/") and n.endswith(".so")
            ]
            reader.extract(name, tmp_path / f"{target.name}.so")
            listing = output_of("objdump", "-d", tmp_path / f"{target.name}.so")
            assert "%ymm" in listing
            counts[target.cpu_isa] = listing.count("%zmm")
    assert counts["x86-64-v3"] == 0
    assert counts["x86-64-v4"] > 0

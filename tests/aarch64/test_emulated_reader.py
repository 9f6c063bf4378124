"""The reader of packages compiled for aarch64. Its tests for every machine run there, too: the Makefile names them."""

from __future__ import annotations

import hashlib
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.aarch64.emulated import COMPILER, LIBRARIES, ROOT, compiled, emulated, needs_an_emulator
from tests.cpp_reader import FLAGS, SOURCES, CppReader, build, program

pytestmark = needs_an_emulator


@pytest.mark.parametrize(
    ("cpu", "level"),
    [
        ("cortex-a57", "armv8-a"),
        ("a64fx", "armv8-a"),  # SVE, but no dot products
        ("cortex-a76", "armv8.2-a+dotprod"),
        ("neoverse-n1", "armv8.2-a+dotprod"),
        ("max", "armv8.2-a+dotprod+sve+bf16"),
        ("max,sve=off", "armv8.2-a+dotprod"),
    ],
)
def test_a_cpu_has_the_highest_level_all_of_whose_features_it_has(cpu: str, level: str) -> None:
    asked = build("check_package", COMPILER, FLAGS, LIBRARIES / "lib" / "libexportkit_package.so")
    said = subprocess.run(emulated(asked, "host", cpu=cpu), capture_output=True, text=True, check=True).stdout
    assert said == f'{{"ok": true, "value": ["linux-aarch64", "{level}"]}}\n'


@pytest.mark.parametrize("cpu", ["cortex-a57", "max"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 63, 64, 65, 1000])
def test_digests_by_arms_instructions_are_those_of_any_machine(cpu: str, length: int, tmp_path: Path) -> None:
    content = np.random.default_rng(length).bytes(length)
    (tmp_path / "file").write_bytes(content)
    digests = compiled(SOURCES / "tests" / "check_digests.cpp", [*FLAGS, "-ldl"])
    command = emulated(digests, tmp_path / "file", cpu=cpu)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(content).hexdigest(), str(zlib.crc32(content))]


def test_golden_packages_are_read_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    reader = CppReader(program())
    for path in sorted((ROOT / "tests" / "golden").glob("*.pt2")):
        assert "ok" in reader.ask("verify", path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "damaged.pt2").write_bytes(content)
        assert reader.ask("verify", tmp_path / "damaged.pt2")["error"] == "DigestMismatchError"
    reader.close()

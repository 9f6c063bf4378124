"""The wheel for aarch64 that another machine builds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.aarch64.emulated import ROOT, needs_an_emulator

pytestmark = needs_an_emulator
EM_AARCH64 = b"\xb7\0"


def test_a_wheel_for_aarch64_has_code_for_that_alone_and_says_so(tmp_path: Path) -> None:
    if shutil.which("make") is None or importlib.util.find_spec("auditwheel") is None:
        pytest.skip("the wheel is made by make and auditwheel, and one is not installed")
    settings = [f"BIN={Path(sys.executable).parent}", "READY=", f"WHEELS={tmp_path}"]
    done = subprocess.run(["make", "wheel-aarch64", *settings], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the C++ runtime is not built" in done.stderr
    (wheel,) = tmp_path.iterdir()
    match = re.fullmatch(r"exportkit-[\d.]+-py3-none-manylinux_2_(\d+)_aarch64\.whl", wheel.name)
    assert match, wheel.name
    assert int(match[1]) <= 38  # as tests/policy/test_wheel.py has it
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    libraries = {name: content for name, content in contents.items() if content.startswith(b"\x7fELF")}
    assert {Path(name).name for name in libraries} == {
        "libexportkit_package.so",
        "libexportkit_recurrent.so",
        "libarr_coc_cpu.so",
    }
    assert {content[18:20] for content in libraries.values()} == {EM_AARCH64}
    (tags,) = (content for name, content in contents.items() if name.endswith(".dist-info/WHEEL"))
    assert f"Tag: py3-none-manylinux_2_{match[1]}_aarch64" in tags.decode()
    (sbom,) = (content for name, content in contents.items() if name.endswith(".dist-info/sboms/exportkit.spdx.json"))
    said = {part["packageFileName"]: part["checksums"][0]["checksumValue"]
            for part in json.loads(sbom)["packages"] if "packageFileName" in part}  # fmt: skip
    assert said == {name: hashlib.sha256(content).hexdigest() for name, content in libraries.items()}

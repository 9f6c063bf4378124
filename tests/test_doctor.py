"""doctor's findings."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from exportkit import doctor
from exportkit.cli import main
from exportkit.doctor import BASIC, HostFinding, diagnose
from exportkit.errors import HostError
from exportkit.export.torch_patches import patch_table
from exportkit.export.torch_patches.patched import is_needed
from exportkit.support import NEWEST_TORCH


@pytest.fixture(scope="module")
def here():
    return diagnose()


def test_every_ability_needs_findings_that_are_looked_at_and_the_basic_ones_hold(here):
    names = {finding.name for finding in here.findings}
    assert len(names) == len(here.findings)
    assert {need for needs in doctor._NEEDS.values() for need in needs} <= names
    able = {capability.name: capability for capability in here.capabilities}
    for name in BASIC:
        assert able[name].ok, able[name].missing
    for finding in here.findings:
        assert finding.ok or finding.hint, finding


def test_a_torch_that_differs_from_the_table_of_patches_is_said_to(monkeypatch):
    found = doctor._torch_patches()
    assert found.ok
    assert int(found.detail.partition(",")[0]) == sum(map(is_needed, patch_table.PATCHES.values()))
    assert "GraphLowering.get_attr" in found.detail
    patch = patch_table.PATCHES["GraphLowering.get_attr"]
    monkeypatch.setattr(patch_table, "PATCHES", {patch.key: replace(patch, name="gone")})
    differs = doctor._torch_patches()
    assert (differs.ok, differs.detail) == (False, "this torch has no GraphLowering.gone")
    assert "2.13" in differs.hint


def test_packages_that_onnx_models_need_have_their_versions_or_are_missing(monkeypatch):
    found = doctor._onnx()
    assert found.ok
    assert re.match(r"ONNX Runtime \d+\.\d+\.\d+, onnx \d+\.\S+, onnxscript \d+\.\S+, onnx-ir \d+\.\S+$", found.detail)
    right = metadata.version

    def version(name):
        if name == "onnxscript":
            raise metadata.PackageNotFoundError(name)
        return right(name)

    monkeypatch.setattr(metadata, "version", version)
    missing = doctor._onnx()
    assert (missing.ok, missing.detail) == (False, "onnxscript is not installed")
    assert "exportkit[onnx]" in missing.hint
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "cannot be imported" in doctor._onnx().detail


def test_without_a_reader_of_packages_what_needs_it_is_not_looked_at(monkeypatch):
    def missing():
        raise HostError("the library that reads packages cannot be loaded", hint="`make build` builds it.")

    monkeypatch.setattr("exportkit.package.core.library", missing)
    looked = diagnose()
    findings = {finding.name: finding for finding in looked.findings}
    assert findings["package reader"] == HostFinding(
        "package reader", False, "the library that reads packages cannot be loaded", "`make build` builds it."
    )
    assert not findings["cache"].ok
    able = {capability.name: capability for capability in looked.capabilities}
    assert not any(able[name].ok for name in BASIC)


def test_signatures_take_a_libcrypto(monkeypatch):
    assert "libcrypto.so.3" in doctor._signatures().detail

    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", none)
    finding = doctor._signatures()
    assert not finding.ok
    assert finding.detail == "cannot be checked: libcrypto.so.3: cannot open shared object file"


def test_a_machine_without_torch_is_told_so_and_nothing_breaks(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = {finding.name: finding for finding in diagnose().findings}
    assert not any(findings[name].ok for name in ("torch", "compiler", "CUDA device", "arr_coc on CPU"))


def test_a_cache_that_cannot_be_used_is_named_and_so_is_what_takes_its_place(monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for cache in (shared, tmp_path / "cache"):
        monkeypatch.setenv("EXPORTKIT_CACHE", str(cache))
        finding = doctor._cache()
        assert finding.ok
        assert str(cache) in finding.detail
        assert f"every process unpacks packages into {tempfile.gettempdir()}" in finding.detail
        monkeypatch.setattr(os, "access", lambda path, mode: False)


def test_a_cache_that_may_hold_no_code_is_no_cache(monkeypatch, tmp_path):
    real = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*real[:8], real.f_flag | os.ST_NOEXEC, *real[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    finding = doctor._cache()
    assert (finding.ok, finding.detail) == (False, f"{tmp_path} is mounted noexec")
    assert "EXPORTKIT_CACHE" in (finding.hint or "")


def test_the_libstdcxx_that_packages_get_is_named_with_its_newest_version(here):
    finding = next(finding for finding in here.findings if finding.name == "libstdc++")
    assert finding.ok
    newest, path = re.fullmatch(r"GLIBCXX_([\d.]+), (.*/libstdc\+\+\.so\S*)", finding.detail).groups()
    content = Path(path).read_bytes()  # the oracle: the string itself, and none of the next
    major, minor, patch = map(int, newest.split("."))
    assert f"GLIBCXX_{newest}\0".encode() in content
    assert f"GLIBCXX_{major}.{minor}.{patch + 1}\0".encode() not in content


def test_worker_processes_need_memory_to_share_and_an_interpreter(monkeypatch):
    assert doctor._worker_processes().ok
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        limited = doctor._worker_processes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not limited.ok
    assert "64 MB of memory cannot be shared: [Errno 27] File too large" in limited.detail
    monkeypatch.setattr("sys.executable", "")
    assert not doctor._worker_processes().ok


def test_a_cxx_that_cannot_be_used_is_named_beside_the_compiler_that_can(monkeypatch, tmp_path):
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    finding = doctor._compiler()
    assert finding.ok
    assert "; $CXX is ignored, it cannot compile a C++20 library" in finding.detail


@pytest.mark.parametrize(("version", "said"), [(13000, "supports CUDA 13.0"), (12080, "supports CUDA 12.8")])
def test_the_drivers_cuda_is_said_beside_torchs(monkeypatch, version, said):
    class Driver:
        def cuDriverGetVersion(self, pointer):
            pointer._obj.value = version
            return 0

    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"the driver {said}" in doctor._cuda_device().detail


def test_doctor_prints_what_was_found_and_what_cannot_be_done(monkeypatch, capsys, here):
    monkeypatch.setattr(doctor, "diagnose", lambda progress: here)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "load and run a CPU package" in out
    for finding in here.findings:
        assert finding.detail in out


def test_doctor_exits_with_4_where_the_basics_are_missing(monkeypatch, capsys):
    broken = doctor.HostReport(
        (HostFinding("torch", False, "none", "Install it."),), (doctor.Capability(BASIC[0], False, ("torch",)),)
    )
    monkeypatch.setattr(doctor, "diagnose", lambda progress: broken)
    assert main(["doctor", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["capabilities"][0]["missing"] == ["torch"]


def test_doctor_says_when_the_cpp_runtime_was_built_for_another_torch(monkeypatch, tmp_path):
    monkeypatch.setattr("exportkit.runtime.native.library_path", lambda: tmp_path / "torch9.9" / "lib.so")
    finding = doctor._runtime()
    assert not finding.ok
    assert finding.detail.startswith(f"{tmp_path / 'torch9.9' / 'lib.so'} does not exist; it was built for ")
    assert "torch's own binding, which holds the GIL and makes no CUDA graphs" in finding.hint


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.12.1+cu130", ", no export of vmap over a size that varies; no program file with a scan"),
        ("2.11.0", "; no compiled code that passes a dtype, a layout or a memory format to an operator"),
        (f"{NEWEST_TORCH}.0", " threads"),
        ("9.9.0", ", which loads packages; export was not tested with it"),
    ],
)
def test_doctor_says_what_a_torch_lacks(monkeypatch, version, said):
    monkeypatch.setattr("torch.__version__", version)
    finding = doctor._torch()
    assert finding.ok
    assert finding.detail.startswith(f"{version}, ")
    assert said in finding.detail
    assert finding.detail.endswith("threads") == (said == " threads")

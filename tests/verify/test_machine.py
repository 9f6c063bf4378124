"""doctor's findings."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from exportkit.cli import main
from exportkit.errors import CompilerError
from exportkit.verify import machine
from exportkit.verify.machine import BASIC, Finding, examine


@pytest.fixture(scope="module")
def here():
    return examine()


def test_every_ability_needs_findings_that_are_looked_at(here):
    names = {finding.name for finding in here.findings}
    assert len(names) == len(here.findings)
    assert {need for needs in machine._NEEDS.values() for need in needs} <= names
    assert set(BASIC) <= machine._NEEDS.keys()


def test_what_is_missing_has_a_hint(here):
    for finding in here.findings:
        assert finding.ok or finding.hint, finding


def test_this_machine_can_do_what_the_tests_do(here):
    able = {ability.name: ability for ability in here.abilities}
    for name in BASIC:
        assert able[name].ok, able[name].missing


def test_a_compiler_that_cannot_be_used_is_a_finding_with_the_exporter_s_own_reasons(monkeypatch):
    def none():
        raise CompilerError("no C++ compiler: g++ links libstdc++ statically", hint="Set CXX.")

    monkeypatch.setattr("exportkit.export.toolchain.usable_compiler", none)
    assert machine._compiler() == Finding(
        "compiler", False, "no C++ compiler: g++ links libstdc++ statically", "Set CXX."
    )


def test_a_machine_without_torch_is_told_so_and_nothing_breaks(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = {finding.name: finding for finding in examine().findings}
    assert not any(findings[name].ok for name in ("torch", "compiler", "CUDA device", "arr_coc, CPU"))


def test_a_cache_that_cannot_be_written_is_named_and_so_is_what_takes_its_place(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    finding = machine._cache()
    assert finding.ok
    assert f"{tmp_path / 'cache'} is not writable: every process unpacks packages into {tempfile.gettempdir()}" in (
        finding.detail
    )


def test_a_cache_that_may_hold_no_code_is_no_cache(monkeypatch, tmp_path):
    real = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*real[:8], real.f_flag | os.ST_NOEXEC, *real[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    finding = machine._cache()
    assert (finding.ok, finding.detail) == (False, f"{tmp_path} is mounted noexec")
    assert "EXPORTKIT_CACHE" in (finding.hint or "")


def test_doctor_prints_what_was_found_and_what_cannot_be_done(monkeypatch, capsys, here):
    monkeypatch.setattr(machine, "examine", lambda progress: here)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "load and run a CPU package" in out
    for finding in here.findings:
        assert finding.detail in out


def test_doctor_exits_with_4_where_the_basics_are_missing(monkeypatch, capsys):
    broken = machine.Machine(
        (Finding("torch", False, "none", "Install it."),), (machine.Ability(BASIC[0], False, ("torch",)),)
    )
    monkeypatch.setattr(machine, "examine", lambda progress: broken)
    assert main(["doctor", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["abilities"][0]["missing"] == ["torch"]

"""`exportkit doctor --cache` and `--prune-cache`: look, and remove."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import unpack_target
from tests import commands
from tests.runtime import tiny


@pytest.fixture
def entry(monkeypatch, tmp_path: Path) -> Path:
    """An unpacked target."""
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody else's leftovers are there
    code = tmp_path / "a.so"
    code.write_bytes(bytes(3000))
    with PackageReader(tiny.write(tmp_path / "a.pt2", {"a.so": code}, cases=())) as reader:
        unpacked = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
        unpacked.close()
        return unpacked.folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return commands.run(capsys, "doctor", *arguments)


def test_info_says_where_it_is_and_what_is_in_it(entry, capsys):
    code, out, _ = run(capsys, "--cache")
    assert code == 0
    first, row = out.splitlines()
    assert first.startswith(str(entry.parents[1]))
    assert row.split()[0] == "target"
    assert row.endswith(str(entry))
    code, out, _ = run(capsys, "--cache", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["directory"] == str(entry.parents[1])
    (item,) = document["items"]
    assert (item["kind"], item["path"], item["in_use"]) == ("target", str(entry), False)
    assert document["size"] == item["size"] > 3000


@pytest.mark.parametrize("limit", ["all", "2kB", "0s"])
def test_prune_removes_and_says_what(entry, capsys, limit):
    code, out, _ = run(capsys, "--json", "--prune-cache", "1 GB", "--prune-cache", "30d")
    assert (code, json.loads(out)["removed"]) == (0, [])
    code, out, _ = run(capsys, "--json", "--prune-cache", limit)
    document = json.loads(out)
    assert code == 0
    assert [item["path"] for item in document["removed"]] == [str(entry)]
    assert (document["left"], document["kept"]) == (0, [])
    assert not entry.exists()


def test_prune_of_leftovers_removes_nothing_else(entry, capsys):
    code, out, _ = run(capsys, "--prune-cache", "leftovers")
    assert code == 0
    assert "removed 0, 0 bytes; 3." in out
    assert entry.exists()


@pytest.mark.parametrize("value", ["", "-1", "2 GiB", "GB", "1e9", "nan", "30", "-1d", "1w", "d", "inf"])
def test_what_is_no_size_or_time_is_refused(entry, capsys, value):
    code, out, err = run(capsys, "--prune-cache", value)
    assert (code, out) == (2, "")
    assert f"{value!r} is not a number with a unit, such as" in err
    assert entry.exists()


def test_a_cache_that_is_not_ours_is_an_error_and_keeps_what_it_leads_to(tmp_path, monkeypatch, capsys):
    """Another user could have made links in it to what is ours."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "precious" / ("0" * 64)).mkdir(parents=True)
    (tmp_path / "cache" / "libraries").symlink_to(tmp_path / "precious")
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    for command in (["--cache"], ["--prune-cache", "all"]):
        code, out, err = run(capsys, *command)
        assert (code, out) == (4, "")
        assert f"the cache {tmp_path / 'cache'} cannot be used" in err
    assert list((tmp_path / "precious").iterdir())


def test_it_does_not_import_torch(entry):
    code = "import sys; from exportkit.cli import main; main(['doctor', '--cache'])"
    code += "; main(['doctor', '--prune-cache', 'leftovers']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"

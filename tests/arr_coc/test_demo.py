"""The demo, with the compilation taken from the shared artifacts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exportkit.cli import main
from exportkit.package.archive import PackageReader
from tests.artifacts import artifact

pytestmark = pytest.mark.slow


@pytest.fixture
def _compiled(monkeypatch):
    def export_aoti(model, out, *options, progress):
        shutil.copyfile(artifact("arr-coc"), out)
        with PackageReader(out) as reader:
            return reader.manifest

    monkeypatch.setattr("exportkit.export.artifact.export_aoti", export_aoti)


@pytest.mark.usefixtures("_compiled")
def test_the_demo_goes_the_whole_way_and_ends_with_a_picture(tmp_path, capsys):
    pytest.importorskip("skimage")
    assert main(["demo", "-o", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = [step["name"] for step in result["steps"]]
    assert names == ["set up", "export", "package", "verify", "load and run", "draw"]
    assert Path(result["picture"]).read_bytes().startswith(b"\x89PNG")
    with PackageReader(Path(result["package"])) as reader:
        assert [library.device for library in reader.manifest.libraries] == ["cpu"]
    assert "200 of 1024 patches" in result["steps"][-1]["detail"]


def test_a_photograph_that_is_not_there_is_a_usage_error(capsys):
    assert main(["demo", "--photograph", "nobody"]) == 2
    assert "'astronaut', 'chelsea', 'coffee'" in capsys.readouterr().err

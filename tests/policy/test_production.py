"""docs/production.md, run as it stands: its commands in their order, and the tests that its promises name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportkit.runtime.native import library_path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "production.md").read_text()
_BLOCK = re.compile(r"<!-- (run(?:: \w+)?|file: \S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_PROMISE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_page_is_followed_from_the_source_to_the_rollback(tmp_path: Path):
    has = {
        "run": True,
        "run: cuda": torch.cuda.is_available(),
        "run: cpp": library_path().exists() and shutil.which("cmake") is not None,
    }
    script = ["set -eu", f"EXAMPLES={ROOT / 'examples'}"]
    for what, content in _BLOCK.findall(TEXT):
        if what.startswith("file: "):
            name = what.removeprefix("file: ")
            assert "EOF" not in content
            script.append(f"cat > {name} <<'EOF'\n{content}EOF")
        elif has[what]:
            script.append(re.sub(r"^\$ ", "", content, flags=re.MULTILINE))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EXPORTKIT_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "EXPORTKIT_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "SignatureMissingError" in said
    assert "[(1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4), (7, 4), (8, 4)]" in said
    assert (tmp_path / "net-2.pt2.sig").exists()
    if has["run: cpp"]:
        assert (tmp_path / "host" / "out.safetensors").exists()
        assert "case 0: ok" in said


@pytest.mark.parametrize(("path", "name"), sorted(set(_PROMISE.findall(TEXT))), ids=lambda part: part)
def test_every_promise_names_a_test_that_is_there(path: str, name: str):
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_the_promises_are_many_and_each_has_a_test():
    table = TEXT.partition("## What is promised")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and line != "| promise | test |"]
    rows = [row for row in rows if not set(row) <= set("| -")]
    assert len(rows) > 30
    for row in rows:
        assert _PROMISE.search(row), row

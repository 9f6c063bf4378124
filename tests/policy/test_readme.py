"""The README's section on one's own model and operators, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_ones_own_model_and_operators_go_the_way_the_readme_shows(tmp_path: Path):
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", README, re.DOTALL):
        (tmp_path / name).write_text(content)
    (commands,) = re.findall(r"<!-- run -->\n```console\n(.*?)```", README, re.DOTALL)
    script = "set -e\n" + re.sub(r"^\$ ", "", commands, flags=re.MULTILINE)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls agree" in done.stdout
    load = "import torch, exportkit; print(exportkit.load('net.pt2')(torch.randn(3, 8))['y'].shape)"
    loaded = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "torch.Size([3, 4])"

"""No command writes over a file that it reads: a slip of the finger would cost a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import run


@pytest.mark.parametrize(
    "command",
    [
        "inspect model.pt2 --sbom model.pt2",
        "bench model.pt2 --output model.pt2",
        "bench model.pt2 --plot link.pt2",
        "bench model.pt2 --onnx model.onnx --output model.onnx",
        "package model.pt2 --weights new.safetensors -o new.safetensors",
        "package model.pt2 --op-library ./ops.so -o ops.so",
        "export net.py:Net -o net.py",
        "export net.py:Net --weights new.safetensors -o new.safetensors",
        "ops check ops.so --reference a::b=net.py:f --candidate ops.so",
        "ops check ops.so --reference a::b=net.py:f --candidate net.py",
    ],
)
def test_what_is_read_is_not_replaced(
    command: str,
    tiny_package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_package, "model.pt2")
    Path("link.pt2").symlink_to("model.pt2")
    for name in ("net.py", "ops.so", "new.safetensors", "model.onnx"):
        Path(name).write_text("kept")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = run(capsys, *command.split())
    assert (code, "it would replace what is read" in err) == (2, True), err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

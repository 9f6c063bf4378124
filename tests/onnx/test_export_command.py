"""`exportkit export --format onnx` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest

from exportkit.cli import main

NET = """
import torch
import exportkit.arr_coc.ops

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.ops.arr_coc.muladd(x, x, 0.5)

def muladd(a, b, c):
    return a * b + c

number = 3
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first arguments of an export of a small model."""
    (tmp_path / "net_in_onnx.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    sizes = ["--input", "x=float32[4,8]", "--dynamic", "x:0=batch[1:64]"]
    return ["export", "net_in_onnx.py:Net", *sizes, "-o", "net.onnx"]


def test_the_model_is_written_and_verifies(net: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    decomposition = ["--decomposition", "arr_coc::muladd=net_in_onnx.py:muladd"]
    assert main([*net, "--format", "onnx", "--opset", "19", *decomposition, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"]["path"] == "net.onnx"
    assert document["manifest"]["onnx"][0]["opset"] == 19
    assert [function["name"] for function in document["manifest"]["onnx"][0]["functions"]] == ["muladd"]
    assert main(["verify", "net.onnx.exportkit"]) == 0  # the sidecar stands for its model
    said = capsys.readouterr().out
    assert f"ONNX Runtime {onnxruntime.__version__}" in said
    assert "onnx on cpu" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "onnx", "--opset", "17"], "opset 17 is not supported: it must be 18 to 23"),
        (["--format", "onnx", "--opset", "24"], "opset 24 is not supported: it must be 18 to 23"),
        (["--format", "onnx", "--cpu-isa", "x86-64-v3"], "are for --format aoti"),
        (["--format", "program", "--onnx-inline"], "--onnx-inline and --decomposition are for --format onnx"),
        (["--format", "program"], "--format program writes no .onnx: give --format onnx, or another name with -o"),
        (["--opset", "18"], "are for --format onnx"),
        (["--format", "onnx", "--decomposition", "muladd=net:f"], "is not NS::OP=MODULE:FUNCTION"),
        (["--format", "onnx", *2 * ["--decomposition", "a::b=c:d"]], "a::b is given twice"),
        (["--format", "onnx", "--decomposition", "a::b=nowhere:d"], "there is no module 'nowhere'"),
        (["--format", "onnx", "--decomposition", "a::b=net_in_onnx.py:number"], "is of type int"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_traced(
    net: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main([*net, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("net.onnx").exists()

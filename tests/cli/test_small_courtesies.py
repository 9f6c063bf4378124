"""What a command says beside its result: readable paths, a file that changed meanwhile, records on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.cli.output import printable
from exportkit.cli.replaced_file import ReplacedFile
from tests.artifacts import ROOT
from tests.commands import run

GOLDEN = ROOT / "tests" / "golden" / "format-1-cpu.pt2"


def test_a_path_that_an_ascii_locale_did_not_decode_is_read_as_utf_8() -> None:
    as_given = "ünï/模型.pt2".encode().decode("ascii", "surrogateescape")
    assert printable(as_given) == "ünï/模型.pt2"
    assert printable(b"\xff\x1b\xc3.pt2".decode("ascii", "surrogateescape")) == r"\udcff\x1b\udcc3.pt2"


@pytest.mark.parametrize("existed", [True, False])
def test_a_file_that_somebody_else_wrote_meanwhile_is_noticed(tmp_path: Path, existed: bool) -> None:
    output, steps = tmp_path / "net.pt2", []
    if existed:
        output.write_bytes(b"old")
    alone, others = ReplacedFile(output), ReplacedFile(output)
    alone.watched(steps.append)(f"writing {output}")
    assert not alone.notice
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(output)
    step = others.watched(steps.append)
    step("compiling")
    assert not others.notice
    step(f"writing {output}")
    assert others.notice == f"{output} was written by another process meanwhile, and is replaced"
    assert steps == [f"writing {output}", "compiling", f"writing {output}"]


def test_an_export_says_that_it_replaces_what_another_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "writes.py", tmp_path / "net.pt2"
    text = """
        import pathlib, torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                pathlib.Path(OUTPUT).write_bytes(b"of another export")

            def forward(self, x):
                return x + 1
    """
    lines = [line[8:] for line in text.splitlines()]
    model.write_text("\n".join(lines).replace("OUTPUT", repr(str(output))))
    given = ("--input", "x=float32[2]", "--format", "program", "--no-edge-cases", "-o", output)
    code, _, err = run(capsys, "export", f"{model}:Net", *given)
    assert code == 0
    assert err.endswith(f"note: {output} was written by another process meanwhile, and is replaced\n")


def test_inspect_lists_records_when_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    _, brief, _ = run(capsys, "inspect", GOLDEN)
    assert "22 records, every digest holds" in brief
    assert "\nRecords\n" not in brief
    _, full, _ = run(capsys, "inspect", GOLDEN, "--records")
    assert full.startswith(brief)
    assert len(full.partition("\nRecords\n")[2].splitlines()) == 21

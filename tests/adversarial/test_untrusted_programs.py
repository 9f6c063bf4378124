"""A program is code: what exportkit did not write is read with `--trust` only, and looking at a program runs nothing.

Each program here leaves a mark when torch reads or calls it. The controls show that it does.

Nor is what a file names imported or called: MODEL comes from the caller, or is a name that was registered. The
artifacts at the end name `subprocess:getoutput`, which every Python has, with a command that leaves the mark.
"""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import exportkit
from exportkit.cli import main
from exportkit.errors import UsageError
from exportkit.export.models.resolve import resolve
from exportkit.package.archive import STOCK_RECORDS, PackageReader, StoredRecord, write_package
from tests.artifacts import artifact
from tests.onnx import small_models
from tests.package import samples
from tests.package.signers import signer

Attack = Callable[[Path, str], None]


class Net(torch.nn.Module):
    """Its program has a guard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2)


@functools.cache
def saved() -> bytes:
    file, rows = io.BytesIO(), torch.export.Dim("rows", min=2, max=8)
    torch.export.save(torch.export.export(Net(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: 2 * rows}}), file)
    return file.getvalue()


def write_edited(path: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """Writes the program with one of its records edited."""
    with zipfile.ZipFile(io.BytesIO(saved())) as archive:
        records = {each: archive.read(each) for each in archive.namelist()}
    assert any(each.endswith(name) for each in records)
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in records.items():
            archive.writestr(each, edit(content) if each.endswith(name) else content)


# --- the attacks ------------------------------------------------------------------------------------------------------


class Bomb:
    """Pickled, it runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, (self.command,)


def pickle_of_the_example_inputs(path: Path, command: str) -> None:
    pickled = io.BytesIO()
    torch.save(((Bomb(command),), {}), pickled)
    write_edited(path, "data/sample_inputs/model.pt", lambda _: pickled.getvalue())


def text_of_a_size(path: Path, command: str) -> None:
    """torch evaluates it with sympy."""

    def edit(content: bytes) -> bytes:
        program = json.loads(content)
        sizes = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = f"__import__('os').system('{command}')"
        return json.dumps(program).encode()

    write_edited(path, "models/model.json", edit)


def key_of_an_input(path: Path, command: str) -> None:
    """torch writes it into the source of a function. The file is as torch.export.save writes it."""
    key = f" + str(__import__('os').system('{command}')) + "

    class Keyed(torch.nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return x[key] + 1

    torch.export.save(torch.export.export(Keyed(), ({key: torch.ones(2)},)), path)


attacks = pytest.mark.parametrize(
    "attack", [pickle_of_the_example_inputs, text_of_a_size, key_of_an_input], ids=lambda attack: attack.__name__
)


def packaged(program: Path, path: Path) -> Path:
    """A package that has the file as its program."""
    records = {samples.CASE: samples.RECORDS[samples.CASE], samples.PROGRAM: program.read_bytes()}
    write_package(path, samples.program_manifest(str(torch.__version__)), records)
    return path


# --- files of torch.export.save ---------------------------------------------------------------------------------------


@attacks
def test_nothing_of_an_untrusted_program_runs(
    attack: Attack, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil, out = tmp_path / "evil.pt2", tmp_path / "out.pt2"
    attack(evil, f"touch {mark}")
    for command in (
        ["export", evil, "--format", "program", "-o", out],
        ["export", evil, "-o", out],
        ["export", evil, "--draft"],
        ["export", evil, "--repair", "-o", out],
    ):
        assert main([str(each) for each in command]) != 0
        said = "".join(capfd.readouterr())
        assert "evil.pt2 was not written by exportkit" in said
        assert "runs what the author of such a file wrote" in said
        assert "If you trust its author, give --trust." in said
    for command in (
        ["verify", evil],
        ["package", evil, "-o", out],
        ["package", evil, "--model-version", "2", "-o", out],
    ):
        assert main([str(each) for each in command]) == 3
        assert "a .pt2 that torch wrote, not exportkit" in "".join(capfd.readouterr())
    assert not mark.exists()
    assert not out.exists()
    main(["export", str(evil), "--format", "program", "--trust", "-o", str(out)])
    assert mark.exists(), f"the attack is none: {capfd.readouterr()}"


def test_with_trust_a_program_is_what_torch_reads(mark: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "program.pt2", tmp_path / "out.pt2"
    path.write_bytes(saved())
    x = torch.randn(6, 3)
    expected = torch.export.load(path).module()(x)
    assert torch.equal(resolve(str(path), trusted=True).spec.model(x), expected)
    assert main(["export", str(path), "--format", "program", "--trust", "-o", str(out)]) == 0
    assert main(["verify", str(out)]) == 0  # what exportkit wrote is a package
    assert main(["export", str(out), "--format", "program", "-o", str(tmp_path / "again.pt2")]) == 0
    assert main(["verify", str(out), "--model", str(path)]) == 2


def test_one_function_reads_programs() -> None:
    root = Path(exportkit.__file__).parent
    readers = [path for path in root.rglob("*.py") if "export.load(" in path.read_text()]
    assert [path.relative_to(root).as_posix() for path in readers] == ["program_reader.py"]


# --- programs in packages ---------------------------------------------------------------------------------------------


@attacks
def test_looking_at_a_program_runs_nothing(attack: Attack, mark: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.pt2"
    attack(evil, f"touch {mark}")
    package = packaged(evil, tmp_path / "package.pt2")
    page = tmp_path / "page.html"
    assert main(["inspect", str(package)]) == 0
    assert main(["inspect", str(package), "--report", str(page)]) == 0
    assert not mark.exists()


# --- models that a file names -----------------------------------------------------------------------------------------

MODEL = "subprocess:getoutput"


def naming(path: Path, changes: dict[str, Any], *, name: str = "weighted", **more: Any) -> Path:
    """The artifact of this name with other words about its source, and with more that is changed."""
    with PackageReader(artifact(name)) as reader:
        source = msgspec.structs.replace(reader.manifest.source, **changes)
        records = {name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS}
        write_package(path, msgspec.structs.replace(reader.manifest, source=source, **more), records)
    return path


@pytest.fixture
def evil(mark: Path) -> dict[str, Any]:
    """The function's name and its argument."""
    return {"model": MODEL, "model_kwargs": {"cmd": f"touch {mark}"}}


@pytest.fixture
def package(tmp_path: Path, evil: dict[str, Any]) -> Path:
    return naming(tmp_path / "named.pt2", evil)


def test_verify_says_that_eager_was_not_compared_and_how_to_compare(
    package: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(package)]) == 0
    said = capsys.readouterr().out
    assert f"not compared with eager: a model is imported only if its caller names it; name it " \
        f"with --model {MODEL}" in said  # fmt: skip
    (last,) = said.splitlines()[-1:]
    assert last.endswith(f"with the recorded answers only, not with eager PyTorch; --model {MODEL} compares it")
    assert main(["verify", str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared_with_eager"] is False
    assert main(["verify", str(package), "--against", "eager"]) == 2
    assert not mark.exists()


def test_a_bisection_traces_no_model_that_the_file_names(
    tmp_path: Path, evil: dict[str, Any], mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = {"norm.bias": "norm.running_mean", "norm.running_mean": "norm.bias"}
    with PackageReader(artifact("weighted")) as reader:
        targets = tuple(
            msgspec.structs.replace(target, constants={"forward": target.constants["forward"] | swapped})
            for target in reader.manifest.targets
        )
    package = naming(tmp_path / "wrong.pt2", evil, targets=targets)
    assert main(["verify", str(package), "--bisect"]) == 1
    assert f"there is no graph to cut: a model is imported only if its caller names it; name it " \
        f"with --model {MODEL}" in capsys.readouterr().out  # fmt: skip
    assert not mark.exists()


def test_no_other_command_imports_it(package: Path, tuned: Path, mark: Path, tmp_path: Path) -> None:
    out, key = tmp_path / "out.pt2", signer(tmp_path).private
    for command, code in (
        (["bench", package, "--device", "cpu", "--seconds", "0.001"], 0),
        (["bench", package, "--device", "cpu", "--against", "eager"], 2),
        (["package", package, "-o", out], 0),
        (["package", package, "--weights", tuned, "-o", out], 2),
        (["package", package, "--weights", tuned, "--no-verify", "-o", out], 2),
        (["inspect", package, "--report", tmp_path / "report.html"], 0),
        (["sign", package, "--key", key], 0),
    ):
        assert main([str(word) for word in command]) == code, command
        assert not mark.exists(), command


def test_a_missing_library_is_not_looked_for_in_a_module_that_the_file_names(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "named.py").write_text(f"open({str(mark)!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = naming(tmp_path / "in.pt2", {"model": "named:Net"}, name="softpool")
    assert main(["package", str(package), "-o", str(tmp_path / "out.pt2")]) == 3
    said = capsys.readouterr().err
    assert "--op-library" in said
    assert "--model net.py:Net" in said
    assert not mark.exists()


def test_the_sidecar_of_an_onnx_model_names_nothing_that_is_called(
    tmp_path: Path, evil: dict[str, Any], mark: Path
) -> None:
    pytest.importorskip("onnxruntime")
    source = msgspec.structs.replace(small_models.manifest().source, **evil)
    model, key = str(small_models.write_small(tmp_path / "evil.onnx", source=source)), str(signer(tmp_path).private)
    for command, code in (("verify", 0), ("inspect", 0), ("bench", 2)):  # a model is timed beside a package
        assert main([command, model]) == code, command
    assert main(["sign", model, "--key", key]) == 0
    assert not mark.exists()


def test_only_a_registered_name_counts_and_not_what_it_stands_for(
    package: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("exportkit.reference_model.installed_models", lambda: {"subprocess": MODEL})
    assert main(["verify", str(package)]) == 0
    assert "not compared with eager" in capsys.readouterr().out
    assert not mark.exists()


@pytest.mark.parametrize("value", [[1], {"a": 1}, print])
def test_arguments_of_a_model_are_numbers_text_booleans_and_null(value: object) -> None:
    with pytest.raises(UsageError, match="numbers, strings, booleans and null"):
        resolve("tests/export/weights_models.py:weighted", model_kwargs={"given": value})

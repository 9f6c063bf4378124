"""What a file names is neither imported nor called: MODEL comes from the caller, or is a name that was registered.

The artifacts here name `subprocess:getoutput` as their model, with a command that leaves a mark. No code of the
attacker's is needed for that: every Python has the function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exportkit.cli import main
from exportkit.errors import UsageError
from exportkit.export.models.resolve import resolve
from exportkit.package.archive import STOCK_RECORDS, PackageReader, StoredRecord, write_package
from tests.artifacts import artifact
from tests.onnx import small_models
from tests.package.signers import signer

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


@pytest.mark.process
def test_verify_says_that_eager_was_not_compared_and_how_to_compare(
    package: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(package)]) == 0
    said = capsys.readouterr().out
    assert f"no comparison with eager: the artifact names its model, and what a file names is not imported; name it " \
        f"with --model {MODEL}" in said  # fmt: skip
    (last,) = said.splitlines()[-1:]
    assert last.endswith(f"with the recorded answers only, not with eager PyTorch; --model {MODEL} compares it")
    assert main(["verify", str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared_with_eager"] is False
    assert main(["verify", str(package), "--against", "eager"]) == 2
    assert not mark.exists()


@pytest.mark.process
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
    assert f"there is no graph to cut: the artifact names its model, and what a file names is not imported; name it " \
        f"with --model {MODEL}" in capsys.readouterr().out  # fmt: skip
    assert not mark.exists()


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
def test_only_a_registered_name_counts_and_not_what_it_stands_for(
    package: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("exportkit.reference_model.installed_models", lambda: {"subprocess": MODEL})
    assert main(["verify", str(package)]) == 0
    assert "no comparison with eager" in capsys.readouterr().out
    assert not mark.exists()


@pytest.mark.parametrize("value", [[1], {"a": 1}, print])
def test_arguments_of_a_model_are_numbers_text_booleans_and_null(value: object) -> None:
    with pytest.raises(UsageError, match="numbers, strings, booleans and null"):
        resolve("tests/export/weights_models.py:weighted", model_kwargs={"given": value})

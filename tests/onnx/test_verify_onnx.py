"""verify, inspect, sign and the others with an ONNX model: what is right passes, and what was changed is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import exportkit
from exportkit.errors import NotAnArchiveError, NoTargetError, UsageError
from exportkit.onnx.files import sidecar_path
from exportkit.package.trust import Trust
from exportkit.reference_model import ReferenceModel
from exportkit.verify import replay
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import (
    CallFailed,
    EagerUnavailable,
    LoadFailed,
    Match,
    Mismatch,
    MissingOperator,
    Signed,
    WrongDtype,
    WrongShape,
)
from exportkit.verify.report import Report
from exportkit.verify.verify import verify
from tests.commands import run
from tests.onnx.small_models import NET, Net, model_proto, write_small
from tests.package.signers import Signer, write_policy
from tests.runtime import exportkit_run
from tests.subprocesses import run_interpreter

NAMED = ReferenceModel("net.py:Net")
CASES = VerifyOptions(against="cases")


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy but the test's, and the source of the eager model in the current folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a data file."""
    return write_small(tmp_path / "model.onnx", data_threshold=0)


def only(report: Report) -> object:
    (check,) = report.checks
    return check.verdict


# --- what is right ----------------------------------------------------------------------------------------------------


def test_a_right_model_agrees_with_its_cases_and_with_eager(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify", model, "--model", "net.py:Net", "--shapes", "3", "--json")
    report = json.loads(out)
    assert (code, report["exit_code"], report["ok"]) == (0, 0, True)
    assert [(target["name"], target["device"]) for target in report["targets"]] == [("onnx", "cpu")]
    assert (report["torch"], report["onnxruntime"]) == (None, onnxruntime.__version__)
    assert [(check["against"], check["verdict"]["kind"]) for check in report["checks"]] == [
        ("cases", "match"),
        *[("eager", "match")] * 3,
    ]
    assert {check["sizes"]["rows"] for check in report["checks"]} >= {1, 8}


REPLAY = """
import sys
from pathlib import Path
from exportkit.onnx.files import open_onnx
from exportkit.verify.commands import CallModel, LoadOnnx
from exportkit.verify.onnx_worker import OnnxReplay
from exportkit.verify.replay import blocked
model, folder = map(Path, sys.argv[1:])
with open_onnx(model) as sidecar:
    sidecar.extract(sidecar.manifest.cases[0].record, folder / "case")
    digest = sidecar.manifest_sha256
replay = OnnxReplay()
models = {"forward": str(model)}
command = LoadOnnx(str(model) + ".exportkit", digest, models, blocked("tests.models:Net"))
print(replay.load(command).device)
replay.run(CallModel(str(folder / "case"), str(folder / "outputs")))
for name in ("torch", "exportkit.export", "exportkit.arr_coc", "tests"):
    assert name not in sys.modules, name
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert "cannot import" in str(error)
    else:
        raise AssertionError(name)
"""


def test_the_process_has_neither_torch_nor_the_exporter_nor_operators_nor_the_model(
    model: Path, tmp_path: Path
) -> None:
    assert run_interpreter(REPLAY, model, tmp_path, cwd=tmp_path) == "cpu\n"


# --- what is wrong ----------------------------------------------------------------------------------------------------


def one_weight(proto: onnx.ModelProto) -> None:
    (tensor,) = proto.graph.initializer
    w = onnx.numpy_helper.to_array(tensor).copy()
    w[2, 7] += 0.01
    tensor.CopyFrom(onnx.numpy_helper.from_array(w, "w"))


def other_body(proto: onnx.ModelProto) -> None:
    """The operator's function computes something else."""
    proto.functions[0].node[0].op_type = "Mul"


def no_function(proto: onnx.ModelProto) -> None:
    del proto.functions[:]


def int32(proto: onnx.ModelProto) -> None:
    proto.graph.node[2].output[0] = "wide"
    proto.graph.node.append(helper.make_node("Cast", ["wide"], ["n"], to=TensorProto.INT32))
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32


def one_more_dimension(proto: onnx.ModelProto) -> None:
    proto.graph.node[2].attribute[1].i = 1
    proto.graph.output[1].type.tensor_type.ClearField("shape")


def fixed_rows(proto: onnx.ModelProto) -> None:
    """The sizes are those of the export's example."""
    proto.graph.node.insert(0, helper.make_node("Reshape", ["x", "shape"], ["reshaped"]))
    proto.graph.node[1].input[0] = "reshaped"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(torch.tensor([2, 3]).numpy(), "shape"))


@pytest.mark.parametrize(
    ("change", "verdict", "code"),
    [
        (one_weight, Mismatch, 1),
        (other_body, Mismatch, 1),
        (int32, WrongDtype, 10),
        (one_more_dimension, WrongShape, 11),
        (no_function, MissingOperator, 15),
    ],
)
def test_a_injected_error_has_its_verdict(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], verdict: type[object], code: int
) -> None:
    report = verify(write_small(tmp_path / "m.onnx", change), CASES)
    assert isinstance(only(report), verdict)
    assert report.exit_code == code


def test_a_size_the_model_does_not_take_is_a_verdict_and_the_others_are_compared(tmp_path: Path) -> None:
    path = write_small(tmp_path / "m.onnx", fixed_rows)
    report = verify(path, VerifyOptions(shapes=2, eager=NAMED))
    case, *eager = (check.verdict for check in report.checks)
    assert isinstance(case, Match)
    assert all(isinstance(verdict, CallFailed) for verdict in eager)
    assert len(eager) == 2
    assert report.exit_code == 12


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "cuda:1"}, {"target": "cpu"}])
def test_other_devices_and_targets_are_refused(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="CPUExecutionProvider"):
        verify(model, VerifyOptions(**options))


@pytest.mark.parametrize("command", ["verify", "inspect", "sign"])
@pytest.mark.parametrize("which", range(3))
def test_changed_bytes_in_any_file_are_exit_code_3_and_the_file_is_named(
    model: Path, release: Signer, capsys: pytest.CaptureFixture[str], command: str, which: int
) -> None:
    file = sorted(each for each in model.parent.glob("model.onnx*"))[which]
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    arguments = ["--key", release.private] if command == "sign" else []
    code, out, err = run(capsys, command, model, *arguments)
    assert code == 3
    assert file.name in out + err
    assert "Copy all files" in out + err or "Get it again" in out + err
    assert not list(model.parent.glob("*.sig"))


def test_a_model_of_another_exporter_is_exit_code_3_with_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.onnx").write_bytes(model_proto().SerializeToString())
    for command in ("verify", "inspect"):
        code, out, err = run(capsys, command, tmp_path / "theirs.onnx")
        assert code == 3
        assert "theirs.onnx.exportkit" in out + err


# --- signatures -------------------------------------------------------------------------------------------------------


def test_a_signature_covers_all_files_and_is_demanded_by_key_and_by_policy(
    model: Path, tmp_path: Path, release: Signer, capsys: pytest.CaptureFixture[str]
) -> None:
    demanded = VerifyOptions(trust=Trust([release.public]))
    verdict = only(verify(model, demanded))
    assert isinstance(verdict, LoadFailed)
    assert verdict.error == "SignatureMissingError"

    code, out, _ = run(capsys, "sign", model, "--key", release.private, "--json")
    assert code == 0
    assert json.loads(out)["signature"] == f"{model}.exportkit.sig"
    signed, case, eager = (check.verdict for check in verify(model, demanded).checks)
    assert isinstance(signed, Signed)
    assert isinstance(case, Match)
    assert isinstance(eager, EagerUnavailable)  # the source beside the model is not signed
    assert run(capsys, "inspect", model, "--public-key", release.public)[0] == 0

    write_policy(tmp_path / "config" / "exportkit" / "policy.json", release.public)
    assert verify(model, CASES).exit_code == 0
    assert verify(model, VerifyOptions(shapes=1, eager=NAMED)).exit_code == 0

    (data,) = model.parent.glob("*.data")
    content = data.read_bytes()
    data.write_bytes(bytes(len(content)))
    assert verify(model, CASES).exit_code == 3
    data.write_bytes(content)
    other = write_small(tmp_path / "other.onnx", proto=model_proto(Net().w + 1))
    shutil.copy(sidecar_path(other), sidecar_path(model))
    shutil.copy(other, model)
    verdict = only(verify(model, CASES))
    assert isinstance(verdict, LoadFailed)
    assert verdict.error == "SignatureError"


def test_what_is_not_signed_is_not_run(model: Path, release: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "VerifyWorker", lambda *args, **kwargs: pytest.fail("a process was started"))
    assert verify(model, VerifyOptions(trust=Trust([release.public]))).exit_code == 3


# --- the other commands -----------------------------------------------------------------------------------------------

INSPECT = """
import sys
from exportkit.cli import main
code = main(["inspect", sys.argv[1], *sys.argv[2:]])
assert not {"torch", "onnx", "onnx_ir", "onnxruntime"} & sys.modules.keys()
sys.exit(code)
"""


def test_inspect_shows_the_model_without_importing_what_would_parse_it(model: Path, tmp_path: Path) -> None:
    text = run_interpreter(INSPECT, model, cwd=tmp_path)
    (data,) = model.parent.glob("*.data")
    for said in (
        "float32[rows, 3]",
        "rows 1..8",
        "function toy::twice  toy::twice(Tensor x) -> Tensor",
        "opset",
        "20",
        data.name,
        "signature  none beside it",
    ):
        assert said in text
    document = json.loads(run_interpreter(INSPECT, model, "--json", cwd=tmp_path))
    assert document["file"]["path"] == str(sidecar_path(model))
    assert document["manifest"]["onnx"][0]["size"] == model.stat().st_size
    assert document["manifest"]["onnx"][0]["functions"][0]["operator"] == "toy::twice"


def test_a_sidecar_under_another_name_is_inspected_and_nothing_else(
    model: Path, tmp_path: Path, release: Signer, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Path(shutil.copy(sidecar_path(model), tmp_path / "alone.pt2"))
    assert run(capsys, "inspect", alone)[0] == 0
    for arguments in (
        ("verify", alone),
        ("sign", alone, "--key", release.private),
        ("package", alone, "-o", tmp_path / "out.pt2"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 2
        assert "describes an ONNX model" in out + err
    assert not (tmp_path / "out.pt2").exists()


def test_python_and_exportkit_run_refuse_an_onnx_model_in_the_same_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "package", model, "-o", tmp_path / "out.pt2")[0] == 3
    alone = Path(shutil.copy(sidecar_path(model), tmp_path / "alone.pt2"))
    not_packages = (
        (model, NotAnArchiveError, "is an ONNX model, not a package"),
        (alone, NoTargetError, "exportkit verify"),
    )
    for file, error, said in not_packages:
        with pytest.raises(error, match=said) as here:
            exportkit.load(file)
        with pytest.raises(error) as there:
            exportkit_run.load(file)
        assert str(here.value) == str(there.value)

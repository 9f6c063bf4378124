"""The files of an ONNX model: what is written, and that nothing else is taken for it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from google.protobuf.message import EncodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from exportkit.errors import ExportError, ManifestConsistencyError, OnnxFileError, PackageError, UsageError
from exportkit.onnx.files import MethodModel, named_model, open_onnx, read_model, sidecar_path, write_onnx
from exportkit.package.archive import write_package
from tests.onnx.small_models import CASE, FUNCTION, OPSET, Net, case, manifest, model_proto, write_small
from tests.package import samples
from tests.subprocesses import killed_in_the_middle

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a data file, not to be changed."""
    return write_small(tmp_path_factory.mktemp("onnx") / "model.onnx", data_threshold=0)


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    for file in files(written):
        shutil.copy(file, tmp_path)
    return tmp_path / written.name


def files(model: Path) -> list[Path]:
    """The model, its sidecar and its data."""
    return sorted(file for file in model.parent.iterdir() if file.name.startswith(model.name))


def data_of(model: Path) -> Path:
    (found,) = model.parent.glob(f"{model.name}.*.data")
    return found


def answers(model: Path) -> np.ndarray:
    """What ONNX Runtime answers for the model as it lies there, without exportkit."""
    (y,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(["y"], {"x": X})
    return np.asarray(y)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_stock_onnx_runtime_runs_what_is_written_and_it_is_as_described(tmp_path: Path, threshold: int) -> None:
    path = write_small(tmp_path / "a.onnx", data_threshold=threshold)
    onnx.checker.check_model(str(path), full_check=True)
    np.testing.assert_allclose(answers(path), Net()(torch.from_numpy(X))["y"].numpy(), rtol=1e-5, atol=1e-6)
    with open_onnx(path) as sidecar:
        (described,) = sidecar.manifest.onnx
        assert (described.opset, described.functions) == (OPSET, (FUNCTION,))
        assert (described.size, described.sha256) == (path.stat().st_size, sha256(path))
        assert read_model(path, described) == path.read_bytes()
        assert sidecar.read(CASE) == case()
        if threshold:
            assert described.data is None
            assert files(path) == [path, sidecar_path(path)]
        else:
            data = data_of(path)
            assert described.data is not None
            assert (described.data.name, described.data.size) == (data.name, data.stat().st_size)
            assert described.data.sha256 == sha256(data)
            assert data.name == f"a.onnx.{sha256(data)[:16]}.data"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_all_files_have_the_same_bytes_wherever_they_are_written(written: Path, tmp_path: Path) -> None:
    again = write_small(tmp_path / written.name, data_threshold=0)
    assert [(file.name, file.read_bytes()) for file in files(again)] == [
        (file.name, file.read_bytes()) for file in files(written)
    ]


def test_large_tensors_leave_the_model_in_every_dtype_and_small_ones_stay(tmp_path: Path) -> None:
    """Also those of a branch; the model that was given stays as it was."""
    large, small = torch.rand(64, 32), torch.rand(4)
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {OPSET}]>
        g (float[64, 32] x) => (float[64, 32] y, float[4] n) {{
            x1 = If (yes) <
                then_branch = one () => (float[64, 32] z) {{ z = Add (x, b) }},
                else_branch = other () => (float[64, 32] z) {{ z = Add (x, b) }}
            >
            df = Cast <to = 1> (d)
            if = Cast <to = 1> (i)
            y = Sum (x1, f, df, if)
            n = Add (s, s)
        }}
    """)
    for branch in proto.graph.node[0].attribute:
        branch.g.initializer.append(numpy_helper.from_array((large + 1).numpy(), "b"))
    tensors = {"f": large, "d": large.double(), "i": (large * 100).char(), "s": small, "yes": torch.tensor(True)}
    proto.graph.initializer.extend(numpy_helper.from_array(each.numpy(), name) for name, each in tensors.items())
    given_model = onnx_ir.serde.deserialize_model(proto)
    before = onnx_ir.serde.serialize_model(given_model).SerializeToString(deterministic=True)
    out = tmp_path / "m.onnx"
    written = write_onnx(
        out, [MethodModel(given_model)], manifest(), {CASE: case()}, opset=OPSET, data_threshold=large.nbytes
    )
    assert onnx_ir.serde.serialize_model(given_model).SerializeToString(deterministic=True) == before
    (described,) = written.onnx
    assert described.data is not None
    loaded = onnx.load(out, load_external_data=False)
    outside = {tensor.name for tensor in loaded.graph.initializer if tensor.data_location == TensorProto.EXTERNAL}
    assert outside == {"f", "d", "i"}
    for tensor in loaded.graph.initializer:
        offsets = [int(entry.value) for entry in tensor.external_data if entry.key == "offset"]
        assert all(offset % 4096 == 0 for offset in offsets)
    x = np.zeros((64, 32), np.float32)
    (y,) = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})
    expected = 1 + 3 * large + (large * 100).char()
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-6)


def test_a_model_beyond_the_limit_of_onnx_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TooLarge:
        def SerializeToString(self, *, deterministic: bool) -> bytes:
            raise EncodeError("Failed to serialize proto")  # as protobuf does from 2 GB on

    monkeypatch.setattr(onnx_ir.serde, "serialize_model", lambda model: TooLarge())
    with pytest.raises(ExportError, match="2 GB"):
        write_small(tmp_path / "b.onnx")
    assert not list(tmp_path.glob("b*"))


def test_a_new_model_of_the_same_name_replaces_all_files_and_no_others(tmp_path: Path) -> None:
    other = write_small(tmp_path / "other.onnx", data_threshold=0)
    path = write_small(tmp_path / "a.onnx", data_threshold=0)
    first = data_of(path)
    for name in ("a.onnx.data", "a.onnx.0123456789abcdeg.data", "ba.onnx.0123456789abcdef.data"):
        (tmp_path / name).write_bytes(b"somebody's")
    write_small(path, proto=model_proto(Net().w + 1), data_threshold=0)
    assert not first.exists()
    with open_onnx(path), open_onnx(other):
        pass
    write_small(path)
    assert not list(tmp_path.glob("a.onnx.[0-9a-f]*[0-9a-f].data"))
    assert len([file for file in tmp_path.iterdir() if file.read_bytes() == b"somebody's"]) == 3


def test_nothing_is_replaced_where_writing_fails(model: Path) -> None:
    before = {file: file.read_bytes() for file in files(model)}
    with pytest.raises(ManifestConsistencyError, match="toy::twice"):
        write_small(model, proto=model_proto(Net().w + 1), data_threshold=0, operators=())
    assert {file: file.read_bytes() for file in model.parent.iterdir()} == before


WRITE = """
from tests.onnx.small_models import Net, model_proto, write_small
out, last = Path(sys.argv[1]), sys.argv[2]
replace = Path.replace
def replaced(file, target):
    result = replace(file, target)
    if file.name == last:
        pause()
    return result
Path.replace = replaced
write_small(out, proto=model_proto(Net().w + 1), data_threshold=0)
"""


@pytest.mark.parametrize("last", ["data", "model-0"])
def test_a_killed_process_leaves_the_old_model_or_one_that_is_refused(model: Path, last: str) -> None:
    killed_in_the_middle(WRITE, model, last)
    if last == "data":
        assert len(list(model.parent.glob("*.data"))) == 2
        open_onnx(model).close()
    else:
        with pytest.raises(OnnxFileError, match=r"model\.onnx is not the file that was exported"):
            open_onnx(model)
    answers(model)  # whichever model it is, it has its own weights
    write_small(model, data_threshold=0)
    open_onnx(model).close()
    assert len(list(model.parent.iterdir())) == 3


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_is_overlooked(model: Path, which: int, data: st.DataObject) -> None:
    file = files(model)[which]
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    try:
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :])
        with pytest.raises(PackageError):
            open_onnx(model)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("which", ["model", "data"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes"),
        (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "bytes"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "sha256"),
        (lambda file: file.write_bytes(b""), "0 bytes"),
        (lambda file: file.unlink(), "there is no file"),
        (lambda file: (file.unlink(), file.mkdir()), "there is no file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "there is no file"),
    ],
)
def test_a_file_that_is_another_one_is_named_with_what_to_do(
    model: Path, which: str, change: Callable[[Path], object], says: str
) -> None:
    file = model if which == "model" else data_of(model)
    change(file)
    with pytest.raises(OnnxFileError) as caught:
        open_onnx(model)
    assert file.name in caught.value.message
    assert says in caught.value.message
    assert "export" in (caught.value.hint or "")
    assert caught.value.exit_code == 3


def test_another_package_under_the_name_of_a_sidecar_is_refused(model: Path) -> None:
    write_package(sidecar_path(model), samples.manifest(), samples.RECORDS)
    with pytest.raises(OnnxFileError, match="describes no ONNX model"):
        open_onnx(model)


def test_what_is_read_for_a_runtime_is_checked_again(model: Path) -> None:
    with open_onnx(model) as sidecar:
        (described,) = sidecar.manifest.onnx
    model.write_bytes(bytes(model.stat().st_size))
    with pytest.raises(OnnxFileError, match="sha256"):
        read_model(model, described)


@pytest.mark.parametrize("name", ["model.onnx", "latest.onnx"])
def test_a_link_to_a_model_is_opened_with_the_files_beside_the_model(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / name
    link.symlink_to(model)
    open_onnx(link).close()
    shutil.copy(sidecar_path(write_small(tmp_path / "other.onnx")), sidecar_path(link))
    with pytest.raises(OnnxFileError, match=f"{name} is not the file that was exported"):
        open_onnx(link)  # what is beside the link comes first


def test_a_model_may_have_any_name_and_must_be_readable(model: Path, tmp_path: Path) -> None:
    renamed = model.rename(tmp_path / "model.bin")
    shutil.copy(sidecar_path(model), sidecar_path(renamed))
    assert named_model(renamed) == renamed
    if os.geteuid() != 0:
        strange = tmp_path / "strange.onnx"
        strange.touch(0)
        with pytest.raises(UsageError, match="cannot read"):
            named_model(strange)

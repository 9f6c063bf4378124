"""ONNX models of methods with state: it goes in and comes out, and stock ONNX Runtime runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import exportkit
from exportkit.cli import main
from exportkit.errors import OnnxFileError
from exportkit.export.export_options import TraceOptions
from exportkit.onnx.export_onnx import export_onnx
from exportkit.onnx.files import open_onnx, sidecar_path
from exportkit.onnx.interface import Interface
from exportkit.package import manifest as m
from exportkit.package.archive import STOCK_RECORDS, PackageReader, write_package
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.package import samples, stateful_samples
from tests.verify import state_models

MODEL = "tests/verify/state_models.py:decoder"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path that was given; the models are beside it."""
    out = tmp_path_factory.mktemp("state") / "dec.onnx"
    export_onnx(state_models.decoder(), out, TraceOptions(cases=2))
    return out


def runtime(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def step(
    session: onnxruntime.InferenceSession, state: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Calls a model with `past_*`; returns its results, and the state that `present_*` makes."""
    past = {f"past_{name}": value for name, value in state.items()}
    taken = {each.name for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]
    given = {name: value for name, value in {**past, **inputs}.items() if name in taken}
    found = dict(zip(names, session.run(names, given), strict=True))
    present = {name.removeprefix("present_"): value for name, value in found.items() if name.startswith("present_")}
    results = {name: value for name, value in found.items() if not name.startswith("present_")}
    return results, {**state, **present}


def test_there_is_a_file_for_each_method_and_one_sidecar(decoder: Path) -> None:
    there = sorted(path.name for path in decoder.parent.iterdir())
    assert there == ["dec.decode.onnx", "dec.onnx.exportkit", "dec.prefill.onnx", "dec.similar.onnx"]
    with open_onnx(decoder.with_name("dec.decode.onnx")) as sidecar:
        assert [each.method for each in sidecar.manifest.onnx] == ["prefill", "decode", "similar"]
        assert sidecar.path == sidecar_path(decoder)
    model = onnx.load(decoder.with_name("dec.decode.onnx"))
    assert [each.name for each in model.graph.input][:3] == ["token", "heard", "past_keys_0"]
    assert [each.name for each in model.graph.output][:3] == ["0", "written.heard", "present_keys_0"]
    (axis, *_) = model.graph.input[2].type.tensor_type.shape.dim
    assert axis.dim_param == "batch"


class Shared(torch.nn.Module):
    """Two methods over one weight of 4 * width**2 bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(width, width)

    def up(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)

    def alike(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.project(x) * self.project(y)).sum(-1)


def export_shared(out: Path, width: int) -> Shared:
    model, x = Shared(width).eval(), torch.rand(2, width)
    methods = {"up": exportkit.Method(example_inputs=(x,)), "alike": exportkit.Method(example_inputs=(x, x + 1))}
    export_onnx(exportkit.ExportSpec(model=model, methods=methods), out, TraceOptions(cases=1))
    return model


@pytest.mark.slow
def test_methods_share_the_file_of_their_weights(tmp_path: Path) -> None:
    model = export_shared(tmp_path / "two.onnx", 600)
    (data,) = tmp_path.glob("two.onnx.*.data")
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert weights <= data.stat().st_size < 1.1 * weights
    assert sum(path.stat().st_size for path in tmp_path.glob("two.*.onnx")) < 0.1 * weights
    x, y = torch.rand(2, 2, 600)
    with torch.no_grad():
        for name, given in (("up", {"x": x}), ("alike", {"x": x, "y": y})):
            session = runtime(tmp_path / f"two.{name}.onnx")
            (answer,) = session.run(None, {key: tensor.numpy() for key, tensor in given.items()})
            np.testing.assert_allclose(answer, getattr(model, name)(*given.values()).numpy(), rtol=1e-3, atol=1e-4)
    with open_onnx(tmp_path / "two.up.onnx") as sidecar:
        assert {each.data.name for each in sidecar.manifest.onnx if each.data} == {data.name}
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for name in ("up", "alike"):
        with pytest.raises(OnnxFileError, match=rf"{data.name} is not the file that was exported"):
            open_onnx(tmp_path / f"two.{name}.onnx")
    # Little that would be there twice stays inside; the file of the old weights goes.
    export_shared(tmp_path / "two.onnx", 64)
    assert not list(tmp_path.glob("*.data"))


def test_stock_onnx_runtime_remembers_what_eager_remembers(decoder: Path) -> None:
    """A session of three texts, which is not the exported number."""
    spec = state_models.decoder()
    model, batch = spec.model.eval(), 3
    for name, buffer in list(model.named_buffers()):
        if buffer.dim():
            setattr(model, name, buffer[:1].expand(batch, *buffer.shape[1:]).clone())
    state = {name: buffer.numpy().copy() for name, buffer in model.named_buffers()}
    prefill, decode = (runtime(decoder.with_name(f"dec.{name}.onnx")) for name in ("prefill", "decode"))
    ids = torch.randint(0, 16, (batch, 4))
    with torch.no_grad():
        results, state = step(prefill, state, {"ids": ids.numpy()})
        np.testing.assert_allclose(results["0"], model.prefill(ids).numpy(), rtol=1e-4, atol=1e-5)
        for number in range(4):
            token, heard = torch.full((batch, 1), number), torch.zeros(batch, state_models.WIDTH)
            results, state = step(decode, state, {"token": token.numpy(), "heard": heard.numpy().copy()})
            np.testing.assert_allclose(results["0"], model.decode(token, heard).numpy(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(results["written.heard"], heard.numpy(), rtol=1e-5)
    for name, buffer in model.named_buffers():
        np.testing.assert_allclose(state[name], buffer.numpy(), rtol=1e-4, atol=1e-5)
    assert state["position"] == 8


def test_sequences_are_verified_with_what_came_out_going_in_again(decoder: Path, capsys) -> None:
    assert main(["verify", str(sidecar_path(decoder)), "--model", MODEL, "--shapes", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    labels = [check["label"] for check in said["checks"]]
    assert any("prefill, 4 times decode" in label for label in labels)
    assert {check["against"] for check in said["checks"]} == {"cases", "eager"}
    assert main(["inspect", str(decoder.with_name("dec.similar.onnx"))]) == 0
    assert "model of decode" in capsys.readouterr().out


def swapped(path: Path, first: str, second: str) -> None:
    """Exchanges two outputs of a model."""
    model = onnx.load(path)
    names = [each.name for each in model.graph.output]
    one, other = model.graph.output[names.index(first)], model.graph.output[names.index(second)]
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = {first: second, second: first}.get(name, name)
        for place, name in enumerate(node.input):
            node.input[place] = {first: second, second: first}.get(name, name)
    assert one.type == other.type
    onnx.save(model, path)


def test_a_layer_that_is_swapped_is_found(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder.parent, tmp_path, dirs_exist_ok=True)
    wrong = tmp_path / "dec.decode.onnx"
    swapped(wrong, "present_keys_0", "present_keys_1")
    sidecar = sidecar_path(tmp_path / decoder.name)
    with PackageReader(sidecar) as reader:
        records = {name: reader.read(name) for name in reader.names if name not in STOCK_RECORDS}
        content = wrong.read_bytes()
        described = [
            msgspec.structs.replace(each, size=len(content), sha256=sha256(content).hexdigest())
            if each.method == "decode"
            else each
            for each in reader.manifest.onnx
        ]
        manifest = msgspec.structs.replace(reader.manifest, onnx=tuple(described))
    write_package(sidecar, manifest, records)
    report = verify(sidecar, VerifyOptions(against="cases"))
    failed = [check for check in report.checks if check.verdict.exit_code]
    assert failed
    assert all("decode" in check.label for check in failed)
    assert "state keys_0" in failed[0].verdict.message


def test_a_single_forward_with_state_is_one_file(tmp_path: Path) -> None:
    manifest = export_onnx(state_models.counter(), tmp_path / "counter.onnx", TraceOptions(cases=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter.onnx", "counter.onnx.exportkit"]
    assert [each.method for each in manifest.onnx] == ["forward"]
    session = runtime(tmp_path / "counter.onnx")
    assert [each.name for each in session.get_inputs()][1:] == ["past_total", "past_gain", "past_calls"]
    report = verify(tmp_path / "counter.onnx", VerifyOptions(against="cases"))
    assert report.exit_code == 0


def test_a_model_that_is_left_from_an_older_export_is_refused(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder.parent, tmp_path, dirs_exist_ok=True)
    old = tmp_path / decoder.name
    old.write_bytes(decoder.with_name("dec.similar.onnx").read_bytes())
    with pytest.raises(OnnxFileError, match=r"dec\.onnx is not among the models that dec\.onnx\.exportkit describes"):
        open_onnx(old)


def names_of(method: m.PackagedMethod, state: tuple[m.StateTensor, ...]) -> tuple[list[Any], list[Any]]:
    interface = Interface.of(method, state)
    return [name for name, _ in interface.inputs], [name for name, _ in interface.outputs]


def test_each_name_stands_once_in_a_model() -> None:
    """An input may be called like what a state becomes."""
    decode = stateful_samples.decode_method()
    inputs, outputs = names_of(decode, stateful_samples.state())
    assert inputs == ["token", "scratch", "past_step", "past_cache.keys"]
    assert outputs == ["0", "written.scratch", "present_step", "present_cache.keys"]
    token = msgspec.structs.replace(decode.call.inputs[0], name="past_step")
    call = msgspec.structs.replace(decode.call, inputs=(token, *decode.call.inputs[1:]))
    inputs, _ = names_of(msgspec.structs.replace(decode, call=call), stateful_samples.state())
    assert inputs == ["past_step", "scratch", "state.past_step", "past_cache.keys"]
    plain = m.PackagedMethod(name="forward", call=samples.manifest().call, state=())
    assert names_of(plain, ()) == (["image"], ["scores"])

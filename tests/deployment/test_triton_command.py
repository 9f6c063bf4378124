"""`exportkit triton`: what the repository has, what is refused, and what the printed command lets clients do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from safetensors.numpy import load
from tritonclient import grpc
from tritonclient.grpc import model_config_pb2

from exportkit.cli import main
from exportkit.deployment import triton
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.signing import sign_package
from tests import commands
from tests.artifacts import ROOT, artifact
from tests.package import samples, stateful_samples
from tests.package.signers import signer
from tests.policy.documents import has_triton
from tests.serve.protocol.messages import triton_inputs
from tests.subprocesses import run_interpreter


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a backend for this torch, which no test here loads."""
    minor = ".".join(triton.host(with_cuda=False).torch.split(".")[:2])
    library = tmp_path / "lib" / f"torch{minor}" / "triton" / "exportkit" / "libtriton_exportkit.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(triton, "LIBRARY_DIR", tmp_path / "lib")
    return library.parents[1]


def package(path: Path, **changes: Any) -> Path:
    write_package(path, samples.manifest(**changes), samples.RECORDS)
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The repository."""
    return tmp_path / "mo dels"


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(backend: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `exportkit triton` for a package and the repository. Returns the exit code, stdout and stderr."""
    return lambda path, *more: commands.run(capsys, "triton", path, "-o", models, *more)


def written(command: Command, path: Path, *more: object) -> dict[str, Any]:
    code, said, _ = command(path, "--json", *more)
    assert code == 0
    return json.loads(said)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the repository ---------------------------------------------------------------------------------------------------


def test_the_folder_has_the_package_its_signatures_and_what_names_the_backend(
    command: Command, models: Path, tmp_path: Path
):
    path = package(tmp_path / "p.pt2")
    sign_package(path, signer(tmp_path).key)
    said = written(command, path)
    assert said["models"] == [{"name": "toy", "method": "forward", "folder": str(models / "toy"), "written": True}]
    signature = path.with_name("p.pt2.sig").read_bytes()
    assert contents(models) == {
        "toy/config.pbtxt": b'backend: "exportkit"\n',
        "toy/1/model.pt2": path.read_bytes(),
        "toy/1/model.pt2.sig": signature,
    }
    elsewhere = tmp_path / "release.signature"
    elsewhere.write_bytes(signature)
    path.with_name("p.pt2.sig").unlink()
    trusted = ["--public-key", tmp_path / "release.pem", "--signature", elsewhere]
    assert not written(command, path, *trusted)["models"][0]["written"]


def test_methods_and_options_become_models_and_parameters(command: Command, models: Path, tmp_path: Path):
    whole = stateful_samples.manifest()
    score = m.PackagedMethod(name="score", call=samples.manifest().call, state=())
    constants = {**whole.targets[0].constants, "score": {}}
    targets = (msgspec.structs.replace(whole.targets[0], constants=constants),)
    records = {**stateful_samples.RECORDS, "data/aotinductor/score.cpu_v3/model.wrapper.so": b"score"}
    path = tmp_path / "p.pt2"
    write_package(path, msgspec.structs.replace(whole, methods=(*whole.methods, score), targets=targets), records)
    said = written(command, path, "--method", "forward", "--method", "score", "--threads", "2", "--cuda-graphs")
    named = [(model["name"], model["method"]) for model in said["models"]]
    assert named == [("toy", "forward"), ("toy.score", "score")]
    for name, method in (("toy", {}), ("toy.score", {"method": "score"})):
        made = text_format.Parse((models / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        assert made.backend == "exportkit"
        given = {key: value.string_value for key, value in made.parameters.items()}
        assert given == {**method, "threads": "2", "cuda_graphs": "true"}
        assert (models / name / "1" / "model.pt2").read_bytes() == path.read_bytes()
    code, _, said = command(path, "--method", "encode")
    assert (code, "toy has no method encode" in said) == (2, True)


def test_a_model_that_is_there_stays_and_another_one_is_refused(command: Command, models: Path, tmp_path: Path):
    path = package(tmp_path / "p.pt2")
    assert written(command, path)["models"][0]["written"]
    before = contents(models)
    assert not written(command, path)["models"][0]["written"]
    for other in (["--threads", "1"], []):
        code, _, said = command(path, *other)
        assert (code, "exists, and is another model" in said) == (2, True)
        package(path, version="2")
    assert contents(models) == before
    assert [entry.name for entry in models.iterdir()] == ["toy"]
    code, _, said = command(path, "-o", tmp_path / "no" / "models")
    assert (code, "there is no folder" in said) == (2, True)


def test_what_does_not_run_here_is_refused_unless_it_is_for_a_gpu(command: Command, models: Path, tmp_path: Path):
    bare = {name: data for name, data in samples.RECORDS.items() if name != samples.LIBRARY}
    write_package(tmp_path / "bare.pt2", samples.manifest(libraries=()), bare)
    write_package(tmp_path / "sidecar.pt2", samples.sidecar(), samples.SIDECAR_RECORDS)
    package(tmp_path / "new.pt2", targets=(samples.target(needs_torch="9.0"),))
    gpu = samples.target(device="cuda", cpu_isa=None, cuda_architecture="sm_90")
    package(tmp_path / "gpu.pt2", targets=(gpu,))
    for name, wanted, message in (
        ("bare", 2, "`exportkit package`"),
        ("sidecar", 2, "no compiled target"),
        ("new", 4, "no target of the package runs here"),
        ("gpu", 0, ""),
    ):
        code, _, said = command(tmp_path / f"{name}.pt2")
        assert (code, message in said, models.exists()) == (wanted, True, code == 0)


def test_nothing_of_a_changed_or_unsigned_package_is_written(command: Command, models: Path, tmp_path: Path):
    path, other = package(tmp_path / "p.pt2"), signer(tmp_path, "other")
    code, _, said = command(path, "--public-key", other.public)
    assert (code, "p.pt2 is not signed as the caller requires" in said) == (3, True)
    with PackageReader(path) as reader:
        offset = reader.data_offset(samples.LIBRARY)
    with path.open("r+b") as file:
        file.seek(offset + 1)
        file.write(b"?")
    assert command(path)[0] == 3
    assert not models.exists()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_is_for_this_torch_and_has_the_key_and_the_options(
    command: Command, backend: Path, models: Path, tmp_path: Path
):
    path, release, next_one = package(tmp_path / "p.pt2"), signer(tmp_path), signer(tmp_path, "next")
    sign_package(path, release.key)
    keys = [f"--public-key={each.public}" for each in (release, next_one)]
    said = written(command, path, *keys, "--", "--http-port=9000")
    assert f"--backend-directory={backend}" in said["arguments"]
    assert f"--backend-config=exportkit,public-key={release.public}:{next_one.public}" in said["arguments"]
    assert said["arguments"][-1] == "--http-port=9000"
    line = shlex.split(command(path, *keys)[1].split("\n", 1)[1].replace("\\\n", ""))
    program = line.index(said["arguments"][0])
    assert len(line[program:]) == len(said["arguments"]) - 1
    assert f"--model-repository={models}" in line
    assert dict(item.split("=", 1) for item in line[:program]) == said["environment"]


def test_an_installation_without_the_backend_and_a_machine_without_triton_say_so(
    command: Command, backend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton, "_find_program", lambda: "no-tritonserver")
    path = package(tmp_path / "p.pt2")
    code, _, said = command(path)
    assert (code, "Triton is not on this machine" in said) == (0, True)
    code, _, said = command(path, "--run")
    assert (code, "neither on PATH" in said) == (4, True)
    backend.rename(backend.with_name("gone"))
    code, _, said = command(path)
    assert (code, "no backend of Triton for torch" in said) == (4, True)


def test_the_command_imports_no_torch(tmp_path: Path):
    path = package(tmp_path / "p.pt2")
    code = f"from exportkit.deployment.triton import *; write_triton_models(Path({str(path)!r}), Path('models'))"
    assert run_interpreter(f"{code}; import sys; print('torch' in sys.modules)", cwd=tmp_path) == "False\n"


# --- a real Triton ----------------------------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, *arguments: str | Path) -> Iterator[tuple[int, int, str]]:
    """`exportkit triton --run`: yields the ports of HTTP and gRPC, and the key, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        http, rpc = a.getsockname()[1], b.getsockname()[1]
    options = [f"--http-port={http}", f"--grpc-port={rpc}", "--allow-metrics=false", "--exit-timeout-secs=1"]
    command = [sys.executable, "-m", "exportkit", "triton", *map(str, arguments), "--run", "--json", "--", *options]
    environment = {**os.environ, "PYTHONPATH": _path()}
    with (folder / "out").open("w") as out, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=log)
    try:
        end = time.monotonic() + 60
        while status(http, "/v2/health/ready") != 200:
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < end
            time.sleep(0.1)
        said = (folder / "out").read_text()
        yield http, rpc, said.partition("exportkit-key=")[2][:32]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def status(port: int, path: str, **post: Any) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", **post)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.skipif(not has_triton(), reason="there is no tritonserver, or its backend was not built")
def test_triton_answers_and_lets_only_the_key_change_models(tmp_path: Path):
    whole = tmp_path / "patches.pt2"
    assert main(["package", str(artifact("patches")), "-o", str(whole), "--no-verify"]) == 0
    with PackageReader(whole) as reader:
        call, name = reader.manifest.call, reader.manifest.name
        tensors = load(reader.read(reader.manifest.cases[0].record))
    with running(tmp_path, whole, "-o", "models") as (http, rpc, key):
        inputs = triton_inputs(grpc, {each.name: tensors[f"0.input.{i}"] for i, each in enumerate(call.inputs)})
        with grpc.InferenceServerClient(f"127.0.0.1:{rpc}") as client:
            answer = client.infer(name, inputs)
            for i, output in enumerate(call.outputs):
                assert answer.as_numpy(output.name).shape == tensors[f"0.output.{i}"].shape
            with pytest.raises(grpc.InferenceServerException):
                client.load_model(name)
            client.load_model(name, headers={"triton-grpc-protocol-exportkit-key": key})
        for path in (f"/v2/repository/models/{name}/load", "/v2/systemsharedmemory/region/x/register"):
            assert status(http, path, data=b"{}") == 403
        assert status(http, f"/v2/repository/models/{name}/load", data=b"{}", headers={"exportkit-key": key}) == 200

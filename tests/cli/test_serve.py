"""What `exportkit serve` refuses before anything listens. tests/serve/operations runs servers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from exportkit.cli import main
from exportkit.cli.serve import command
from exportkit.serve import server
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import ListenOptions, ServeOptions
from tests import commands
from tests.package.signers import signer, write_policy
from tests.serve.operations.certificates import make_certificates


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return commands.run(capsys, "serve", *arguments)


@pytest.fixture(autouse=True)
def _does_not_listen(monkeypatch: pytest.MonkeyPatch):
    """What should have been refused must not start a server in the tests' process."""

    def listens(*_: object) -> None:
        raise AssertionError("it would have listened")

    monkeypatch.setattr(server, "open_port", listens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_certificates(tmp_path_factory.mktemp("certificates"))
    (folder / "open.key").write_bytes((folder / "server.key").read_bytes())
    (folder / "open.key").chmod(0o644)
    (folder / "keys.txt").write_text("a-key-of-some-length\n")
    (folder / "keys.txt").chmod(0o644)
    command = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "server.key", "-out", "encrypted.key"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "encrypted.key").chmod(0o600)
    return folder


def tls(certificate: str, key: str, *more: str) -> list[str]:
    return ["{package}", "--tls-certificate", f"{{folder}}/{certificate}", "--tls-key", f"{{folder}}/{key}", *more]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to serve: give a PACKAGE or --model-repository"),
        (["none.pt2"], "none.pt2"),
        (["--model-repository", "{folder}/none"], "none"),
        (["{package}", "--grpc-port", "9000", "--no-grpc"], "--grpc-port and --no-grpc exclude each other"),
        (["{package}", "--port", "8001"], "HTTP and gRPC cannot share port 8001"),
        (["{package}", "--port", "65536"], "65536"),
        (["{package}", "--device", "cuda:x"], "unknown device 'cuda:x'"),
        (["{package}", "--runners", "0"], "--runners"),
        (["{package}", "--max-delay", "-1"], "--max-delay"),
        (["{package}", "--max-queue-bytes", "0"], "--max-queue-bytes 0 would refuse every request"),
        (["{package}", "--max-queue-bytes", "much"], "'much' is not a number with a unit"),
        (["{package}", "--tls-certificate", "{folder}/server.pem"], "TLS needs a certificate and its key"),
        (["{package}", "--client-ca", "{folder}/authority.pem"], "--client-ca needs TLS"),
        (tls("client.pem", "server.key"), "server.key does not belong to"),
        (tls("server.key", "server.key"), "are not a certificate and its key"),
        (tls("server.pem", "open.key"), "chmod o-rwx"),
        (tls("server.pem", "encrypted.key"), "encrypted.key is encrypted"),
        (tls("server.pem", "server.key", "--client-ca", "{folder}/server.key"), "has no certificate in PEM form"),
        (["{package}", "--api-keys", "{folder}/keys.txt"], "is open to every user of this machine (mode 0644)"),
        (["{package}", "{package}"], "would both be served as tiny"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(
    tiny_package: Path, folder: Path, capsys: Any, arguments: list[str], says: str
):
    code, out, err = run(capsys, *(argument.format(package=tiny_package, folder=folder) for argument in arguments))
    assert (code, out) == (2, "")
    assert says in err


def test_a_bad_package_is_refused_before_anything_listens(tiny_package: Path, tmp_path: Path, capsys: Any):
    (tmp_path / "cut.pt2").write_bytes(tiny_package.read_bytes()[:-100])
    code, out, err = run(capsys, tiny_package, tmp_path / "cut.pt2", "--json")
    assert code == 3
    assert json.loads(out)["error"]["kind"] == "NotAnArchiveError"
    assert "listening" not in err


@pytest.mark.parametrize("name", ["x.safetensors", "old.bin"])
def test_weights_where_a_package_is_wanted_are_called_weights(tmp_path: Path, capsys: Any, name: str):
    (tmp_path / name).write_bytes(save({"x": np.zeros(2)}))
    for arguments in (["serve", tmp_path / name], ["package", tmp_path / name, "-o", tmp_path / "out.pt2"]):
        code, _, err = commands.run(capsys, *arguments)
        assert code == 2
        assert f"{name}' is a checkpoint: it has weights, and not the model's code" in err
        assert "`export` takes the code that makes the model: path/file.py:Class --weights " in err


def test_an_unsigned_package_is_refused_by_a_key_and_by_a_policy(
    tiny_package: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    key = signer(tmp_path).public
    code, _, err = run(capsys, tiny_package, "--public-key", key)
    assert (code, "listening" in err) == (3, False)
    assert "signature" in err
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", key)))
    assert run(capsys, tiny_package)[0] == 3


def test_an_address_that_is_not_here_says_so(tiny_package: Path, capsys: Any):
    code, _, err = run(capsys, tiny_package, "--host", "no-such-host.invalid")
    assert code == 4
    assert "--host no-such-host.invalid: this machine knows no such address or name" in err


KEYS, CERTIFICATE, AUTHORITY = Path("keys.txt"), Path("cert.pem"), Path("ca.pem")


@pytest.mark.parametrize(
    ("listen", "warns"),
    [
        (ListenOptions(), []),
        (ListenOptions(host="localhost"), []),
        (ListenOptions(host="::1"), []),
        (ListenOptions(host="0.0.0.0"), ["whoever reaches 0.0.0.0 may use the models"]),
        (ListenOptions(host="::", certificate=CERTIFICATE), ["whoever reaches :: may use the models"]),
        (ListenOptions(host="0.0.0.0", api_keys=KEYS), ["API keys cross the network in clear text"]),
        (ListenOptions(host="0.0.0.0", api_keys=KEYS, certificate=CERTIFICATE), []),
        (ListenOptions(host="0.0.0.0", client_authorities=AUTHORITY, certificate=CERTIFICATE), []),
    ],
)
def test_who_listens_to_others_without_asking_who_they_are_is_warned(listen: ListenOptions, warns: list[str]):
    given = list(server._warnings(listen))
    assert [text for text, start in zip(given, warns) if text.startswith(start)] == given
    assert len(given) == len(warns)


@pytest.mark.parametrize(
    ("missing", "options", "extra"),
    [
        ("uvicorn", (), "serve"),
        ("google.protobuf", (), "serve"),
        ("opentelemetry.sdk", ("--traces", "http://x"), "traces"),
    ],
)
def test_a_missing_extra_is_an_error_that_says_what_to_install(
    tiny_package: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, missing: str, options: Any, extra: str
):
    found = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == missing else found(name)

    monkeypatch.setattr("exportkit.serve.process_settings.find_spec", find)
    code, _, err = run(capsys, tiny_package, *options)
    assert code == 4
    assert f"the Python package {missing}, which is not installed" in err
    assert f"pip install 'exportkit[{extra}]'" in err


def test_without_ray_it_says_what_to_install(tiny_package: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run(capsys, tiny_package, "--ray")
    assert code == 4
    assert "cannot serve on Ray" in err
    assert "pip install 'exportkit[serve,ray]'" in err


def test_every_option_reaches_the_server(tiny_package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[ServeOptions] = []

    def note(options: ServeOptions, **_: object) -> bool:
        asked.append(options)
        return True

    monkeypatch.setattr(server, "run", note)
    words = {
        "--model-repository": folder,
        "--host": "::1",
        "--port": 1,
        "--grpc-port": 2,
        "--device": "cpu",
        "--runners": 3,
        "--max-batch": 4,
        "--max-delay": 5,
        "--max-queue-rows": 6,
        "--max-queue-bytes": "7kB",
        "--public-key": folder / "server.pem",
        "--tls-certificate": folder / "server.pem",
        "--tls-key": folder / "server.key",
        "--client-ca": folder / "authority.pem",
        "--api-keys": folder / "keys.txt",
        "--max-connections": 8,
        "--drain-timeout": 9,
        "--max-sequences": 10,
        "--max-sequence-bytes": "11kB",
        "--sequence-idle": 12,
        "--sequence-finish": 13,
        "--adapters": folder,
        "--traces": "http://localhost:4318/v1/traces",
    }
    flags = ["--isolate", "--cuda-graphs", "--no-warm-up", "--no-access-log"]
    assert main(["serve", str(tiny_package), *flags, *(str(word) for pair in words.items() for word in pair)]) == 0
    assert main(["serve", str(tiny_package), "--no-grpc"]) == 0
    given, plain = asked
    assert (given.packages, given.repository) == ((tiny_package,), folder)
    assert (given.load.devices, given.load.runners) == (("cpu",), 3)
    assert (given.load.isolate, given.load.warm_up, given.load.cuda_graphs) == (True, False, True)
    assert given.load.public_keys == (folder / "server.pem",)
    limits = given.batch
    assert (limits.max_rows, limits.max_delay) == (4, 0.005)
    assert (limits.max_queued_rows, limits.max_queued_bytes) == (6, 7000)
    assert given.sequences == SequenceLimits(10, 11000, 12.0, 13.0)
    assert (given.adapters, plain.adapters) == (folder, None)
    listen = given.listen
    assert (listen.host, listen.port, listen.grpc_port, listen.max_connections) == ("::1", 1, 2, 8)
    assert (listen.certificate, listen.private_key) == (folder / "server.pem", folder / "server.key")
    assert (listen.client_authorities, listen.api_keys) == (folder / "authority.pem", folder / "keys.txt")
    assert (given.drain_seconds, given.access_log) == (9, False)
    assert given.traces == "http://localhost:4318/v1/traces"
    assert plain == ServeOptions(packages=(tiny_package,), listen=type(listen)(grpc_port=None))
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert options <= {*words, *flags, "--no-grpc", "--access-log", "--ray", "--json", "--debug"}

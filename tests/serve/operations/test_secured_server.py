"""A server with TLS, certificates of clients, API keys and models in worker processes."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from tests.serve.operations.asking_tiny import INFER, arrays, body, expected, mean, triton_inputs
from tests.serve.operations.certificates import make_certificates
from tests.serve.operations.server_processes import Launcher, ServerProcess

KEY = "a-key-of-one-of-the-clients"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def keys(folder: Path) -> Path:
    path = folder / "keys.txt"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(launcher: Launcher, tiny_package: Path, folder: Path, keys: Path) -> Iterator[ServerProcess]:
    process = launcher.start(
        tiny_package,
        "--isolate",
        *("--tls-certificate", folder / "server.pem", "--tls-key", folder / "server.key"),
        *("--client-ca", folder / "authority.pem", "--api-keys", keys),
    )
    yield process.wait_until_ready()
    process.stop()


def client_context(folder: Path, name: str | None = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "authority.pem")
    if name is not None:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def grpc_client(server: ServerProcess, folder: Path, name: str | None = "client") -> triton.InferenceServerClient:
    files = {} if name is None else {"private_key": f"{folder}/{name}.key", "certificate_chain": f"{folder}/{name}.pem"}
    return triton.InferenceServerClient(
        server.started["grpc"], ssl=True, root_certificates=f"{folder}/authority.pem", **files
    )


def test_a_client_with_certificate_and_key_is_answered(server: ServerProcess, folder: Path):
    assert server.started["http"].startswith("https://")
    status, _, answer = server.ask(INFER, body(), BEARER, client_context(folder))
    assert status == 200
    np.testing.assert_allclose(mean(answer), expected(arrays()), rtol=1e-5)
    with grpc_client(server, folder) as client:
        result = client.infer("tiny", triton_inputs(triton, arrays()), headers={"authorization": f"Bearer {KEY}"})
        np.testing.assert_allclose(result.as_numpy("regions.mean"), expected(arrays()), rtol=1e-5)


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Basic {KEY}"}])
def test_without_a_key_only_probes_and_the_pages_files_are_answered(
    server: ServerProcess, folder: Path, headers: dict[str, str]
):
    context = client_context(folder)
    for path in ("/v2", "/v2/models/tiny", "/v2/models/tiny/ready", "/metrics", "/page/status", "/none", "/v2/health"):
        status, answered, answer = server.ask(path, headers=headers, context=context)
        assert (path, status, answered["www-authenticate"]) == (path, 401, 'Bearer realm="exportkit"')
        assert "Authorization: Bearer KEY" in json.loads(answer)["error"]
    assert server.ask(INFER, body(), headers, context)[0] == 401
    for path in ("/v2/health/live", "/v2/health/ready/", "/"):
        assert server.ask(path, headers=headers, context=context)[0] == 200


def test_without_a_key_grpc_answers_nothing_but_probes(server: ServerProcess, folder: Path):
    with grpc_client(server, folder) as client:
        with pytest.raises(triton.InferenceServerException, match="no valid API key") as refusal:
            client.infer("tiny", triton_inputs(triton, arrays()))
        assert refusal.value.status() == "StatusCode.UNAUTHENTICATED"


def test_keys_are_in_no_log_and_refusals_are_counted(server: ServerProcess, folder: Path):
    context = client_context(folder)
    server.ask("/v2", headers={"Authorization": "Bearer a-wrong-key-from-somebody"}, context=context)
    text = server.ask("/metrics", headers=BEARER, context=context)[2].decode()
    (sample,) = (line for line in text.splitlines() if 'reason="unauthorized"' in line)
    assert sample.startswith('exportkit_rejected_total{model="",reason="unauthorized",version=""}')
    assert float(sample.split()[-1]) >= 1
    server.until(lambda: any(line.get("reason") == "unauthorized" for line in server.access_log))
    assert KEY not in server.errors
    assert "a-wrong-key" not in server.errors


@pytest.mark.parametrize("name", [None, "stranger"])
def test_a_client_without_a_certificate_of_the_authority_is_not_heard(
    server: ServerProcess, folder: Path, name: str | None
):
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.ask("/v2/health/live", context=client_context(folder, name))
    with grpc_client(server, folder, name) as client, pytest.raises(triton.InferenceServerException):
        client.is_server_live()
    with socket.create_connection(server.address) as plain:
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert not plain.makefile("rb").read().startswith(b"HTTP/1.1 200")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_of_tls_are_refused(server: ServerProcess, folder: Path):
    context = client_context(folder)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.ask("/v2/health/live", context=context)


def test_sighup_reads_the_keys_again(server: ServerProcess, folder: Path, keys: Path):
    context = client_context(folder)

    def said(text: str) -> Any:
        return any(text in line for line in server.report)

    keys.write_text("short\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: said("error: the API keys stay as they were: the key in line 1"))
    assert server.ask("/v2", headers=BEARER, context=context)[0] == 200
    keys.write_text("another-key-for-the-clients\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: said(f"read the API keys of {keys} again"))
    assert server.ask("/v2", headers=BEARER, context=context)[0] == 401
    assert server.ask("/v2", headers={"Authorization": "Bearer another-key-for-the-clients"}, context=context)[0] == 200
    keys.write_text(f"{KEY}\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: server.ask("/v2", headers=BEARER, context=context)[0] == 200)


def test_kill_9_leaves_nothing_behind(launcher: Launcher, tiny_package: Path):
    server = launcher.start(tiny_package, "--isolate").wait_until_ready()
    children = server.descendants()
    assert children
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert psutil.wait_procs(children, timeout=60)[1] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)


def test_tls_clients_that_do_not_say_goodbye_do_not_hold_up_the_end(
    launcher: Launcher, tiny_package: Path, folder: Path
):
    server = launcher.start(
        tiny_package,
        *("--tls-certificate", folder / "server.pem", "--tls-key", folder / "server.key"),
        *("--no-grpc", "--no-access-log", "--drain-timeout", "20"),
    ).wait_until_ready()
    idle = server.connect(client_context(folder, None))
    idle.request("GET", "/v2/health/live")
    assert idle.getresponse().read() == b'{"live":true}'
    assert server.stop() == 0  # and not 1, after the 30 seconds that Python waits for the end of TLS
    assert server.access_log == []
    idle.close()

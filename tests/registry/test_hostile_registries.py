"""What a hostile registry may answer, and what comes of it: never a file that is not what its digest says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportkit import errors
from exportkit.registry.oci_reference import RegistryReference, parse_reference
from exportkit.registry.pull import Pulled, pull
from exportkit.registry.push import push
from exportkit.registry.registry_client import RegistryClient, RegistryOptions
from tests.registry.conftest import QUICK, docker_config
from tests.registry.lying_registry import Exchange, LyingRegistry, lying_registry


@pytest.fixture
def pushed(registry: LyingRegistry, package: Path) -> RegistryReference:
    reference = push(package, parse_reference(f"oci://{registry.host}/models/net:1"), QUICK).reference
    registry.seen.clear()
    return reference


def _pull(reference: RegistryReference, folder: Path, **more: Any) -> Pulled:
    return pull(reference, folder / "got.pt2", options=QUICK, **more)


def _on_blob(
    reference: RegistryReference, package: Path, do: Callable[[Exchange, bytes], None]
) -> Callable[[Exchange], bool]:
    """A lie about the package's file alone."""
    content = package.read_bytes()

    def lie(exchange: Exchange) -> bool:
        hit = exchange.command == "GET" and "/blobs/" in exchange.path and "uploads" not in exchange.path
        if hit:
            do(exchange, content)
        return hit

    return lie


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "got" in path.name)


def _changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _endless(exchange: Exchange, content: bytes) -> None:
    exchange.send_response(200)
    exchange.end_headers()  # no length: to the end of the connection
    exchange.close_connection = True
    while True:
        exchange.wfile.write(content)


def _endless_chunks(exchange: Exchange, content: bytes) -> None:
    exchange.send_response(200)
    exchange.send_header("Transfer-Encoding", "chunked")
    exchange.end_headers()
    while True:
        exchange.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))


def _endless_chunk_header(exchange: Exchange, content: bytes) -> None:
    exchange.send_response(200)
    exchange.send_header("Transfer-Encoding", "chunked")
    exchange.end_headers()
    for _ in range(200):
        exchange.wfile.write(b"1" * 100_000)
    exchange.cut()


@pytest.mark.parametrize(
    ("lie", "error", "says"),
    [
        (lambda e, content: e.answer(200, _changed(content)), errors.DigestMismatchError, "has another digest"),
        (lambda e, content: e.answer(200, content + b"!"), errors.ArtifactError, "sends more than"),
        (_endless, errors.ArtifactError, "sends more than"),
        (_endless_chunks, errors.ArtifactError, "sends more than"),
        (_endless_chunk_header, errors.RegistryError, "5 attempts"),
        (lambda e, content: e.answer(200, content[:-9]), errors.RegistryError, "ended after"),
        (lambda e, content: e.answer(206, content, Content_Range="bytes 7-9/10"), errors.ArtifactError, "bytes 7-9/10"),
        (lambda e, content: e.answer(404), errors.ArtifactError, "but not its sha256"),
        (lambda e, content: e.answer(500), errors.RegistryError, "status 500"),
        (lambda e, content: e.answer(302, Location="http://192.0.2.1/x"), errors.RegistryError, "which is not https"),
        (lambda e, content: e.answer(302, Location="file:///etc/passwd"), errors.RegistryError, "which is not https"),
        (lambda e, content: e.answer(302, Location=e.path), errors.RegistryError, "redirects more than 5 times"),
        (lambda e, content: e.cut(), errors.RegistryError, "5 attempts"),
    ],
)
def test_a_blob_that_is_not_what_was_announced_leaves_no_file(
    registry: LyingRegistry,
    package: Path,
    pushed: RegistryReference,
    tmp_path: Path,
    lie: Callable[[Exchange, bytes], None],
    error: type[Exception],
    says: str,
) -> None:
    registry.lie = _on_blob(pushed, package, lie)
    with pytest.raises(error, match=says):
        _pull(pushed, tmp_path)
    assert not (tmp_path / "got.pt2").exists()
    if issubclass(error, errors.PackageError):
        assert _left(tmp_path) == []
    registry.lie = lambda exchange: False
    assert _pull(pushed, tmp_path).path.read_bytes() == package.read_bytes()
    assert _left(tmp_path) == ["got.pt2"]


def test_a_cut_connection_goes_on_where_it_was(
    registry: LyingRegistry, package: Path, pushed: RegistryReference, tmp_path: Path
) -> None:
    cuts = iter([100, 1000, 1001])

    def lie(exchange: Exchange, content: bytes) -> None:
        begin = int(exchange.headers.get("Range", "bytes=0-")[6:-1])
        end = next(cuts, len(content))
        given = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        length = {"Content-Length": str(len(content) - begin), "Content-Range": given}
        exchange.answer(206 if begin else 200, content[begin:end], **length)
        if end < len(content):
            exchange.cut()

    registry.lie = _on_blob(pushed, package, lie)
    assert _pull(pushed, tmp_path).path.read_bytes() == package.read_bytes()
    asked = [seen.headers.get("Range") for seen in registry.seen if "/blobs/" in seen.path]
    assert asked == [None, "bytes=100-", "bytes=1000-", "bytes=1001-"]


def _cut_after(count: int) -> Callable[[Exchange, bytes], None]:
    def lie(exchange: Exchange, content: bytes) -> None:
        if "Range" in exchange.headers:
            exchange.cut()
        else:
            exchange.answer(200, content[:count], Content_Length=str(len(content)))
            exchange.cut()

    return lie


@pytest.mark.parametrize("damaged", [False, True])
def test_the_next_pull_goes_on_and_hashes_again_what_is_there(
    registry: LyingRegistry, package: Path, pushed: RegistryReference, tmp_path: Path, damaged: bool
) -> None:
    registry.lie = _on_blob(pushed, package, _cut_after(500))
    with pytest.raises(errors.RegistryError):
        _pull(pushed, tmp_path)
    (part,) = tmp_path.glob(".got.pt2.*.pull/got.pt2")
    assert part.read_bytes() == package.read_bytes()[:500]
    if damaged:
        part.write_bytes(b"?" * 500)
    registry.lie = lambda exchange: False
    registry.seen.clear()
    assert _pull(pushed, tmp_path).path.read_bytes() == package.read_bytes()
    asked = [seen.headers.get("Range") for seen in registry.seen if "/blobs/" in seen.path]
    assert asked == (["bytes=500-", None] if damaged else ["bytes=500-"])
    assert _left(tmp_path) == ["got.pt2"]


def test_a_registry_without_ranges_sends_all_again(
    registry: LyingRegistry, package: Path, pushed: RegistryReference, tmp_path: Path
) -> None:
    answers = iter([100])

    def lie(exchange: Exchange, content: bytes) -> None:
        exchange.answer(200, content[: next(answers, len(content))], Content_Length=str(len(content)))
        exchange.cut()

    registry.lie = _on_blob(pushed, package, lie)
    assert _pull(pushed, tmp_path).path.read_bytes() == package.read_bytes()


@pytest.mark.parametrize("tokens", [False, True])
def test_credentials_go_to_no_host_that_a_registry_redirects_to(
    registry: LyingRegistry, package: Path, pushed: RegistryReference, tmp_path: Path, tokens: bool
) -> None:
    docker_config(tmp_path, auths={registry.host: {"auth": "dXNlcjpzZWNyZXQ="}})
    registry.password, registry.tokens = "user:secret", tokens
    with lying_registry() as other:
        other.blobs = registry.blobs

        def lie(exchange: Exchange) -> bool:
            if "/blobs/" not in exchange.path or not registry._known(exchange.headers.get("Authorization", "")):
                return False
            exchange.answer(307, Location=f"http://{other.host}{exchange.path}")
            return True

        registry.lie = lie
        assert _pull(pushed, tmp_path).path.read_bytes() == package.read_bytes()
        assert other.seen
        assert all("Authorization" not in seen.headers for seen in other.seen)
        assert any("Authorization" in seen.headers for seen in registry.seen)


def test_an_upload_that_is_sent_to_another_host_takes_no_credentials_there(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    docker_config(tmp_path, auths={registry.host: {"auth": "dXNlcjpzZWNyZXQ="}})
    registry.password = "user:secret"
    with lying_registry() as other:
        other.blobs = registry.blobs

        def lie(exchange: Exchange) -> bool:
            sent = exchange.command == "POST" and registry._known(exchange.headers.get("Authorization", ""))
            if sent:
                other.uploads["there"] = bytearray()
                exchange.answer(202, Location=f"http://{other.host}/v2/models/net/blobs/uploads/there")
            return sent

        registry.lie = lie
        push(package, parse_reference(f"oci://{registry.host}/models/net:1"), QUICK)
        assert {seen.method for seen in other.seen} == {"PATCH", "PUT"}
        assert all("Authorization" not in seen.headers for seen in other.seen)


@pytest.mark.parametrize("challenge", ["Basic realm=x", 'Bearer realm="http://{host}/token"', "Digest x", ""])
def test_a_registry_that_always_asks_who_it_is_gets_an_error(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path, challenge: str
) -> None:
    docker_config(tmp_path, auths={registry.host: {"auth": "dXNlcjpzZWNyZXQ="}})
    registry.password = "user:secret"

    def lie(exchange: Exchange) -> bool:
        if exchange.path.startswith("/token"):
            return False
        exchange.answer(401, WWW_Authenticate=challenge.format(host=registry.host))
        return True

    registry.lie = lie
    with pytest.raises(errors.RegistryError, match="401"):
        _pull(pushed, tmp_path)
    assert len(registry.seen) <= 3


def test_what_a_registry_says_adds_no_line_to_a_message(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path
) -> None:
    said = json.dumps({"errors": [{"code": "DENIED", "message": "no\nverified: yes"}]}).encode()
    registry.lie = lambda exchange: bool(exchange.answer(403, said)) or True
    with pytest.raises(errors.RegistryError) as caught:
        _pull(pushed, tmp_path)
    assert "DENIED no verified: yes" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("realm", ["http://192.0.2.1/token", "ftp://x/", "", "https://user:pw@x/"])
def test_a_password_goes_to_no_authority_without_tls(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path, realm: str
) -> None:
    docker_config(tmp_path, auths={registry.host: {"auth": "dXNlcjpzZWNyZXQ="}})

    def lie(exchange: Exchange) -> bool:
        exchange.answer(401, WWW_Authenticate=f'Bearer realm="{realm}"')
        return True

    registry.lie = lie
    with pytest.raises(errors.RegistryError, match="is not https"):
        _pull(pushed, tmp_path)


def _manifest(registry: LyingRegistry, reference: RegistryReference, **changes: object) -> None:
    assert reference.digest is not None
    manifest = json.loads(registry.manifests[reference.digest])
    registry.manifests["1"] = json.dumps(manifest | changes).encode()


_DIGEST = "sha256:" + "0" * 64
_LAYER = {"mediaType": "application/vnd.exportkit.package.v1+zip", "digest": _DIGEST, "size": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"artifactType": "application/vnd.oci.image.config.v1+json"}, "is no package: its type is"),
        ({"artifactType": 7}, "does not follow the specification"),
        ({"mediaType": "application/vnd.oci.image.index.v1+json"}, "is no package"),
        ({"schemaVersion": 1}, "does not follow the specification"),
        ({"layers": []}, "needs one layer"),
        ({"layers": [_LAYER, _LAYER]}, "needs one layer"),
        ({"layers": [_LAYER | {"mediaType": "application/vnd.oci.image.layer.v1.tar"}]}, "needs one layer"),
        ({"layers": [_LAYER | {"size": -1}]}, "does not follow the specification"),
        ({"layers": [_LAYER | {"size": 2**70}]}, "does not follow the specification"),
        ({"layers": [_LAYER | {"digest": "sha256:../../../etc/passwd"}]}, "does not follow the specification"),
        ({"layers": [_LAYER | {"digest": _DIGEST + "\n"}]}, "does not follow the specification"),
        ({"artifactType": "a\nb"}, r"its type is 'a\\nb'"),
        ({"layers": [_LAYER | {"digest": "sha512:" + "0" * 128}]}, "does not follow the specification"),
        ({"layers": [_LAYER]}, "but not its sha256:000"),
    ],
)
def test_a_manifest_that_is_not_a_packages_is_refused(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    _manifest(registry, pushed, **changes)
    with pytest.raises(errors.ArtifactError, match=says):
        _pull(RegistryReference(pushed.host, pushed.name, "1"), tmp_path)
    assert _left(tmp_path) == []


def test_a_package_larger_than_the_disk_or_the_limit_is_refused_before_it_comes(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path
) -> None:
    with pytest.raises(errors.ArtifactError, match="--max-size allows 10 bytes"):
        _pull(pushed, tmp_path, max_bytes=10)
    _manifest(registry, pushed, layers=[_LAYER | {"size": 2**55}])
    with pytest.raises(errors.UsageError, match="are free"):
        _pull(RegistryReference(pushed.host, pushed.name, "1"), tmp_path)
    assert not any(seen.path.startswith("/v2/models/net/blobs") for seen in registry.seen)


def test_a_manifest_of_another_digest_than_was_asked_for_is_refused(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path
) -> None:
    assert pushed.digest is not None
    registry.manifests[pushed.digest] += b" "
    with pytest.raises(errors.ArtifactError, match="a manifest of another digest"):
        _pull(pushed, tmp_path)


def test_a_manifest_without_end_is_refused(registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path) -> None:
    registry.lie = lambda exchange: bool(_endless(exchange, b" " * 100_000)) or True
    with pytest.raises(errors.RegistryError, match="more than 4194304 bytes"):
        _pull(pushed, tmp_path)


def test_titles_of_layers_name_no_file(registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path) -> None:
    assert pushed.digest is not None
    manifest = json.loads(registry.manifests[pushed.digest])
    manifest["layers"][0]["annotations"] = {"org.opencontainers.image.title": "../../evil.pt2"}
    _manifest(registry, pushed, layers=manifest["layers"])
    assert _pull(RegistryReference(pushed.host, pushed.name, "1"), tmp_path).path == tmp_path / "got.pt2"
    assert not list(tmp_path.rglob("evil*"))
    assert not (tmp_path.parent.parent / "evil.pt2").exists()


def test_the_config_of_another_package_is_refused(
    registry: LyingRegistry, pushed: RegistryReference, tmp_path: Path
) -> None:
    config = {"mediaType": "application/vnd.exportkit.manifest.v1+json", "digest": _DIGEST, "size": 1}
    _manifest(registry, pushed, config=config)
    with pytest.raises(errors.ArtifactError, match="the manifest of another package"):
        _pull(RegistryReference(pushed.host, pushed.name, "1"), tmp_path)


@pytest.mark.parametrize(
    ("host", "plain", "url"),
    [
        ("localhost:5000", None, "http://localhost:5000/v2/net/"),
        ("127.9.9.9", None, "http://127.9.9.9/v2/net/"),
        ("[::1]:5000", None, "http://[::1]:5000/v2/net/"),
        ("localhost:5000", False, "https://localhost:5000/v2/net/"),
        ("registry.example", None, "https://registry.example/v2/net/"),
        ("localhost.example", None, "https://localhost.example/v2/net/"),
        ("192.168.0.9:5000", None, "https://192.168.0.9:5000/v2/net/"),
        ("192.168.0.9:5000", True, "http://192.168.0.9:5000/v2/net/"),
        ("docker.io", None, "https://registry-1.docker.io/v2/library/net/"),
    ],
)
def test_without_tls_only_this_machine_is_asked(host: str, plain: bool | None, url: str) -> None:
    client = RegistryClient(parse_reference(f"oci://{host}/net:1"), "pull", RegistryOptions(plain_http=plain))
    assert client.url("") == url

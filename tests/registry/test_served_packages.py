"""`exportkit serve oci://...`: by digest out of the cache, by tag from the registry, and nothing that was changed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from exportkit import errors
from exportkit.package.signing import sign_package
from exportkit.registry.oci_reference import RegistryReference, parse_reference
from exportkit.registry.pulled_packages import pulled_package
from exportkit.registry.push import push
from exportkit.runtime.cache.prune import prune
from tests.commands import run
from tests.package import signers
from tests.registry.conftest import QUICK
from tests.registry.docker_registry import PROGRAM, WHY_NOT, blob_file, docker_registry
from tests.serve.operations.server_processes import Launcher

pytestmark = [pytest.mark.process, pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)]


def test_it_serves_a_tag_and_then_its_digest_without_the_registry(
    tiny_package: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cached = f"import os; os.environ['EXPORTKIT_CACHE'] = {str(tmp_path / 'cache')!r}"
    (tmp_path / "disk").mkdir()
    with contextlib.closing(Launcher(tmp_path_factory.mktemp("servers"))) as launcher:
        with docker_registry(tmp_path / "disk") as host:
            reference = push(tiny_package, parse_reference(f"oci://{host}/team/net:1"), QUICK).reference
            tagged = launcher.start(f"oci://{host}/team/net:1", "--no-grpc", before=cached).wait_until_ready()
            assert tagged.stop() == 0
        assert f"oci://{host}/team/net:1 is {reference} now" in tagged.errors
        assert "getting" in tagged.errors
        server = launcher.start(reference, "--no-grpc", before=cached).wait_until_ready()
        status, _, content = server.ask("/v2/models/tiny")
        assert (status, json.loads(content)["name"]) == (200, "tiny")
        assert server.stop() == 0
        assert "getting" not in server.errors


@pytest.fixture
def reference(host: str, tmp_path: Path) -> RegistryReference:
    package = signers.package(tmp_path, "net.pt2", version=tmp_path.name)  # another one for each test
    return push(package, parse_reference(f"oci://{host}/cached/net:1"), QUICK).reference


def test_a_tampered_blob_is_not_served(
    host: str, disk: Path, tmp_path: Path, reference: RegistryReference, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = blob_file(disk, push(tmp_path / "net.pt2", parse_reference(f"oci://{host}/cached/net:1"), QUICK).sha256)
    blob.write_bytes(b"?" * blob.stat().st_size)
    code, _, err = run(capsys, "serve", reference, "--no-grpc", "--port", "0")
    assert (code, "what has another digest" in err) == (3, True)


def test_a_package_that_was_changed_in_the_cache_comes_anew(reference: RegistryReference, tmp_path: Path) -> None:
    found = pulled_package(reference, options=QUICK)
    content = found.path.read_bytes()
    assert (found.was_there, pulled_package(reference, options=QUICK).was_there) == (False, True)
    found.path.write_bytes(content[:-200] + b"?" + content[-199:])
    again = pulled_package(reference, options=QUICK)
    assert (again.was_there, again.path.read_bytes()) == (False, content)
    (found.path.parent / "artifact.json").write_text("{}")
    assert not pulled_package(reference, options=QUICK).was_there


def test_a_policy_that_came_later_is_followed(
    host: str, reference: RegistryReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not pulled_package(reference, options=QUICK).was_there
    key = signers.signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(signers.write_policy(tmp_path / "policy.json", key.public)))
    with pytest.raises(errors.SignatureMissingError):
        pulled_package(reference, options=QUICK)
    sign_package(tmp_path / "net.pt2", key.key)
    push(tmp_path / "net.pt2", parse_reference(f"oci://{host}/cached/net:1"), QUICK)
    assert not pulled_package(reference, options=QUICK).was_there  # the signature is fetched
    assert pulled_package(reference, options=QUICK).was_there


def test_prune_removes_what_no_process_uses(reference: RegistryReference) -> None:
    found = pulled_package(reference, options=QUICK)
    assert [item.in_use for item in prune(everything=True).kept if item.kind == "pulled"] == [True]
    found.entry.close()
    assert "pulled" in [item.kind for item in prune(everything=True).removed]
    assert not found.path.exists()

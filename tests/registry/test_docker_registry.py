"""Packages in Debian's docker-registry: pushed, pulled, copied by skopeo, and tampered with on its disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from exportkit import errors
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.registry.blob_upload import bytes_source, upload
from exportkit.registry.oci_artifact import describe
from exportkit.registry.oci_reference import RegistryReference, parse_reference
from exportkit.registry.pull import pull
from exportkit.registry.push import push
from exportkit.registry.registry_client import RegistryClient
from tests.package.signers import signer
from tests.registry.conftest import QUICK, docker_config
from tests.registry.docker_registry import PROGRAM, WHY_NOT, blob_file, docker_registry

pytestmark = [pytest.mark.process, pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)]
SKOPEO = shutil.which("skopeo")
needs_skopeo = pytest.mark.skipif(SKOPEO is None, reason="no skopeo here (Debian: apt-get install skopeo)")

_USER = "user:$2y$05$5g7iE7nuTS81F2vheKdU/uOZV2FBKJhbv/NH/ZiFoWcchgueIOxJq"  # the password is `secret`


def test_a_signed_package_goes_there_and_comes_back(host: str, package: Path, tmp_path: Path) -> None:
    key = signer(tmp_path)
    signature = sign_package(package, key.key)
    reference = push(package, parse_reference(f"oci://{host}/team/net:1"), QUICK).reference
    for named in (reference, RegistryReference(host, "team/net", "1")):
        got = pull(named, tmp_path / "got.pt2", trust=Trust((key.public,)), options=QUICK)
        assert (got.reference, got.path.read_bytes()) == (reference, package.read_bytes())
        assert got.signatures[0].read_bytes() == signature.read_bytes()


def test_a_blob_that_was_tampered_with_is_refused(host: str, disk: Path, package: Path, tmp_path: Path) -> None:
    pushed = push(package, parse_reference(f"oci://{host}/tampered/net:1"), QUICK)
    blob = blob_file(disk, pushed.sha256)
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + b"?")
    try:
        with pytest.raises(errors.DigestMismatchError, match="what has another digest"):
            pull(pushed.reference, tmp_path / "got.pt2", options=QUICK)
    finally:
        blob.write_bytes(content)
    assert [path.name for path in tmp_path.iterdir() if "got" in path.name] == []


def test_a_blob_goes_there_by_pieces(host: str) -> None:
    content = bytes(range(256)) * 5000
    client = RegistryClient(parse_reference(f"oci://{host}/pieces/net:1"), "pull,push", QUICK)
    assert upload(client, describe(content, "x"), bytes_source(content), piece=300_000)
    assert client.ask("GET", f"blobs/{describe(content, 'x').digest}").content == content


def test_it_asks_for_a_password(package: Path, tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text(f"{_USER}\n")
    with docker_registry(tmp_path, tmp_path / "passwords") as host:
        reference = parse_reference(f"oci://{host}/net:1")
        with pytest.raises(errors.RegistryError, match="asks for a password"):
            push(package, reference, QUICK)
        docker_config(tmp_path, auths={host: {"auth": "dXNlcjpzZWNyZXQ="}})
        assert push(package, reference, QUICK).sent
        docker_config(tmp_path, auths={host: {"auth": "dXNlcjp3cm9uZw=="}})
        with pytest.raises(errors.RegistryError, match="401"):
            pull(reference, tmp_path / "got.pt2", options=QUICK)


@needs_skopeo
def test_an_image_has_the_package_and_its_signatures_in_its_layer(host: str, package: Path, tmp_path: Path) -> None:
    signature = sign_package(package, signer(tmp_path).key)
    reference = parse_reference(f"oci://{host}/images/net:1")
    pushed = push(package, reference, QUICK, image=True)
    said = json.loads(_skopeo("inspect", "--tls-verify=false", f"docker://{host}/images/net:1"))
    assert (said["Os"], said["Architecture"], f"sha256:{pushed.sha256}"[7:] in said["Labels"].values()) == (
        *("linux", "amd64"),
        True,
    )
    _skopeo("copy", "--src-tls-verify=false", f"docker://{host}/images/net:1", f"dir:{tmp_path}/copy")
    with tarfile.open(tmp_path / "copy" / said["Layers"][0][7:]) as layer:
        assert layer.getnames() == ["models", "models/net.pt2", "models/net.pt2.sig"]
        layer.extractall(tmp_path / "mounted", filter="data")
    for file in (package, signature):
        assert (tmp_path / "mounted/models" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(errors.ArtifactError, match="is no package"):
        pull(reference, tmp_path / "got.pt2", options=QUICK)
    assert not push(package, reference, QUICK, image=True).sent


def _skopeo(*arguments: str) -> bytes:
    assert SKOPEO is not None
    return subprocess.run([SKOPEO, *arguments], check=True, capture_output=True).stdout


@needs_skopeo
def test_skopeo_copies_what_push_made_and_pull_gets_the_copy(host: str, package: Path, tmp_path: Path) -> None:
    pushed = push(package, parse_reference(f"oci://{host}/from/net:1"), QUICK)
    names = [f"docker://{host}/{repository}:1" for repository in ("from/net", "to/net")]
    raw = json.loads(_skopeo("inspect", "--raw", "--tls-verify=false", names[0]))
    assert raw["layers"][0]["digest"] == f"sha256:{pushed.sha256}"
    _skopeo("copy", "--src-tls-verify=false", "--dest-tls-verify=false", *names)
    copied = pull(parse_reference(f"oci://{host}/to/net:1"), tmp_path / "got.pt2", options=QUICK)
    assert copied.path.read_bytes() == package.read_bytes()
    assert copied.reference.digest == pushed.reference.digest
    _skopeo("copy", "--src-tls-verify=false", names[0], f"oci:{tmp_path}/layout:1")
    assert (tmp_path / "layout/blobs/sha256" / pushed.sha256).read_bytes() == package.read_bytes()

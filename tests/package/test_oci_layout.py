"""OCI image layouts and mounted folders: what `exportkit oci` writes, what is read of it, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import exportkit
from exportkit import errors
from exportkit.cli import main
from exportkit.package.archive import PackageReader
from exportkit.package.oci_layout import write_layout
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand, signature_info
from tests.listening import free_port, running
from tests.package import signers
from tests.package.signers import Change, edit, set_at
from tests.subprocesses import output_of

PROGRAM = shutil.which("docker-registry")
WHY_NOT = "no docker-registry here (Debian: apt-get install docker-registry)"
_CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: 127.0.0.1:{port}}}
"""

SKOPEO, ORAS = shutil.which("skopeo"), shutil.which("oras")


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return signers.package(tmp_path, "net.pt2")


@pytest.fixture
def layout(package: Path, tmp_path: Path) -> Path:
    sign_package(package, signers.signer(tmp_path, "release").key)
    write_layout(package, tmp_path / "net")
    return tmp_path / "net"


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(layout: Path) -> str:
    """Of the manifest of the only artifact."""
    (described,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(described["digest"])


def document(layout: Path) -> dict[str, Any]:
    """That manifest."""
    read: dict[str, Any] = json.loads(blob(layout, digest(layout)).read_text())
    return read


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_package_is_one_layer_of_a_model_with_its_signature_as_a_document(package: Path, layout: Path) -> None:
    manifest = document(layout)
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    weights, signature = manifest["layers"]
    assert weights["mediaType"] == "application/vnd.cncf.model.weight.v1.raw"
    assert signature["mediaType"] == "application/vnd.cncf.model.doc.v1.raw"
    for layer, file in ((weights, package), (signature, package.with_name("net.pt2.sig"))):
        assert blob(layout, layer["digest"]).read_bytes() == file.read_bytes()
        assert layer["annotations"] == dict.fromkeys(
            ("org.cncf.model.filepath", "org.opencontainers.image.title"), file.name
        )
    config = json.loads(blob(layout, manifest["config"]["digest"]).read_text())
    assert config["modelfs"] == {"type": "layers", "diffIds": [weights["digest"], signature["digest"]]}
    assert config["config"]["format"] == "pt2"
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


def test_the_same_files_give_the_same_layout(
    package: Path, layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oci", str(package), "-o", str(tmp_path / "again"), "--json"]) == 0
    assert files(tmp_path / "again") == files(layout)
    assert json.loads(capsys.readouterr().out)["digest"] == digest(layout)
    assert main(["oci", str(package), "-o", str(layout)]) == errors.UsageError.exit_code
    assert "Name a new folder" in capsys.readouterr().err


def test_a_signature_of_another_package_is_not_written(package: Path, layout: Path, tmp_path: Path) -> None:
    other = signers.package(tmp_path, "other.pt2", version="2")
    shutil.copy(package.with_name("net.pt2.sig"), tmp_path / "other.pt2.sig")
    with pytest.raises(errors.SignatureError, match="signs another package"):
        write_layout(other, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_key_and_a_policy_see_the_signatures_of_a_layout(
    package: Path, layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = tmp_path / "release.pem", signers.signer(tmp_path, "other")
    with PackageReader(layout, demand=demand(key)) as reader:
        reader.verify()
        assert [signer.source for signer in reader.signers] == [str(key)]
        (info,) = signature_info(reader)
        assert (str(info.path), info.key_ids) == ("layer *.sig", (reader.signers[0].id,))
    with pytest.raises(errors.SignatureMissingError, match=r"layer \*\.sig has signatures by"):
        PackageReader(layout, demand=demand(other.public))
    policy = signers.write_policy(tmp_path / "policy.json", other.public)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    with pytest.raises(errors.SignatureMissingError, match="the policy"):
        exportkit.load(layout)


def test_a_bundle_of_model_signing_is_a_layer_too(package: Path, tmp_path: Path) -> None:
    key = signers.signer(tmp_path, "curve", curve=ec.SECP256R1())
    sign_package(package, key.key)
    assert write_layout(package, tmp_path / "net").signatures == ("net.pt2.sigstore.json",)
    with PackageReader(tmp_path / "net", demand=demand(key.public)) as reader:
        assert len(reader.signers) == 1


def test_a_folder_with_one_package_is_that_package(package: Path, layout: Path, tmp_path: Path) -> None:
    """As a volume has it that Kubernetes makes of an image."""
    (tmp_path / "models").mkdir()
    for file in (package, package.with_name("net.pt2.sig")):
        shutil.copy(file, tmp_path / "models")
    with PackageReader(tmp_path / "models", demand=demand(tmp_path / "release.pem")) as reader:
        assert (reader.name, len(reader.signers)) == ("net.pt2", 1)
    shutil.copy(package, tmp_path / "models" / "b.pt2")
    with pytest.raises(errors.UsageError, match=r"a folder with 2 \.pt2 files, not one"):
        PackageReader(tmp_path / "models")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "net.pt2").symlink_to(package)
    with pytest.raises(errors.ArtifactError, match="is a link"):
        PackageReader(tmp_path / "empty")
    (tmp_path / "empty" / "net.pt2").unlink()
    with pytest.raises(errors.UsageError, match=r"0 \.pt2 files(?s:.*)exportkit oci"):
        PackageReader(tmp_path / "empty")


def test_commands_take_a_layout(tiny_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = str(tmp_path / "tiny")
    assert main(["oci", str(tiny_package), "-o", layout]) == 0
    assert main(["inspect", layout]) == 0
    assert f"{layout}, " in capsys.readouterr().out
    assert main(["verify", layout, "--against", "cases"]) == 0
    with exportkit.load(layout, isolate=True) as model:
        exportkit.self_test(model)
    runner = Path(exportkit.__file__).parent / "bin" / "exportkit-run"
    if runner.exists():
        assert main(["verify", layout, "--runner", "cpp"]) == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def _with(change: Change) -> Callable[[Path], None]:
    """Has the manifest changed, with the digests of a layout that is whole."""

    def spoil(layout: Path) -> None:
        manifest = document(layout)
        change(manifest)
        content = json.dumps(manifest).encode()
        described = {"digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}
        blob(layout, described["digest"]).write_bytes(content)
        edit(layout / "index.json", lambda it: it["manifests"][0].update(described))

    return spoil


def _indexed(change: Change) -> Callable[[Path], None]:
    """Has the index changed."""
    return lambda layout: edit(layout / "index.json", change)


def _package_blob(layout: Path) -> Path:
    return blob(layout, document(layout)["layers"][0]["digest"])


def _lost(layout: Path) -> None:
    _package_blob(layout).unlink()


def _linked(layout: Path) -> None:
    path = _package_blob(layout)
    path.unlink()
    path.symlink_to(layout.parent / "net.pt2")


def _linked_folder(layout: Path) -> None:
    (layout / "blobs").rename(layout.parent / "elsewhere")
    (layout / "blobs").symlink_to(layout.parent / "elsewhere")


def _another_package(layout: Path) -> None:
    """A whole package under the digest of another one of its size."""
    other = signers.package(layout.parent, "other.pt2", version="2")
    path = _package_blob(layout)
    assert other.stat().st_size == path.stat().st_size
    os.replace(other, path)


def _changed_manifest(layout: Path) -> None:
    path = blob(layout, digest(layout))
    path.write_bytes(path.read_bytes().replace(b"net.pt2", b"ten.pt2"))


def _changed_signature(layout: Path) -> None:
    path = blob(layout, document(layout)["layers"][1]["digest"])
    path.write_bytes(path.read_bytes()[:-1] + b" ")


def _no_json(layout: Path) -> None:
    (layout / "index.json").write_text('{"manifests": [], "manifests": []}')


INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (_with(lambda it: it["layers"].append(it["layers"][0])), errors.ArtifactError, "several packages"),
        (_with(lambda it: it["layers"].append(it["layers"][1])), errors.ArtifactError, "several signatures 'net"),
        (_with(lambda it: it["layers"].pop(0)), errors.ArtifactError, "has no layer of type"),
        (_with(set_at("artifactType", "text")), errors.ArtifactError, "an artifact of type 'text'"),
        (_with(set_at("layers", 0, "digest", "sha256:../../../net.pt2")), errors.ArtifactError, "expected sha256: and"),
        (_with(set_at("layers", 0, "size", 7)), errors.DigestMismatchError, "its descriptor says 7"),
        (_lost, errors.ArtifactError, "cannot be read: No such file"),
        (_linked, errors.ArtifactError, "is a link, which could lead out of the folder"),
        (_linked_folder, errors.ArtifactError, "is a link"),
        (_another_package, errors.DigestMismatchError, "has another digest than its name"),
        (_changed_manifest, errors.DigestMismatchError, "has another digest than its name"),
        (_changed_signature, errors.DigestMismatchError, "has another digest than its name"),
        (_indexed(lambda it: it["manifests"].extend(it["manifests"])), errors.UsageError, "has 2 manifests, not one"),
        (_indexed(set_at("manifests", 0, "mediaType", INDEX)), errors.ArtifactError, "has no manifest of an artifact"),
        (_no_json, errors.ArtifactError, "does not follow the OCI image specification"),
    ],
)
def test_a_layout_that_is_not_whole_is_refused(
    layout: Path, spoil: Callable[[Path], None], error: type[Exception], said: str
) -> None:
    spoil(layout)
    with pytest.raises(error, match=said), PackageReader(layout) as reader:
        reader.verify()


# --- registries -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Debian's docker-registry."""
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    (folder / "config.yml").write_text(_CONFIG.format(folder=folder, port=port))
    with running([str(PROGRAM), "serve", str(folder / "config.yml")], port):
        yield f"localhost:{port}"


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
@pytest.mark.skipif(SKOPEO is None, reason="no skopeo here (Debian: apt-get install skopeo)")
def test_skopeo_takes_a_layout_to_a_registry_and_back(host: str, layout: Path, tmp_path: Path) -> None:
    output_of(str(SKOPEO), "copy", "--dest-tls-verify=false", f"oci:{layout}", f"docker://{host}/models/net:1")
    pinned = f"docker://{host}/models/net@{digest(layout)}"
    assert json.loads(output_of(str(SKOPEO), "inspect", "--raw", "--tls-verify=false", pinned)) == document(layout)
    output_of(str(SKOPEO), "copy", "--src-tls-verify=false", pinned, f"oci:{tmp_path}/back")
    blobs = {name: content for name, content in files(layout).items() if name.startswith("blobs/")}
    assert {name: content for name, content in files(tmp_path / "back").items() if name.startswith("blobs/")} == blobs
    with PackageReader(tmp_path / "back", demand=demand(tmp_path / "release.pem")) as reader:
        reader.verify()


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
@pytest.mark.skipif(ORAS is None, reason="no oras here (github.com/oras-project/oras)")
def test_oras_puts_a_layout_into_a_registry_and_gets_its_files(
    host: str, package: Path, layout: Path, tmp_path: Path
) -> None:
    there = f"{host}/oras/net"
    output_of(str(ORAS), "cp", "--from-oci-layout", "--to-plain-http", f"{layout}@{digest(layout)}", f"{there}:1")
    output_of(str(ORAS), "pull", "--plain-http", f"{there}@{digest(layout)}", "-o", tmp_path / "got")
    assert (tmp_path / "got" / "net.pt2").read_bytes() == package.read_bytes()
    with PackageReader(tmp_path / "got", demand=demand(tmp_path / "release.pem")) as reader:
        reader.verify()

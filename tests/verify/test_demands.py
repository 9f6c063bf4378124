"""Where a signature is demanded, nothing runs that it does not cover, and none is made before the package works."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.errors import SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.verify.commands import ArtifactLoaded
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import EagerUnavailable, LoadFailed, Match
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.report import Report
from exportkit.verify.verify import verify
from tests.adversarial.test_nothing_runs import CONSTRUCTOR, MARK, compiled
from tests.package.c_library import build
from tests.package.signers import Signer, write_policy
from tests.verify.verify_artifacts import Affine, right, write_artifact
from tests.verify.verify_models import STATE

X = torch.arange(6.0).reshape(2, 3)
CASES = VerifyOptions(against="cases")
SOURCE = "net.py:Net"
NET = "from verify_models import Refusing as Net\nopen({mark!r}, 'w').close()\n"


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy and no cache but the test's; what is imported from the current folder is imported from the test's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that is there once hostile code has run."""
    return tmp_path / "mark"


@pytest.fixture
def genuine(tmp_path: Path, mark: Path, release: Signer) -> Path:
    """A package as the release key signed it; the source beside it, of the name in its manifest, is somebody else's."""
    (tmp_path / "net.py").write_text(NET.format(mark=str(mark)))
    cases = [(X, right(X))]
    path = write_artifact(tmp_path / "net.pt2", Affine(), cases, source=SOURCE, state_sha256=STATE)
    sign_package(path, release.key)
    return path


def require(release: Signer) -> None:
    """A policy that asks for the release key's signature."""
    write_policy(Path(os.environ["XDG_CONFIG_HOME"], "exportkit", "policy.json"), release.public)


def signing(release: Signer, trust: Trust = Trust()) -> PackOptions:
    return PackOptions(VerifyOptions(against="cases", trust=trust), sign_key=release.key)


def hostile(path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose library and code leave the mark when they are loaded."""
    monkeypatch.setenv(MARK, str(mark))
    loud = {
        kind: build(path.parent, CONSTRUCTOR % kind, name=f"{kind}.so").read_bytes() for kind in ("library", "code")
    }
    return compiled(path, loud)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the caller", "a policy"])
def test_a_source_that_lies_beside_a_signed_package_is_not_run(genuine: Path, mark: Path, release: Signer, by: str):
    if by == "a policy":
        require(release)
    keys = [release.public] if by == "the caller" else []
    report = verify(genuine, VerifyOptions(trust=Trust(keys)))
    assert not mark.exists()
    assert report.exit_code == 0
    case, eager = (check.verdict for check in report.checks if check.against != "package")
    assert isinstance(case, Match)
    assert isinstance(eager, EagerUnavailable)
    assert f"name it with --model {SOURCE}" in eager.message
    assert by.removeprefix("a ") in eager.message


def test_it_is_run_where_the_caller_names_it_and_nowhere_else(genuine: Path, mark: Path, release: Signer):
    verify(genuine, VerifyOptions(trust=Trust([release.public]), eager=ReferenceModel(SOURCE), shapes=1))
    assert mark.exists()
    mark.unlink()
    report = verify(genuine, VerifyOptions(shapes=1))
    assert report.exit_code == 0
    assert (
        f"a model is imported only if its caller names it; name it with --model {SOURCE}"
        in report.checks[-1].verdict.message
    )
    assert not mark.exists()


# --- package ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the caller", "a policy"])
def test_an_unsigned_artifact_is_refused_before_anything_of_it_runs(
    tmp_path: Path, mark: Path, release: Signer, by: str, monkeypatch: pytest.MonkeyPatch
):
    """Whoever packages and signs would vouch for what nobody did."""
    path = hostile(tmp_path / "artifact.pt2", mark, monkeypatch)
    if by == "a policy":
        require(release)
    keys = [release.public] if by == "the caller" else []
    with pytest.raises(SignatureMissingError):
        build_package([path], tmp_path / "out.pt2", signing(release, Trust(keys)))
    assert not mark.exists()
    assert not list(tmp_path.glob("*out.pt2*"))


def test_there_is_no_signature_while_the_package_runs(tmp_path: Path, release: Signer, monkeypatch: pytest.MonkeyPatch):
    """It could be carried off: what is examined runs as the same user."""
    seen: list[str] = []

    def looking(*arguments: Any, **options: Any) -> Report:
        report = verify(*arguments, **options)
        seen.extend(path.name for path in tmp_path.rglob("*"))
        return report

    monkeypatch.setattr("exportkit.packaging.verify", looking)
    path = write_artifact(tmp_path / "artifact.pt2", Affine(), [(X, right(X))])
    build_package([path], tmp_path / "out.pt2", signing(release))
    assert "out.pt2" in seen
    assert not [name for name in seen if ".sig" in name]
    assert (tmp_path / "out.pt2.sig").exists()


def test_a_package_that_fails_leaves_neither_package_nor_signature(tmp_path: Path, release: Signer):
    wrong = {**right(X), "y": X.clone()}
    path = write_artifact(tmp_path / "artifact.pt2", Affine(), [(X, wrong)])
    _, report = build_package([path], tmp_path / "out.pt2", signing(release))
    assert report is not None
    assert report.exit_code == 1
    assert not list(tmp_path.glob("*out.pt2*"))


def test_the_process_that_runs_it_takes_no_other_package_without_a_signature(tmp_path: Path, release: Signer):
    """One that took its place under its name, say."""
    path = write_artifact(tmp_path / "artifact.pt2", Affine(), [(X, right(X))])
    with PackageReader(path) as reader:
        manifest, digest = reader.manifest, reader.manifest_sha256
    require(release)
    for permitted, error in (("0" * 64, "DigestMismatchError"), (None, "SignatureMissingError"), (digest, None)):
        process = ReplayProcess.of_target(path, manifest, CASES, target=None, device="cpu", unsigned=permitted)
        with process as replay:
            replay.start()
            answer = replay.load()
        assert isinstance(answer, ArtifactLoaded if error is None else LoadFailed)
        assert error is None or answer.error == error


def test_one_signature_file_is_not_for_several_artifacts(genuine: Path, tmp_path: Path, release: Signer):
    signature = tmp_path / "net.pt2.sig"
    with pytest.raises(UsageError, match="several artifacts"):
        build_package([genuine, genuine], tmp_path / "out.pt2", signing(release, Trust([release.public], signature)))

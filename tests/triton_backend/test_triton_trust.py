"""Triton serves no package that exportkit would not load."""

from __future__ import annotations

import contextlib
from pathlib import Path
from zipfile import ZipFile

import pytest
from tritonclient.utils import InferenceServerException

from exportkit.package.signing import sign_package
from tests.package.signers import Signer, signer, write_policy
from tests.runtime import tiny
from tests.serve.engine import rows
from tests.triton_backend.triton_server import ASAN, Triton

checks_signatures = pytest.mark.skipif(
    ASAN is not None, reason="AddressSanitizer refuses RTLD_DEEPBIND, with which libcrypto is opened"
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Signer]:
    folder = tmp_path_factory.mktemp("keys")
    return [signer(folder, name) for name in ("release", "second", "stranger")]


def signed(server: Triton, name: str, package: Path, key: Signer) -> str:
    name = server.put(name, package)
    sign_package(server.repository / name / "1" / package.name, key.key)
    return name


@checks_signatures
def test_one_of_several_keys_must_have_signed(tmp_path: Path, rows_package: Path, keys: list[Signer]) -> None:
    named = ":".join(str(key.public) for key in keys[:2])
    with contextlib.closing(Triton(tmp_path, f"--backend-config=exportkit,public-key={named}")) as demanding:
        for number, key in enumerate(keys[:2]):
            demanding.load(signed(demanding, f"signed{number}", rows_package, key))
        assert "SignatureMissingError" in demanding.refusal("unsigned", rows_package)
        name = signed(demanding, "strange", rows_package, keys[2])
        with pytest.raises(InferenceServerException, match=r"SignatureMissingError.*Others signed it"):
            demanding.load(name)


def test_what_was_changed_is_not_loaded(triton: Triton, rows_package: Path, tmp_path: Path) -> None:
    """Triton's answer and its log have the message and what to do."""
    changed = bytearray(rows_package.read_bytes())
    with ZipFile(rows_package) as archive:
        code = next(each for each in archive.infolist() if each.filename.endswith(".so"))
    changed[code.header_offset + 30_000] ^= 1
    package = tmp_path / "changed.pt2"
    package.write_bytes(changed)
    said = triton.refusal("changed", package)
    assert "DigestMismatchError: record " in said
    assert said.rpartition("DigestMismatchError")[2][:60] in triton.log


def test_a_wrong_answer_to_a_recorded_case_is_not_served(triton: Triton, tmp_path: Path) -> None:
    package = rows.write(tmp_path / "wrong.pt2", rows.example(3), wrong=1.0)
    assert "WrongResultError" in triton.refusal("wrong", package)


def test_a_package_of_another_torch_is_not_loaded(triton: Triton, tmp_path: Path) -> None:
    target = tiny.target(needs_torch="9.9", built_with_torch="9.9.0")
    package = rows.write(tmp_path / "later.pt2", rows.example(3), targets=(target,))
    assert "it needs torch 9.9 or newer, this is " in triton.refusal("later", package)


@checks_signatures
def test_the_policy_of_the_machine_holds(tmp_path: Path, rows_package: Path, keys: list[Signer]) -> None:
    policy = write_policy(tmp_path / "policy.json", keys[0].public)
    with contextlib.closing(Triton(tmp_path, EXPORTKIT_POLICY=str(policy))) as server:
        assert "SignatureMissingError" in server.refusal("unsigned", rows_package)
        server.load(signed(server, "signed", rows_package, keys[0]))


def test_a_setting_that_is_not_known_stops_each_model(tmp_path: Path, rows_package: Path) -> None:
    """A key that is misspelt would leave packages unchecked."""
    with contextlib.closing(Triton(tmp_path, "--backend-config=exportkit,public_key=release.pem")) as server:
        assert "exportkit,public_key is not known. There is public-key=FILE.pem." in server.refusal("any", rows_package)

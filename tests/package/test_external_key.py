"""Signing by a command: any answer but the key's signature is refused, and nothing is written then."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from exportkit.errors import SigningError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.external_key import command_key
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand
from tests.commands import run
from tests.package.signers import Signer, package, signer

CURVES = [None, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1]
MODULE = Path("/usr/lib/softhsm/libsofthsm2.so")

# Signs what it reads, as a service that has the key does.
SERVICE = """
import base64, sys
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
key = serialization.load_pem_private_key(open(sys.argv[1], "rb").read(), None)
gets, form = sys.argv[2:]
given = open("/dev/stdin", "rb").read()
if not isinstance(key, ec.EllipticCurvePrivateKey):
    answer = key.sign(given)
else:
    hash = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[key.key_size]
    answer = key.sign(given, ec.ECDSA(utils.Prehashed(hash) if gets == "digest" else hash))
    if "numbers" in form:
        size = (key.key_size + 7) // 8
        answer = b"".join(n.to_bytes(size, "big") for n in utils.decode_dss_signature(answer))
if "base64" in form:
    answer = base64.urlsafe_b64encode(answer).rstrip(b"=") if "url" in form else base64.encodebytes(answer)
sys.stdout.buffer.write(answer)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return package(tmp_path)


def service(key: Signer, gets: str = "message", form: str = "bytes") -> str:
    return shlex.join([sys.executable, "-c", SERVICE, str(key.private), gets, form])


def shell(text: str) -> str:
    return shlex.join(["sh", "-c", text])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    ("gets", "form"), [("message", "bytes"), ("message", "url base64 numbers"), ("digest", "base64")]
)
def test_what_a_command_signs_is_what_the_key_signs(path: Path, tmp_path: Path, curve, gets: str, form: str) -> None:
    key = signer(tmp_path, "any", curve=curve and curve())
    if curve is None and gets == "digest":
        with pytest.raises(UsageError, match="signs the message itself"):
            command_key(service(key), key.public, "digest")
        return
    made = sign_package(path, command_key(service(key, gets, form), key.public, gets))
    assert made.name == ("model.pt2.sig" if curve is None else "model.pt2.sigstore.json")
    with PackageReader(path, demand=demand(key.public)) as reader:
        assert [found.source for found in reader.signers] == [str(key.public)]


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("true", "answered 0 bytes"),
        ("cat", "not a signature by the key"),
        ("head -c 64 /dev/zero", "answered 64 bytes"),
        (shell("head -c 64 /dev/zero | base64 -w0"), "not a signature"),
        ("yes", "answered more than 65536 bytes"),
        ("false", "ended with status 1"),
        (shell("kill -9 $$"), "ended with status -9"),
        ("/nowhere/signer", "cannot be started"),
        ("/tmp", "cannot be started"),
        ("sleep 60", r"no signature within 0\.5 s"),
        (shell("exec >&-; sleep 60"), r"no signature within 0\.5 s"),
        (shell("sleep 60 & echo no"), r"no signature within 0\.5 s"),
    ],
)
@pytest.mark.parametrize("curve", [None, ec.SECP256R1])
def test_other_answers_are_refused_and_nothing_is_written(path: Path, tmp_path: Path, curve, command, what) -> None:
    key = signer(tmp_path, "any", curve=curve and curve())
    began = time.monotonic()
    with pytest.raises(SigningError, match=what):
        sign_package(path, command_key(command, key.public, timeout=0.5 if "sleep" in command else 60))
    assert time.monotonic() - began < 30
    assert sorted(each.name for each in tmp_path.iterdir()) == ["any-private.pem", "any.pem", "model.pt2"]


def test_a_signature_by_another_key_or_of_another_message_is_refused(path: Path, release: Signer, tmp_path) -> None:
    stranger = signer(tmp_path, "stranger")
    with pytest.raises(SigningError, match="not a signature by the key"):
        sign_package(path, command_key(service(stranger), release.public))
    other = shell(f"echo other | {service(release)}")
    with pytest.raises(SigningError, match="not a signature by the key"):
        sign_package(path, command_key(other, release.public))
    assert not path.with_name("model.pt2.sig").exists()


def test_signatures_that_are_there_survive_a_command_that_fails(path: Path, release: Signer, tmp_path: Path) -> None:
    written = sign_package(path, release.key)
    before = written.read_bytes()
    other = signer(tmp_path, "other")
    with pytest.raises(SigningError):
        sign_package(path, command_key("cat", other.public))
    assert written.read_bytes() == before
    sign_package(path, command_key(service(other), other.public))
    for public in (release.public, other.public):
        with PackageReader(path, demand=demand(public)) as reader:
            assert reader.signers


def test_no_child_of_a_command_outlives_its_time(path: Path, release: Signer, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = shell(f"sleep 61 & echo $! > {pids}; wait")
    with pytest.raises(SigningError, match="no signature within"):
        sign_package(path, command_key(command, release.public, timeout=2))
    child = int(pids.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, 9)
    raise AssertionError("the command's child still runs")


def test_the_command_line_signs_by_a_command(capsys, path: Path, release: Signer) -> None:
    command = ["--sign-command", service(release), "--public-key", release.public]
    code, out, _ = run(capsys, "sign", path, *command)
    assert code == 0
    assert release.public_key.id in out
    for given in ([], ["--key", release.private, *command], command[:2], ["--key", release.private, *command[2:]]):
        assert run(capsys, "sign", path, *given)[0] == 2
    for bad in ("", "'"):
        assert run(capsys, "sign", path, "--sign-command", bad, "--public-key", release.public)[0] == 2
    code, _, err = run(capsys, "sign", path, "--sign-command", "cat", "--public-key", release.public)
    assert code == 1
    assert "not a signature by the key" in err


@pytest.mark.skipif(
    not MODULE.exists() or shutil.which("pkcs11-tool") is None, reason="needs Debian's softhsm2 and opensc"
)
def test_a_key_in_a_hardware_module_signs_by_pkcs11(path: Path, tmp_path: Path, monkeypatch) -> None:
    """The recipe of docs/production.md, with SoftHSM in place of the hardware."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tmp_path / 'tokens'}\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm2.conf"))
    monkeypatch.setenv("PIN", "1234")
    init = ["softhsm2-util", "--init-token", "--free", "--label", "release", "--pin", "1234", "--so-pin", "5678"]
    subprocess.run(init, check=True, capture_output=True)
    tool = f"pkcs11-tool --module {MODULE} --token-label release --login --pin env:PIN"
    pair = [*shlex.split(tool), "--keypairgen", "--key-type", "EC:edwards25519", "--label", "key", "--id", "01"]
    subprocess.run(pair, check=True, capture_output=True)
    public = tmp_path / "release.pub.pem"
    read = [*shlex.split(tool), "--read-object", "--type", "pubkey", "--id", "01", "-o", str(public)]
    subprocess.run(read, check=True, capture_output=True)
    sign_package(path, command_key(f"{tool} --sign --mechanism EDDSA --id 01", public))
    with PackageReader(path, demand=demand(public)) as reader:
        assert [key.source for key in reader.signers] == [str(public)]

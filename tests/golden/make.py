"""Makes the golden packages of the current format version, once: see README.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from exportkit.package.keys import read_private_key
from exportkit.package.manifest import FORMAT_VERSION
from exportkit.package.signing import sign_package
from tests.fixtures.stable_library import build

FOLDER = Path(__file__).parent
MAX_BYTES = 1_500_000  # git keeps every one of them forever


def main() -> None:
    plain, state = (FOLDER / f"{kind}-{FORMAT_VERSION}-cpu.pt2" for kind in ("format", "state"))
    if found := [path for path in (plain, state) if path.exists()]:
        sys.exit(f"{found[0]} is there; packages of a format that was released are not made again")
    make(plain, "golden_model.py", "--op-library", str(build(FOLDER / "golden_ops.cpp", None, "-s")))
    make(state, "golden_state.py")
    sign(plain, FOLDER / f"signature-{FORMAT_VERSION}.pem")


def make(out: Path, model: str, *library: str) -> None:
    """Exports and packages the model of a file in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, package = Path(folder, "artifact.pt2"), Path(folder, "package.pt2")
        spec = f"{(FOLDER / model).relative_to(Path.cwd())}:spec"
        subprocess.run(["exportkit", "export", spec, "--device", "cpu", *library, "-o", str(artifact)], check=True)
        subprocess.run(["exportkit", "package", str(artifact), *library, "-o", str(package)], check=True)
        content = package.read_bytes()
    if len(content) > MAX_BYTES:
        sys.exit(f"{out.name} would have {len(content)} bytes; at most {MAX_BYTES} go into git")
    out.write_bytes(content)
    print(f"wrote {out}, {len(content)} bytes")


def sign(package: Path, public: Path) -> None:
    """Signs it with a key of which only the public half stays."""
    key = Ed25519PrivateKey.generate()
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with tempfile.NamedTemporaryFile() as private:
        private.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        private.flush()
        sign_package(package, read_private_key(Path(private.name), lambda: ""))


if __name__ == "__main__":
    main()

"""Makes the golden package of the current format version, once: see README.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from exportkit.package.manifest import FORMAT_VERSION

FOLDER = Path(__file__).parent
MAX_BYTES = 1_500_000  # git keeps every one of them forever


def main() -> None:
    out = FOLDER / f"format-{FORMAT_VERSION}-cpu.pt2"
    if out.exists():
        sys.exit(f"{out} is there; packages that were released are not made again")
    with tempfile.TemporaryDirectory() as folder:
        artifact, package = Path(folder, "artifact.pt2"), Path(folder, "package.pt2")
        model = f"{(FOLDER / 'golden_model.py').relative_to(Path.cwd())}:spec"
        subprocess.run(["exportkit", "export", model, "--device", "cpu", "-o", str(artifact)], check=True)
        subprocess.run(["exportkit", "package", str(artifact), "-o", str(package)], check=True)
        content = package.read_bytes()
    if len(content) > MAX_BYTES:
        sys.exit(f"it would have {len(content)} bytes; at most {MAX_BYTES} go into git")
    out.write_bytes(content)
    print(f"wrote {out}, {len(content)} bytes")


if __name__ == "__main__":
    main()

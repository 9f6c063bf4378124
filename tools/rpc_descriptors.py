"""Writes exportkit/serve/rpc/messages.binpb from the .proto files beside it: `python -m tools.rpc_descriptors`.

Installing the package then needs no compiler of .proto files. A test fails when the file is stale.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.generated import ROOT

FOLDER = ROOT / "exportkit" / "serve" / "rpc"
WRITTEN = FOLDER / "messages.binpb"


def descriptor_set() -> bytes:
    """Returns the FileDescriptorSet of the .proto files, by protoc."""
    sources = sorted(path.name for path in FOLDER.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", *sources]
        subprocess.run(command, check=True)
        return out.read_bytes()


if __name__ == "__main__":
    WRITTEN.write_bytes(descriptor_set())

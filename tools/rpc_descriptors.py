"""Writes exportkit/serve/rpc/descriptor_set.py from the .proto files beside it: `python -m tools.rpc_descriptors`.

A Python file is in every wheel without being listed, and needs no compiler when it is installed. A test fails when it
is stale.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.generated import ROOT

FOLDER = ROOT / "exportkit" / "serve" / "rpc"
WRITTEN = FOLDER / "descriptor_set.py"

_HEAD = '''\
"""The messages of the .proto files beside this one, as a FileDescriptorSet in base 64.

Written by `python -m tools.rpc_descriptors`. Do not edit it.
"""

FILE_DESCRIPTOR_SET = """
'''


def descriptor_set() -> bytes:
    """Returns the FileDescriptorSet of the .proto files, by protoc."""
    sources = sorted(path.name for path in FOLDER.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", *sources]
        subprocess.run(command, check=True)
        return out.read_bytes()


def module() -> str:
    """Returns the text of descriptor_set.py."""
    return _HEAD + textwrap.fill(base64.b64encode(descriptor_set()).decode(), 120) + '\n"""\n'


if __name__ == "__main__":
    WRITTEN.write_text(module())

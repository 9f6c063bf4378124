"""Builds the wheel twice, in different folders and at different times, and compares the bytes.

With CUDA kernels both are built in the same folder.

`python -m tools.reproducible [OUT]`, or `make reproducible`. Only files of the last commit are built. EXPORTKIT_CUDA
and EXPORTKIT_CPP_RUNTIME choose what is built, as for setup.py. A wheel that is the same both times is left in OUT.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def differences(first: Path, second: Path) -> list[str]:
    """Returns what differs between two wheels, one line each; empty if they have the same bytes."""
    if first.name != second.name:
        return [f"names: {first.name}, {second.name}"]
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        ours = {each.filename: each for each in one.infolist()}
        theirs = {each.filename: each for each in other.infolist()}
        found = [f"only in one: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
        for name in sorted(ours.keys() & theirs.keys()):
            if one.read(name) != other.read(name):
                found.append(f"content: {name}")
            for what in ("date_time", "external_attr", "compress_type", "extra"):
                a, b = getattr(ours[name], what), getattr(theirs[name], what)
                if a != b:
                    found.append(f"{what} of {name}: {a}, {b}")
        if list(ours) != list(theirs):
            found.append("the order of the files")
    return found or ["the archives' own bytes"]


def build(folder: Path, epoch: str, umask: int) -> Path:
    """Builds the wheel of the last commit in a new folder."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    now = time.time()
    for path in folder.rglob("*"):
        os.utime(path, (now, now))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PWD": str(folder), "MAKEFLAGS": ""}
    command = ["make", "wheel", f"BIN={Path(sys.executable).parent}", "READY=", "WHEELS=wheels"]
    if cuda := os.environ.get("EXPORTKIT_CUDA"):
        command.append(f"EXPORTKIT_CUDA={cuda}")
    subprocess.run(command, cwd=folder, env=environment, umask=umask, stdout=sys.stderr, check=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def main(out: Path | None) -> int:
    """Returns 0 if both wheels have the same bytes."""
    epoch = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory(prefix="another-place-") as other:
        here = Path(one) / "a"
        first = build(here, epoch.stdout.strip(), 0o022)
        elsewhere = Path(other) / "much" / "longer"
        if any(name.endswith("_cuda.so") for name in zipfile.ZipFile(first).namelist()):
            # nvcc names what is in an unnamed namespace by the folder, and has no option against it.
            first, elsewhere = Path(shutil.move(first, other)), here
            shutil.rmtree(here)
        second = build(elsewhere, epoch.stdout.strip(), 0o077)
        found = differences(first, second)
        print("\n".join(found) or f"{hashlib.sha256(first.read_bytes()).hexdigest()}  {first.name}")
        if not found and out is not None:
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy2(first, out / first.name)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))

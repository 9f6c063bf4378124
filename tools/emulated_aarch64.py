"""Runs Python and torch of aarch64 on another machine, under qemu: exports a model there, loads and verifies it.

`python -m tools.emulated_aarch64 FOLDER` does all of it once and prints what was seen; it needs Debian's
`g++-aarch64-linux-gnu qemu-user`, a network, 6 GB of disk for torch's wheel for aarch64 and what that needs, and half
an hour. FOLDER keeps what was fetched. `make wheel-aarch64` must have built dist/*_aarch64.whl.

The emulated Python is a script, FOLDER/bin/python3, which starts every child under the emulator, too. The compiler is
not emulated: a program of this machine that is started there just runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU = "neoverse-n1"  # Graviton 2 and Altra
DEBIAN = "http://deb.debian.org/debian bookworm main"  # has Python 3.11
PACKAGES = ("python3.11", "libstdc++6", "libgomp1")
GLIBC = range(17, 36)  # of the wheels that Debian 12 can load
NEEDED = ("click", "rich", "msgspec", "safetensors", "numpy", "pyelftools")

# torch asks these files what the CPU is, and without them dies of what they say of the real one.
CPUINFO = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
MIDR = "0x00000000413fd0c1\n"

PYTHON = """\
#!/bin/sh
export PYTHONHOME={root}/usr PYTHONPATH={exportkit}:{site} OMP_NUM_THREADS=1
export CXX=/usr/bin/aarch64-linux-gnu-g++ EXPORTKIT_CACHE={folder}/cache
exec qemu-aarch64 -cpu {cpu} -L {root} -0 "$0" {root}/usr/bin/python3.11 "$@"
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Runs a program, and prints what it was and how long it took."""
    started = time.monotonic()
    subprocess.run(command, cwd=cwd, check=True)
    print(f"    {time.monotonic() - started:.0f} s: {' '.join(map(str, command[:6]))}", flush=True)


def fetch_python(folder: Path) -> Path:
    """Unpacks an aarch64 Python with its C library into folder/root, without installing anything on this machine."""
    root, state = folder / "root", folder / "apt"
    if root.exists():
        return root
    for made in ("lists/partial", "archives/partial"):
        (state / made).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "sources.list").write_text(
        f"deb [arch=arm64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {DEBIAN}\n"
    )
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", *options, "update", "-qq")
    run("apt-get", *options, "install", "-qq", "-y", "--no-install-recommends", "--download-only", *PACKAGES)
    for archive in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, folder / "root.partial"], check=True)
    partial = folder / "root.partial"
    for path, content in (
        (partial / "proc" / "cpuinfo", CPUINFO),
        (partial / "sys/devices/system/cpu/cpu0/regs/identification/midr_el1", MIDR),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    partial.rename(root)
    return root


def fetch_wheels(folder: Path, *wanted: str | Path, dependencies: bool = True) -> Path:
    """Installs wheels for aarch64 into a folder."""
    if folder.exists():
        return folder
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["--platform=manylinux2014_aarch64"]
    partial = folder.with_suffix(".partial")
    options = ["--no-compile", "--only-binary=:all:", "--python-version=3.11", f"--target={partial}", *platforms]
    options += [] if dependencies else ["--no-deps"]
    run(sys.executable, "-m", "pip", "install", "-q", *options, *wanted)
    partial.rename(folder)
    return folder


def prepare(folder: Path, wheel: Path) -> Path:
    """Returns a Python for aarch64 that has torch and this wheel."""
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    root = fetch_python(folder)
    site = fetch_wheels(folder / "site", pinned, *NEEDED)
    ours = fetch_wheels(folder / wheel.stem, wheel, dependencies=False)
    python = folder / "bin" / "python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text(PYTHON.format(root=root, site=site, exportkit=ours, folder=folder, cpu=CPU))
    python.chmod(0o755)
    return python


def run_without_python(folder: Path, ours: Path) -> None:
    """Lets the C++ runtime run the package and hold it against its recorded cases, if the wheel has the runtime."""
    for program in ours.glob("exportkit/lib/torch*/exportkit-run"):
        libraries = {path.parent for path in (folder / "site").rglob("*.so*")}
        found = f"LD_LIBRARY_PATH={':'.join(sorted(map(str, libraries)))}"
        run("qemu-aarch64", "-cpu", CPU, "-L", folder / "root", "-E", found, program, folder / "patches.pt2")


def main(folder: Path) -> None:
    """Exports, packages, inspects and verifies a model with a custom operator, all on the emulated CPU."""
    (wheel,) = (ROOT / "dist").glob("exportkit-*_aarch64.whl")
    python = prepare(folder, wheel)
    os.environ["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    model = ROOT / "tests" / "export" / "export_models.py"
    run(python, "-c", "import torch, platform; print(platform.machine(), torch.__version__)")
    exportkit: list[str | Path] = [python, "-m", "exportkit"]
    for words in (
        ("export", f"{model}:patches", "-o", "artifact.pt2"),
        ("package", "artifact.pt2", "-o", "patches.pt2"),
        ("inspect", "patches.pt2"),
        ("verify", "patches.pt2", "--against", "cases"),
    ):
        run(*exportkit, *words, cwd=folder)  # not where this machine's exportkit would be found first
    run_without_python(folder, folder / wheel.stem)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

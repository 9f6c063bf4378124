"""How long a package takes to load, beside torch's own aoti_load_package, and the command line to answer --help.

    python -m benchmarks.load_time artifacts/arr_coc.pt2

Every load is the first of its process, after `import torch`, on warm files. "cold" has empty caches, as a machine that
never loaded a package has; "warm" has those that the cold load left. torch's loader is given the operator libraries
beforehand, which is not counted; ours unpacks, checks and loads them itself, which is.

Prints a Markdown table. On a busy machine the numbers say little: look at `uptime` first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.children import ROOT, SEARCH_PATH

# Installed packages have their bytecode; where this one runs from its source tree, it may be written.
ENVIRONMENT = {**os.environ, "PYTHONPATH": SEARCH_PATH, "PYTHONDONTWRITEBYTECODE": ""}

OURS = """
import json, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
import exportkit
model = exportkit.load(sys.argv[1], device="cpu")
print(json.dumps({"import torch": imported - start, "load": time.perf_counter() - imported}))
"""
STOCK = """
import json, sys, time
import torch
from torch._inductor.package import load_package  # aoti_load_package for any model name; not counted
for library in sys.argv[3:]:
    torch.ops.load_library(library)
start = time.perf_counter()
model = load_package(sys.argv[1], sys.argv[2])
print(json.dumps({"load": time.perf_counter() - start}))
"""
HELP = "import sys; sys.argv = ['exportkit', '--help']; from exportkit.cli import main; main()"


def run(code: str, *args: str, **environment: str) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"a load failed with exit status {result.returncode}:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def measure(code: str, *args: str, repeat: int) -> dict[str, list[float]]:
    """Seconds of each cold and each warm load; every pair shares caches of its own."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
            caches = {"EXPORTKIT_CACHE": f"{folder}/exportkit", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            for state in seconds:
                seconds[state].append(run(code, *args, **caches)["load"])
    return seconds


def unpack(package: Path, folder: Path) -> list[str]:
    """The name of the package's target for the CPU that we would take, and its operator libraries, unpacked."""
    from exportkit.package.archive import PackageReader
    from exportkit.runtime import targets

    with PackageReader(package) as reader:
        files = [targets.pick(reader.manifest.targets, "cpu", targets.host(with_cuda=False)).target.name]
        for library in reader.manifest.libraries:
            if library.device == "cpu":
                file = folder / Path(library.record).name
                reader.extract(library.record, file)
                files.append(str(file))
    return files


def help_time(repeat: int) -> list[float]:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", HELP], env=ENVIRONMENT, capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def machine() -> str:
    import torch

    with open("/proc/cpuinfo") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return (
        f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def in_words(seconds: list[float]) -> str:
    """Median, and the least and the greatest."""
    unit, scale = ("s", 1) if statistics.median(seconds) >= 1 else ("ms", 1000)
    median, least, greatest = (f"{scale * x:.3g}" for x in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median} {unit} ({least} to {greatest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", default=ROOT / "artifacts" / "arr_coc.pt2")
    parser.add_argument("--repeat", type=int, default=7, help="processes for each number; at most 3 of torch's loader")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.package.exists():
        parser.error(f"there is no {options.package}; `exportkit export` and `exportkit package` make one")
    package = str(options.package.resolve())
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        stock = unpack(options.package, Path(folder))
        run(OURS, package, EXPORTKIT_CACHE=f"{folder}/unmeasured")  # brings the files into the page cache
        ours = measure(OURS, package, repeat=options.repeat)
        torchs = measure(STOCK, package, *stock, repeat=min(options.repeat, 3))
    helped = help_time(options.repeat)
    size = options.package.stat().st_size
    if options.json:
        results = {"exportkit.load": ours, "load_package": torchs, "exportkit --help": {"warm": helped}}
        print(json.dumps({"machine": machine(), "package": package, "bytes": size, "seconds": results}, indent=1))
        return
    print(
        f"{options.package.name} ({size / 1e6:.1f} MB) on {machine()}; median (least to greatest) of fresh processes:\n"
    )
    print("| after `import torch` | empty caches | warm caches |\n| --- | --- | --- |")
    print(f"| `exportkit.load` | {in_words(ours['cold'])} | {in_words(ours['warm'])} |")
    print(
        f"| torch's `load_package`, operators not counted | {in_words(torchs['cold'])} | {in_words(torchs['warm'])} |"
    )
    print(f"\n`exportkit --help`: {in_words(helped)}, the whole process.")


if __name__ == "__main__":
    main()

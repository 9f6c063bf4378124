"""How long a package takes to load, beside torch's own aoti_load_package, and the command line to answer --help.

    python benchmarks/load_time.py artifacts/arr_coc.pt2

Every load is the first of its process, after `import torch`, on warm files. "cold" has empty caches, as a machine that
never loaded a package has; "warm" has those that the cold load left. torch's loader is given the operator libraries
beforehand, which is not counted; ours unpacks, checks and loads them itself, which is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Installed packages have their bytecode; where this one runs from its source tree, it may be written.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}

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
    import time

    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", HELP], env=ENVIRONMENT, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", default=ROOT / "artifacts" / "arr_coc.pt2")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.package.exists():
        parser.error(f"there is no {options.package}; `exportkit export` and `exportkit package` make one")
    package = str(options.package.resolve())
    sys.path.insert(0, str(ROOT))
    results = {}
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        stock = unpack(options.package, Path(folder))
        run(OURS, package, EXPORTKIT_CACHE=f"{folder}/unmeasured")  # brings the files into the page cache
        for name, code, args in (("exportkit.load", OURS, []), ("aoti_load_package", STOCK, stock)):
            for state, seconds in measure(code, package, *args, repeat=options.repeat).items():
                results[f"{name}, {state}"] = seconds
    results["exportkit --help"] = help_time(options.repeat)
    summary = {
        name: {"median_ms": 1e3 * statistics.median(s), "min_ms": 1e3 * min(s), "max_ms": 1e3 * max(s)}
        for name, s in results.items()
    }
    if options.json:
        print(json.dumps({"package": package, "bytes": options.package.stat().st_size, "results": summary}, indent=1))
        return
    print(f"{package}, {options.package.stat().st_size / 1e6:.1f} MB, {options.repeat} runs each, milliseconds")
    for name, row in summary.items():
        print(f"{name:26} median {row['median_ms']:8.1f}   from {row['min_ms']:8.1f} to {row['max_ms']:8.1f}")


if __name__ == "__main__":
    main()

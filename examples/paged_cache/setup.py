"""Builds paged_cache/_cpu.abi3.so and, where nvcc is, _cuda.abi3.so.

Both use the LibTorch stable ABI only: one build serves Python >= 3.10 and torch >= 2.11. torch's own BuildExtension is
not used, because it refuses CUDA sources where torch is a CPU build.

Environment:
    EXPORTKIT_CUDA: 0 leaves the CUDA library out, 1 demands nvcc, auto (default) builds it where nvcc is.
    TORCH_CUDA_ARCH_LIST: The architectures, such as "8.0;9.0+PTX", which is the default.
    DEBUG: 1 gives symbols and no optimisation.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TORCH = Path(torch.__file__).parent
DEBUG = os.environ.get("DEBUG") == "1"
COMMON = ["-std=c++17", "-O0" if DEBUG else "-O3", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem",
          str(TORCH / "include")]  # fmt: skip
# Nobody here reads errno or the floating-point exception flags, and a loop that must keep them is not vectorised.
CXX = [*COMMON, "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-Wall", "-Wextra", "-fPIC",
       "-fvisibility=hidden"]  # fmt: skip
NVCC = [*COMMON, "-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]


def find_nvcc():
    """The CUDA compiler, or None."""
    wanted = os.environ.get("EXPORTKIT_CUDA", "auto")
    home = os.environ.get("CUDA_HOME")
    nvcc = (
        None if wanted == "0" else (shutil.which("nvcc", path=f"{home}/bin") if home else None) or shutil.which("nvcc")
    )
    if wanted == "1" and nvcc is None:
        sys.exit("EXPORTKIT_CUDA=1, but nvcc was not found: add it to PATH, or set CUDA_HOME")
    return nvcc


def architectures():
    """nvcc's flags for the architectures."""
    flags = []
    for item in os.environ.get("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX").replace(" ", ";").split(";"):
        number = item.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def run(command):
    """Runs a compiler and shows how."""
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


class Build(build_ext):
    """Compiles each source that changed, then links."""

    def get_ext_filename(self, fullname):
        """`paged_cache/_cpu.abi3.so`: no library uses Python's API."""
        return str(Path(*fullname.split("."))) + ".abi3.so"

    def build_extension(self, extension):
        """Builds one library."""
        cuda = extension.name.endswith("_cuda")
        compiler = [NVCC_PATH, *NVCC, *architectures()] if cuda else [os.environ.get("CXX", "g++"), *CXX]
        folder = Path("build", "debug" if DEBUG else "release")
        folder.mkdir(parents=True, exist_ok=True)
        headers = max(path.stat().st_mtime for path in [*Path("csrc").glob("*.*h"), Path(__file__)])
        objects, commands = [], []
        for source in map(Path, extension.sources):
            made = folder / f"{source.name}.o"
            objects.append(str(made))
            if not made.exists() or made.stat().st_mtime < max(headers, source.stat().st_mtime):
                commands.append([*compiler, "-c", str(source), "-o", str(made)])
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(run, commands))
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The CUDA runtime is static, so that the library does not care which of the CUDA wheels is installed.
        link = (
            [NVCC_PATH, "-shared", "-cudart", "static", "-Xlinker=-s,--no-as-needed"]
            if cuda
            else ["g++", "-shared", "-s", "-Wl,--no-as-needed"]
        )
        unfinished = folder / target.name
        run([*link, *objects, "-o", str(unfinished), f"-L{TORCH / 'lib'}", "-ltorch" if cuda else "-ltorch_cpu"])
        unfinished.replace(target)  # a new file, not new content: another process may have the old one mapped


NVCC_PATH = find_nvcc()
sources = {"paged_cache._cpu": "*.cpp", **({"paged_cache._cuda": "*.cu"} if NVCC_PATH else {})}

setup(
    ext_modules=[
        Extension(name, sorted(map(str, Path("csrc").glob(files))), py_limited_api=True)
        for name, files in sources.items()
    ],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

"""Builds the reader of packages, the operator libraries and, where CMake is, the C++ runtime.

The reader (csrc/package) becomes libexportkit_package.so, which needs neither torch nor Python. ARR-COC's C++ operators
go into libarr_coc_cpu.so, its CUDA operators into libarr_coc_cuda.so, recurrent layers (csrc/recurrent) into
libexportkit_recurrent.so for every device. No library is a Python module (there is no PyInit): Python opens them by
their path. Operators use the LibTorch stable ABI only, so one wheel serves every Python and torch of
exportkit/support.py, with or without CUDA. The C++ runtime (csrc/runtime) is built for each minor version of torch that
it serves; with another one, torch's Python binding runs the code. torch's own BuildExtension is not used: it refuses
CUDA sources where torch is a CPU build, and it adds Python's link flags.

Environment:
    EXPORTKIT_CUDA: Which CUDA kernels are built.
        auto (default): those for the GPUs that torch sees; without such a GPU, nvcc does not run.
        1: those for every architecture of a release; it needs nvcc but no GPU.
        0: nothing.
        check: as auto; without a GPU, the sources are compiled for one architecture, unoptimised, and stay in the build
            folder (`make test` does so).
    EXPORTKIT_ARR_COC: 0 leaves ARR-COC out: its operators, model, demo and entry points.
    EXPORTKIT_CPP_RUNTIME: 0, 1 or auto (default): whether the C++ runtime is built; auto builds it where CMake is
        installed.
    EXPORTKIT_RUNTIME_TORCHES: Other torches that the C++ runtime is built for, too: folders such as
        build/torch/2.15/torch, with colons between. `make torches` gets them. They need not run.
    DEBUG: 1 gives symbols and no optimisation.
    TORCH_CUDA_ARCH_LIST: The architectures to build for, such as "8.0;9.0+PTX", in place of those above.
    CUDA_HOME, CXX, MAX_JOBS: Where CUDA is, the C++ compiler, how many compilers run at a time.
    EXPORTKIT_TORCH: The folder of the torch package to build for, in place of the one that is installed.
    _PYTHON_HOST_PLATFORM: linux-aarch64 builds for that machine on another one, by a cross-compiler, without CUDA
        (`make wheel-aarch64`). The C++ runtime needs that machine's torch then: EXPORTKIT_TORCH.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MACHINE = sysconfig.get_platform().rpartition("-")[2]
CROSS = platform.machine() != MACHINE
COMPILER = os.environ.get("CXX") or (f"{MACHINE}-linux-gnu-g++" if CROSS else "g++")
# Not imported, which takes seconds. The reader alone is built without one.
FOUND_TORCH = importlib.util.find_spec("torch")
if FOUND_TORCH is None and "build_reader" not in sys.argv:
    sys.exit("there is no torch to build for: pip install torch, then pip install --no-build-isolation .")
TORCH = Path(os.environ.get("EXPORTKIT_TORCH") or (Path(FOUND_TORCH.origin).parent if FOUND_TORCH else "")).resolve()
# torch's headers are for every machine, its libraries for one.
OTHER_TORCH = CROSS and "EXPORTKIT_TORCH" not in os.environ
TARGET_TORCH = "0x020b000000000000"  # 2.11: the oldest torch the libraries load in
# A100, RTX 30xx, Ada, Hopper, B200, RTX 50xx; PTX for others (docs/adr/0068-absent-gpus.md)
RELEASE_ARCHITECTURES = "8.0;8.6;8.9;9.0+PTX;10.0;12.0"
CHECKED_ARCHITECTURE = "9.0"  # compiles what is for Hopper alone, too
CHECKED = "cuda-check"  # the folder of what is compiled but not installed, in the build folder
DEBUG = os.environ.get("DEBUG", "0") == "1"

# Messages and libraries name no build folder, nor where torch was.
PLACELESS = ["-fPIC", f"-ffile-prefix-map={ROOT}/="]
# The C++ runtime uses the reader's classes, so that they are visible. What it allocates for hostile packages is bounded
# by its own checks; the library's of bounds are kept all the same. -O1 compiles a quarter faster, and reads as fast.
PACKAGE_FLAGS = ["-std=c++20", *(["-O0", "-g"] if DEBUG else ["-O1"]), "-D_GLIBCXX_ASSERTIONS", "-Wall", "-Wextra",
                 *PLACELESS, f"-I{ROOT / 'csrc'}"]  # fmt: skip
# Only the operators' registrations run, so nothing else of them is visible.
COMMON = [*PLACELESS, f"-ffile-prefix-map={TORCH}/=", "-fvisibility=hidden"]
DEFINES = [f"-DTORCH_TARGET_VERSION={TARGET_TORCH}", f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH / "include")]
# Nobody here reads errno or the floating-point exception flags, and a loop that must keep them is not vectorised. No
# result changes, unlike with -ffast-math. torch is built so too.
CXX_FLAGS = [
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    *(["-O0", "-g"] if DEBUG else ["-O3"]),
    "-fopenmp-simd",
    "-Wall",
    "-Wextra",
    *(["-Wno-psabi"] if MACHINE == "aarch64" else []),  # a note on what GCC did before version 10
    *COMMON,
    *DEFINES,
]
# The CUDA shims' declarations hide behind USE_CUDA. Compressed, five architectures cost a package a fraction.
NVCC_FLAGS = ["-std=c++17", "-DUSE_CUDA", "-Xfatbin=-compress-all", f"-Xcompiler={','.join(COMMON)}", *DEFINES]
NVCC_OPTIMISED = ["-G", "-g"] if DEBUG else ["-O3"]
NVCC_QUICK = ["-Xcicc=-O0", "-Xptxas=-O0"]
STRIP = [] if DEBUG else ["-s"]
# What most sources include, or half of their time goes into reading it: the headers of others, by compiler rule.
PRECOMPILED = {
    "cxx": ["torch/csrc/stable/library.h", "torch/csrc/stable/ops.h", "algorithm", "cmath", "cstring", "sstream",
            *(["immintrin.h"] if MACHINE == "x86_64" else [])],
    "cxx_package": ["algorithm", "array", "cstring", "filesystem", "fstream", "functional", "map", "memory", "optional",
                    "set", "span", "sstream", "stdexcept", "string", "string_view", "unordered_map", "vector"],
}  # fmt: skip
# After that header, GCC 12 warns of its own library in these. The code is the same.
PLAIN = ("csrc/package/keys.cpp", "csrc/package/writer.cpp")
TORCH_GOES = """\
exportkit: exportkit-run will not look for torch in {torch}:
that is the torch of an isolated build, or others can put another one there. Python runs packages all the same;
exportkit-run needs the folder of torch's libraries in LD_LIBRARY_PATH. `pip install --no-build-isolation -e .`
builds for the torch that is installed."""


class Cuda(NamedTuple):
    """How the CUDA sources are compiled: by which nvcc, for what, and whether the library is for use."""

    nvcc: str
    architectures: str
    installed: bool = True


def choice(variable, *others, default="auto"):
    """The variable's value: 0, 1, auto or one of the others."""
    value, allowed = os.environ.get(variable, default), ("0", "1", "auto", *others)
    if value not in allowed:
        sys.exit(f"{variable} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
    return value


def choose_cuda():
    """How the CUDA sources are compiled, or None; and why."""
    wanted = choice("EXPORTKIT_CUDA", "check")
    if wanted == "0":
        return None, "EXPORTKIT_CUDA=0"
    if CROSS:
        if wanted == "1":
            sys.exit(f"EXPORTKIT_CUDA=1, but CUDA kernels for {MACHINE} are compiled on such a machine only")
        return None, f"cross-compiling for {MACHINE}"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None) or shutil.which("nvcc")
    if nvcc is None:
        if wanted == "1":
            sys.exit("EXPORTKIT_CUDA=1, but nvcc was not found: add it to PATH, set CUDA_HOME, or set EXPORTKIT_CUDA=0")
        return None, "nvcc is not on PATH, and CUDA_HOME is not set"
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if wanted == "1":
        return Cuda(nvcc, named or RELEASE_ARCHITECTURES), "EXPORTKIT_CUDA=1"
    if visible := visible_architectures():
        return Cuda(nvcc, named or visible), "for the GPU here"
    if wanted == "check":
        return Cuda(nvcc, named or CHECKED_ARCHITECTURE, installed=False), "to see that they compile: torch sees no GPU"
    return None, "torch sees no GPU; EXPORTKIT_CUDA=1 builds for others"


def visible_architectures():
    """Those of the GPUs that torch sees, such as "8.0;9.0"; the empty string without one."""
    import torch

    capabilities = {torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities))


def torch_stays(folder):
    """Whether libraries may look for torch in this folder for ever: nobody else can put another one there.

    pip removes the torch of an isolated build after it, and anybody may make a folder of that name in /tmp.
    """
    # Without PYTHONPATH, this Python does not see what an isolated build adds.
    code = "import importlib.util as u; found = u.find_spec('torch'); print(found.origin if found else '')"
    found = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True).stdout
    if Path(found.strip()).parent.resolve() != folder.resolve():
        return False
    for parent in folder.resolve().parents:
        if parent.stat().st_mode & 0o002:
            beside = ROOT.is_relative_to(parent) and ROOT.relative_to(parent).parts[:1]
            if beside != folder.resolve().relative_to(parent).parts[:1]:
                return False
    return True


def other_torches():
    """The folders of EXPORTKIT_RUNTIME_TORCHES, but for that of a torch whose minor version is that of the build."""
    named = [Path(name).resolve() for name in os.environ.get("EXPORTKIT_RUNTIME_TORCHES", "").split(os.pathsep) if name]
    return sorted((folder for folder in named if minor_of(folder) != minor_of(TORCH)), key=minor_of)


def minor_of(torch_folder):
    """The minor version of a torch that need not run, such as "2.15"."""
    header = torch_folder / "include" / "torch" / "headeronly" / "version.h"
    if not header.is_file():
        sys.exit(f"EXPORTKIT_RUNTIME_TORCHES: there is no torch in {torch_folder}; `make torches` gets what is needed")
    return ".".join(re.findall(r"define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", header.read_text()))


def gencode_flags(architectures):
    """nvcc's flags for a list such as "8.0;9.0+PTX"."""
    flags = []
    for item in re.split(r"[;, ]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", item)
        if not match:
            sys.exit(f"TORCH_CUDA_ARCH_LIST: {item!r} is no architecture; write it as 9.0 or 9.0+PTX, separated by ;")
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def ninja():
    """The ninja command: that of the Python package, which need not be on PATH, or the system's."""
    beside_python = Path(sys.executable).with_name("ninja")
    return str(beside_python) if beside_python.exists() else "ninja"


class BuildLibraries(build_ext):
    """Writes one build.ninja for all but the C++ runtime and runs it."""

    def get_ext_filename(self, fullname):
        """`exportkit/arr_coc/lib/libarr_coc_cpu.so`, without a Python ABI tag."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        """Compiles what changed, with MAX_JOBS jobs or one a core."""
        cuda, reason = choose_cuda()
        print(
            f"exportkit: torch {importlib.metadata.version('torch')} headers, stable ABI of torch 2.11, "
            f"{'debug' if DEBUG else 'optimised'} build; CUDA {cuda.architectures if cuda else 'off'} ({reason})",
            file=sys.stderr,
        )
        print("exportkit: compiling takes three minutes of one core, for CUDA more; cores share them", file=sys.stderr)
        built, jobs = self.compile(cuda)
        if not (cuda and cuda.installed):
            for library in [extension for extension in self.extensions if extension.name.endswith("_cuda")]:
                self.extensions.remove(library)
                Path(self.get_ext_fullpath(library.name)).unlink(missing_ok=True)  # of an earlier build
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new content: another process may have the old one mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(built[target.stem], target)
        self.build_runtime(Path(self.get_ext_fullpath("exportkit.lib.any")).parents[1], jobs)

    def compile(self, cuda, *options):
        """Runs ninja. Returns the path of each library by its name, and ninja's options for the number of jobs."""
        if shutil.which(shlex.split(COMPILER)[0]) is None:
            debian = f"g++-{MACHINE.replace('_', '-')}-linux-gnu" if CROSS else "g++"
            sys.exit(f"there is no C++ compiler {COMPILER}: apt-get install {debian}, or name another one in CXX")
        # Not build_temp, which differs between `pip install -e`, wheels and build_ext: each would compile it all again.
        build = ROOT / "build" / (("debug" if DEBUG else "release") + (f"-{MACHINE}" if CROSS else ""))
        build.mkdir(parents=True, exist_ok=True)
        lines, built = self.ninja_file(build, cuda)
        (build / "build.ninja").write_text(lines)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        subprocess.run([ninja(), "-C", str(build), *jobs, *options, *built.values()], check=True, stdout=sys.stderr)
        return {library: build / target for library, target in built.items()}, jobs

    def build_runtime(self, package, jobs):
        """Builds csrc/runtime and installs it into the package's folder; says so where that cannot be."""
        wanted = choice("EXPORTKIT_CPP_RUNTIME")
        if wanted == "0":
            return
        # The torch that is installed last: exportkit-run takes it where no other lies beside exportkit.
        for torch_folder in [*other_torches(), TORCH]:
            missing = self.build_runtime_for(torch_folder, package, jobs)
            if missing:
                print(f"exportkit: the C++ runtime is not built:\n{missing}", file=sys.stderr)
                if wanted == "1":
                    sys.exit("EXPORTKIT_CPP_RUNTIME=1, but the C++ runtime cannot be built here")
                print("exportkit: goes on without it; packages are run through torch's Python binding", file=sys.stderr)
                return
        if self.inplace and not torch_stays(TORCH):
            print(TORCH_GOES.format(torch=TORCH), file=sys.stderr)

    def build_runtime_for(self, torch_folder, package, jobs):
        """Builds the C++ runtime for one torch. Returns why that cannot be, or None."""
        if OTHER_TORCH:
            return f"it needs the libraries of a torch for {MACHINE}: EXPORTKIT_TORCH=/folder/of/its/torch"
        if shutil.which("cmake") is None:
            return "there is no cmake on PATH; on Debian and Ubuntu: apt-get install cmake"
        build = ROOT / "build" / (f"runtime-{MACHINE}" if CROSS else "runtime") / minor_of(torch_folder)
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if DEBUG else "Release",
            "CMAKE_INSTALL_PREFIX": package,
            "CMAKE_MAKE_PROGRAM": shutil.which(ninja()),
            "EXPORTKIT_TORCH": torch_folder,
            "EXPORTKIT_PACKAGE_LIBRARY": package / "lib" / "libexportkit_package.so",
            "EXPORTKIT_ABSOLUTE_RPATH": "ON" if self.inplace and torch_stays(torch_folder) else "OFF",
        }
        configure = ["cmake", "-S", str(ROOT / "csrc" / "runtime"), "-B", str(build), "-G", "Ninja"]
        if CROSS:
            options |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": MACHINE, "CMAKE_CXX_COMPILER": COMPILER}
        configure += [f"-D{name}={value}" for name, value in options.items()]
        # The cache of another compiler would be kept.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        done = subprocess.run(configure, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()
        subprocess.run([ninja(), "-C", str(build), *jobs, "install"], check=True, stdout=sys.stderr)
        return None

    def ninja_file(self, build, cuda):
        """The build of every library but the C++ runtime. Returns it, and where it puts each library."""
        cxx = COMPILER
        lib = "-Ltorch" if OTHER_TORCH else f"-L{TORCH / 'lib'}"
        lines = compiler_rules(build, "cxx", [cxx, *CXX_FLAGS])
        lines += compiler_rules(build, "cxx_package", [cxx, *PACKAGE_FLAGS])
        exports = f"-Wl,--version-script={ROOT / 'csrc/package/exports.map'}"
        lines += rules("link_package", [cxx, "-shared", *STRIP, "$in", "-o", "$out", exports,
                                        "-Wl,-soname,libexportkit_package.so", "-ldl", "-lpthread"])  # fmt: skip
        lines += rules("link_cpu", [cxx, "-shared", *STRIP, "$in", "-o", "$out", "$soname", lib,
                                    "-Wl,--no-as-needed", "-ltorch_cpu"])  # fmt: skip
        if OTHER_TORCH:  # an empty library of the right name: what an operator needs of torch is found when it loads
            stand_in = [cxx, "-shared", "-nostdlib", "-Wl,-soname,libtorch_cpu.so", "-xc", os.devnull, "-o", "$out"]
            lines += [*rules("stand_in", stand_in), "build torch/libtorch_cpu.so: stand_in"]
        if cuda:
            flags = [*(NVCC_OPTIMISED if cuda.installed else NVCC_QUICK), *gencode_flags(cuda.architectures)]
            lines += rules("nvcc", [cuda.nvcc, "-MD", "-MF", "$out.d", *NVCC_FLAGS, *flags, "-c", "$in", "-o", "$out"],
                           depfile=True)  # fmt: skip
            # The CUDA runtime is static, so that the library does not care which of the CUDA wheels is installed.
            lines += rules("link_cuda", [cuda.nvcc, "-shared", "-nodlink", "-cudart", "static", "$in", "-o", "$out",
                                         lib, *(f"-Xlinker={flag}" for flag in STRIP),
                                         "-Xlinker=-soname,libarr_coc_cuda.so",
                                         "-Xlinker=--no-as-needed", "-ltorch"])  # fmt: skip
        built = {}
        for extension in self.extensions:
            library = extension.name.rpartition(".")[2]
            kind = KINDS.get(library) or library.rpartition("_")[2]
            if kind == "cuda" and not cuda:
                continue
            compiler = {"cpu": "cxx", "cuda": "nvcc", "package": "cxx_package"}[kind]
            apart = CHECKED if kind == "cuda" and not cuda.installed else None  # it is not for use
            folder, objects = apart or kind, []
            for source in extension.sources:
                objects.append(f"{folder}/{Path(source).stem}.o")
                header = f"{compiler}.h" if compiler in PRECOMPILED and source not in PLAIN else None
                lines.append(f"build {objects[-1]}: {compiler} {ROOT / source}{f' | {header}.gch' if header else ''}")
                lines.append(f"  more = {f'-include {header}' if header else ''}")
            target = f"{apart}/{library}.so" if apart else f"{library}.so"
            after = " | torch/libtorch_cpu.so" if OTHER_TORCH and kind == "cpu" else ""
            lines += [f"build {target}: link_{kind} {' '.join(objects)}{after}", f"  soname = -Wl,-soname,{library}.so"]
            built[library] = target
        return "\n".join(lines) + "\n", built


class BuildReader(BuildLibraries):
    """Compiles the reader alone, which can be done before torch is there; nothing is installed."""

    def run(self):
        """Leaves its objects where build_ext finds them."""
        self.extensions = [extension for extension in self.extensions if extension.name == READER]
        self.compile(None, "--quiet")


class Wheel(bdist_wheel):
    """One wheel for every Python: no library uses Python's API. It brings its SBOM, and no trace of the umask."""

    def write_wheelfile(self, wheelfile_base, *arguments, **options):
        """Adds the SBOM beside the metadata, last of all files."""
        super().write_wheelfile(wheelfile_base, *arguments, **options)
        content, metadata = Path(self.bdist_dir), self.distribution.metadata
        if not content.is_dir():  # an editable install has nothing in it
            return
        cuda = choose_cuda()[0] if any(content.rglob("*_cuda.so")) else None
        sbom = runpy.run_path(str(ROOT / "tools" / "wheel_sbom.py"))["wheel_sbom"]
        requires = self.distribution.install_requires
        made = sbom(content, metadata.get_version(), "MIT", requires, cuda and cuda.nvcc)
        (Path(wheelfile_base) / "sboms").mkdir()
        (Path(wheelfile_base) / "sboms" / "exportkit.spdx.json").write_bytes(made)
        for path in content.rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)

    def get_tag(self):
        """`py3-none` and the platform."""
        return "py3", "none", super().get_tag()[2]


def compiler_rules(build, name, command):
    """The rules of a C++ compiler, after that of the header that it reads before each source, compiled."""
    header, text = build / f"{name}.h", "".join(f"#include <{included}>\n" for included in PRECOMPILED[name])
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    # Its dependencies are torch's headers, too: of another torch, all is compiled again.
    once = [*command, "-MD", "-MF", "$out.d", "-x", "c++-header", "$in", "-o", "$out"]
    each = [*command, "-MMD", "-MF", "$out.d", "$more", "-c", "$in", "-o", "$out"]
    lines = [*rules(f"{name}_header", once, depfile=True), f"build {name}.h.gch: {name}_header {name}.h"]
    return lines + rules(name, each, depfile=True)


def rules(name, command, depfile=False):
    """One ninja rule. Ninja's own variables stay unquoted."""
    words = (word if word.startswith("$") else shlex.quote(word).replace("'$out.d'", "$out.d") for word in command)
    lines = [f"rule {name}", f"  command = {' '.join(words)}", f"  description = {name} $out"]
    return lines + (["  depfile = $out.d", "  deps = gcc"] if depfile else [])


ENTRY_POINTS = {"console_scripts": ["exportkit = exportkit.cli:main"]}
READER = "exportkit.lib.libexportkit_package"
LIBRARIES = {
    READER: "csrc/package/*.cpp",
    "exportkit.lib.libexportkit_recurrent": "csrc/recurrent/*.cpp",
}
KINDS = {"libexportkit_recurrent": "cpu"}  # the others' are in their names
EXCLUDED = []
if choice("EXPORTKIT_ARR_COC", default="1") == "0":
    EXCLUDED = ["exportkit.arr_coc", "exportkit.arr_coc.*"]
else:
    # How exportkit finds ARR-COC, as it finds anybody's package: exportkit/installed.py describes the groups.
    ENTRY_POINTS |= {
        "exportkit.operators": ["arr_coc = exportkit.arr_coc", "arr_coc_triton = exportkit.arr_coc.ops.triton"],
        "exportkit.models": ["arr-coc = exportkit.arr_coc.model:export_spec"],
        "exportkit.commands": ["demo = exportkit.arr_coc.demo_command:command"],
        "exportkit.bench": ["arr_coc = exportkit.arr_coc.bench.operators"],
        "exportkit.pages": ["arr_coc = exportkit.arr_coc.page"],
    }
    LIBRARIES |= {
        "exportkit.arr_coc.lib.libarr_coc_cpu": "csrc/arr_coc/*/*.cpp",
        "exportkit.arr_coc.lib.libarr_coc_cuda": "csrc/arr_coc/*/*.cu",
    }

setup(
    packages=find_packages(include=["exportkit", "exportkit.*"], exclude=EXCLUDED),
    entry_points=ENTRY_POINTS,
    ext_modules=[
        Extension(name, sorted(str(path) for path in Path().glob(sources))) for name, sources in LIBRARIES.items()
    ],
    cmdclass={"build_ext": BuildLibraries, "build_reader": BuildReader, "bdist_wheel": Wheel},
)

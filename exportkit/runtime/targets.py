"""Which of a package's targets runs here, and why the others do not.

torch's own loader checks none of this before it runs the code: the wrong instruction set ends the process inside the
loader (an illegal instruction), the wrong GPU fails at the first kernel.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from exportkit.errors import ManifestConsistencyError, NoTargetError, UsageError
from exportkit.libraries import host_platform
from exportkit.package.manifest import Library, Target

# The x86-64 psABI's micro-architecture levels, each with the /proc/cpuinfo flags it adds to the one before. `abm` is
# lzcnt, `pni` is SSE3.
_ISA_FLAGS = {
    "x86-64": set[str](),
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
_ISA_LEVELS = tuple(_ISA_FLAGS)
# What torch.cpu.get_capabilities calls those that it knows; it asks the CPU itself.
_CAPABILITIES = {
    **{flag: flag for flag in ("avx", "avx2", "bmi2", "f16c")},
    **{"abm": "lzcnt", "bmi1": "bmi", "fma": "fma3"},
    **{flag: flag.replace("avx512", "avx512_") for flag in _ISA_FLAGS["x86-64-v4"]},
}


class Host(NamedTuple):
    """What a target is held against.

    Attributes:
        platform: Such as "linux-x86_64".
        cpu_isa: The highest level the CPU has, such as "x86-64-v3"; the machine's name where there are no levels.
        torch: The installed version, such as "2.13.0+cpu".
        cuda: The CUDA version torch was built with, None for a CPU build.
        capabilities: (major, minor) of each CUDA device; empty where there is none, or none was asked for.
        current_cuda: The index of the device that `cuda` and `auto` mean.
    """

    platform: str
    cpu_isa: str
    torch: str
    cuda: str | None = None
    capabilities: tuple[tuple[int, int], ...] = ()
    current_cuda: int = 0


class Choice(NamedTuple):
    """A target and where it runs. `device_index` is that of the CUDA device, -1 for the CPU."""

    target: Target
    device_index: int

    @property
    def device(self) -> str:
        """As torch names it."""
        return "cpu" if self.target.device == "cpu" else f"cuda:{self.device_index}"


class Survey(NamedTuple):
    """The targets that run on a machine, best first, and why each of the others does not, by name."""

    fitting: tuple[Choice, ...]
    rejected: Mapping[str, str]


def host(*, with_cuda: bool) -> Host:
    """This machine. Asking for its GPUs initialises CUDA, so that is done only where it matters."""
    import torch

    here = Host(host_platform(), host_cpu_isa(), str(torch.__version__), torch.version.cuda)
    if not (with_cuda and torch.cuda.is_available()):
        return here
    capabilities = tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return here._replace(capabilities=capabilities, current_cuda=torch.cuda.current_device())


def host_for(targets: Sequence[Target], device: str) -> Host:
    """This machine; its GPUs only where one of the targets might run there.

    Raises:
        UsageError: `device` is no device.
    """
    kind, _ = parse_device(device)
    return host(with_cuda=kind != "cpu" and any(target.device == "cuda" for target in targets))


@lru_cache(maxsize=1)
def host_cpu_isa() -> str:
    """The highest x86-64 level this CPU has, such as "x86-64-v3"; the machine's name on other machines.

    The kernel's list has what the kernel allows, but is that of the real CPU under an emulator; so both are asked.
    """
    import torch

    if platform.machine() != "x86_64":
        return platform.machine()
    with open("/proc/cpuinfo") as file:
        flags = next((line.partition(":")[2].split() for line in file if line.startswith("flags")), [])
    capabilities = torch.cpu.get_capabilities()
    return isa_level([flag for flag in flags if capabilities.get(_CAPABILITIES.get(flag, ""), True)])


def isa_level(flags: Sequence[str]) -> str:
    """The highest x86-64 level of a CPU with these /proc/cpuinfo flags."""
    level = _ISA_LEVELS[0]
    for name, needed in _ISA_FLAGS.items():
        if not needed <= set(flags):
            break
        level = name
    return level


def parse_device(device: str) -> tuple[str, int | None]:
    """`auto`, `cpu`, `cuda` or `cuda:1`, taken apart.

    Raises:
        UsageError: It is none of these.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,3}))?", device)
    if match is None:
        raise UsageError(f"device {device!r} is not known", hint="Give auto, cpu, cuda or cuda:<index>.")
    kind = device.partition(":")[0]
    return kind, int(match[1]) if match[1] else None


def named(targets: Sequence[Target], name: str | None) -> Sequence[Target]:
    """The target of this name alone; all of them where None is asked for.

    Raises:
        UsageError: There is none of this name.
    """
    if name is None:
        return targets
    found = [target for target in targets if target.name == name]
    if not found:
        names = ", ".join(target.name for target in targets) or "none"
        raise UsageError(f"the package has no target {name!r}", hint=f"It has: {names}.")
    return found


def pick(targets: Sequence[Target], device: str, host: Host) -> Choice:
    """The best of the targets that run on `host`; arguments and errors are those of `survey`."""
    return survey(targets, device, host).fitting[0]


def survey(targets: Sequence[Target], device: str, host: Host) -> Survey:
    """Holds every target against `host`. CUDA is better than CPU, newer instructions are better than older ones.

    Args:
        targets: Of the package.
        device: `auto`, `cpu`, `cuda` or `cuda:<index>`.
        host: The machine.

    Raises:
        UsageError: `device` is no device.
        NoTargetError: None runs here; the message gives the reason for each.
    """
    kind, index = parse_device(device)
    index = host.current_cuda if index is None else index
    if not targets:
        raise NoTargetError(
            "the package has no compiled target",
            hint="It holds an exported program: compile it with `exportkit export`.",
        )
    reasons = {target.name: rejection(target, kind, index, host) for target in targets}
    rejected = {name: reason for name, reason in reasons.items() if reason is not None}
    fitting = [target for target in targets if target.name not in rejected]
    if not fitting:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in rejected.items())
        raise NoTargetError(
            f"no target of the package runs here (device {device}):\n{lines}",
            hint="Export for this machine, or ask for another device.",
        )
    best_first = sorted(fitting, key=_preference, reverse=True)
    return Survey(tuple(Choice(target, index if target.device == "cuda" else -1) for target in best_first), rejected)


def rejection(target: Target, kind: str, index: int, host: Host) -> str | None:
    """Why this target does not run on this host and device, or None if it does.

    Args:
        target: Of the package.
        kind: `auto`, `cpu` or `cuda`.
        index: Of the CUDA device.
        host: The machine.
    """
    if kind not in ("auto", target.device):
        return f"it is for {target.device}, and {kind} was asked for"
    if target.platform != host.platform:
        return f"it is for {target.platform}, this is {host.platform}"
    if _minor(host.torch) < _minor(target.needs_torch):
        return f"it needs torch {target.needs_torch} or newer, this is {host.torch}"
    return _cpu_rejection(target, host) or (_cuda_rejection(target, index, host) if target.device == "cuda" else None)


def library_rejection(library: Library, torch_version: str) -> str | None:
    """Why an operator library does not work with this torch, or None if it does."""
    if library.torch_bound is not None and _minor(library.torch_bound) != _minor(torch_version):
        return (
            f"it was built against the C++ API of torch {library.torch_bound}, which holds for no other minor version; "
            f"this is torch {torch_version}"
        )
    if _minor(torch_version) < _minor(library.needs_torch):
        return f"it needs torch {library.needs_torch} or newer, this is {torch_version}"
    return None


def _cpu_rejection(target: Target, host: Host) -> str | None:
    """The host code of a CUDA target has instructions too."""
    if target.cpu_isa is None:
        return None
    if target.cpu_isa not in _ISA_LEVELS:
        return f"its instruction set {target.cpu_isa} is not known here"
    if host.cpu_isa not in _ISA_LEVELS or _ISA_LEVELS.index(host.cpu_isa) < _ISA_LEVELS.index(target.cpu_isa):
        return f"it needs a CPU with {target.cpu_isa}, this one has {host.cpu_isa}"
    return None


def _cuda_rejection(target: Target, index: int, host: Host) -> str | None:
    if host.cuda is None:
        return f"it needs CUDA, this torch ({host.torch}) is a CPU build"
    if target.built_with_cuda and _minor(target.built_with_cuda)[0] != _minor(host.cuda)[0]:
        return f"it was built with CUDA {target.built_with_cuda}, this torch has CUDA {host.cuda}"
    if not host.capabilities:
        return "it needs a CUDA device, and torch sees none"
    if index >= len(host.capabilities):
        return f"it cannot run on cuda:{index}, torch sees {len(host.capabilities)} CUDA device(s)"
    if target.cuda_architecture is None:
        return None
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target.cuda_architecture)
    if match is None:
        return f"its CUDA architecture {target.cuda_architecture} is not known here"
    built, here = (int(match[1]), int(match[2])), host.capabilities[index]
    # Machine code runs on later minor versions of its architecture; PTX is compiled by the driver for any later one.
    # What an `a` or `f` marks uses features that later ones need not have.
    same = here == built if match[3] else here[0] == built[0] and here >= built
    if same or (target.cuda_ptx and not match[3] and here >= built):
        return None
    has = f"{target.cuda_architecture}{' and PTX' if target.cuda_ptx else ''}"
    return f"it has code for {has}, cuda:{index} is sm_{here[0]}{here[1]}"


def _preference(target: Target) -> tuple[bool, tuple[int, ...], int]:
    """Sorts targets that all run here."""
    architecture = tuple(int(n) for n in re.findall(r"\d+", target.cuda_architecture or ""))
    isa = _ISA_LEVELS.index(target.cpu_isa) if target.cpu_isa in _ISA_LEVELS else -1
    return target.device == "cuda", architecture, isa


def _minor(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cpu".

    Raises:
        ManifestConsistencyError: It is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ManifestConsistencyError(f"{version!r} is no version: it starts with no <major>.<minor>")
    return int(match[1]), int(match[2])

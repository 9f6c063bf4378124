"""Chooses the target that runs here, and says why the others do not. csrc/package/targets.cpp has the rules.

torch's own loader does not check this. With the wrong instruction set, the process dies inside the loader (an illegal
instruction). With the wrong GPU, the first kernel fails.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from exportkit.errors import NoTargetError, UsageError
from exportkit.libraries import host_platform
from exportkit.package import core
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import Library, Target, code_folder

if TYPE_CHECKING:
    from exportkit.package.archive import PackageReader


class Host(NamedTuple):
    """The properties of a machine that targets depend on.

    `capabilities` is empty if there are no CUDA devices, or if they were not asked. `cpu_isa` is the CPU's highest
    level, or the machine's name if it has no levels. `cuda` is torch's, None for a CPU build; `driver` is the newest
    CUDA that the driver supports. `current_cuda` is the index of the device that `cuda` and `auto` mean.
    """

    platform: str
    cpu_isa: str
    torch: str
    cuda: str | None = None
    capabilities: tuple[tuple[int, int], ...] = ()
    current_cuda: int = 0
    driver: str | None = None


class Choice(NamedTuple):
    """A target and its device. `device_index` is the index of the CUDA device, or -1 for the CPU.

    `fit` is "ptx" if the driver must compile the target's PTX for the device, which has no code of its own in it.
    """

    target: Target
    device_index: int
    fit: Literal["native", "ptx"] = "native"

    @property
    def device(self) -> str:
        """The device, as torch names it."""
        return "cpu" if self.target.device == "cpu" else f"cuda:{self.device_index}"


class Survey(NamedTuple):
    """The targets that run on a machine, the best first, and the reason for each other target, by name."""

    fitting: tuple[Choice, ...]
    rejected: Mapping[str, str]


@functools.lru_cache(maxsize=1)
def host_cpu_isa() -> str:
    """Returns this CPU's highest x86-64 level, such as "x86-64-v3", or the machine's name on other machines."""
    level: str = msgspec.json.decode(core.text("ek_host"))["cpu_isa"]
    return level


def host(*, with_cuda: bool) -> Host:
    """Returns the properties of this machine. Initialises CUDA only if `with_cuda`."""
    torch_version, cuda = _torch_build()
    here = Host(host_platform(), host_cpu_isa(), torch_version, cuda)
    if not with_cuda or cuda is None:
        return here
    import torch

    here = here._replace(driver=driver_cuda())  # with one that is too old, torch sees no device
    if not torch.cuda.is_available():
        return here
    capabilities = tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return here._replace(capabilities=capabilities, current_cuda=torch.cuda.current_device())


def _torch_build() -> tuple[str, str | None]:
    """Returns torch's version and its CUDA's, by the file that torch has them in: importing torch takes seconds."""
    if "torch" not in sys.modules and (found := importlib.util.find_spec("torch")) is not None and found.origin:
        version = runpy.run_path(str(Path(found.origin).with_name("version.py")))
        return version["__version__"], version["cuda"]
    import torch

    return str(torch.__version__), torch.version.cuda


def driver_cuda() -> str | None:
    """Returns the newest CUDA that the installed driver supports, such as "13.0", or None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def host_for(targets: Sequence[Target], device: str) -> Host:
    """Returns the properties of this machine, with its GPUs if a target might use them.

    UsageError: `device` is invalid.
    """
    kind, _ = parse_device(device)
    return host(with_cuda=kind != "cpu" and any(target.device == "cuda" for target in targets))


def parse_device(device: str) -> tuple[str, int | None]:
    """Splits `auto`, `cpu`, `cuda` or `cuda:1` into kind and index. Raises UsageError for other values."""
    parsed = msgspec.json.decode(core.text("ek_parse_device", core.encoded(device)))
    return parsed["kind"], parsed["index"]


def named(targets: Sequence[Target], name: str | None) -> Sequence[Target]:
    """Returns the target of this name, or all targets for None. Raises UsageError if the target does not exist."""
    if name is None:
        return targets
    found = [target for target in targets if target.name == name]
    if not found:
        names = ", ".join(target.name for target in targets) or "none"
        raise UsageError(f"the package has no target {name!r}", hint=f"It has: {names}.")
    return found


def pick(targets: Sequence[Target], device: str, host: Host, libraries: Sequence[Library] = ()) -> Choice:
    """Returns the best target that runs on `host`. Arguments and errors are the same as for `survey`."""
    return survey(targets, device, host, libraries).fitting[0]


def survey(targets: Sequence[Target], device: str, host: Host, libraries: Sequence[Library] = ()) -> Survey:
    """Checks every target against `host`. CUDA is better than CPU; newer instructions are better than older ones.

    The dynamic linker of this process is asked for what the package's operator libraries need.

    Raises:
        UsageError: `parse_device` refuses `device`.
        NoTargetError: No target runs here. The message gives a reason for each.
    """
    if any(not need.startswith("GLIBC") for library in libraries for need in library.needs):
        import torch  # noqa: F401  (it loads libraries that others need, such as CUDA's)
    machine, candidates = msgspec.json.encode(host._asdict()), msgspec.json.encode(targets)
    brought = msgspec.json.encode(libraries)
    found = msgspec.json.decode(core.text("ek_survey", candidates, brought, core.encoded(device), machine))
    by_name = {target.name: target for target in targets}
    return Survey(tuple(Choice(by_name[name], index, fit) for name, index, fit in found["fitting"]), found["rejected"])


def survey_package(reader: PackageReader, targets: Sequence[Target], device: str, host: Host) -> Survey:
    """Checks targets of a package, and whether the driver compiles the PTX of those that have no code for the GPU.

    Arguments and errors are the same as for `survey`.
    """
    found = survey(targets, device, host, reader.manifest.libraries)
    reasons = {choice.target.name: _ptx_rejection(reader, choice, host) for choice in found.fitting}
    late = {name: reason for name, reason in reasons.items() if reason}
    fitting = tuple(choice for choice in found.fitting if choice.target.name not in late)
    rejected = {**found.rejected, **late}
    if not fitting:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in rejected.items())
        said = f"no target of the package runs here (device {device}):{lines}"
        raise NoTargetError(said, hint="Install a newer driver, or export on this machine.")
    return Survey(fitting, rejected)


def _ptx_rejection(reader: PackageReader, choice: Choice, host: Host) -> str | None:
    """Returns why the driver cannot compile what a target has for the GPU; None if it can, or need not."""
    if choice.fit == "native" or host.driver is None:
        return None
    folders = [f"{AOTINDUCTOR_DIR}/{code_folder(choice.target.name, m.name)}/" for m in reader.manifest.methods]
    for name in reader.names:
        if name.startswith(tuple(folders)) and name.endswith((".so", ".fatbin", ".cubin")):
            code = bytes(reader.read(name))
            if reason := core.text("ek_ptx_rejection", code, len(code), core.encoded(host.driver)):
                return reason.decode()
    return None


def library_rejection(library: Library, torch_version: str) -> str | None:
    """Returns why an operator library does not work with this torch, or None if it works."""
    reason = core.text("ek_library_rejection", msgspec.json.encode(library), core.encoded(torch_version))
    return reason.decode() or None

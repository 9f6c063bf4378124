"""Which of a package's targets runs here, and why the others do not (the rules are csrc/package/targets.cpp's).

torch's own loader checks none of this before it runs the code: the wrong instruction set ends the process inside the
loader (an illegal instruction), the wrong GPU fails at the first kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from exportkit.errors import UsageError
from exportkit.libraries import host_platform
from exportkit.package import core
from exportkit.package.manifest import Library, Target


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


@functools.lru_cache(maxsize=1)
def host_cpu_isa() -> str:
    """The highest x86-64 level this CPU has, such as "x86-64-v3"; the machine's name on other machines."""
    level: str = msgspec.json.decode(core.text("ek_host"))["cpu_isa"]
    return level


def host(*, with_cuda: bool) -> Host:
    """This machine. Asking for its GPUs initialises CUDA, so that is done only where it matters."""
    import torch

    here = Host(host_platform(), host_cpu_isa(), str(torch.__version__), torch.version.cuda)
    if not (with_cuda and torch.cuda.is_available()):
        return here
    capabilities = tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return here._replace(capabilities=capabilities, current_cuda=torch.cuda.current_device())


def host_for(targets: Sequence[Target], device: str) -> Host:
    """This machine; its GPUs only where one of the targets might run on `device`: UsageError if it is no device."""
    kind, _ = parse_device(device)
    return host(with_cuda=kind != "cpu" and any(target.device == "cuda" for target in targets))


def parse_device(device: str) -> tuple[str, int | None]:
    """`auto`, `cpu`, `cuda` or `cuda:1`, taken apart: UsageError if it is none of these."""
    parsed = msgspec.json.decode(core.text("ek_parse_device", core.encoded(device)))
    return parsed["kind"], parsed["index"]


def named(targets: Sequence[Target], name: str | None) -> Sequence[Target]:
    """The target of this name alone, UsageError if there is none; all of them where None is asked for."""
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

    Raises:
        UsageError: `device` is none that `parse_device` knows.
        NoTargetError: None runs here; the message gives the reason for each.
    """
    machine, candidates = msgspec.json.encode(host._asdict()), msgspec.json.encode(targets)
    found = msgspec.json.decode(core.text("ek_survey", candidates, core.encoded(device), machine))
    by_name = {target.name: target for target in targets}
    return Survey(tuple(Choice(by_name[name], index) for name, index in found["fitting"]), found["rejected"])


def library_rejection(library: Library, torch_version: str) -> str | None:
    """Why an operator library does not work with this torch, or None if it does."""
    reason = core.text("ek_library_rejection", msgspec.json.encode(library), core.encoded(torch_version))
    return reason.decode() or None

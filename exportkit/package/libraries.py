"""Describes operator libraries: what one defines, and what it asks of the host, as the manifest records it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from exportkit.errors import HostError, LibraryLoadError, NotAnOperatorLibraryError
from exportkit.package.consistency import OPERATORS_DIR
from exportkit.package.elf import Elf, is_stable, oldest_torch, read_elf
from exportkit.package.manifest import Library, Operator

# Run in a process of its own: a library that does not fit ends the process it is loaded into rather than raising.
_CHILD = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # not the working directory; Python 3.10 has no -P
import json, torch

KEYS = {"CPU": "cpu", "CUDA": "cuda", "CompositeExplicitAutograd": "any", "CompositeImplicitAutograd": "any"}

def schemas():
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        found[name] = str(schema)
    return found

def kernels():
    get = torch._C._dispatch_get_registrations_for_dispatch_key
    return {(key, name) for key in KEYS for name in get(key)}

schemas_before, kernels_before = schemas(), kernels()
try:
    torch.ops.load_library(sys.argv[1])
except OSError as error:
    print(json.dumps({"refused": str(error.__cause__ or error)}))
    sys.exit()
defines = {name: schema for name, schema in schemas().items() if schemas_before.get(name) != schema}
added = sorted({KEYS[key] for key, name in kernels() - kernels_before})
print(json.dumps({"defines": defines, "kernels": added}))
"""


def describe_library(path: Path) -> Library:
    """What the manifest says of an operator library.

    The file is read, and then loaded into another process, to see what it registers. A CUDA library where torch has no
    CUDA cannot be loaded: it is taken to add CUDA kernels to operators that another library defines.

    Args:
        path: The shared library. Its file name becomes its record's.

    Raises:
        NotAnOperatorLibraryError: It is no shared library, or registers nothing.
        LibraryLoadError: It does not load with the torch that is installed here, or ends the process.
        HostError: torch is not installed here.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotAnOperatorLibraryError(f"cannot read the operator library {path}: {error.strerror}") from error
    elf = read_elf(path)
    if not elf.registers_operators:
        raise NotAnOperatorLibraryError(
            f"{path} registers no operators: it calls neither TORCH_LIBRARY's functions nor the stable ABI's",
            hint="Operators that are written in Python cannot travel; define them with TORCH_LIBRARY in C++.",
        )
    torch_version, torch_has_cuda = _installed_torch()
    device: Literal["cpu", "cuda"] = "cuda" if elf.device == "cuda" else "cpu"
    if device == "cuda" and not torch_has_cuda:
        registered: dict[str, Any] = {"defines": {}, "kernels": ["cuda"]}
    else:
        registered = _load_elsewhere(path, elf)
    platform = f"{sys.platform}-{elf.machine}"
    stable = is_stable(elf.torch_symbols)
    return Library(
        record=f"{OPERATORS_DIR}/{platform}/{path.name}",
        sha256=hashlib.sha256(content).hexdigest(),
        platform=platform,
        device=device,
        kernels=tuple(registered["kernels"]),
        defines=tuple(Operator(name=name, schema=schema) for name, schema in sorted(registered["defines"].items())),
        needs_torch=(oldest_torch(elf.torch_symbols) if stable else None) or torch_version,
        torch_bound=None if stable else torch_version,
        needs=elf.host_needs,
    )


def _installed_torch() -> tuple[str, bool]:
    """Minor version of the torch that is installed, such as "2.13", and whether it is a CUDA build; not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise HostError(
            "torch is not installed here, and an operator library can only be described beside one",
            hint="Install torch, or package where the libraries were built.",
        )
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return version, Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def _load_elsewhere(path: Path, elf: Elf) -> dict[str, Any]:
    """What the library defines and has kernels for, found by loading it into a child process."""
    command = [sys.executable, "-c", _CHILD, str(path.resolve())]
    # Waited for as long as it takes: on a loaded machine, importing torch alone takes minutes.
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    last_words = child.stderr.strip()[-2000:]
    if child.returncode < 0:
        raise LibraryLoadError(
            f"{path.name} ends the process it is loaded into with {signal.Signals(-child.returncode).name}"
            + (f":\n{last_words}" if last_words else ""),
            hint="A malformed schema does that, as does a namespace that torch or another loaded library has already.",
        )
    if child.returncode > 0:
        raise LibraryLoadError(f"{path.name} does not load in a process of its own:\n{last_words}")
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    if "refused" in answer:
        raise LibraryLoadError(f"the dynamic linker refused {path.name}: {answer['refused']}", hint=_hint(answer, elf))
    if not answer["defines"] and not answer["kernels"]:
        raise NotAnOperatorLibraryError(f"{path} was loaded, and neither defined an operator nor added a kernel to one")
    return answer


def _hint(answer: dict[str, Any], elf: Elf) -> str:
    if symbol := re.search(r"undefined symbol: (\S+)", answer["refused"]):
        if symbol[1] in elf.torch_symbols:
            return "It was built for another torch; build it for the one that is installed here."
        return f"Link it with the library that has {symbol[1]}."
    if elf.host_needs:
        return f"Beside torch it needs {', '.join(elf.host_needs)}."
    return "`ldd` says which of the libraries it needs are missing here."

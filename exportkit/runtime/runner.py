"""Runs the compiled code of a target."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from exportkit.errors import HostError, ModelLoadError, ModelRunError
from exportkit.package.compiled_with import REFUSED, REFUSED_LENGTH, REFUSED_PLACES
from exportkit.runtime.cache import Entry
from exportkit.runtime.native import NativeRunner, RunnerOptions, say_what_is_lost, use_native
from exportkit.runtime.requests import Answers, run_in_steps
from exportkit.runtime.targets import Choice
from exportkit.runtime.weights import Weights, borrowed, constants_of, on_device, released


class Runner(Protocol):
    """The compiled code of a method with its weights. Any number of threads may call it.

    What its classes do not write anew has no CUDA graphs, and every call of it says itself what it refuses.
    """

    @property
    def run(self) -> Callable[..., list[torch.Tensor]]:
        """Returns the flat outputs for flat, valid inputs, and then the state that the method has.

        With `session_memory`, a session's, as the second argument.
        """

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int], /) -> Answers:
        """Runs requests together. See `Model.run_requests`."""

    def session_memory(self) -> torch.Tensor | None:
        """Returns memory for what a session's calls refuse; None if each call says itself what it refuses."""
        return None

    def look(self, refused: torch.Tensor | None = None, /) -> None:
        """Raises RuntimeError if a call that has ended refused a value: a session's, or one on the current stream."""
        return None

    def capture(self, arguments: list[torch.Tensor], own: int, /) -> list[torch.Tensor] | None:
        """Makes a CUDA graph for calls with arguments of these sizes, and any values; None without graphs.

        Returns the inputs to call it with: the first `own` arguments. State may be on the device "meta". RuntimeError:
        there can be none.
        """
        return None

    def graph_report(self) -> str | None:
        """Returns which CUDA graphs there are, as JSON; None without graphs."""
        return None


class ContainerRunner(Runner):
    """Compiled code that runs through torch's own binding, which holds the GIL (pytorch#197516)."""

    def __init__(
        self,
        entry: Entry,
        choice: Choice,
        constants: Mapping[str, torch.Tensor],
        options: RunnerOptions,
    ) -> None:
        """Loads a target's library. Arguments and errors are the same as for NativeRunner; there are no graphs."""
        assert options.graphs == "none"
        library, folder = str(entry.library), str(entry.library.parent)

        def opened() -> Any:
            if choice.target.device == "cpu":
                container: Any = torch._C._aoti.AOTIModelContainerRunnerCpu(library, options.runners)
            else:
                container = torch._C._aoti.AOTIModelContainerRunnerCuda(library, options.runners, choice.device, folder)
            if constants:
                _lend_constants(container, constants)
            return container

        container = opened()
        names = container.get_constant_names_to_original_fqns().values()
        computes = any(name.startswith(COMPUTED) for name in names)
        self._constants = constants  # the code reads these tensors without a copy
        self._entry = entry
        self._device = torch.device(choice.device)
        fallible = computes or choice.target.device != "cpu"
        run = _Preparing(container, opened, choice.target.device).run if fallible else container.run
        self._run = RefusedValues(entry.library, self._device).wrapped(run)
        weakref.finalize(self, released, constants, self._device).atexit = False

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Returns the flat outputs for flat, valid inputs. Raises RuntimeError if the compiled code fails."""
        return self._run(inputs)

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int], /) -> Answers:
        """Runs requests together. See `Model.run_requests`."""
        return run_in_steps(self._run, self._device, requests, outputs)


COMPUTED = "_FOLDED_CONST_"  # begins AOTInductor's names of constants that the code computes from the weights


class _Preparing:
    """Code that torch prepares in its first call; this binding cannot ask for it before.

    It computes constants, and on a GPU it records an event. Where that fails, as without memory or on a broken device,
    every torch before 2.15 loses the runner that it took, and the next call would wait for it forever. So that call
    opens the code anew.

    An event that is recorded in a capture can never be waited for, so that each call after it would fail.
    """

    def __init__(self, container: Any, opened: Callable[[], Any], device: str) -> None:
        self._container, self._opened, self._device = container, opened, device
        self._prepared = False

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._device != "cpu" and torch.cuda.is_current_stream_capturing():
            raise HostError(
                "a call cannot be captured in a CUDA graph without the C++ runtime",
                hint="`make build` builds it for the installed torch; EXPORTKIT_RUNTIME=python turns it off.",
            )
        if self._container is None:
            self._container = self._opened()
        try:
            outputs: list[torch.Tensor] = self._container.run(inputs)
        except RuntimeError:
            if not self._prepared:
                self._container = None
            raise
        self._prepared = True
        return outputs


RunnerClass = type[NativeRunner] | type[ContainerRunner]


def runner_class() -> RunnerClass:
    """Returns NativeRunner if the C++ runtime is usable, or else warns once. Errors are those of `use_native`."""
    if use_native():
        return NativeRunner
    say_what_is_lost()
    return ContainerRunner


@dataclass(frozen=True)
class Construction:
    """Makes the runners of the chosen target from its libraries in the cache, with any weights.

    aoti_load_package is not used: it builds every target's runner, compiles instruction set probes with g++ for seconds
    (pytorch#191715), and hides why an operator is missing. AOTIModelPackageLoader is not used either: it unpacks the
    library into a temporary directory each time. The dynamic linker never unloads a library with unique symbols, such
    as some of libstdc++'s, so each load would leave a mapped copy.
    """

    kind: RunnerClass
    entries: Mapping[str, Entry]
    choice: Choice
    options: RunnerOptions
    written: Mapping[str, tuple[int, ...]]
    package: str

    def make(self, weights: Weights, like: Mapping[str, Runner] | None = None) -> dict[str, Runner]:
        """Makes a runner for each method. What was captured in runners of the same model, `like`, is captured again.

        The weights are on the CPU, and may include more than the target needs. Code for the CPU reads them without a
        copy; on a GPU, there is one copy for all methods.

        Raises:
            ModelLoadError: torch's loader refused the code.
            ModelRunError: A CUDA graph of `like` cannot be made again.
        """
        _promote_libstdcxx()
        target, device = self.choice.target, torch.device(self.choice.device)
        try:
            weights = on_device(target, weights, device)
            runners: dict[str, Runner] = {
                method: self.kind(
                    entry,
                    self.choice,
                    constants_of(target, method, weights),
                    self.options._replace(written=self.written[method]),
                )
                for method, entry in self.entries.items()
            }
        except RuntimeError as error:
            raise ModelLoadError(
                f"torch {torch.__version__} cannot load target {target.name} of {self.package}: "
                f"{str(error).partition(chr(10))[0]}",
                hint="stderr may say more. If the cache is mounted noexec, set EXPORTKIT_CACHE to a directory that "
                "allows executable code.",
            ) from error
        for method, old in (like or {}).items():
            _capture_again(runners[method], old)
        return runners


def _capture_again(runner: Runner, old: Runner) -> None:
    if not (isinstance(runner, NativeRunner) and isinstance(old, NativeRunner)):
        return
    try:
        runner.capture_as(old)
    except RuntimeError as error:
        raise ModelRunError(
            f"the CUDA graphs cannot be made with the new weights: {str(error).partition(chr(10))[0]}",
            hint="The old weights stay. Free some GPU memory and swap again: both need memory meanwhile.",
        ) from error


def _lend_constants(container: Any, constants: Mapping[str, torch.Tensor]) -> None:
    """Sets the constants as csrc/runtime/code.cpp does; the reasons are there. torch leaks the handles here."""
    # Within the code, AOTInductor uses names derived from the constants' names.
    known = container.get_constant_names_to_original_fqns().items()
    names = {constant: name for name, constant in known if not constant.startswith(COMPUTED)}
    if len(names) < sum(not constant.startswith(COMPUTED) for _, constant in known):
        raise RuntimeError("the code has several constants of one name, of which one would stay unset: export it again")
    if names.keys() != constants.keys():
        odd = ", ".join(sorted(names.keys() ^ constants.keys()))
        raise RuntimeError(f"the code's constants differ from the manifest's: {odd}")
    # The code never releases its references, so it gets tensors that do not keep the memory alive.
    tensors = {names[constant]: borrowed(tensor) for constant, tensor in constants.items()}
    container.update_constant_buffer(tensors, False, True, True)


@functools.lru_cache(maxsize=1)
def _promote_libstdcxx() -> None:
    """Makes the process's libstdc++ visible to all libraries.

    torch's loader crashes in std::regex if a model's library contains parts of a statically linked libstdc++, unless
    the linker finds the real one first.
    """
    with contextlib.suppress(OSError):  # no libstdc++.so.6: torch itself uses another one
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


# --- what compiled code refused: see csrc/runtime/code.h --------------------------------------------------------------


class RefusedValues:
    """The memory in which the calls of a code write what they refused."""

    def __init__(self, library: Path, device: torch.device) -> None:
        """Reads what the code of a library refuses, which torch has loaded."""
        self._device = device
        self._free: list[torch.Tensor] = []
        lines = _lines(library)
        self._expected = bool(lines)
        self._places = [line.partition("\t")[::2] for line in lines[1:]]

    def wrapped(self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
        """Returns a function that gives each call its memory, and raises RuntimeError if it refused a value.

        A call on a GPU is waited for: this binding has no other time to look.
        """
        if not self._expected:
            return run

        def looking(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            memory = (
                self._free.pop() if self._free else torch.zeros(REFUSED_LENGTH, dtype=torch.int64, device=self._device)
            )
            try:
                return run([*inputs, memory])
            finally:
                try:
                    self._look(memory)  # raises in place of what the code raised: it says more
                finally:
                    self._free.append(memory)

        return looking

    def _look(self, memory: torch.Tensor) -> None:
        if not memory[0]:
            return
        said = memory.tolist()
        memory.zero_()
        raise RuntimeError(f"{REFUSED}{self._message(said)}")

    def _message(self, said: list[int]) -> str:
        for place, (kind, operators) in enumerate(self._places):
            value, size = said[1 + 2 * place : 3 + 2 * place]
            if size == 0:
                continue
            at = f"{operators}: " if operators else ""
            if kind == "division":
                return f"{at}an integer is divided by zero"
            if not kind:  # one of many that share a place
                break
            if not kind.startswith("index"):
                return f"{at}{kind}"
            length, wraps = abs(size) - 1, kind != "index"  # negative ones had the length added
            given = "an index" if size < 0 else f"index {value - length if wraps and value < 0 else value}"
            return f"{at}{given} is out of range: from {-length if wraps else 0} to {length - 1} are allowed"
        return "the code refused a value"


def _lines(library: Path) -> list[str]:
    opened = ctypes.CDLL(str(library))
    try:
        places = getattr(opened, REFUSED_PLACES, None)
        if places is None:
            return []
        places.restype = ctypes.c_char_p
        text: bytes = places()
        return text.decode(errors="replace").split("\n")
    finally:
        _ctypes.dlclose(opened._handle)

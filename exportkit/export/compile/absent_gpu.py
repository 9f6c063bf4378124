"""GPUs that Inductor and Triton compile for although none is there (docs/adr/0068-absent-gpus.md).

Both ask torch and the driver what the GPU is, and time kernels on it. `believe_in` answers in their place. It changes
the process for good, so that it is called in a fork alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from exportkit.errors import ExportError, UsageError
from exportkit.support import exporting_torches

_DEVICE = 0


@dataclass(frozen=True)
class _Card:
    """What Inductor's choices depend on. The processors decide only how work is split, so a related card may differ."""

    name: str
    processors: int
    threads: int  # that a processor holds
    shared_kib: int  # of shared memory, that one block may have


_CARDS: Mapping[tuple[int, int], _Card] = {
    (7, 5): _Card("T4", 40, 1024, 64),
    (8, 0): _Card("A100", 108, 2048, 163),
    (8, 6): _Card("A10", 72, 1536, 99),
    (8, 9): _Card("L4", 58, 1536, 99),
    (9, 0): _Card("H100", 132, 2048, 227),
    (10, 0): _Card("B200", 148, 2048, 227),
    (10, 3): _Card("B300", 148, 2048, 227),
    (12, 0): _Card("RTX 5090", 170, 1536, 99),
    (12, 1): _Card("GB10", 48, 1536, 99),
}


@dataclass(frozen=True)
class AbsentGpu:
    """A GPU that code is compiled for.

    Attributes:
        capability: Its compute capability, such as (8, 0).
        ptx: Whether newer GPUs get PTX.
    """

    capability: tuple[int, int]
    ptx: bool = False

    @property
    def architecture(self) -> str:
        """Its name, such as "sm_80". Code for it may be for "sm_90a", which says more."""
        return "sm_{}{}".format(*self.capability)

    @property
    def shared_memory(self) -> int:
        """How many bytes of shared memory one block may have."""
        return _CARDS[self.capability].shared_kib << 10

    @property
    def properties(self) -> SimpleNamespace:
        """What torch.cuda.get_device_properties would tell."""
        card, (major, minor) = _CARDS[self.capability], self.capability
        return SimpleNamespace(
            name=card.name,
            major=major,
            minor=minor,
            gcnArchName="",
            is_integrated=0,
            warp_size=32,
            multi_processor_count=card.processors,
            regs_per_multiprocessor=1 << 16,
            max_threads_per_multi_processor=card.threads,
            max_threads_per_block=1024,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 1024,
            L2_cache_size=4 << 20,
            total_memory=16 << 30,
        )


def parse_gpus(texts: Iterable[str]) -> tuple[AbsentGpu, ...]:
    """Reads compute capabilities such as "8.0" and "8.0+ptx", each of which is given once.

    Raises:
        UsageError: One is unknown, is given twice, or has no PTX that newer GPUs run.
    """
    found: dict[tuple[int, int], AbsentGpu] = {}
    for text in texts:
        match = re.fullmatch(r"(\d{1,2})\.(\d)(\+ptx)?", text)
        capability = (int(match[1]), int(match[2])) if match else (0, 0)
        if match is None or capability not in _CARDS:
            known = ", ".join("{}.{}".format(*each) for each in _CARDS)
            raise UsageError(f"unknown GPU architecture {text!r}", hint=f"Give native, native+ptx or one of {known}.")
        if capability in found:
            raise UsageError(f"the GPU architecture {match[1]}.{match[2]} was given twice", hint="Give each once.")
        if match[3] and capability >= (9, 0):
            raise UsageError(
                f"there is no PTX for GPUs newer than {match[1]}.{match[2]}: Triton's code for it runs on no other",
                hint="Give +ptx for 7.5 to 8.9, and the newer GPUs' own architectures beside them.",
            )
        found[capability] = AbsentGpu(capability, ptx=match[3] is not None)
    return tuple(found.values())


def believe_in(gpu: AbsentGpu) -> None:
    """Makes torch, Inductor and Triton of this process take a GPU for the only one. Nothing can be run on it.

    Raises:
        ExportError: This torch asks in another way.
    """
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: _DEVICE,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: gpu.properties,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "_exchange_device": lambda device: _DEVICE,
        "_maybe_exchange_device": lambda device: _DEVICE,
        # Tracing keeps the generator's state, which it does not use.
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }
    asked = {name: vars(torch.cuda).get(name) for name in answers}
    for name, answer in answers.items():
        _put(torch.cuda, name, answer)
    _answer_inductor(asked, answers)
    _answer_triton(gpu)


def _answer_inductor(asked: Mapping[str, Any], answers: Mapping[str, Callable[..., Any]]) -> None:
    from torch._dynamo import device_interface
    from torch._inductor import graph, utils
    from torch._inductor.codegen.cuda import cuda_env
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import hints
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    interface = device_interface.CudaInterface
    for key, value in list(vars(interface).items()):
        for name, original in asked.items():
            if isinstance(value, staticmethod) and value.__func__ is original:
                setattr(interface, key, staticmethod(answers[name]))
    device_interface.caching_worker_device_properties.clear()
    device_interface.caching_worker_current_devices.clear()
    utils.clear_caches()
    for owner in (_triton, utils, cuda_env, hints.DeviceProperties):
        for value in list(vars(owner).values()):
            clear = getattr(getattr(value, "__func__", value), "cache_clear", None)
            if clear is not None:
                clear()
    _put(fake_tensor, "init_gpu_context", lambda device: None)  # makes a real tensor, where torch is built for CUDA
    # Fake weights have no address: tied ones are one tensor.
    _put(graph, "is_same_tensor", lambda one, other: one is other)

    def without_gpu(start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            torch.cuda.is_available = lambda: False
            try:
                return start(*args, **named)  # writes down its patterns, for which it makes tensors
            finally:
                torch.cuda.is_available = answers["is_available"]

        return call

    for module in (joint_graph, post_grad):
        _put(module, "lazy_init", without_gpu(vars(module)["lazy_init"]))


def _answer_triton(gpu: AbsentGpu) -> None:
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel

    memory = {"max_shared_mem": gpu.shared_memory, "warpSize": 32}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32),
        get_current_device=lambda: _DEVICE,
        get_current_stream=lambda device=_DEVICE: 0,
        get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device: memory, unload_module=lambda module: None),
    )
    triton.runtime.driver.set_active(driver)
    _put(triton_helpers, "set_driver_to_gpu", lambda: None)
    _put(CompiledKernel, "_init_handles", _handles_of_nothing)
    _store_kernels(gpu)


def _handles_of_nothing(kernel: Any) -> None:
    """Gives a kernel what Inductor reads of a loaded one."""
    kernel.module = kernel.function = _DEVICE
    kernel.n_regs = kernel.n_spills = 0
    kernel._run = None


def _store_kernels(gpu: AbsentGpu) -> None:
    """Compiles kernels and stores them, where Inductor would also run them to choose between several forms."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compile_kernels(wrapper: Any) -> None:
        wrapper.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
        scope: dict[str, Any] = {}
        exec(wrapper.kernel_autotune_defs.getvalue(), scope)  # as Inductor does, which wrote it
        for kernel in scope.values():
            if isinstance(kernel, CachingAutotuner):
                _store(kernel, gpu)

    _put(PythonWrapperCodegen, "generate_and_run_autotune_block", compile_kernels)
    _put(CachingAutotuner, "_make_launchers", lambda kernel: None)
    _put(CachingAutotuner, "_dynamic_scale_rblock", lambda kernel: None)


def _store(kernel: Any, gpu: AbsentGpu) -> None:
    """Stores the first form of a kernel that fits the GPU. Each is right; which is the fastest, only the GPU tells."""
    for form in kernel.compile_results:
        if form.kernel.metadata.shared <= gpu.shared_memory:
            kernel.save_gpu_kernel(0, form.make_launcher())
            return
    name = kernel.inductor_meta.get("kernel_name", "a kernel")
    least = min(form.kernel.metadata.shared for form in kernel.compile_results)
    raise ExportError(
        f"{name} needs {least} bytes of shared memory, and a block of {gpu.architecture} has {gpu.shared_memory}",
        hint="Leave this architecture out, or give a Triton kernel of your own a configuration with smaller blocks.",
    )


def _put(owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute that must exist."""
    if name not in vars(owner):
        raise ExportError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which compiling for a GPU that is not here "
            "needs to replace",
            hint=f"Export with torch {exporting_torches()}, or on a machine with that GPU.",
        )
    setattr(owner, name, value)

"""Compiles a traced method for a GPU that is not here, in a fork: nothing of a GPU is asked for or run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.child.forked import in_fork
from exportkit.child.messages import Failed, Message, decode, encode
from exportkit.errors import CompilerError, ExportError
from exportkit.export.compile.absent_gpu import AbsentGpu, believe_in
from exportkit.export.compile.program_weights import tensor_identity
from exportkit.package.elf import read_elf
from exportkit.package.manifest import Target

# Inductor times a padded product against a plain one, and reads small or uniform constants into the code.
WITHOUT_GPU: Mapping[str, Any] = {
    "shape_padding": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "compile_threads": 1,  # otherwise other processes compile, which see no GPU
}
_DEVICE = torch.device("cuda", 0)
_DRIVER = "libcuda.so.1"
# What the code calls in the driver, which a machine without a GPU does not have.
_CALLED = (
    *("cuFuncSetAttribute", "cuGetErrorString", "cuGetErrorName", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cuModuleLoad", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload", "cuTensorMapEncodeTiled"),
)


class Made(Message, frozen=True):
    """What the fork made: the target, its files, and the program's name of each constant that the code reads."""

    target: Target
    files: tuple[str, ...]
    constants: dict[str, str]


Compile = Callable[[torch.export.ExportedProgram, torch.device], tuple[Target, list[Path], Mapping[str, torch.Tensor]]]


def compile_absent(
    program: torch.export.ExportedProgram, gpu: AbsentGpu, folder: Path, compile_program: Compile
) -> tuple[Target, list[Path], dict[str, torch.Tensor]]:
    """Compiles a program for a GPU that is not here.

    Args:
        program: The program, on any device.
        gpu: The GPU.
        folder: An existing folder for files.
        compile_program: Is called in the fork with the program as one of the GPU, whose weights have no values.

    Returns:
        The target, its files, and the constants that its code reads, which are the program's own tensors.

    Raises:
        CompilerError: A compiler refused the code, or CUDA's headers are missing.
        ExportError: Inductor needs the GPU for this program, or made a constant that has no value here.
    """
    answer = _in_fork(lambda: _compile(program, gpu, folder, compile_program))
    if isinstance(answer, Failed):
        error = answer.exception()
        if isinstance(error, RuntimeError):
            raise ExportError(
                f"{gpu.architecture} is not here, and this model cannot be compiled without it: {answer.message}",
                hint=f"Export on a machine with that GPU, and `exportkit package` both artifacts. {answer.hint or ''}",
            )
        raise error
    values = {
        name: tensor
        for name, tensor in {**program.constants, **program.state_dict}.items()
        if isinstance(tensor, torch.Tensor)
    }
    if missing := [constant for constant, name in answer.constants.items() if name not in values]:
        raise ExportError(
            f"the compiler computed the constant {missing[0]}, for which it needs {gpu.architecture}",
            hint="Export on a machine with that GPU, and `exportkit package` both artifacts.",
        )
    constants = {constant: values[name] for constant, name in answer.constants.items()}
    return answer.target, [Path(file) for file in answer.files], constants


def _in_fork(work: Callable[[], Made]) -> Made | Failed:
    """Runs work in a fork. Its memory is this process's, so that neither program nor operators are sent."""

    def answer() -> bytes:
        torch.set_num_threads(1)
        try:
            return encode(work())
        except Exception as error:  # anything that Inductor raises
            return encode(Failed.of(error))

    body = in_fork(answer)
    if isinstance(body, str):
        raise ExportError(f"the process that compiled for a GPU that is not here {body}")
    answered: Made | Failed = decode(body, Made | Failed)
    return answered


def _compile(program: torch.export.ExportedProgram, gpu: AbsentGpu, folder: Path, compile_program: Compile) -> Made:
    from torch.utils import cpp_extension  # imported late: it imports setuptools

    believe_in(gpu)
    cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = cuda_home()
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [os.environ.get("LIBRARY_PATH"), str(_driver(folder))]))
    placed = _without_values(program)
    names = {id(tensor): name for name, tensor in {**placed.constants, **placed.state_dict}.items()}
    target, files, constants = compile_program(placed, _DEVICE)
    elsewhere = [name for name, tensor in constants.items() if tensor.device.type != _DEVICE.type]
    if elsewhere:
        raise ExportError(
            f"the code for cuda takes the tensor {elsewhere[0]} on the CPU, which torch 2.11 cannot set from outside",
            hint="Make it a buffer, which moves with the model.",
        )
    if not any(_DRIVER in read_elf(file).needed for file in files if file.suffix == ".so"):
        raise CompilerError(f"the compiled code was not linked with {_DRIVER}, so that it could not be loaded")
    return Made(target, tuple(map(str, files)), {name: names.get(id(t), name) for name, t in constants.items()})


def _without_values(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program of the GPU with weights that have a shape alone. The given one can be used no more."""
    values = [value for node in program.graph.nodes for value in tree_leaves(node.meta.get("val"))]
    known = [value for value in values if isinstance(value, torch._subclasses.FakeTensor)]
    for value in known:
        value.constant = None  # torch would compute with it on the GPU
    mode = known[0].fake_mode
    made: dict[Any, torch.Tensor] = {}

    def fake(name: str, tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)
        if isinstance(tensor, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=False)
        return made.setdefault(tensor_identity(name, tensor), plain)

    for tensors in (program.state_dict, program.constants):
        tensors.update({name: fake(name, t) for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    program._example_inputs = tree_map_only(torch.Tensor, lambda t: fake(str(id(t)), t), program.example_inputs)
    return move_to_device_pass(program, _DEVICE)


def cuda_home() -> str:
    """Returns the folder of CUDA's headers. No driver is needed.

    Raises:
        CompilerError: They are not here.
    """
    from torch.utils import cpp_extension

    for home in _cuda_folders(cpp_extension.CUDA_HOME):
        # NVIDIA's wheels for running CUDA have the first alone.
        if all((Path(home) / "include" / header).is_file() for header in ("cuda.h", "crt/host_defines.h")):
            return home
    raise CompilerError(
        "code for a GPU needs CUDA's headers (cuda.h), which are not here",
        hint="Install the CUDA toolkit and name its folder with CUDA_HOME. No GPU or driver is needed.",
    )


def _cuda_folders(known: str | None) -> Iterator[str]:
    yield from filter(None, [os.environ.get("CUDA_HOME"), known])
    yield from map(str, sorted(Path(torch.__file__).parents[1].glob("nvidia/cu*")))
    yield "/usr/local/cuda"
    yield from map(str, sorted(Path("/usr/local").glob("cuda-*"), reverse=True))


def _driver(folder: Path) -> Path:
    """Makes a library that stands for the driver's while code is linked, as that of the CUDA toolkit does."""
    place = folder / "driver"
    place.mkdir(exist_ok=True)
    source = place / "libcuda.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in _CALLED))
    compiler = shutil.which("cc") or shutil.which("gcc") or "g++"
    command: Sequence[str] = [compiler, "-shared", "-fPIC", "-x", "c", str(source), f"-Wl,-soname,{_DRIVER}"]
    try:
        subprocess.run([*command, "-o", str(place / "libcuda.so")], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(f"the C compiler cannot make a library: {getattr(error, 'stderr', error)}") from error
    return place

"""ARR-COC's CPU operators compiled for aarch64, on their own samples, against the same operators on this machine.

No torch is there: call_operator.cpp has what the library needs of it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit.arr_coc.ops import SPECS, OpSpec, Sample
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.sample import tensors
from tests.aarch64.emulated import COMPILER, LIBRARIES, STAND_IN, compiled, emulated, needs_an_emulator

pytestmark = needs_an_emulator
CPU = torch.device("cpu")
# torch's numbers: c10/core/ScalarType.h
DTYPES = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
          torch.float64: 7, torch.bool: 11, torch.bfloat16: 15}  # fmt: skip
BY_NUMBER = {number: dtype for dtype, number in DTYPES.items()}
# What is not an element of the answer's tolerance: a sum of many numbers in another order.
SLACK = 4
ELEMENTS = 30_000  # of a sample's tensors at most: an emulator is slow


class Operators:
    """A process with the library, which calls one operator at a time."""

    def __init__(self, program: Path, folder: Path) -> None:
        library = LIBRARIES / "arr_coc" / "lib" / "libarr_coc_cpu.so"
        command = emulated("-E", f"LD_LIBRARY_PATH={STAND_IN}", program, library)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder

    def call(self, spec: OpSpec, sample: Sample) -> list[Tensor]:
        """What the operator gives, and its tensor arguments after the call."""
        given = dict(sample.kwargs)
        schema = spec.overload._schema
        arguments = [
            sample.args[n] if n < len(sample.args) else given.get(argument.name, argument.default_value)
            for n, argument in enumerate(schema.arguments)
        ]
        words = [self._word(n, value, "?" in str(a.real_type) or "Optional" in str(a.real_type))
                 for n, (value, a) in enumerate(zip(arguments, schema.arguments))]  # fmt: skip
        answers = self._ask(spec.name, str(len(schema.returns)), str(self._folder / "out"), *words)
        outputs = [self._read(self._folder / f"out{n}", answer) for n, answer in enumerate(answers)]
        after = [
            self._read(self._folder / f"in{n}", [DTYPES[value.dtype], *value.shape])
            for n, value in enumerate(arguments)
            if isinstance(value, Tensor)
        ]
        return outputs + after

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _word(self, number: int, value: Any, optional: bool) -> str:
        if optional:
            return "o:" if value is None else f"o:{self._word(number, value, False)}"
        if isinstance(value, Tensor):
            path = self._folder / f"in{number}"
            path.write_bytes(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
            return " ".join(map(str, [f"t:{DTYPES[value.dtype]}", value.dim(), *value.shape, path]))
        if isinstance(value, (list, tuple)):
            return "l:" + " ".join(repr(float(item)) for item in value)
        return f"d:{value!r}" if isinstance(value, float) else f"i:{int(value)}"

    def _ask(self, *words: str) -> list[list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()
        lines = []
        while (line := self._process.stdout.readline()).strip():
            lines.append([int(word) for word in line.split()])
        assert line, f"the process ended with status {self._process.wait()} on {words}"
        return lines

    def _read(self, path: Path, described: list[int]) -> Tensor:
        dtype, *shape = described
        content = bytearray(path.read_bytes())
        flat = torch.frombuffer(content, dtype=BY_NUMBER[dtype]) if content else torch.empty(0, dtype=BY_NUMBER[dtype])
        return flat.view(shape)


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    include = Path(torch.__file__).parent / "include"
    flags = [
        "-std=c++20",
        "-O1",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-isystem",
        str(include),
        "-rdynamic",
        "-ldl",
    ]
    program = compiled(Path(__file__).with_name("call_operator.cpp"), flags)
    process = Operators(program, tmp_path_factory.mktemp("operators"))
    yield process
    process.close()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_an_operator_gives_on_aarch64_what_it_gives_here(spec: OpSpec, operators: Operators) -> None:
    compared = 0
    for dtype in spec.dtypes:
        allowed = tuple(SLACK * limit for limit in spec.tolerance(dtype))
        for sample in spec.samples(CPU, dtype):
            if sample.elements > ELEMENTS:
                continue
            here = sample.copied()
            result = spec.overload(*here.args, **here.kwargs)
            expected = tensors(result) + [t.contiguous() for t in here.tensors]
            actual = operators.call(spec, sample)
            difference = first_difference(actual, expected, lambda _, allowed=allowed: allowed)
            assert difference is None, f"{sample.label}, {dtype}: {difference}"
            compared += 1
    assert compared >= len(spec.dtypes)


def test_the_libraries_are_for_aarch64_and_their_loops_use_neon() -> None:
    for path in LIBRARIES.rglob("*.so"):
        assert path.read_bytes()[18:20] == b"\xb7\0", path  # EM_AARCH64
    objdump = COMPILER.replace("g++", "objdump")
    library = LIBRARIES / "arr_coc" / "lib" / "libarr_coc_cpu.so"
    code = subprocess.run([objdump, "-d", str(library)], capture_output=True, text=True, check=True).stdout
    for instruction in ("fmla\tv", "fcvtl", "fcvtn"):
        assert instruction in code

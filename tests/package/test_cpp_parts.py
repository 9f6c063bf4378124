"""Parts of the library against what they are in Python: safetensors, str, and its own errors."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from exportkit import errors
from tests.cpp_reader import FLAGS, SOURCES, CppReader, program
from tests.subprocesses import output_of


@pytest.fixture(scope="module")
def cpp() -> Iterator[CppReader]:
    reader = CppReader(program())
    yield reader
    reader.close()


def test_the_classes_of_the_two_languages_have_one_name_and_one_exit_code() -> None:
    header = (SOURCES / "errors.h").read_text()
    for name, code in re.findall(r'ErrorClass k\w+\{"(\w+)", (\d)\d\d\}', header):
        assert getattr(errors, name).exit_code == int(code)
    in_cpp = set(re.findall(r'\{"(\w+)", 3\d\d\}', header))
    in_python = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.PackageError)
    }
    # ONNX and programs are Python's.
    assert in_cpp == in_python - {"PackageError", "OnnxFileError", "UntrustedProgramError"}


@pytest.mark.slow_but("fuzz_safetensors")
@pytest.mark.parametrize("harness", sorted((SOURCES / "tests").glob("fuzz_*.cpp")), ids=lambda path: path.stem)
def test_the_fuzzing_harnesses_compile(harness: Path) -> None:
    program()  # or the reason why nothing can be compiled
    command = [os.environ.get("CXX", "g++"), *FLAGS, "-fsyntax-only", str(harness)]
    output_of(*command)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that says a file's SHA-256 and CRC-32, if they are the same in all pieces and by all ways."""
    program()
    built = tmp_path_factory.mktemp("digests") / "check_digests"
    source = SOURCES / "tests" / "check_digests.cpp"
    subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, str(source), "-ldl", "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("length", [0, 1, 15, 16, 55, 56, 63, 64, 65, 119, 120, 127, 128, 129, 255, 1000, 1024])
def test_digests_of_any_length_in_any_pieces_and_by_any_way(digests: Path, length: int, tmp_path: Path) -> None:
    content = np.random.default_rng(length).bytes(length)
    (tmp_path / "file").write_bytes(content)
    done = subprocess.run([digests, tmp_path / "file"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(content).hexdigest(), str(zlib.crc32(content))]


# --- safetensors ------------------------------------------------------------------------------------------------------

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros((0, 3), np.int64),
    "scalar": np.array(7, np.uint8),
    "flags": np.array([True, False]),
    "half": np.ones(3, np.float16),
    'odd "name"\\\n\t\r\b\f\0\x1f\x7f\u00e9': np.ones((1, 1), np.float64),
    "z": np.ones(5, np.complex64),
}


def test_tensors_are_read_as_safetensors_reads_them_and_written_byte_for_byte_so(
    cpp: CppReader, tmp_path: Path
) -> None:
    data = safetensors.numpy.save(TENSORS)
    (tmp_path / "x").write_bytes(data)
    answer = cpp.ask("safetensors", tmp_path / "x", tmp_path / "again")["value"]
    assert {name: rest for name, *rest in answer} == {
        name: [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        for name, value in TENSORS.items()
    }
    assert (tmp_path / "again").read_bytes() == data


A = '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
ONE = '{"dtype":"U8","shape":[1],"data_offsets":'
FILES: dict[str, tuple[str | bytes, bytes]] = {
    "plain": (A, b"xy"),
    "space around": (f" {A} \n", b"xy"),
    "a NUL after it": (f"{A}\0", b"xy"),
    "extra data": (A, b"xyz"),
    "missing data": (A, b"x"),
    "unknown dtype": (A.replace("U8", "U7"), b"xy"),
    "dtype of another case": (A.replace("U8", "u8"), b"xy"),
    "sizes do not match": (A.replace("U8", "U16"), b"xy"),
    "unknown key": (A.replace('"shape"', '"x":{"y":[1]},"shape"'), b"xy"),
    "no shape": (A.replace('"shape":[2],', ""), b"xy"),
    "shape is null": (A.replace("[2]", "null"), b"xy"),
    "negative size": (A.replace("[2]", "[-2]"), b"xy"),
    "minus zero": ('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b""),
    "a float for a size": (A.replace("[2]", "[2.0]"), b"xy"),
    "overflow": (A.replace("[2]", "[4611686018427387904,4,2]"), b"xy"),
    "overflow to what fits": (A.replace("[2]", "[4294967296,4294967296,2]"), b"xy"),
    "overflow, then zero": ('{"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}', b""),
    "a size of 2^64": (A.replace("[2]", "[18446744073709551616]"), b"xy"),
    "three offsets": (A.replace("[0,2]", "[0,2,2]"), b"xy"),
    "offsets backwards": (A.replace("[0,2]", "[2,0]"), b"xy"),
    "a hole": (f'{{"a":{ONE}[0,1]}},"b":{ONE}[2,3]}}}}', b"xyz"),
    "an overlap": (f'{{"a":{ONE}[0,1]}},"b":{ONE}[0,1]}}}}', b"x"),
    "in another order": (f'{{"b":{ONE}[1,2]}},"a":{ONE}[0,1]}}}}', b"xy"),
    "a key of a tensor twice": (A.replace('"dtype"', '"dtype":"U8","dtype"'), b"xy"),
    "metadata": (A.replace('{"a"', '{"__metadata__":{"k":"v"},"a"'), b"xy"),
    "metadata is null": ('{"__metadata__":null}', b""),
    "metadata of a number": ('{"__metadata__":{"k":1}}', b""),
    "metadata is a list": ('{"__metadata__":[]}', b""),
    "nothing": ("{}", b""),
    "an empty header": ("", b""),
    "a list": ("[]", b""),
    "null": ("null", b""),
    "a scalar": ('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"abcd"),
    "half of a pair": (A.replace('"a"', '"\\ud800"'), b"xy"),
    "an escaped name": (A.replace('"a"', '"\\u0061"'), b"xy"),
    "a byte order mark": (f"\ufeff{A}", b"xy"),
    "no UTF-8": (b'{"\xff":1}', b""),
    "a control character": (A.replace('"a"', '"a\n"'), b"xy"),
    "deep": (A.replace('"shape"', f'"x":{"[" * 100}{"]" * 100},"shape"'), b"xy"),
    "too deep": (A.replace('"shape"', f'"x":{"[" * 140}{"]" * 140},"shape"'), b"xy"),
    "an infinite number": (A.replace('"shape"', '"x":1e999,"shape"'), b"xy"),
}
# What the reference implementation takes though it means two things, or is not what its documentation says.
STRICTER: dict[str, tuple[str | bytes, bytes]] = {
    "a name twice": (f'{{"a":{ONE}[0,1]}},"a":{ONE}[0,1]}}}}', b"x"),
    "metadata with a key twice": ('{"__metadata__":{"a":"1","a":"2"}}', b""),
    "a list for a tensor": ('{"a":["U8",[2],[0,2]]}', b"xy"),
    "an object for a dtype": ('{"a":{"dtype":{"U8":null},"shape":[2],"data_offsets":[0,2]}}', b"xy"),
    "a size beyond int64": ('{"a":{"dtype":"U8","shape":[0,18446744073709551615],"data_offsets":[0,0]}}', b""),
}


def file_of(header: str | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(text)) + text + data


CUT = {
    f"{length} bytes of a header of {claimed}": struct.pack("<Q", claimed)[:length]
    for length in (0, 7, 8)
    for claimed in (1, 100_000_001, 2**63, 2**64 - 1, 2**64 - 8)
}
CASES = CUT | {case: file_of(*parts) for case, parts in {**FILES, **STRICTER}.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_taken_where_safetensors_takes_it_if_it_can_be_read_in_one_way(
    cpp: CppReader, tmp_path: Path, case: str
) -> None:
    (tmp_path / "x").write_bytes(CASES[case])
    try:
        expected: dict[str, Any] | None = {name: info["shape"] for name, info in safetensors.deserialize(CASES[case])}
    except safetensors.SafetensorError:
        expected = None
    assert expected is None or case not in CUT
    answer = cpp.ask("safetensors", tmp_path / "x")
    found = {name: shape for name, _, shape, _ in answer["value"]} if "ok" in answer else None
    if case in STRICTER:
        assert expected is not None
        assert answer["error"] is None
    else:
        assert found == expected, answer

"""Recorded cases whose safetensors header is absurd: refused as a CaseError, in little memory, and never unpickled."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.errors import CaseError
from exportkit.package.archive import PackageReader, write_package
from exportkit.runtime.model import Cases
from tests.package import samples


def file(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"0.input.0": first, "0.output.0": second}


IMAGE, SCORES = tensor("F32", [2, 3], 0, 24), tensor("F32", [2, 1], 24, 32)
WHOLE = both(IMAGE, SCORES)
DATA = bytes(32)


def read(path: Path, content: bytes) -> Any:
    write_package(path, samples.manifest(), {**samples.RECORDS, samples.CASE: content})
    with PackageReader(path) as reader:
        return Cases(reader, torch.device("cpu"))[0]


def test_control_a_plain_file_is_a_case(tmp_path: Path) -> None:
    case = read(tmp_path / "case.pt2", file(WHOLE, DATA))
    assert case.args[0].shape == (2, 3)
    assert case.outputs["scores"].shape == (2, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        file(b""),
        file(b"{}", length=2**64 - 1),
        file(b"{}", length=200 << 20),
        file(b"[" * 100_000),
        file(b'{"0.input.0":' * 10_000),
        file(WHOLE, DATA[:-1]),
        file(both(tensor("F32", [2, 3], 2**63, 2**63 + 24), SCORES), DATA),
        file(both(IMAGE, tensor("F32", [2, 1], 28, 36)), DATA + bytes(4)),
        file(both(tensor("F8_E8M0", [2, 12], 0, 24), SCORES), DATA),
        file(both(tensor("F4", [2, 24], 0, 24), SCORES), DATA),
        file(both(tensor("I64", [3], 0, 24), SCORES), DATA),
        file(both(tensor("F32", [1, 6], 0, 24), SCORES), DATA),
        file(both(tensor("F32", [1] * 5000 + [6], 0, 24), SCORES), DATA),
        file({"0.input.0": IMAGE, "0.output.1": SCORES}, DATA),
        file({**WHOLE, "extra": tensor("F32", [0], 32, 32)}, DATA),
        file({**WHOLE, "0.input.0\0": tensor("F32", [0], 32, 32)}, DATA),
        file(json.dumps(WHOLE).replace('"0.output.0"', '"0.input.0"').encode(), DATA),
        file({**WHOLE, "__metadata__": {"a": {"b": "c"}}}, DATA),
        b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        b"PK\x03\x04" + bytes(100),
    ],
)
def test_an_absurd_header_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CaseError, match=samples.CASE):
        read(tmp_path / "case.pt2", content)

"""The histograms of the cases agree with torch and with the verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from exportkit import accuracy
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import DTYPES
from exportkit.report import case_numbers
from exportkit.report.untrusted import LeftOut, PageLimits
from exportkit.runtime.case_tensors import read_case
from tests.artifacts import artifact
from tests.report.written import package

STORED = sorted(DTYPES - {"complex32", "complex128"})  # safetensors has no such dtypes


@pytest.mark.parametrize("dtype", STORED)
def test_tensors_of_every_dtype_have_torch_s_values(dtype: str):
    kind = getattr(torch, dtype)
    if dtype.startswith("float8") or dtype == "bfloat16":
        width = torch.uint8 if dtype.startswith("float8") else torch.int16
        codes = torch.arange(256) if dtype.startswith("float8") else torch.arange(-(1 << 15), 1 << 15)
        tensor = codes.to(width).view(kind)
    else:
        tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(kind)
    expected = tensor.float().numpy() if kind.is_floating_point and kind.itemsize < 4 else tensor.numpy()
    found = case_numbers.tensors_of(save({"t": tensor}))["t"]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def test_errors_are_those_of_the_verdicts():
    path = artifact("patches-program")
    with PackageReader(path) as reader:
        outputs, cases = reader.manifest.call.outputs, reader.manifest.cases
        left_out = LeftOut()
        numbers = {each["name"]: each for each in case_numbers.case_numbers(reader, left_out)}
        read = [read_case(reader, case) for case in cases]
    assert left_out.notes == []
    compared = 0
    for index, output in enumerate(outputs):
        found = numbers[output.name]
        values = torch.cat([case.calls[0].outputs[index].flatten().double() for case in read])
        assert found["values"]["count"] == values.numel()
        assert found["values"]["low"] == values.min().item()
        assert found["values"]["high"] == values.max().item()
        assert sum(found["values"]["bars"]) == values.numel()
        if (errors := found.get("errors")) is None:
            continue
        compared += 1
        assert errors["count"] == errors["exact"] + errors["infinite"] + sum(errors["bars"])
        recorded = [case.calls[0].accuracy[output.name] for case in cases]
        assert errors["greatest"] == max(each.greatest for each in recorded)
        allowed = accuracy.allowed_error(m.Accuracy(rms=errors["rms"], greatest=errors["greatest"]), output.dtype)
        assert (errors["rms_allowed"], errors["greatest_allowed"]) == (allowed.rms, allowed.greatest)
        if output.tolerance.rows_of is None and errors["greatest"]:
            decade = int(np.floor(np.log10(errors["greatest"]) * errors["per_decade"]))
            highest = max(i for i, height in enumerate(errors["bars"]) if height)
            assert highest == decade - errors["lowest"] * errors["per_decade"]
    assert compared


def test_each_error_is_that_of_the_verdicts():
    reference = torch.tensor([1.0, -2.0, 0.0, float("inf"), float("nan"), 1e-30, 5.0], dtype=torch.float64)
    values = torch.tensor([1.1, -2.0, 0.25, float("inf"), float("nan"), float("inf"), float("nan")])
    typical = accuracy.typical_magnitude(reference)
    expected = [
        accuracy.measure_error(reference[i : i + 1], values[i : i + 1], typical=typical).size.greatest
        for i in range(len(values))
    ]
    np.testing.assert_array_equal(case_numbers._errors(values.numpy(), reference.numpy()), expected)


def with_case(path: Path, content: bytes) -> Path:
    """A package whose only case has this content."""
    from exportkit.package.archive import write_package

    with PackageReader(package(path.with_name("plain.pt2"))) as reader:
        program = reader.read("exportkit/program.pt2")
        record = {"exportkit/program.pt2": program, "exportkit/cases/0.safetensors": content}
        write_package(path, reader.manifest, record)
    return path


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"garbage", "it is not a safetensors file"),
        (save({"0.input.0": torch.ones(4)}), "it has no value of y"),
    ],
)
def test_a_case_that_cannot_be_read_is_noted(content: bytes, note: str, tmp_path: Path):
    with PackageReader(with_case(tmp_path / "p.pt2", content)) as reader:
        left_out = LeftOut()
        assert case_numbers.case_numbers(reader, left_out) == [{"name": "y", "method": "forward", "dtype": "float32"}]
    (noted,) = left_out.notes
    assert note in noted


def test_values_that_are_not_numbers_are_counted(tmp_path: Path):
    values = torch.tensor([float("nan"), float("inf"), 0.0, 2.0])
    content = save({"0.input.0": torch.ones(4), "0.output.0": values})
    with PackageReader(with_case(tmp_path / "p.pt2", content)) as reader:
        (found,) = case_numbers.case_numbers(reader, LeftOut())
    expected = {"count": 4, "nan": 1, "infinite": 1, "zero": 1, "low": 0.0, "high": 2.0, "mean": 1.0}
    assert {name: found["values"][name] for name in expected} == expected


def test_more_than_can_be_read_is_noted(tmp_path: Path):
    left_out = LeftOut(PageLimits(case_bytes=10))
    with PackageReader(package(tmp_path / "p.pt2")) as reader:
        case_numbers.case_numbers(reader, left_out)
    assert left_out.notes == ["exportkit/cases/0.safetensors in the histograms: the cases take more than 0 MiB"]

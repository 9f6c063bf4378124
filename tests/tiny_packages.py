"""Fixtures of a small package, which tests of the runtime, of the commands and of ONNX share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime import tiny


@pytest.fixture(scope="session")
def tiny_files() -> dict[str, Path]:
    """The compiled code of tests.runtime.tiny, by record."""
    return tiny.tiny_files()


@pytest.fixture(scope="session")
def tiny_package(tiny_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with two recorded cases and no custom operator."""
    records, cases = {}, []
    for index, (batch, gh) in enumerate([(1, 1), (4, 6)]):
        torch.manual_seed(index)
        args, kwargs = tiny.example(batch, gh)
        answer = tiny.Tiny()(*args, **kwargs)
        outputs = [*answer["regions"], answer["rest"][0]]
        name = f"exportkit/cases/{index}.safetensors"
        records[name] = tiny.case(args, kwargs, outputs)
        cases.append(tiny.one_call(name, batch=batch, gh=gh))
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt2"
    return tiny.write(path, tiny_files, extra=records, cases=tuple(cases))

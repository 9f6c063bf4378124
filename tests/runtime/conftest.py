"""Packages that the runtime's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportkit.package.manifest import Case
from exportkit.runtime.native import library_path
from tests.runtime import tiny


@pytest.fixture(scope="session")
def tiny_files() -> dict[str, Path]:
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
        cases.append(Case(record=name, sizes={"batch": batch, "gh": gh}))
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt2"
    return tiny.write(path, tiny_files, extra=records, cases=tuple(cases))


@pytest.fixture(params=["cpp", "python"])
def each_runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs compiled code, the C++ runtime where it was built and then torch's binding; processes inherit it."""
    if request.param == "cpp" and not library_path().exists():
        pytest.skip(f"the C++ runtime was not built for torch {torch.__version__}")
    monkeypatch.setenv("EXPORTKIT_RUNTIME", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds what another unpacked, nor touches the user's cache."""
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "exportkit-cache"))

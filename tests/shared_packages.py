"""Fixtures of packages and weights that tests of several folders share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.arr_coc import LIBRARIES
from tests.artifacts import packaged
from tests.fixtures import softpool_library
from tests.runtime import fine_tunes, meeting, stateful, tiny
from tests.serve.engine import rows, ticker


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


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """The weights of another fine-tune of `weighted` as a file, tied ones under one name."""
    state = fine_tunes.state(1)
    del state["tied"]
    return fine_tunes.save(tmp_path / "tuned.safetensors", state)


def package(name: str, write: Callable[[Path], object]) -> Any:
    """The fixture NAME_package: the path of a package that is written once."""

    @pytest.fixture(scope="session", name=f"{name}_package")
    def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp(name) / f"{name}.pt2"
        write(path)
        return path

    return written


def write_meeting(path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.rand(4, 8), torch.rand(4, 8, 2))
    meeting.write(path, [(inputs, meeting.answer(*inputs))])


# Its operator waits for other calls of it, and raises if it is told to.
meeting_package = package("meeting", write_meeting)
# Independent rows, and dtypes of every kind, bfloat16 among them; and rows that influence one another.
rows_package = package("rows", lambda path: rows.write(path, rows.example(3), rows.example(1)))
coupled_package = package("coupled", lambda path: rows.write(path, rows.example(3, 1.0)))
# State in independent rows, and methods over a state that has no rows.
ticker_package = package("ticker", ticker.write)
recorder_package = package("recorder", stateful.write)
# Somebody else's operators; and another build of them, which crash, stall or raise when they are told to.
softpool_package = package("softpool", lambda path: packaged("softpool", path, softpool_library.build()))
misbehaving_package = package("misbehaving", lambda path: packaged("softpool", path, softpool_library.misbehaving()))
# Our operators.
patches_package = package("patches", lambda path: packaged("patches", path, LIBRARIES["cpu"]))
arr_coc_package = package("arr_coc", lambda path: packaged("arr-coc", path, LIBRARIES["cpu"]))
# Rows of which some values are refused; scalars, and outputs whose sizes depend on values.
words_package = package("words", lambda path: packaged("words", path))
lookups_package = package("lookups", lambda path: packaged("lookups", path))

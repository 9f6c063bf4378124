"""A tritonserver that the tests share, and packages for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exportkit.arr_coc import LIBRARIES
from exportkit.package.assemble import assemble
from exportkit.package.describe_library import describe_library
from tests.artifacts import artifact
from tests.fixtures import softpool_library
from tests.runtime import stateful
from tests.serve.engine import rows, ticker
from tests.triton_backend.triton_server import Triton


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[Triton]:
    """A server without models, that has crashed in no test."""
    server = Triton(tmp_path_factory.mktemp("triton"))
    try:
        yield server
        assert server.process.poll() is None, server.log[-3000:]
    finally:
        server.close()
    assert "AddressSanitizer" not in server.log, server.log[-8000:]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the packages."""
    return tmp_path_factory.mktemp("packages")


def package(name: str, write: Callable[[Path], object]) -> Any:
    """The fixture NAME_package: the path of a package that is written once."""

    @pytest.fixture(scope="session", name=f"{name}_package")
    def written(packages: Path) -> Path:
        path = packages / f"{name}.pt2"
        write(path)
        return path

    return written


def assembled(name: str, *libraries: Path) -> Callable[[Path], object]:
    """Writes a package of an artifact and operator libraries."""
    return lambda path: assemble([artifact(name)], [(each, describe_library(each)) for each in libraries], path)


# Independent rows, and dtypes of every kind, bfloat16 among them; and rows that influence one another.
rows_package = package("rows", lambda path: rows.write(path, rows.example(3), rows.example(1)))
coupled_package = package("coupled", lambda path: rows.write(path, rows.example(3, 1.0)))
# State in independent rows, and methods over a state that has no rows.
ticker_package = package("ticker", ticker.write)
recorder_package = package("recorder", stateful.write)
# Somebody else's operators, and ours.
softpool_package = package("softpool", lambda path: assembled("softpool", softpool_library.build())(path))
arr_coc_package = package("arr_coc", lambda path: assembled("arr-coc", LIBRARIES["cpu"])(path))
# Rows of which some values are refused; scalars, and outputs whose sizes depend on values.
words_package = package("words", assembled("words"))
lookups_package = package("lookups", assembled("lookups"))

"""A tritonserver that the tests share, and packages for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def rows_package(packages: Path) -> Path:
    """Independent rows, and dtypes of every kind, bfloat16 among them."""
    return rows.write(packages / "rows.pt2", rows.example(3), rows.example(1))


@pytest.fixture(scope="session")
def coupled_package(packages: Path) -> Path:
    """The same, with rows that influence one another in its recorded cases."""
    return rows.write(packages / "coupled.pt2", rows.example(3, 1.0))


@pytest.fixture(scope="session")
def ticker_package(packages: Path) -> Path:
    """State in independent rows."""
    return ticker.write(packages / "ticker.pt2")


@pytest.fixture(scope="session")
def recorder_package(packages: Path) -> Path:
    """Methods over a state that has no rows."""
    return stateful.write(packages / "recorder.pt2")


@pytest.fixture(scope="session")
def softpool_package(packages: Path) -> Path:
    """Somebody else's operators."""
    library = softpool_library.build()
    assemble([artifact("softpool")], [(library, describe_library(library))], packages / "softpool.pt2")
    return packages / "softpool.pt2"


@pytest.fixture(scope="session")
def arr_coc_package(packages: Path) -> Path:
    """Our own operators."""
    library = LIBRARIES["cpu"]
    assemble([artifact("arr-coc")], [(library, describe_library(library))], packages / "arr_coc.pt2")
    return packages / "arr_coc.pt2"


@pytest.fixture(scope="session")
def words_package(packages: Path) -> Path:
    """Rows of which some values are refused."""
    assemble([artifact("words")], [], packages / "words.pt2")
    return packages / "words.pt2"


@pytest.fixture(scope="session")
def lookups_package(packages: Path) -> Path:
    """Scalars, and outputs whose sizes depend on values."""
    assemble([artifact("lookups")], [], packages / "lookups.pt2")
    return packages / "lookups.pt2"

"""A fixture that lets every test which opens a package ask the C++ reader too, with no list of tests to edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.errors import ExportkitError
from exportkit.package import archive
from exportkit.package.archive import PackageReader
from tests.cpp_reader import cpp_reader


class _Said:
    """What of exportkit's errors is raised in a block, which then goes on."""

    error: ExportkitError | None = None

    def __enter__(self) -> _Said:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error if isinstance(error, ExportkitError) else None
        return self.error is not None


@pytest.fixture(autouse=True)
def both_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package that a test opens has the same verdict from both readers, its digests included.

    `from tests.both_readers import both_readers` in a conftest.py is all that the tests beside it need.
    """
    ask = cpp_reader().verdict
    opened = PackageReader.__init__

    def open_twice(self: PackageReader, path: Path, *, file: int | None = None) -> None:
        with _Said() as opening:
            opened(self, path, file=file)
        with _Said() as verifying:
            if opening.error is None:
                self.verify()
        error = opening.error or verifying.error
        assert ask(Path(path)) == (type(error).__name__ if error else None), error
        if opening.error:
            raise opening.error

    monkeypatch.setattr(archive.PackageReader, "__init__", open_twice)

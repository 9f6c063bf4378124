"""Fixtures of the tests with forged packages."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from exportkit.errors import PackageError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest
from tests.aarch64 import emulated
from tests.adversarial.forge import Refused, Taken
from tests.cpp_reader import CppReader, program


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a forged package goes."""
    return tmp_path / "forged.pt2"


@functools.lru_cache(maxsize=1)
def _on_aarch64() -> CppReader:
    return CppReader(program())


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that an attack leaves. There is no policy and no cache but the test's own."""
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "mark"


@pytest.fixture
def taken(file: Path) -> Taken:
    """The manifest of these bytes, which hold."""

    def check(data: bytes) -> Manifest:
        file.write_bytes(data)
        with PackageReader(file) as reader:
            reader.verify()
            return reader.manifest

    return check


@pytest.fixture
def refused(file: Path) -> Refused:
    """Opening these bytes and checking every digest raises this very class, with this in the message."""

    def check(data: bytes, kind: type[PackageError], named: str) -> PackageError:
        file.write_bytes(data)
        with pytest.raises(PackageError) as caught, PackageReader(file) as reader:
            reader.verify()
        assert type(caught.value) is kind, caught.value
        assert named in str(caught.value)
        assert caught.value.exit_code == 3
        if emulated.missing() is None:
            said = _on_aarch64().ask("verify", file)
            message = caught.value.message.removeprefix(f"{file}: ")  # Python names what is no archive at all
            assert (said["error"], said["message"]) == (kind.__name__, message)
        return caught.value

    return check

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from exportkit.registry.registry_client import RegistryOptions
from tests.package import signers
from tests.registry.docker_registry import docker_registry
from tests.registry.lying_registry import LyingRegistry, lying_registry

QUICK = RegistryOptions(first_wait=0.001)


@pytest.fixture(autouse=True)
def _nothing_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `host`."""
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def host(disk: Path) -> Iterator[str]:
    """The address of Docker's registry, with its blobs on `disk`."""
    with docker_registry(disk) as host:
        yield host


@pytest.fixture
def registry() -> Iterator[LyingRegistry]:
    with lying_registry() as registry:
        yield registry


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return signers.package(tmp_path, "net.pt2")


def docker_config(folder: Path, **content: object) -> None:
    """What `docker login` writes."""
    (folder / "docker").mkdir(exist_ok=True)
    (folder / "docker" / "config.json").write_text(json.dumps(content))

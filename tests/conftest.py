"""Fixtures every test shares."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from fnmatch import fnmatch

# Hundreds of processes import the same modules. Python keeps what it compiled, and pytest what it rewrote.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads of torch that wait give up their core: other workers of pytest-xdist, and compilers, need it. Waiting busily,
# tests with small tensors take ten times as long. libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import numpy as np
import pytest
import torch

from exportkit.child.process import use_forkservers
from tests.subprocesses import WITH_TORCH

sys.dont_write_bytecode = False

pytest_plugins = ["tests.package.signers", "tests.shared_packages"]

REQUIRE_CUDA = os.environ.get("EXPORTKIT_REQUIRE_CUDA") == "1"


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from one random state and leaves the caller's as it was."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new_is_collected() -> None:
    """What is tested collects garbage: it would look through the objects of torch and of all tests each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Sets up what depends on how fast the machine is, and how many tests it runs at a time."""
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers inherit it
        # Programs that several tests export are compiled once, and nothing is left in the user's cache.
        folder = tempfile.TemporaryDirectory(prefix="exportkit-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["EXPORTKIT_CACHE"] = f"{folder.name}/cache"
        os.environ["CCACHE_DIR"] = f"{folder.name}/ccache"
    gc.set_threshold(100_000)  # as `exportkit` does: importing creates millions of objects and little garbage
    # Otherwise Inductor compiles and runs ten programs to see whether this CPU has the instructions that it names.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    use_forkservers(WITH_TORCH)
    if config.option.markexpr == "not slow":  # before the modules of tests are imported, which ask for it
        os.environ["EXPORTKIT_FEW_EXAMPLES"] = "1"
    hypothesis.settings.register_profile("exportkit", deadline=None)  # a slow machine is not a failure
    hypothesis.settings.load_profile("exportkit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests, and skips what needs CUDA where there is none and none was promised."""
    quick: dict[str, list[bool]] = {}
    for item in items:
        if slow := _is_slow(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow_but"):
            quick.setdefault(item.nodeid.partition("[")[0], []).append(not slow)
    if wrong := [name for name, variants in quick.items() if len(variants) > 1 and not any(variants)]:
        raise pytest.UsageError(f"slow_but names no variant of {', '.join(wrong)}")
    if REQUIRE_CUDA or torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device (EXPORTKIT_REQUIRE_CUDA=1 makes this a failure)")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


def _is_slow(item: pytest.Item) -> bool:
    """By folder, browser or variant."""
    if "browser" in getattr(item, "fixturenames", ()) or item.path.parent.name in ("aarch64", "examples"):
        return True
    quick = item.get_closest_marker("slow_but")
    variant = item.name.partition("[")[2].removesuffix("]")
    return quick is not None and not any(fnmatch(variant, pattern) for pattern in quick.args)


DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn, never only "the best one here"."""
    return torch.device(request.param)

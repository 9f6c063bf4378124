"""What export replaces within torch stands in one table, fits the torch that runs, and is seen by one thread."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from exportkit.errors import ExportError
from exportkit.export.torch_patches import patched as door
from exportkit.export.torch_patches.patch_table import PATCHES, Patch
from exportkit.export.torch_patches.patched import all_patched, is_needed, misfit, patched
from exportkit.support import EXPORTING_TORCHES
from tests.subprocesses import ROOT

MISFITS = """
from exportkit.export.torch_patches.patched import is_needed, misfit
from exportkit.export.torch_patches.patch_table import PATCHES
print([reason for patch in PATCHES.values() if is_needed(patch) and (reason := misfit(patch))])
"""
EXPORTER = [path for part in ("export", "onnx") for path in (ROOT / "exportkit" / part).rglob("*.py")]


class Owner:
    limit = 1

    def number(self) -> int:
        return 1

    @classmethod
    def name(cls) -> str:
        return "owner"


class Heir(Owner):
    pass


OURS = [
    Patch(f"{__name__}:Owner", "number", "", "", ("(self)",)),
    Patch(f"{__name__}:Owner", "name", "", "", ("(cls)",)),
    Patch(f"{__name__}:Owner", "limit", "", ""),
]


@pytest.fixture(autouse=True)
def _with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATCHES", {**PATCHES, **{patch.key: patch for patch in OURS}})


@pytest.mark.parametrize("key", PATCHES)
def test_each_patch_fits_this_torch(key: str) -> None:
    assert not is_needed(PATCHES[key]) or misfit(PATCHES[key]) is None


@pytest.mark.parametrize("python", filter(None, os.environ.get("EXPORTKIT_TORCH_PYTHONS", "").split(os.pathsep)))
def test_each_patch_fits_the_other_torches(python: str) -> None:
    """`tests/runtime/test_torch_versions.py` says how to make these interpreters."""
    found = subprocess.run([python, "-c", MISFITS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "[]"


def test_each_patch_is_used_and_says_where_torch_hears_of_it() -> None:
    code = "\n".join(path.read_text() for path in EXPORTER if path.name != "patch_table.py")
    used = set(re.findall(r'"([\w.]+)"', code))
    layers = (ROOT / "exportkit" / "export" / "trace" / "recurrent_layers.py").read_text()
    used |= {f"torch.{name}" for name in re.findall(r'"(\w+)"', layers)}
    used |= {f"{name}.forward" for name in re.findall(r'"(\w+)"', layers)}
    assert PATCHES.keys() - used == set()
    upstream = {patch.upstream for patch in PATCHES.values()}
    files = {f"docs/upstream/{path.name}" for path in (ROOT / "docs" / "upstream").glob("*.md")}
    named = {where for where in upstream if not where.startswith("https://github.com/")}
    assert named <= files  # the others are reports of wrong code that is left to eager
    assert all(patch.why.endswith(".") for patch in PATCHES.values())


def test_no_patch_is_kept_that_no_torch_needs() -> None:
    oldest = tuple(map(int, EXPORTING_TORCHES[0].split(".")))
    assert all(tuple(map(int, patch.until.split("."))) > oldest for patch in PATCHES.values() if patch.until)


def failing_while_patched() -> None:
    with patched("Owner.number", lambda number, self: number(self) + 1):
        assert Owner().number() == 2
        raise RuntimeError("inside")


def test_the_original_is_back_after_an_error() -> None:
    before = dict(vars(Owner))
    with pytest.raises(RuntimeError, match="inside"):
        failing_while_patched()
    with all_patched(("Owner.limit", lambda limit: limit + 1), ("Owner.name", lambda name, cls: name(cls) * 2)):
        assert (Owner.limit, Heir.name()) == (2, "ownerowner")
    assert dict(vars(Owner)) == before


def test_other_threads_call_what_torch_has_and_make_changes_of_their_own() -> None:
    def add(amount: int) -> Callable[[Callable[[Owner], int], Owner], int]:
        return lambda number, self: number(self) + amount

    def there() -> tuple[int, int]:
        plain = Owner().number()
        with patched("Owner.number", add(10)):
            return plain, Owner().number()

    with ThreadPoolExecutor(1) as pool, patched("Owner.number", add(1)), patched("Owner.number", add(1)):
        assert pool.submit(there).result() == (1, 11)
        assert Owner().number() == 3
    assert Owner().number() == 1


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (replace(OURS[0], owner=f"{__name__}:Heir"), "has no Heir.number"),
        (replace(OURS[0], owner="torch.gone"), "has no gone.number"),
        (replace(OURS[0], signatures=("(self, more)",)), r"has Owner.number\(self\), not Owner.number\(self, more\)"),
    ],
)
def test_a_torch_that_differs_is_refused(patch: Patch, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATCHES", {patch.key: patch})
    version = torch.__version__.replace("+", r"\+")
    message = rf"torch {version} {says}, which exportkit needs to replace\n.*2\.13"
    with pytest.raises(ExportError, match=message), patched(patch.key, lambda original, *given: original(*given)):
        raise AssertionError("the block ran")


MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    "patch", [replace(OURS[0], until=f"{MAJOR}.{MINOR}"), replace(OURS[0], since=f"{MAJOR}.{MINOR + 1}")]
)
def test_a_change_that_this_torch_does_not_need_is_not_made(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATCHES", {patch.key: patch})
    with patched("Owner.number", lambda number, self: 2):
        assert Owner().number() == 1

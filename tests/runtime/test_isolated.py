"""A package in a worker process answers as it does in this one, and whatever becomes of the worker, we go on."""

from __future__ import annotations

import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import ExportkitError, ModelRunError, UsageError
from tests.fixtures.softpool_library import RAISE
from tests.package.signers import signer
from tests.runtime import tiny
from tests.runtime.isolation import softpool_call
from tests.subprocesses import ROOT, mounted, run_python


def test_what_an_operator_raises_is_the_same_error_with_the_same_words(misbehaving_package, tmp_path):
    code = """
import sys, torch, exportkit
from exportkit.errors import ModelRunError
try:
    tokens = torch.full((2, 4, 8), 444.0)
    exportkit.load(sys.argv[1])(tokens, bias=torch.zeros(2, 4))
except ModelRunError as error:
    print(error)
"""
    tokens, bias = torch.full((2, 4, 8), RAISE), torch.zeros(2, 4)
    with exportkit.load(misbehaving_package, isolate=True) as model:
        with pytest.raises(ModelRunError) as error:
            model(tokens, bias=bias)
        tokens, bias = softpool_call()
        assert model(tokens, bias=bias).logits.shape == (2, 3)  # it goes on
    assert f"{error.value}\n" == run_python(code, misbehaving_package, cwd=tmp_path)


def failure(source: Path, **arguments: object) -> tuple[type, str]:
    with pytest.raises(ExportkitError) as error:
        exportkit.load(source, **arguments)
    return type(error.value), str(error.value)


def test_what_load_refuses_it_refuses_alike(tiny_package, tiny_files, tmp_path):
    text = tmp_path / "text.pt2"
    text.write_text("no archive")
    changed = tmp_path / "changed.pt2"
    content = bytearray(tiny_package.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    elsewhere = tiny.write(tmp_path / "arm.pt2", tiny_files, targets=(tiny.target(platform="linux-aarch64"),))
    for arguments in (
        {"source": tmp_path / "nothing.pt2"},
        {"source": text},
        {"source": changed},
        {"source": elsewhere},
        {"source": tiny_package, "device": "gpu"},
        {"source": tiny_package, "runners": 0},
        {"source": tiny_package, "verify": "never"},
        {"source": tiny_package, "public_key": tmp_path / "nothing.pem"},
        {"source": tiny_package, "public_key": signer(tmp_path).public},
    ):
        assert failure(**arguments, isolate=True) == failure(**arguments), arguments


def test_an_argument_that_cannot_travel_is_named(tiny_package):
    with pytest.raises(UsageError, match="`target` is a bytes, which cannot be passed on to a worker process"):
        exportkit.load(tiny_package, target=b"cpu", isolate=True)


# --- two builds of one namespace --------------------------------------------------------------------------------------


def test_two_builds_of_a_namespace_run_side_by_side(softpool_package, misbehaving_package, tmp_path):
    code = """
import sys, torch, exportkit
from exportkit.errors import LibraryConflictError
here = exportkit.load(sys.argv[1])
try:
    exportkit.load(sys.argv[2])
except LibraryConflictError as error:
    print(error.hint)
there = exportkit.load(sys.argv[2], isolate=True)
for case in here.cases:
    one, other = (model(*case.args, **case.kwargs) for model in (here, there))
    assert all(map(torch.equal, one, other))
print("both")
"""
    said = run_python(code, softpool_package, misbehaving_package, cwd=tmp_path)
    assert "isolate=True" in said
    assert said.endswith("both\n")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_tiny_dev_shm_does_not_matter(tiny_package, tmp_path):
    code = """
import os, sys, torch, exportkit
sys.path.insert(0, sys.argv[2])
from tests.runtime import tiny
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 4096
with exportkit.load(sys.argv[1], isolate=True) as model:
    args, kwargs = tiny.example(4, 6)
    model(*args, **kwargs)
print("ran")
"""
    code = mounted(Path("/dev/shm"), "4k") + code
    assert run_python(code, tiny_package, ROOT, cwd=tmp_path) == "ran\n"


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
def test_what_cannot_be_shared_is_an_error_and_the_next_call_works(tiny_package, limit):
    args, kwargs = tiny.example(4, 6)
    with exportkit.load(tiny_package, isolate=True) as model:
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (1, hard))
        try:
            with pytest.raises(ModelRunError, match="the tensors of a call cannot be shared with the worker process"):
                model(*args, **kwargs)
        finally:
            resource.setrlimit(limit, (soft, hard))
        assert model(*args, **kwargs)["regions"].mean.shape == (4, 3)


def test_loading_and_closing_leaves_nothing_behind(tiny_package, temporary):
    args, kwargs = tiny.example()

    def cycle() -> tuple[int, int, int]:
        with exportkit.load(tiny_package, isolate=True) as model:
            model(*args, **kwargs)
        memory = len(re.findall("exportkit-tensors", Path("/proc/self/maps").read_text()))
        return len(os.listdir("/proc/self/fd")), memory, threading.active_count()

    first = cycle()
    assert [cycle() for _ in range(3)] == [first] * 3
    assert list(temporary.iterdir()) == []

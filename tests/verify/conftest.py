"""Fixtures of the verification tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from verify_artifacts import write_artifact

from exportkit.libraries import load_library
from tests.made_once import one_maker
from tests.templates import compiler_in_templates

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".cache" / "verify"


@pytest.fixture(scope="package", autouse=True)
def _children_have_torchs_compiler() -> Iterator[None]:
    """They also find the modules of this folder: one search path for all needs one template."""
    with pytest.MonkeyPatch.context() as patch, compiler_in_templates():
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FOLDER, FOLDER / "children"))), prepend=os.pathsep)
        yield


@pytest.fixture
def artifact(tmp_path):
    """Writes an artifact into the test's folder."""
    return lambda *args, **kwargs: write_artifact(tmp_path / "affine.pt2", *args, **kwargs)


@pytest.fixture(scope="session")
def misbehaving_library() -> Path:
    """The operator misbehaving::act, built once for these sources and this torch, and loaded here for tracing."""
    source = (FOLDER / "misbehaving.cpp").read_text()
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-s", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += [f"-I{torch_folder / 'include'}", "-x", "c++", "-", f"-L{torch_folder / 'lib'}"]
    command += ["-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,-soname,libmisbehaving.so"]
    key = hashlib.sha256(repr((source, torch.__version__, command)).encode()).hexdigest()[:16]
    library = CACHE / key / "libmisbehaving.so"
    with one_maker(library) as ours:
        if ours:
            if shutil.which("g++") is None:
                pytest.skip("no g++ to build the library with")
            temporary = library.with_name(f"{os.getpid()}.so")
            subprocess.run([*command, "-o", temporary], input=source, text=True, check=True)
            temporary.replace(library)
    load_library(library, defines=["misbehaving"])
    torch.library.register_fake("misbehaving::act", torch.empty_like, allow_override=True)
    return library

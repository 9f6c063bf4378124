"""Packages by path, from memory, streams and descriptors are loaded as the caller and the policies ask for it.

In Python and in C, and in workers. What the reader refuses is in tests/package.
"""

from __future__ import annotations

import ctypes as c
import io
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

import exportkit
from exportkit.errors import SignatureError, SignatureMissingError, UsageError
from exportkit.package.signing import sign_package
from tests.artifacts import artifact
from tests.export.weights_models import Weighted
from tests.package.signers import Signer, signer, write_policy
from tests.package.sources import SOURCES, Giving
from tests.runtime import c_interface, exportkit_run, tiny, ways
from tests.runtime.c_interface import Refused, view

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-cpu.pt2"


Load = Callable[..., None]  # of a package, keys and, by name, a signature file


def load_in_python(package: Path, *keys: object, signature: Path | None = None) -> None:
    args, kwargs = tiny.example()
    with exportkit.load(package, public_key=list(keys) or None, signature=signature) as model:
        assert model(*args, **kwargs)["regions"].mean.isfinite().all()


def load_in_c(library: c_interface.Library, package: Path, *keys: object, signature: Path | None = None) -> None:
    given: dict[str, object] = {}
    if keys:
        given = {"public_keys": (c.c_char_p * len(keys))(*map(encoded, keys)), "public_key_count": len(keys)}
    if signature is not None:
        given["signature"] = encoded(signature)
    with ways.called(library.open, package, **given) as model:
        model.replay(0)


def encoded(text: object) -> bytes:
    return str(text).encode()


@pytest.fixture(params=["Python", "C"])
def load(request: pytest.FixtureRequest) -> Load:
    if request.param == "Python":
        return load_in_python
    return partial(load_in_c, request.getfixturevalue("c_library"))


@pytest.fixture
def package(tiny_package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_package, tmp_path / "signed.pt2"))


@pytest.fixture(params=[None, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> Signer:
    """Of every kind."""
    return signer(tmp_path, "any", curve=request.param and request.param())


@pytest.fixture
def curve(tmp_path: Path) -> Signer:
    """Of a bundle of model signing."""
    return signer(tmp_path, "curve", curve=ec.SECP384R1())


@pytest.fixture
def stranger(tmp_path: Path) -> Signer:
    return signer(tmp_path, "stranger")


def test_a_signature_by_the_key_that_was_asked_for_is_taken(load, package, key, stranger):
    with pytest.raises(SignatureMissingError, match="as the caller requires"):
        load(package, key.public)
    sign_package(package, key.key)
    load(package, stranger.public, key.public)
    with pytest.raises(SignatureMissingError):
        load(package, stranger.public)
    assert str(package) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_keys_are_given_as_text_and_signatures_lie_anywhere(load, package, release, curve, tmp_path):
    for key in (release, curve):
        sign_package(package, key.key)
        load(package, key.public.read_text())
    moved = Path(f"{package}.sig").rename(tmp_path / "elsewhere")
    load(package, release.public, signature=moved)
    with pytest.raises(UsageError, match="without a public key"):
        load(package, signature=moved)


def test_exportkit_run_asks_for_a_signature_by_a_key(package, release, stranger, tmp_path):
    sign_package(package, release.key)
    moved = Path(f"{package}.sig").rename(tmp_path / "elsewhere")
    keys = ["--public-key", stranger.public, "--public-key", release.public]
    assert exportkit_run.load(package, *keys, "--signature", moved)["ok"] is True
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package, *keys)


def test_a_policy_asks_for_a_signature_as_a_caller_does(load, package, release, stranger, tmp_path, monkeypatch):
    policy = write_policy(tmp_path / "policy.json", release.public)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    with pytest.raises(SignatureMissingError, match="is not signed as the policy"):
        load(package)
    with pytest.raises(SignatureMissingError, match=r"^\d+ bytes in memory is not signed as the policy"):
        exportkit.load(package.read_bytes())
    sign_package(package, release.key)
    load(package)
    exportkit.load(package.read_bytes(), signature=Path(f"{package}.sig").read_bytes()).close()
    package.write_bytes(GOLDEN.read_bytes())
    with pytest.raises(SignatureError, match="signs another package"):
        load(package)
    assert str(package) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


# --- signatures of what has no path -----------------------------------------------------------------------------------


@pytest.fixture(params=[None, ec.SECP256R1], ids=["sig", "sigstore.json"])
def signed(request: pytest.FixtureRequest, package: Path, tmp_path: Path) -> tuple[Path, Signer, Path]:
    """A signed package, its key and its signature file."""
    key = signer(tmp_path, curve=request.param and request.param())
    sign_package(package, key.key)
    (signature,) = tmp_path.glob("signed.pt2.*")
    return package, key, signature


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "worker"])
def test_a_signature_comes_as_bytes_or_as_a_file(signed, curve, isolate):
    package, release, file = signed
    for signature in (file, file.read_bytes()) if not isolate else (file.read_bytes(),):
        for keys in (release.public, [curve.public, release.public.read_text()]):
            exportkit.load(package.read_bytes(), public_key=keys, signature=signature, isolate=isolate).close()


def test_a_given_signature_that_does_not_hold_is_refused(signed):
    package, release, file = signed
    for signature, error, message in [
        (file.read_bytes()[:-9], SignatureError, "given signature"),
        (b"x" * 70_000, SignatureError, "has 70000 bytes; one has at most 65536"),
        (b"", SignatureMissingError, "there is no signature beside it"),
    ]:
        with pytest.raises(error, match=message):
            exportkit.load(package.read_bytes(), public_key=release.public, signature=signature)


# --- memory, streams and descriptors ----------------------------------------------------------------------------------

TAKEN = {
    name: SOURCES[name] for name in ("part of a memoryview", "BytesIO", "gzip", "descriptor", "pipe", "sealed memfd")
}


@pytest.fixture(params=TAKEN.values(), ids=TAKEN)
def source(request: pytest.FixtureRequest, tiny_package: Path) -> Giving:
    made: Giving = request.param(tiny_package)
    return made


def check(model: exportkit.Model) -> None:
    """The recorded answers, to the last bit."""
    exportkit.self_test(model)
    args, kwargs = tiny.example()
    torch.testing.assert_close(model(*args, **kwargs)["regions"].mean, tiny.Tiny()(*args, **kwargs)["regions"].mean)


def test_a_model_from_any_source_gives_the_recorded_answers(source, runtime):
    with source as value:
        model = exportkit.load(value, verify="always")
    with model:
        check(model)


@pytest.mark.parametrize("kind", ["BytesIO", "descriptor", "pipe"])
def test_a_worker_process_loads_it_too(kind, tiny_package):
    with SOURCES[kind](tiny_package) as value:
        model = exportkit.load(value, isolate=True)
    with model:
        check(model)
        ours = os.stat(f"/proc/self/fd/{model._reader.fileno()}")
        theirs = [
            os.stat(fd) for fd in Path(f"/proc/{model.pid}/fd").iterdir() if fd.exists() or "memfd" in os.readlink(fd)
        ]
        assert (ours.st_dev, ours.st_ino) in {(found.st_dev, found.st_ino) for found in theirs}  # one copy for both


def test_weights_are_swapped_and_the_first_come_back_from_the_copy():
    content = bytearray(artifact("weighted").read_bytes())
    with exportkit.load(content) as model:
        content[:] = bytes(len(content))
        x = torch.randn(2, 16)
        before = model(x)
        tuned = Weighted(seed=5).eval()
        model.swap_weights(tuned.state_dict())
        torch.testing.assert_close(model(x), tuned(x))
        assert not torch.equal(model(x), before)
        assert model.cases[0] is not None


def test_arguments_are_checked_before_a_stream_is_read(tiny_package):
    stream = io.BytesIO(tiny_package.read_bytes())
    for wrong in ({"runners": 0}, {"verify": "never"}, {"public_key": []}):
        with pytest.raises(UsageError):
            exportkit.load(stream, **wrong)
        assert stream.tell() == 0


Open = Callable[..., c_interface.Model]


def open_bytes(library: c_interface.Library, path: Path, **options: Any) -> c_interface.Model:
    content = bytearray(path.read_bytes())
    try:
        memory = (c.c_char * len(content)).from_buffer(content)
        return library.open_as("open_bytes", memory, len(content), **options)
    finally:
        content[:] = bytes(len(content))


def open_descriptor(library: c_interface.Library, path: Path, **options: Any) -> c_interface.Model:
    with path.open("rb") as file:
        return library.open_as("open_descriptor", file.fileno(), **options)


def open_pipe(library: c_interface.Library, path: Path, **options: Any) -> c_interface.Model:
    with SOURCES["pipe"](path) as descriptor:
        os.set_blocking(descriptor, False)
        return library.open_as("open_descriptor", descriptor, **options)


@pytest.fixture(params=[open_bytes, open_descriptor, open_pipe], ids=["bytes", "descriptor", "pipe"])
def open_it(request: pytest.FixtureRequest) -> Open:
    return request.param


def test_c_opens_memory_descriptors_and_pipes(open_it, c_library, tiny_package, arrays):
    with open_it(c_library, tiny_package) as model:
        for case in range(model.about.case_count):
            c_library.call("replay", model.handle, case)
        assert len(model.run(*map(view, arrays))) == 3


def test_c_checks_signatures_over_them(open_it, c_library, signed):
    package, release, file = signed
    keys = (c.c_char_p * 1)(str(release.public).encode())
    asked = {"public_keys": keys, "public_key_count": 1}
    with pytest.raises(Refused, match="there is no signature beside it"):
        open_it(c_library, package, **asked)
    content = file.read_bytes()
    open_it(c_library, package, **asked, signature=str(file).encode()).close()
    open_it(c_library, package, **asked, signature_content=content, signature_content_size=len(content)).close()


def test_c_refuses_what_is_no_package(c_library, tiny_package, tmp_path):
    for number, code, message in [
        (-1, 200, "descriptor -1 is not open: Bad file descriptor"),
        (os.open(tmp_path, os.O_RDONLY), 301, "is open on a folder; a package is one .pt2 file"),
        (os.open(tiny_package, os.O_PATH), 200, r"only names a file \(O_PATH\)"),
    ]:
        with pytest.raises(Refused, match=message) as refused:
            c_library.open_as("open_descriptor", number)
        assert refused.value.code == code
    with pytest.raises(Refused, match="10 bytes in memory: the file"):
        c_library.open_as("open_bytes", b"no package", 10)
    with pytest.raises(Refused, match="bytes must not be null"):
        c_library.open_as("open_bytes", None, 0)
    out, into = os.pipe()
    os.write(into, bytes(6000))
    with pytest.raises(Refused, match="gave more than 5000 bytes, the limit of a stream"):
        c_library.open_as("open_descriptor", out, stream_limit=5000)

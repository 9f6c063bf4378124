"""Nothing of a package is executed, unpickled or imported before it is known to be whole, and signed where it must be.

The packages here leave a mark when anything of them runs. What is refused must leave none; the controls, which refuse
nothing, show that the mark is left by every way there is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import exportkit
from exportkit.bench import runs
from exportkit.cli import main
from exportkit.errors import (
    ArchiveLayoutError,
    DigestMismatchError,
    ExportkitError,
    FormatVersionError,
    ManifestSyntaxError,
    MissingLibraryError,
    NotAnArchiveError,
    NoTargetError,
    SignatureError,
    SignatureMissingError,
    TorchVersionError,
    UnlistedRecordError,
)
from exportkit.libraries import host_platform
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import FORMAT_VERSION
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.verify import replay
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import VerifyWorker
from tests.adversarial import forge
from tests.adversarial.test_untrusted_programs import packaged, pickle_of_the_example_inputs
from tests.package import samples
from tests.package.c_library import build
from tests.package.signers import Signer, signer, write_policy
from tests.runtime import exportkit_run
from tests.subprocesses import run_python

MARK = "EXPORTKIT_TEST_MARK"
CONSTRUCTOR = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void start(void) {
  FILE* file = fopen(getenv("EXPORTKIT_TEST_MARK"), "w");
  fputs("%s", file);
  fclose(file);
}
"""
LIBRARY = f"exportkit/ops/{host_platform()}/libtoy_cpu.so"
METADATA = samples.CODE.replace(".so", "_metadata.json")  # without it torch looks no further

Break = Callable[[Path, Signer], None]
Spoil = Callable[[forge.Document, dict[str, bytes]], bytes]


@pytest.fixture(params=["python", "cpp"])
def mark(request: pytest.FixtureRequest, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there once anything of a package has run, run by either runtime."""
    if request.param == "cpp":
        exportkit_run.require_built()
    monkeypatch.setenv("EXPORTKIT_RUNTIME", request.param)
    monkeypatch.setenv(MARK, str(mark))
    monkeypatch.setattr(runs, "copy_rate", lambda device: 10.0)  # which `bench` measures for a second
    return mark


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Shared libraries that leave the mark when they are loaded, as an operator library and as compiled code."""
    folder = tmp_path_factory.mktemp("loud")
    return {name: build(folder, CONSTRUCTOR % name, name=f"{name}.so").read_bytes() for name in ("library", "code")}


def compiled(path: Path, loud: dict[str, bytes], *, library: bool = True) -> Path:
    """A package whose operator library, compiled code and eager model would each leave the mark."""
    eager = path.with_name("eager.py")
    eager.write_text(f"import os; open(os.environ[{MARK!r}], 'w').write('eager')")
    whole = samples.manifest()
    target = samples.target(platform=host_platform(), cpu_isa=None)
    records = {**samples.RECORDS, samples.CODE: loud["code"], METADATA: b'{"AOTI_DEVICE_KEY": "cpu"}'}
    del records[samples.LIBRARY]
    changes: dict[str, Any] = {"libraries": (), "operators": ()}
    if library:
        records[LIBRARY] = loud["library"]
        digest = hashlib.sha256(loud["library"]).hexdigest()
        described = {"record": LIBRARY, "sha256": digest, "platform": host_platform()}
        changes = {"libraries": (msgspec.structs.replace(whole.libraries[0], **described),)}
    source = msgspec.structs.replace(whole.source, model=f"{eager}:spec")
    write_package(path, msgspec.structs.replace(whole, targets=(target,), source=source, **changes), records)
    return path


def program(path: Path) -> Path:
    """A package of an ExportedProgram whose example inputs are a pickle that leaves the mark."""
    forged = path.with_name("forged")
    pickle_of_the_example_inputs(forged, f"touch {os.environ[MARK]}")
    return packaged(forged, path)


@pytest.fixture(params=["library", "program"])
def either(request: pytest.FixtureRequest, mark: Path, loud: dict[str, bytes], tmp_path: Path) -> Path:
    """A package of each kind."""
    return program(tmp_path / "program.pt2") if request.param == "program" else compiled(tmp_path / "loud.pt2", loud)


# --- what is wrong with it --------------------------------------------------------------------------------------------


def damaged(path: Path, release: Signer) -> None:
    """A record that nobody executes was changed."""
    content = bytearray(path.read_bytes())
    content[content.index(samples.RECORDS[samples.CASE])] ^= 1
    path.write_bytes(content)


def unsigned(path: Path, release: Signer) -> None:
    """A policy asks for a signature, and there is none."""
    write_policy(Path(os.environ["XDG_CONFIG_HOME"], "exportkit", "policy.json"), release.public)


def exchanged(path: Path, release: Signer) -> None:
    """A policy asks for a signature, and the one that is there is of another build."""
    unsigned(path, release)
    sign_package(path, release.key)
    with PackageReader(path) as reader:
        records = {name: reader.read(name) for name in reader.names}
        write_package(path, msgspec.structs.replace(reader.manifest, version="2"), records)


def signed_by_a_stranger(path: Path, release: Signer) -> None:
    """A policy asks for a signature by another key."""
    unsigned(path, release)
    sign_package(path, signer(path.parent, "stranger").key)


BREAKS: list[tuple[Break, type[ExportkitError]]] = [
    (damaged, DigestMismatchError),
    (unsigned, SignatureMissingError),
    (exchanged, SignatureError),
    (signed_by_a_stranger, SignatureMissingError),
]
broken = pytest.mark.parametrize(("break_it", "error"), BREAKS, ids=[each.__name__ for each, _ in BREAKS])


# --- promises ---------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], path: Path, error: type[ExportkitError], *options: object) -> None:
    """Whatever would run a package, or export its program, ends with this error."""
    commands = [("verify", path), ("bench", path)]
    if path.name == "program.pt2":
        commands.append(("export", path, "-o", path.with_name("out.pt2")))
    for command in commands:
        assert main([*map(str, (*command, *options)), "--json"]) == 3
        assert error.__name__ in capsys.readouterr().out


@broken
def test_nothing_of_a_package_runs_before_it_is_trusted(
    mark: Path, either: Path, capsys: pytest.CaptureFixture[str], break_it: Break, error: type[ExportkitError]
) -> None:
    break_it(either, signer(either.parent, "release"))
    with pytest.raises(error):
        exportkit.load(either)
    refused(capsys, either, error)
    assert not mark.exists()


def changed(path: str, value: object) -> Spoil:
    """Has a part of the manifest changed."""
    return lambda whole, contents: forge.package(forge.changed(path, value, whole), contents)


def flipped(name: str) -> Spoil:
    """Has a bit of a record changed."""

    def spoil(whole: forge.Document, contents: dict[str, bytes]) -> bytes:
        damaged = bytearray(forge.package(whole, contents))
        damaged[damaged.index(contents[name]) + 9] ^= 1
        return bytes(damaged)

    return spoil


def with_another_library(whole: forge.Document, contents: dict[str, bytes]) -> bytes:
    return forge.package(whole, forge.records({"exportkit/ops/libevil.so": contents[LIBRARY]}, contents))


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda *parts: forge.package(*parts)[:-1], NotAnArchiveError, None),
        (lambda *parts: forge.package(*parts)[:5000], NotAnArchiveError, None),
        (lambda *parts: forge.package(*parts).replace(b"FB", b"GB", 1), ArchiveLayoutError, None),
        (flipped(LIBRARY), DigestMismatchError, LIBRARY),
        (flipped(samples.CODE), DigestMismatchError, samples.CODE),
        (with_another_library, UnlistedRecordError, "libevil.so"),
        (changed("surprise", 1), ManifestSyntaxError, "surprise"),
        (changed("format_version", FORMAT_VERSION + 1), FormatVersionError, None),
        (changed("targets.0.platform", "plan9-vax"), NoTargetError, None),
        (changed("libraries.0.torch_bound", "1.13"), TorchVersionError, r"libtoy_cpu\.so .*C\+\+ API of torch 1\.13"),
        (changed("libraries.0.needs_torch", "9.9"), TorchVersionError, r"libtoy_cpu\.so .*needs torch 9\.9 or newer"),
        (changed("libraries", []), MissingLibraryError, "toy::twice"),
    ],
)
def test_a_bad_package_is_refused_before_anything_of_it_runs(
    mark: Path, loud: dict[str, bytes], tmp_path: Path, spoil: Spoil, error: type[ExportkitError], said: str | None
) -> None:
    path = compiled(tmp_path / "loud.pt2", loud)
    with PackageReader(path) as reader:
        contents = {name: reader.read(name) for name in reader.names}
        whole = forge.document(reader.manifest, contents)
    path.write_bytes(spoil(whole, contents))
    for load in (exportkit.load, *([exportkit_run.load] if os.environ["EXPORTKIT_RUNTIME"] == "cpp" else [])):
        with pytest.raises(error, match=said) as caught:
            load(path)
        assert type(caught.value) is error
    assert not mark.exists()
    cache = tmp_path / "cache"
    assert not cache.exists() or set(os.listdir(cache)) <= {"packages"}  # nothing was unpacked


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed_by_a_stranger"])
def test_nothing_runs_before_the_key_that_the_caller_names_has_signed(
    mark: Path, either: Path, capsys: pytest.CaptureFixture[str], signed: bool
) -> None:
    if signed:
        sign_package(either, signer(either.parent, "stranger").key)
    refused(capsys, either, SignatureMissingError, "--public-key", signer(either.parent, "release").public)
    assert not mark.exists()


@pytest.mark.parametrize("asked_by", ["a policy", "the caller"])
def test_a_program_that_torch_wrote_is_not_unpickled_where_signatures_are_required(
    mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked_by: str
) -> None:
    path, release = program(tmp_path / "program.pt2"), signer(tmp_path, "release")
    with PackageReader(path) as reader:
        reader.extract(samples.PROGRAM, tmp_path / "foreign.pt2")
    command = ["export", str(tmp_path / "foreign.pt2"), "-o", str(tmp_path / "out.pt2"), "--trust", "--json"]
    if asked_by == "a policy":
        unsigned(path, release)
    else:
        command += ["--public-key", str(release.public)]
    assert main(command) == 3
    assert "SignatureMissingError" in capsys.readouterr().out
    assert not mark.exists()


def test_looking_at_a_package_and_signing_it_runs_nothing_of_it(mark: Path, either: Path) -> None:
    release = signer(either.parent, "release")
    assert main(["inspect", str(either)]) == 0
    assert main(["sign", str(either), "--key", str(release.private)]) == 0
    assert main(["inspect", str(either), "--public-key", str(release.public)]) == 0
    assert not mark.exists()


def test_a_package_that_is_exchanged_while_it_is_verified_is_not_run(
    mark: Path, either: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that runs it asks for the signature itself, of the file that it opened."""
    release, evil = signer(either.parent, "release"), either.with_name("evil.pt2")
    sign_package(either, release.key)
    evil.write_bytes(either.read_bytes())
    exchanged(evil, release)

    class Exchanging(VerifyWorker):
        def tell(self, *command: Any) -> None:
            evil.replace(either)
            super().tell(*command)

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(replay, "VerifyWorker", Exchanging)
    report = verify(either, VerifyOptions(against="cases", trust=Trust([release.public])))
    assert [check.verdict.kind for check in report.checks] == ["signed", "load_failed"]
    assert "SignatureError" in report.checks[1].verdict.message
    assert not mark.exists()


# --- the control; that of programs is in test_untrusted_programs.py ---------------------------------------------------

LOAD = """
import sys, exportkit
from exportkit.errors import ExportkitError
try: exportkit.load(sys.argv[1])
except ExportkitError as error: print(type(error).__name__)
"""


@pytest.mark.parametrize("kind", ["library", "code"])
def test_control_a_whole_package_is_executed(mark: Path, loud: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    path = compiled(tmp_path / "loud.pt2", loud, library=kind == "library")
    run_python(LOAD, path, cwd=tmp_path)
    assert mark.read_text() == kind

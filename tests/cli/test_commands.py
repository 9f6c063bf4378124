"""The commands on a compiled artifact: what they print, what they write, and how they end."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from safetensors.torch import load, save

from exportkit.cli import main
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import Accuracy
from tests.artifacts import ROOT, THIRD_PARTY, artifact
from tests.commands import run
from tests.fixtures import softpool_library
from tests.subprocesses import run_exportkit


@pytest.fixture(scope="module")
def compiled() -> Path:
    return artifact("patches")


@pytest.fixture(scope="module")
def package(compiled, tmp_path_factory):
    """A package, and what `package --json` said of it."""
    path = tmp_path_factory.mktemp("package") / "patches.pt2"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["package", str(compiled), "-o", str(path), "--json"]) == 0
    return path, json.loads(printed.getvalue())


def rewritten(source, path, change):
    """The artifact at `source` with its recorded outputs changed."""
    with PackageReader(source) as reader:
        records = {name: reader.read(name) for name in reader.names}
        for case in reader.manifest.cases:
            tensors = load(records[case.record])
            records[case.record] = save({k: change(k, tensor) for k, tensor in tensors.items()})
        write_package(path, reader.manifest, records)
    return path


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_says_what_is_taken_returned_called_and_missing(compiled, capsys):
    code, out, _ = run(capsys, "inspect", compiled)
    assert code == 0
    with PackageReader(compiled) as reader:
        manifest = reader.manifest
    for tensor in (*manifest.call.inputs, *manifest.call.outputs):
        assert tensor.name in out
    for operator in manifest.operators:
        assert f"  not in this artifact  {operator.schema}\n" in out
    assert manifest.targets[0].name in out
    assert "`exportkit package` adds the libraries" in out


def test_inspect_as_json_is_the_manifest(package, capsys):
    path, _ = package
    code, out, err = run(capsys, "inspect", path, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["file"]["size"] == path.stat().st_size
    (library,) = document["manifest"]["libraries"]
    assert library["record"] == "exportkit/ops/linux-x86_64/libarr_coc_cpu.so"


@pytest.mark.parametrize(
    "command",
    [
        ("export", "arr-coc", "-o", "x.pt2"),
        ("export", "arr-coc", "-o", "x.pt2", "--format", "program"),
        ("verify", "COMPILED"),
        ("package", "COMPILED", "-o", "x.pt2"),
        ("bench", "ops"),
        ("bench", "COMPILED"),
    ],
    ids=" ".join,
)
def test_a_device_means_the_same_to_every_command(compiled, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *(compiled if word == "COMPILED" else word for word in command), "--device", "cpu:0")
    assert (code, "error: unknown device 'cpu:0'" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


# --- package and verify -----------------------------------------------------------------------------------------------


def test_package_adds_our_library_and_verifies(package):
    path, document = package
    assert path.exists()
    assert document["verification"]["ok"]
    kinds = {check["verdict"]["kind"] for check in document["verification"]["checks"]}
    assert kinds == {"match"}
    assert document["verification"]["artifact"] == str(path)


def test_a_package_that_fails_its_verification_is_not_written(compiled, tmp_path, capsys):
    bad = rewritten(compiled, tmp_path / "bad.pt2", lambda k, t: t + 1 if ".output." in k else t)
    out = tmp_path / "package.pt2"
    code, text, _ = run(capsys, "package", bad, "-o", out)
    assert code == 1
    assert "was not written" in text
    assert "elements differ" in text
    assert "With --no-verify the package is written all the same: then `verify --bisect`" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pt2"]


def test_a_package_of_a_program_alone_says_in_its_last_line_that_nothing_is_compiled(tmp_path, capsys):
    out = tmp_path / "package.pt2"
    code, text, _ = run(capsys, "package", artifact("patches-program"), "-o", out, "--no-verify")
    assert code == 0
    last = text.splitlines()[-1]
    assert last.startswith("Nothing in it is compiled, so exportkit.load refuses it. Next: exportkit export ")
    assert str(out) in last


def test_a_package_whose_answers_cannot_be_judged_is_written(compiled, tmp_path, capsys, monkeypatch):
    moves = {f"0.output.{place}": Accuracy(rms=1e9, greatest=1e9) for place in range(8)}
    monkeypatch.setattr("exportkit.verify.calls.moves_of", lambda content: moves)
    other = rewritten(compiled, tmp_path / "other.pt2", lambda k, t: t + 1 if ".output." in k else t)
    code, text, _ = run(capsys, "package", other, "-o", tmp_path / "package.pt2")
    assert (code, (tmp_path / "package.pt2").exists()) == (21, True)
    assert "eager moves by as much" in text
    assert text.endswith("exit code 21\nThe package was written: nothing failed.\n")


def test_a_package_with_no_target_for_this_machine_is_not_written_unless_told_to(compiled, tmp_path, capsys):
    code, text, _ = run(capsys, "package", compiled, "-o", tmp_path / "x.pt2", "--device", "cuda")
    assert code == 4
    assert "NoTargetError" in text
    assert "--no-verify" in text
    assert list(tmp_path.iterdir()) == []


def test_no_verify_writes_it_all_the_same_and_says_so(compiled, tmp_path, capsys):
    out = tmp_path / "package.pt2"
    code, text, _ = run(capsys, "package", compiled, "-o", out, "--no-verify", "--name", "mine", "--model-version", "7")
    assert code == 0
    assert "not verified" in text
    with PackageReader(out) as reader:
        assert (reader.manifest.name, reader.manifest.version) == ("mine", "7")


@pytest.mark.slow
def test_a_library_of_somebody_else_goes_the_same_way(tmp_path):
    compiled, library = artifact("softpool"), softpool_library.build()
    search = {"PYTHONPATH": f"{ROOT}{os.pathsep}{THIRD_PARTY}"}
    package = tmp_path / "softpool.pt2"

    missing = run_exportkit("package", compiled, "-o", package, **search)
    assert missing.returncode == 3
    assert "--op-library" in missing.stderr
    assert not package.exists()

    made = run_exportkit("package", compiled, "-o", package, "--op-library", library, **search)
    assert made.returncode == 0, made.stdout + made.stderr
    assert library.name in made.stdout

    model = "softpool.model:Classifier"
    search["SOFTPOOL_LIBRARY"] = str(library)  # where its own module looks for it
    libraries = ("--op-library", library, "--op-library", "softpool.model")
    verified = run_exportkit("verify", package, "--model", model, "--shapes", 3, *libraries, **search)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "ok  eager" in verified.stdout


def test_an_interrupt_ends_with_130_and_leaves_no_files_behind(package, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "exportkit", "verify", str(package[0])],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it runs in the background, these tests perhaps, with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while "fresh process" not in process.stderr.readline():
        assert process.poll() is None
    # As a terminal does: to the children too.
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "{artifact}", "--rtol", "1"], "--rtol without --atol"),
        (["verify", "{artifact}", "--atol", "1"], "--atol without --rtol"),
        (["verify", "{artifact}", "--rtol", "-1", "--atol", "1"], "--rtol"),
        (["verify", "{artifact}", "--rtol", "nan", "--atol", "1"], "--rtol nan: give a finite number"),
        (["verify", "{artifact}", "--timeout", "inf"], "--timeout"),
        (["verify", "no_such_file.pt2"], "no_such_file.pt2"),
        (["export", "arr-coc"], "--output"),
        (["export", "arr-coc", "-o", "x.pt2", "--static", "--dynamic", "image:0=batch[1:2]"], "exclude each other"),
        (["export", "arr-coc", "-o", "x.pt2", "--model-kwargs", "{{"], "not JSON"),
        (["export", "arr-coc", "-o", "x.pt2", "--model-kwargs", "[1]"], "not a JSON object"),
        (["export", "arr-coc", "-o", "x.pt2", "--model-kwargs", '{{"a": [1]}}'], "a is [1]"),
        (["export", "arr-coc", "-o", "x.pt2", "--inductor-config", "max_autotune"], "KEY=VALUE"),
        (["export", "arr-coc", "-o", "x.pt2", "--format", "program", "--cpu-isa", "x86-64-v4"], "--format aoti"),
        (["export", "arrcoc", "-o", "x.pt2"], "'arrcoc' is not a model"),
        (["package", "-o", "x.pt2"], "ARTIFACT"),
        (["package", "{artifact}", "-o", "none/x.pt2"], "there is no folder"),
    ],
)
def test_arguments_that_mean_nothing_are_usage_errors(compiled, capsys, arguments, says):
    code, out, err = run(capsys, *(argument.format(artifact=compiled) for argument in arguments))
    assert (code, out) == (2, "")
    assert says in err

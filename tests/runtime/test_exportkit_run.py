"""exportkit-run: the whole of it in C++, and its verdicts beside Python's."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors

import exportkit
from exportkit.errors import CaseError, InputError, LibraryLoadError, UsageError
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.case_files import EDGE_CASE, recorded_errors
from exportkit.runtime.native import library_path
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.outcomes import Match, Mismatch
from tests.artifacts import artifact
from tests.runtime import exportkit_run, meeting, sequences, tiny
from tests.runtime.fine_tunes import X, eager, save, state
from tests.runtime.stateful import WIDTH, Recorder

# --- what it is -------------------------------------------------------------------------------------------------------


def test_neither_it_nor_the_library_has_python_in_it():
    exportkit_run.require_built()
    for file in (exportkit_run.PROGRAM, library_path()):
        needed = subprocess.run(["ldd", file], capture_output=True, text=True, check=True, env={}).stdout
        assert "libtorch_cpu" in needed
        assert "python" not in needed.replace("site-packages", "").replace("/lib/python3", "")
        assert "not found" not in needed


def test_help_goes_to_stdout_and_names_every_exit_code():
    answer = exportkit_run.run("--help", json_output=False)
    assert answer.code == 0
    assert answer.document["text"].startswith("Usage: exportkit-run PACKAGE [OPTIONS]")
    assert "0 success; 1 a check failed; 2 wrong usage; 3 the package is bad" in answer.document["text"]


@pytest.mark.slow_but("arguments1-*", "arguments9*", "arguments10*", "arguments13*")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one PACKAGE, got 0"),
        (["a.pt2", "b.pt2"], "give one PACKAGE, got 2"),
        (["a.pt2", "--surprise"], "--surprise is not an option"),
        (["a.pt2", "--bench"], "--bench is not an option, or its value is missing"),
        (["a.pt2", "--bench", "0"], "--bench must be a number of seconds above 0, got '0'"),
        (["a.pt2", "--threads", "2"], "--threads needs --bench"),
        (["a.pt2", "--threads", "none", "--bench", "1"], "--threads must be an integer from 1 to 1024, got 'none'"),
        (["a.pt2", "--output", "y"], "--output needs --input"),
        (["a.pt2", "--verify", "twice"], "--verify must be once or always, got 'twice'"),
        (["nowhere.pt2"], "cannot open nowhere.pt2"),
        (["RECORDER", "--method", "decode"], "recorder has no method 'decode'"),
        (["RECORDER", "--session", "batch=2"], "--session needs --input"),
        (["RECORDER", "--session", "batch", "--input", "x"], "--session must be SIZE=N, such as batch=3, got 'batch'"),
        (["RECORDER", "--session", "batch=two", "--input", "x"], "must be SIZE=N with an integer, got 'batch=two'"),
        (["RECORDER", "--session", "b=1", "--session", "b=1", "--input", "x"], "--session gives b twice"),
        (["RECORDER", "--input", "x"], "recorder has several methods and none is forward: name one"),
    ],
)
def test_usage_is_refused_with_2(recorder_package, arguments, message):
    answer = exportkit_run.run(*(recorder_package if word == "RECORDER" else word for word in arguments))
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "UsageError"
    assert message in answer.document["error"]["message"]
    assert answer.said.startswith("error: ")


# --- replay -----------------------------------------------------------------------------------------------------------


def test_it_replays_the_recorded_cases_and_says_the_same_to_people(tiny_package):
    document = exportkit_run.load(tiny_package)
    assert document["ok"] is True
    assert document["package"] == {"name": "tiny", "version": "1"}
    assert (document["target"], document["device"]) == ("cpu", "cpu")
    assert torch.__version__.startswith(document["torch"])
    assert [[call["sizes"] for call in case["calls"]] for case in document["cases"]] == [
        [{"batch": 1, "gh": 1}], [{"batch": 4, "gh": 6}],
    ]  # fmt: skip
    assert [output["name"] for output in document["cases"][0]["calls"][0]["outputs"]] == [
        "regions.mean", "regions.doubled", "rest.0",
    ]  # fmt: skip
    answer = exportkit_run.run(tiny_package, json_output=False)
    assert answer.code == 0
    text = answer.document["text"]
    assert "takes image: float32[batch, 3, 16*gh, 8], query.features: float32[batch, 5], offset: float32[5]" in text
    assert "case 1 (batch=4, gh=6): ok" in text


def test_it_says_which_case_is_an_edge_case(tiny_package, tmp_path):
    with PackageReader(tiny_package) as reader:
        manifest, records = reader.manifest, {name: reader.read(name) for name in reader.names}
    said = {EDGE_CASE: "ties in image, NaN in offset"}, {EDGE_CASE: "a" * 2000}
    for case, metadata in zip(manifest.cases, said):
        records[case.record] = safetensors.save(safetensors.load(records[case.record]), metadata=metadata)
    package = tmp_path / "with_edge_values.pt2"
    write_package(package, manifest, records)
    cases = exportkit_run.load(package)["cases"]
    assert [case["edge_case"] for case in cases] == ["ties in image, NaN in offset", ""]
    text = exportkit_run.run(package, json_output=False).document["text"]
    assert "case 0 (batch=1, gh=1; ties in image, NaN in offset): ok" in text
    assert "case 1 (batch=4, gh=6): ok" in text


def test_a_target_is_run_by_name(tiny_files, tmp_path):
    targets = (tiny.target(name="better", cpu_isa="x86-64"), tiny.target(name="plain"))
    package = tiny.write(tmp_path / "several.pt2", tiny_files, targets=targets)
    assert exportkit_run.load(package)["target"] == "better"
    assert exportkit_run.load(package, "--target", "plain")["target"] == "plain"
    with pytest.raises(UsageError, match="no target 'plane'"):
        exportkit_run.load(package, "--target", "plane")


Tensors = list[torch.Tensor]


def recorded_wrongly() -> list[tuple[Tensors, Tensors]]:
    """Calls of the meeting model with every kind of answer beside the right one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 8, generator=generator).clamp(max=0.9)
    x[:, 5], x[:, 6] = 0.95, 0.95005  # within the tolerance of each other
    rows = torch.rand(4, 8, 2, generator=generator)
    rows[2, [1, 4], 1] = 1.0  # two greatest, of which argmax takes the first

    right = meeting.answer(x, rows)

    def changed(output: int, at: tuple[Any, ...], value: float | torch.Tensor) -> tuple[Tensors, Tensors]:
        outputs = [tensor.clone() for tensor in right]
        outputs[output][at] = value
        return [x, rows], outputs

    nan, inf = float("nan"), float("inf")
    return [
        ([x, rows], right),
        *(changed(0, (2, 3), value) for value in (nan, inf, -inf)),
        *(changed(0, (1, 1), right[0][1, 1] + step) for step in (9e-5, -9e-5, 2e-3, 1.0)),
        changed(1, (0, 0), nan),
        changed(2, (1, [0, 1]), right[2][1, [1, 0]]),
        changed(2, (1, [0, 2]), right[2][1, [2, 0]]),
        changed(2, (0, 2), 7),
        changed(3, (0, 0, 0), right[3][0, 0, 0] + 1),
        changed(5, (2, 1), 4),
        changed(5, (2, 1), 8),
        changed(5, (2, 0), (right[5][2, 0] + 1) % 8),
    ]


def check_judged_alike(package: Path, cases: Sequence[tuple[Tensors, Tensors]]) -> list[bool]:
    """Judges the calls of a package in both languages; returns which agree."""
    answer = exportkit_run.run(package)
    assert answer.code == 1
    with exportkit.load(package) as model:
        manifest = model.manifest
        outputs = manifest.call.outputs
        for index, ((inputs, recorded), judged) in enumerate(zip(cases, answer.document["cases"], strict=True)):
            reference = Reference(model.cases[index].references, recorded_errors(manifest.cases, "forward"))
            expected = compare_outputs(outputs, recorded, list(model(*inputs).values()), reference=reference)
            assert isinstance(expected, (Match, Mismatch))
            assert judged["ok"] is isinstance(expected, Match)
            (call,) = judged["calls"]
            for one, other in zip(call["outputs"], expected.outputs, strict=True):
                assert (one["name"], one["compared"], one["mismatched"]) == (
                    other.name,
                    other.compared,
                    other.mismatched,
                )
                for key in ("max_abs", "max_rel"):
                    value = getattr(other, key)
                    assert one[key] is None if value is None else float(one[key]) == pytest.approx(value, rel=1e-6)
                assert (one["error"] is None) == (other.error is None)
                for key, value in (one["error"] or {}).items():
                    assert float(value) == pytest.approx(getattr(other.error, key), rel=1e-6, abs=1e-15)
    return [case["ok"] for case in answer.document["cases"]]


def test_it_judges_as_python_does(tmp_path):
    cases = recorded_wrongly()
    assert check_judged_alike(meeting.write(tmp_path / "wrong.pt2", cases), cases).count(True) >= 3


def test_it_judges_by_references_as_python_does(tmp_path):
    """The recorded outputs are right, and the references are off: by noise, and by what the other test records."""
    inputs, right = recorded_wrongly()[0]
    noise = torch.Generator().manual_seed(2)
    references = []
    for _, outputs in recorded_wrongly():
        wide = [t.double() * (1 + 1e-4 * torch.randn(t.shape, generator=noise)) for t in outputs]
        references.append([whole.clone() if not whole.is_floating_point() else w for whole, w in zip(outputs, wide)])
    cases = [(inputs, right)] * len(references)
    accuracy = m.Accuracy(rms=1e-4, greatest=4e-4)
    agree = check_judged_alike(meeting.write(tmp_path / "referenced.pt2", cases, references, accuracy), cases)
    assert agree[0]
    assert agree.count(False) >= 3


@pytest.mark.parametrize("wrong", ["absent", "float32", "smaller"])
def test_a_reference_that_does_not_fit_its_output_is_a_case_error(tmp_path, wrong):
    inputs, right = recorded_wrongly()[0]
    wide = [tensor.double() if tensor.is_floating_point() else tensor.clone() for tensor in right]
    wide[3] = {"absent": wide[3], "float32": right[3].clone(), "smaller": wide[3][:, :1].contiguous()}[wrong]
    references = wide[:3] if wrong == "absent" else wide
    package = meeting.write(tmp_path / "bad.pt2", [(inputs, right)], [references], m.Accuracy(rms=0, greatest=0))
    with exportkit.load(package) as model, pytest.raises(CaseError, match=r"reference\.3 \(kept\)") as python:
        model.cases[0]
    with pytest.raises(CaseError) as cpp:
        exportkit_run.load(package)
    assert cpp.value.message == python.value.message


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_come_from_a_file_and_outputs_go_to_one(tiny_package, tmp_path):
    args, kwargs = tiny.example(2, 3)
    inputs = {"image": args[0], "query.features": args[1]["features"], "offset": kwargs["offset"]}
    safetensors.save_file(inputs, tmp_path / "x.safetensors")
    document = exportkit_run.load(
        tiny_package, "--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"
    )
    assert document["outputs"] == {"regions.mean": [2, 3], "regions.doubled": [2, 3, 48, 8], "rest.0": [2, 5]}
    with exportkit.load(tiny_package) as model:
        expected = model(*args, **kwargs)
    written = safetensors.load_file(tmp_path / "y.safetensors")
    assert torch.equal(written["regions.doubled"], expected["regions"].doubled)
    assert torch.equal(written["rest.0"], expected["rest"][0])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("image", "offset"), "has no `query.features`"),
        (("image", "query.features", "offset", "more"), "has `more`, which is not an input"),
        (("image", "query.features", "offset"), "`image` must have 4 dimensions, got shape"),
    ],
)
def test_a_file_of_other_inputs_is_refused(tiny_package, tmp_path, names, message):
    safetensors.save_file({name: torch.zeros(1) for name in names}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=message):
        exportkit_run.load(tiny_package, "--input", tmp_path / "x.safetensors")


def test_a_file_that_is_no_safetensors_is_refused(tiny_package, tmp_path):
    (tmp_path / "x").write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match="is not a safetensors file"):
        exportkit_run.load(tiny_package, "--input", tmp_path / "x")
    with pytest.raises(UsageError, match="cannot read"):
        exportkit_run.load(tiny_package, "--input", tmp_path / "nothing")


def test_it_takes_other_weights_and_then_replays_no_case(tmp_path):
    inputs, new = save(tmp_path / "x", {"x": X}), save(tmp_path / "new", state(1))
    arguments = (artifact("weighted"), "--weights", new, "--input", inputs, "--output", tmp_path / "y")
    document = exportkit_run.load(*arguments)
    assert document["weights"]["file"] == str(new)
    assert "cases" not in document
    (answer,) = safetensors.load_file(tmp_path / "y").values()
    torch.testing.assert_close(answer, eager(1))
    said = exportkit_run.run(*arguments, json_output=False).document["text"]
    belong = "the recorded cases belong to the package's weights and are not replayed"
    assert f"runs with the weights of {new}; {belong}" in said
    timed = exportkit_run.load(artifact("weighted"), "--weights", new, "--bench", "0.1")
    assert timed["bench"]["calls"] > 0
    assert "cases" not in timed
    with pytest.raises(UsageError, match="--weights needs --input or --bench: the recorded cases belong to the"):
        exportkit_run.load(artifact("weighted"), "--weights", new)
    with pytest.raises(InputError):
        exportkit_run.load(artifact("weighted"), "--weights", new, "--input", new)


# --- methods and state ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequence_package(tmp_path_factory) -> Path:
    return sequences.write(tmp_path_factory.mktemp("sequences") / "recorder.pt2", sequences.tensors())


def test_it_replays_a_sequence_in_one_session_and_says_what_it_compared(sequence_package):
    text = exportkit_run.run(sequence_package, json_output=False).document["text"]
    assert "  push takes, in a session, x: float32[batch, 4]\n" in text
    assert "  fill takes x: float32[batch, 4], out: float32[batch, 4], written\n" in text
    assert "  remembers cache: float32[batch, 6, 4], position: int64[], gain: float32[batch, 4]\n" in text
    assert "  case 0: 5 calls in one session: ok\n    push (batch=2): ok\n" in text
    assert "    state after the last call\n      ok  cache: 0 of 48 elements differ" in text


@pytest.mark.slow_but("3.written*", "state.0")
@pytest.mark.parametrize("wrong", ["1.output.0", "3.written.1", "4.output.0", "state.0", "state.1", "state.2"])
def test_what_differs_is_named(tmp_path, wrong):
    recorded = sequences.tensors()
    recorded[wrong].view(-1)[-1] += 1
    answer = exportkit_run.run(sequences.write(tmp_path / "wrong.pt2", recorded))
    assert answer.code == 1
    (case,) = answer.document["cases"]
    results = [(i, output) for i, call in enumerate(case["calls"]) for output in call["outputs"]]
    results += [(None, tensor) for tensor in case["state"]]
    names = {"output": "0", "written": "written.out"}
    place = wrong.split(".")
    number = None if place[0] == "state" else int(place[0])
    name = ("cache", "position", "gain")[int(place[1])] if number is None else names[place[1]]
    assert [(i, result["name"], result["mismatched"]) for i, result in results if result["mismatched"]] == [
        (number, name, 1)
    ]


def test_a_sequence_without_its_state_is_compared_up_to_there(tmp_path):
    recorded = {name: tensor for name, tensor in sequences.tensors().items() if not name.startswith("state")}
    (case,) = exportkit_run.load(sequences.write(tmp_path / "stateless.pt2", recorded))["cases"]
    assert (case["ok"], case["state"]) == (True, [])


def test_a_method_is_run_on_inputs_of_a_file(sequence_package, tmp_path):
    row, out = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    safetensors.save_file({"x": row, "out": out}, tmp_path / "in.safetensors")
    options = ["--input", tmp_path / "in.safetensors", "--output", tmp_path / "out.safetensors"]
    document = exportkit_run.load(sequence_package, "--method", "fill", *options)
    assert document["outputs"] == {"0": [2], "written.out": [2, 4]}
    written = safetensors.load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(written["0"], Recorder().fill(row, out))
    torch.testing.assert_close(written["written.out"], out)


def test_a_method_with_state_is_run_in_a_session_of_the_given_size(sequence_package, tmp_path):
    row = torch.randn(3, WIDTH)
    safetensors.save_file({"x": row}, tmp_path / "in.safetensors")
    options = ["--method", "push", "--input", tmp_path / "in.safetensors"]
    exportkit_run.load(sequence_package, *options, "--session", "batch=3", "--output", tmp_path / "out.safetensors")
    torch.testing.assert_close(safetensors.load_file(tmp_path / "out.safetensors")["0"], Recorder(3).push(row))
    with pytest.raises(UsageError, match="batch must be from 1 to 8, got nothing"):
        exportkit_run.load(sequence_package, *options)
    with pytest.raises(InputError, match="the session has batch = 2"):
        exportkit_run.load(sequence_package, *options, "--session", "batch=2")


@pytest.mark.slow_but("push")
@pytest.mark.parametrize("method", ["push", "peek", "embed", "fill"])
def test_it_times_a_method_on_copies_of_its_session(sequence_package, method):
    bench = exportkit_run.load(sequence_package, "--method", method, "--bench", "0.5", "--threads", "2")["bench"]
    assert (bench["method"], bench["threads"]) == (method, 2)
    assert bench["calls"] > 12  # more than the session has room for
    assert 0 < bench["median_ms"] <= bench["p99_ms"]


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_the_linker_refuses_is_named(tiny_files, tmp_path):
    content = b"no ELF file" * 100
    library = tiny.library(content, "toy::op() -> ()")
    package = tiny.write(tmp_path / "text.pt2", tiny_files, extra={library.record: content}, libraries=(library,))
    with pytest.raises(LibraryLoadError, match=r"the dynamic linker refused libtoy\.so: .*invalid ELF header"):
        exportkit_run.load(package)


def test_with_another_torch_than_it_was_built_with_it_says_so(tiny_package, tmp_path):
    exportkit_run.require_built()
    other = tmp_path / "other.so"
    source = "unsigned long aoti_torch_abi_version(void) { return 0x0909010000000000; }"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(other)]
    subprocess.run(command, input=source, text=True, check=True)
    answer = exportkit_run.run(tiny_package, LD_PRELOAD=str(other))
    assert (answer.code, answer.document["error"]["kind"]) == (4, "TorchVersionError")
    assert "but runs with torch 9.9.1" in answer.document["error"]["message"]


def test_without_a_usable_cache_it_says_so_and_leaves_nothing_behind(tiny_package, tmp_path):
    (tmp_path / "tmp").mkdir()
    environment = {"EXPORTKIT_CACHE": "/proc/nowhere", "TMPDIR": str(tmp_path / "tmp")}
    answer = exportkit_run.run(tiny_package, **environment)
    assert answer.document["ok"] is True
    assert "warning: exportkit cannot use its cache /proc/nowhere (" in answer.said
    assert list((tmp_path / "tmp").iterdir()) == []
    answer = exportkit_run.run(tiny_package, **environment | {"TMPDIR": "/nowhere"})
    assert (answer.code, answer.document["error"]["kind"]) == (4, "CacheError")


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_it_verified_is_not_hashed_again_unless_that_is_asked_for(meeting_package, tmp_path):
    """A file that is hashed has another record afterwards, written under another name and renamed."""
    time.sleep(max(0.0, meeting_package.stat().st_ctime + 2.1 - time.time()))  # until its times can be relied on

    def records() -> dict[str, int]:
        found = [*tmp_path.rglob("~verified.json"), *tmp_path.rglob("packages/*.json")]
        return {str(path): path.stat().st_ino for path in found}

    exportkit_run.load(meeting_package)
    first = records()
    assert len(first) == 3, "of the package, its library and its target"
    exportkit_run.load(meeting_package)
    exportkit_run.load(meeting_package, "--verify", "once")
    exportkit.load(meeting_package).close()
    assert records() == first
    exportkit_run.load(meeting_package, "--verify", "always")
    assert records().keys() == first.keys()
    assert not records().items() & first.items()

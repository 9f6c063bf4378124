"""Rules 9 and 14 of FORMAT.md for methods and state: packages that break one each, and what the message names."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from exportkit.errors import CaseError, ManifestConsistencyError
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import code_folder, decode_manifest, encode_manifest
from tests.adversarial.forge import (
    STATEFUL_RECORDS,
    TENSOR,
    Refused,
    Taken,
    at,
    changed,
    document,
    package,
    records,
    stateful,
)
from tests.package import samples, stateful_samples


def forged(path: str, value: object) -> bytes:
    """The sample with state, with one value of its manifest replaced."""
    return package(changed(path, value, stateful()), STATEFUL_RECORDS)


def entry(path: str, **changes: Any) -> dict[str, Any]:
    """A part of it with some of its keys changed."""
    return {**at(stateful(), path), **changes}


FORWARD, DECODE = at(stateful(), "methods.0"), at(stateful(), "methods.1")
BATCH = {"dimension": "batch", "scale": 1, "offset": 0}
ERROR = {"rms": 0, "greatest": 0}


def test_a_package_with_methods_and_state_is_read_as_it_was_written(file: Path) -> None:
    written = write_package(file, stateful_samples.manifest(), stateful_samples.RECORDS)
    with PackageReader(file) as reader:
        reader.verify()
        assert reader.manifest == written
        assert [code_folder("cpu_v3", method.name) for method in written.methods] == ["cpu_v3", "decode.cpu_v3"]
        assert reader.read_case(1) == stateful_samples.RECORDS[stateful_samples.SEQUENCE]
    assert decode_manifest(encode_manifest(written)) == written


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        # methods
        ("methods", [], "no method, so there is nothing to call"),
        ("methods", [FORWARD, DECODE, DECODE], "method 'decode' appears twice"),
        ("methods.1.name", "class", "method 'class' has a name that is not allowed"),
        ("methods.1.name", "a.b", "method 'a.b' has a name that is not allowed"),
        ("methods.1.call.inputs.0.dtype", "int65", "method decode: inputs: 'token' has the unknown dtype"),
        ("methods.1.call.inputs.1.written.ranking_of", "0", "input 'scratch' has ranking_of or rows_of"),
        # what methods use
        ("methods.1.state.0.index", 2, "method decode uses state 2; there are 2 state tensors"),
        ("methods.1.state.0.index", 2**62, "method decode uses state 4611686018427387904"),
        ("methods.1.state.0.index", 0, "method decode uses state 0 twice"),
        ("methods.1.state", [{"index": 0, "written": True}], "state 'step' is used by no method"),
        # names
        ("state.1.name", "cache.keys", "state 'cache.keys' appears twice"),
        ("state.1.aliases", ["cache.k"], "state 'cache.k' appears twice"),
        ("state.0.aliases", ["cache.keys"], "state 'cache.keys' appears twice"),
        ("state.1.name", "head.weight", "state 'head.weight' has the name of a weight"),
        ("state.0.aliases", ["tied.weight"], "state 'tied.weight' has the name of a weight"),
        # dtypes and shapes
        ("state.0.dtype", "float31", "state 'cache.keys' has the unknown dtype 'float31'"),
        ("state.1.shape", [1] * 65, "state 'step' has 65 sizes; at most 64"),
        ("state.1.shape", [2, BATCH], "1*batch and 0 as size 1"),
        ("state.0.shape.0", {**BATCH, "scale": 2}, "2*batch and 0 as size 0"),
        ("state.0.shape.0", {**BATCH, "offset": 1}, "1*batch and 1 as size 0"),
        ("state.0.shape.0.dimension", "n", "method decode uses state 'cache.keys' but has no dimension n"),
        ("state.1.shape", [2**62, 2**62, 2**62], "the state up to 'step' has more than 2^62 bytes"),
        ("state.1.shape", [2**60], "the state up to 'step' has more than 2^62 bytes"),
        ("state.0.shape", [BATCH, 2**62], "the state up to 'cache.keys' has more than 2^62 bytes"),
        ("state.1.tolerance.rows_of", "cache.keys", "state 'step' has ranking_of or rows_of"),
        # initial values
        ("state.0.initial", "exportkit/state/" + "0" * 64, "is not a record"),
        ("state.0.initial", samples.WEIGHT, "is not exportkit/state/ and the sha256 of its content"),
        ("state.0.shape", [BATCH, 5], "has 16 bytes; dtype and shape take 20, with one row of what varies"),
        ("state.0.shape", [2, 4], "has 16 bytes; dtype and shape take 32"),
        ("state.0.shape", [BATCH, 0], "has 16 bytes; dtype and shape take 0"),
        ("state.1.initial", stateful_samples.INITIAL, "has 16 bytes; dtype and shape take 8"),
        # targets, programs and ONNX models are of all methods
        ("targets.0.constants", {"forward": {}}, "constants for other methods, but not for 'decode'"),
        ("targets.0.constants.encode", {}, "constants for 'encode', which is not a method"),
        ("targets.0.constants.decode", {"w": "cache.keys"}, "takes 'w' from 'cache.keys', which is not a weight"),
        (
            "program",
            {"records": {"forward": samples.CASE}, "device": "cpu", "built_with_torch": "2.13"},
            "the program has records for other methods, but not for 'decode'",
        ),
        # cases
        ("cases.1.calls", [], "has no call"),
        ("cases.1.calls.0.method", "encode", "call 0 is of 'encode', which is not a method"),
        ("cases.1.calls.1.sizes", {"batch": 3}, "has batch = 2 in one call and 3 in another"),
        ("cases.1.calls.1.sizes", {}, "call 1 gives sizes for 0 dimensions of 1"),
        ("cases.0.calls", [at(stateful(), "cases.0.calls.0")] * 2, "has 2 calls of methods without state"),
        ("cases.0.state_accuracy", {"cache.keys": ERROR}, "a reference of state, but calls no method that has state"),
        ("cases.1.state_accuracy", {"cache.k": ERROR}, "'cache.k', which is not state"),
        ("cases.1.state_accuracy", {"step": ERROR}, "the accuracy of 'step', which is int64, must be null"),
        ("cases.1.calls.0.accuracy", {"written.token": None}, "'written.token', which is not an output or written"),
        ("cases.1.calls.0.accuracy", {"written.scratch": None}, "must not be null"),
        ("cases.1.reference_dtype", None, "must have a reference_dtype"),
    ],
)
def test_rule_9_methods_and_state_that_contradict_themselves(
    refused: Refused, path: str, value: object, named: str
) -> None:
    refused(forged(path, value), ManifestConsistencyError, named)


def test_any_method_may_use_the_state(taken: Taken) -> None:
    uses = [{"index": 0, "written": True}]
    assert msgspec.to_builtins(taken(forged("methods.0.state", uses)).methods[0].state) == tuple(uses)


def test_rule_9_a_dimension_of_state_has_one_range(refused: Refused) -> None:
    whole = changed("methods.0.state", [{"index": 0, "written": False}], stateful())
    data = package(changed("call.dimensions.0.max", 63, whole), STATEFUL_RECORDS)
    refused(data, ManifestConsistencyError, "1 to 64 for dimension batch of state 'cache.keys'")


def test_rule_9_no_output_has_the_name_of_what_is_written(refused: Refused) -> None:
    inner = {"type": "mapping", "keys": ["scratch"], "items": [TENSOR]}
    node = {"type": "mapping", "keys": ["written"], "items": [inner]}
    whole = changed("methods.1.call.outputs.0.name", "written.scratch", stateful())
    data = package(changed("methods.1.call.result", node, whole), STATEFUL_RECORDS)
    refused(data, ManifestConsistencyError, "'written.scratch', which means what is written")


def test_rule_9_a_case_says_the_size_of_all_state(refused: Refused) -> None:
    """A second state varies with another dimension, which only a method has that the case does not call."""
    other = {**DECODE, "name": "encode", "state": [{"index": 2, "written": True}]}
    other["call"] = changed("methods.1.call.dimensions.0.name", "n", stateful())["methods"][1]["call"]
    for tensor in (*other["call"]["inputs"], *other["call"]["outputs"]):
        tensor["shape"][0] = {**BATCH, "dimension": "n"}
    whole = stateful()
    whole["methods"].append(other)
    whole["targets"][0]["constants"]["encode"] = {}
    whole["state"].append(entry("state.1", name="n", shape=[{**BATCH, "dimension": "n"}]))
    contents = records({"data/aotinductor/encode.cpu_v3/a.so": b""}, stateful_samples.RECORDS)
    whole["records"] = document(stateful_samples.manifest(), contents)["records"]
    data = package(whole, contents)
    refused(data, ManifestConsistencyError, "no call with the dimension n, so the size of the state")


def test_rule_9_every_method_of_a_target_has_code(refused: Refused) -> None:
    contents = {name: content for name, content in STATEFUL_RECORDS.items() if name != stateful_samples.CODE}
    whole = document(stateful_samples.manifest(), contents)
    refused(package(whole, contents), ManifestConsistencyError, "no record data/aotinductor/decode.cpu_v3/*.so")


@pytest.mark.parametrize("name", ["decode.cpu_v3", "decode.cpu_v34", "decode"])
def test_rule_9_code_folders_of_methods_are_no_prefixes_of_others(refused: Refused, name: str) -> None:
    """A target may have the name of another target's folder of a method."""
    data = forged("targets", [entry("targets.0"), entry("targets.0", name=name)])
    refused(data, ManifestConsistencyError, "is a prefix of the code folder decode")


def test_rule_9_each_method_has_an_onnx_model_or_none_has(refused: Refused) -> None:
    onnx = samples.sidecar().onnx[0]
    contents = {name: content for name, content in STATEFUL_RECORDS.items() if "aotinductor" not in name}
    whole = document(stateful_samples.manifest(targets=(), weights=(), libraries=(), onnx=(onnx,)), contents)
    refused(package(whole, contents), ManifestConsistencyError, "ONNX models for other methods, but not for 'decode'")
    whole["onnx"] *= 2
    refused(package(whole, contents), ManifestConsistencyError, "for 'forward', which is not a method or appears twice")


# --- rule 14 ----------------------------------------------------------------------------------------------------------

Tensors = dict[str, np.ndarray]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def with_tensor(name: str, value: np.ndarray) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("0.input.0"), "has no 0.input.0 (token)"),
        (without("2.output.0"), "has no 2.output.0 (0)"),
        (without("0.written.1"), "has no 0.written.1 (scratch)"),
        (without("0.reference.0"), "has no 0.reference.0 (0)"),
        (without("2.written_reference.1"), "has no 2.written_reference.1 (written.scratch)"),
        (without("state.1"), "has no state.1 (step)"),
        (without("state.0", "state.1", "state_reference.0", "state_reference.1"), "has no state.0 (cache.keys)"),
        (without("state_reference.1"), "has no state_reference.1 (step)"),
        (with_tensor("3.input.0", np.zeros(2, np.int64)), "unexpected tensor: 3.input.0"),
        (with_tensor("0.written.0", np.zeros(2, np.int64)), "unexpected tensor: 0.written.0"),
        (with_tensor("1.reference.0", np.zeros((2, 7))), "unexpected tensor: 1.reference.0"),
        (with_tensor("state.2", np.zeros(2)), "unexpected tensor: state.2"),
        (with_tensor("00.input.0", np.zeros(2)), "unexpected tensor: 00.input.0"),
        (
            with_tensor("1.input.0", np.zeros((3, 3), np.float32)),
            "(image) is float32[3, 3]; the manifest says float32[2",
        ),
        (with_tensor("1.output.0", np.zeros((3, 7), np.float32)), "the manifest says float32[2, *]"),
        (with_tensor("0.input.0", np.zeros(2, np.int32)), "(token) is int32[2]; the manifest says int64[2]"),
        (with_tensor("state.0", np.zeros((3, 4), np.float32)), "(cache.keys) is float32[3, 4]"),
        (with_tensor("state.0", np.zeros((1, 4), np.float32)), "(cache.keys) is float32[1, 4]"),
        (with_tensor("state_reference.0", np.zeros((2, 4), np.float32)), "the manifest says float64[2, 4]"),
        (with_tensor("0.written_reference.1", np.zeros((2, 3))), "the manifest says float32[2, 3]"),
    ],
)
def test_rule_14_a_sequence_has_exactly_the_tensors_of_its_calls(
    file: Path, change: Callable[[Tensors], Tensors], named: str
) -> None:
    case = {stateful_samples.SEQUENCE: save(change(stateful_samples.sequence()))}
    write_package(file, stateful_samples.manifest(), {**stateful_samples.RECORDS, **case})
    with PackageReader(file) as reader, pytest.raises(CaseError) as caught:
        reader.read_case(1)
    assert named in str(caught.value)


def test_rule_14_a_case_may_leave_out_the_whole_state(file: Path) -> None:
    manifest = stateful_samples.manifest()
    sequence = msgspec.structs.replace(manifest.cases[1], state_accuracy={})
    kept = {name: value for name, value in stateful_samples.sequence().items() if not name.startswith("state")}
    contents = {**stateful_samples.RECORDS, stateful_samples.SEQUENCE: save(kept)}
    write_package(file, stateful_samples.manifest(cases=(manifest.cases[0], sequence)), contents)
    with PackageReader(file) as reader:
        assert reader.read_case(1) == save(kept)


def header(described: dict[str, Any] | bytes, data: bytes = bytes(32), length: int | None = None) -> bytes:
    """A safetensors file that says this of its tensors, and may claim another length of what it says."""
    encoded = described if isinstance(described, bytes) else msgspec.json.encode(described)
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


IMAGE, SCORES = tensor("F32", [2, 3], 0, 24), tensor("F32", [2, 1], 24, 32)
WHOLE = {"0.input.0": IMAGE, "0.output.0": SCORES}


def image(dtype: str, shape: list[int], start: int = 0, end: int = 24) -> bytes:
    """The same with another image."""
    return header({**WHOLE, "0.input.0": tensor(dtype, shape, start, end)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        header(b"", b""),
        header(b"{}", b"", length=2**64 - 1),
        header(b"{}", b"", length=200 << 20),
        header(b"[" * 100_000, b""),
        header(b'{"0.input.0":' * 10_000, b""),
        header(WHOLE, bytes(31)),
        header({"0.input.0": IMAGE, "0.output.0": tensor("F32", [2, 1], 28, 36)}, bytes(36)),
        header({"0.input.0": IMAGE, "0.output.1": SCORES}),
        header({**WHOLE, "extra": tensor("F32", [0], 32, 32)}),
        header({**WHOLE, "0.input.0\0": tensor("F32", [0], 32, 32)}),
        header(msgspec.json.encode(WHOLE).replace(b'"0.output.0"', b'"0.input.0"')),
        header({**WHOLE, "__metadata__": {"a": {"b": "c"}}}),
        image("F32", [2, 3], 2**63, 2**63 + 24),
        image("F8_E8M0", [2, 12]),
        image("F4", [2, 24]),
        image("I64", [3]),
        image("F32", [1, 6]),
        image("F32", [1] * 5000 + [6]),
        b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        b"PK\x03\x04" + bytes(100),
    ],
)
def test_rule_14_a_file_with_an_absurd_header_is_no_case(file: Path, content: bytes) -> None:
    wrong = pytest.raises(CaseError, match=samples.CASE)
    for stored, expected in ((header(WHOLE), nullcontext()), (content, wrong)):
        write_package(file, samples.manifest(), {**samples.RECORDS, samples.CASE: stored})
        with PackageReader(file) as reader, expected:
            assert reader.read_case(0) == stored

"""Rules 7 to 9 of FORMAT.md: manifests that break one each, the class, and what the message names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exportkit.errors import FormatVersionError, ManifestConsistencyError, ManifestSyntaxError
from exportkit.package.manifest import Accuracy
from tests.adversarial.forge import (
    SIDECAR_RECORDS,
    STATEFUL_RECORDS,
    TENSOR,
    Document,
    Refused,
    Taken,
    at,
    changed,
    document,
    named_tuple,
    package,
    places,
    records,
    replaced,
    sidecar,
    stateful,
    value_at,
)
from tests.package import samples

# --- rule 7 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        *((newer, "made by a newer exportkit") for newer in (2, 3, 4, 10, 10**30)),
        (0, "no such version"),
        (-1, "no such"),
    ],
)
def test_rule_7_another_version_is_named_and_what_to_do(refused: Refused, version: int, hint: str) -> None:
    data = msgspec.json.encode(document()).replace(b'"format_version":1,', b'"format_version":%d,' % version)
    error = refused(package(data), FormatVersionError, f"format version {version}; this exportkit reads 1")
    assert hint in (error.hint or "")


def test_rule_7_another_version_is_named_even_where_every_key_is_another(refused: Refused) -> None:
    refused(package(b'{"format_version": 7, "models": {}}'), FormatVersionError, "7")


# --- rule 8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not JSON"),
        (b"not json", "not JSON"),
        (b"[]", "format_version"),
        (b"{}", "format_version"),
        (b'{"format_version": "1"}', "format_version"),
        (b'{"format_version": true}', "format_version"),
        (b'{"format_version": 1}', "name"),
        (b'{"format_version": 1, "format_version": 1}', "duplicate key 'format_version'"),
        (b'{"format_version": 1, "a": {"b": 1, "c": 2, "b": 3}}', "duplicate key 'b'"),
        (b'{"format_version": 1, "x": NaN}', "NaN"),
        (b'{"format_version": 1, "x": -Infinity}', "number without digits"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"format_version": 1, "name": "\\ud800"}', "surrogate"),
        (b'{"format_version": 1, "\\udfff\\ud800": 1}', "surrogate"),
        (b'{"format_version": 1, "name": "\xed\xa0\x80"}', "UTF-8"),  # a surrogate as bytes
        (b'{"format_version": 1, "name": "\x00"}', "not JSON"),
        (b'\xef\xbb\xbf{"format_version": 1}', "not JSON"),  # a byte order mark
        (b'{"format_version": 1e0}', "format_version"),
        (b'{"format_version": 1} {}', "not JSON"),
        (b'{"format_version": 1,}', "not JSON"),
        ('{"format_version": 1}'.encode("utf-16"), "UTF-8"),
        (b"[" * 100_000, "80"),
        (b'{"format_version": 1, "x": ' + b"[" * 100 + b"]" * 100 + b"}", "80"),
        (b'"' + b'\\"' * 1_000_000, "not JSON"),
    ],
)
def test_rule_8_what_is_not_json_of_the_right_shape(refused: Refused, data: bytes, named: str) -> None:
    refused(package(data), ManifestSyntaxError, named)


# The objects whose keys are data: names of sizes, constants, arguments and outputs. Those of nodes go with their type.
OF_ANY_KEYS = {"sizes", "constants", "model_kwargs", "accuracy", "state_accuracy", "value", "result"}
SAMPLES = {
    "package": (document(), records()),
    "state": (stateful(), STATEFUL_RECORDS),
    "sidecar": (sidecar(), SIDECAR_RECORDS),
}


@pytest.mark.parametrize(("whole", "contents"), SAMPLES.values(), ids=SAMPLES)
def test_rule_8_every_key_must_be_there_and_no_other(
    refused: Refused, whole: Document, contents: dict[str, bytes]
) -> None:
    for place in places(whole):
        part = value_at(whole, place)
        if not isinstance(part, dict) or OF_ANY_KEYS & {*place}:
            continue
        more = replaced(whole, place, {**part, "surprise": 1})
        refused(package(more, contents), ManifestSyntaxError, "surprise")
        for key in part:
            less = replaced(whole, place, {other: part[other] for other in part if other != key})
            refused(package(less, contents), ManifestSyntaxError, key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "../up"),
        ("name", "new\n"),
        ("name", ""),
        ("targets", {}),
        ("targets.0.device", "tpu"),
        ("targets.0.name", "a/b"),
        ("records.0.size", -1),
        ("records.0.size", 2**63),
        ("records.0.size", 1.5),
        ("records.0.size", 1.0),
        ("source.seed", 2**63),
        ("source.seed", -(2**63) - 1),
        ("call.inputs.0.shape.0", {"dimension": "batch", "scale": 2**63, "offset": 0}),
        ("records.0.sha256", "0" * 63),
        ("records.0.sha256", "A" * 64),
        ("call.dimensions.0.min", "1"),
        ("call.inputs.0.shape.0", {"dimension": "batch", "scale": 0, "offset": 0}),
        ("call.result", {"type": "object", "items": []}),
        ("call.parameters.0.kind", "varargs"),
        ("libraries.0.kernels", ["tpu"]),
    ],
)
def test_rule_8_a_value_of_the_wrong_type_or_pattern_is_named(refused: Refused, path: str, value: object) -> None:
    key = next(step for step in reversed(path.split(".")) if not step.isdigit())
    refused(package(changed(path, value)), ManifestSyntaxError, f".{key}")


# --- rule 9 -----------------------------------------------------------------------------------------------------------

TOY = {"name": "toy::twice", "schema": samples.SCHEMA}
DIMENSION = {"name": "batch", "min": 1, "max": 64}
ANOTHER = {"name": "n", "min": 1, "max": 2}


def program(record: str = samples.CASE, *, built_with_torch: str = "2.13") -> dict[str, Any]:
    return {"records": {"forward": record}, "device": "cpu", "built_with_torch": built_with_torch}


def entry(path: str, **changes: Any) -> dict[str, Any]:
    """A part of the sample's manifest with some of its keys changed."""
    return {**at(document(), path), **changes}


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        # the call
        ("call.parameters.0.name", "not a name", "'not a name'"),
        ("call.parameters", [entry("call.parameters.0")] * 2, "parameter 'image'"),
        ("call.parameters.0.value.index", 1, "tensor 1 where it should have tensor 0"),
        ("call.parameters", [], "inputs"),
        (
            "call.result",
            {"type": "sequence", "kind": "list", "items": [TENSOR, TENSOR]},
            "tensor 0 where it should have tensor 1",
        ),
        ("call.result", {"type": "mapping", "keys": ["a", "a"], "items": [TENSOR, TENSOR]}, "'a' appears twice"),
        ("call.result", {"type": "mapping", "keys": ["a", "b"], "items": [TENSOR]}, "2 keys for 1 items"),
        ("call.result", {"type": "mapping", "keys": [], "items": [TENSOR]}, "0 keys for 1 items"),
        ("call.result", {"type": "namedtuple", "class_name": "P", "fields": ["x"], "items": []}, "1 keys for 0 items"),
        ("call.result", named_tuple("2.11", "x"), "'2.11' is not allowed as the name of a named tuple"),
        ("call.result", named_tuple("P", "a b"), "'a b' is not allowed as the name of a named tuple"),
        ("call.result", named_tuple("P", "_x"), "cannot start with an underscore"),
        ("call.inputs.0.name", "picture", "'picture'"),
        ("call.inputs.0.dtype", "float31", "'float31'"),
        ("call.outputs.0.name", "score", "'score'"),
        ("call.outputs.0.dtype", "torch.float32", "'torch.float32'"),
        ("call.dimensions", [DIMENSION, DIMENSION], "dimension 'batch'"),
        ("call.dimensions", [DIMENSION, ANOTHER], "no input has dimension n"),
        ("call.dimensions.0.min", 65, "min 65 above max 64"),
        ("call.dimensions.0.tried", [2, 65], "tried at 65, which is not in its range"),
        ("call.inputs.0.shape.0", {"dimension": "n", "scale": 1, "offset": 0}, "'n'"),
        ("call.inputs.0.shape.0", {"dimension": "batch", "scale": 1, "offset": -2}, "1*batch and -2"),
        ("call.inputs.0.shape.0", {"dimension": "batch", "scale": 2**62, "offset": 0}, "*batch"),
        ("call.inputs.0.shape", [2**62, 2**62], "at its smallest, which no memory holds"),
        ("call.inputs.0.shape", [{"dimension": "batch", "scale": 3, "offset": 0}, 2**61], "more than 2^62 elements"),
        ("call.outputs.0.shape", [2**31, 2**31, 2], "more than 2^62 elements"),
        ("call.inputs.0.shape", [1] * 65, "65 sizes"),
        ("call.outputs.0.tolerance.ranking_of", "rows", "refers to 'rows'"),
        ("call.outputs.0.tolerance.rows_of", "scores", "refers to 'scores'"),
        ("call.outputs.0.tolerance.dim", 0, "has dim and no ranking_of"),
        # targets
        ("targets", [], "nothing to run"),
        ("targets", [entry("targets.0")] * 2, "target 'cpu_v3'"),
        (
            "targets",
            [entry("targets.0"), entry("targets.0", name="cpu")],
            "cpu is a prefix of the code folder cpu_v3",
        ),
        ("targets.0.name", "other", "cpu_v3/model.wrapper.cpp' belongs to no method of a target"),
        ("targets.0.needs_torch", "new", "needs_torch is 'new'"),
        ("targets.0.needs_torch", "\u0662.\u0661", "needs_torch"),  # digits, but not ours
        ("targets.0.built_with_cuda", "new", "built_with_cuda is 'new'"),
        ("targets.0.device", "cuda", "cuda_architecture"),
        ("targets.0.cuda_architecture", "9.0", "cuda_architecture '9.0'"),
        ("targets.0.cuda_ptx", True, "cuda_ptx"),
        ("program", program("models/m.json"), "'models/m.json'"),
        ("program", program(built_with_torch="2"), "built_with_torch is '2'"),
        # weights
        ("weights", [entry("weights.0")] * 2, "weight 'head.weight' appears twice"),
        ("weights.0.aliases", ["head.weight"], "weight 'head.weight' appears twice"),
        ("weights", [entry("weights.0"), entry("weights.0", name="w")], "weight 'tied.weight' appears twice"),
        ("weights.0.dtype", "float31", "'float31'"),
        ("weights.0.dtype", "float64", "does not have the size of its record"),
        ("weights.0.shape", [2], "2 strides for 1 dimensions"),
        ("weights.0.shape", [4, 3], "does not have the size of its record"),
        ("weights.0.shape", [2**62, 3], "its record"),
        ("weights.0.shape", [0, 3], "does not have the size of its record"),
        ("weights.0.strides", [3, 2], "strides that leave gaps or overlap"),
        ("weights.0.strides", [0, 1], "strides that leave gaps or overlap"),
        ("weights.0.strides", [1, 1], "strides that leave gaps or overlap"),
        ("weights.0.strides", [2**62, 1], "strides that leave gaps or overlap"),
        ("weights.0.record", "data/weights/none", "'data/weights/none'"),
        ("weights.0.record", samples.CASE, "not under data/weights/"),
        ("weights.0.record", None, "from 'head.weight', which is not a weight with a record"),
        ("targets.0.constants.forward", {"w": "other"}, "takes 'w' from 'other'"),
        ("targets.0.constants.forward", {"w": "tied.weight"}, "takes 'w' from 'tied.weight'"),
        # operators and libraries
        ("operators", [TOY, TOY], "'toy::twice' appears twice"),
        ("operators.0.name", "twice", "'twice'"),
        ("operators.0.schema", "toy::thrice(Tensor x) -> Tensor", "toy::twice has another operator's schema"),
        ("libraries.0.record", "exportkit/ops/linux-x86_64/libother.so", "libother.so"),
        ("libraries.0.record", samples.CASE, "not under exportkit/ops/linux-x86_64/"),
        ("libraries.0.sha256", "0" * 64, samples.LIBRARY),
        ("libraries.0.platform", "linux-aarch64", "linux-aarch64"),
        ("libraries.0.torch_bound", "", "torch_bound"),
        ("libraries.0.defines.0.schema", "toy::twice(Tensor x, int n=1) -> Tensor", "int n=1"),
        ("libraries.0.defines", [TOY, TOY], "'toy::twice' appears twice"),
        ("libraries", [entry("libraries.0")] * 2, "libtoy_cpu.so' appears twice"),
        # cases and records
        ("cases.0.record", "exportkit/cases/1.safetensors", "1.safetensors"),
        ("cases.0.record", samples.LIBRARY, "not under exportkit/cases/"),
        ("cases", [entry("cases.0")] * 2, "0.safetensors' appears twice"),
        ("cases.0.calls.0.sizes", {}, "sizes for 0 dimensions of 1"),
        ("cases.0.calls.0.sizes", {"batch": 2, "n": 1}, "sizes for 2 dimensions of 1"),
        ("cases.0.calls.0.sizes", {"batch": 65}, "batch = 65"),
        ("records", at(document(), "records")[::-1], "not sorted"),
        ("records", [at(document(), "records.0"), *at(document(), "records")], "not sorted"),
    ],
)
def test_rule_9_a_manifest_that_contradicts_itself(refused: Refused, path: str, value: object, named: str) -> None:
    refused(package(changed(path, value)), ManifestConsistencyError, named)


def two_outputs(first: Document, second: Document, base: Document) -> Document:
    result = {"type": "mapping", "keys": [first["name"], second["name"]], "items": [TENSOR, {**TENSOR, "index": 1}]}
    return changed("call.result", result, changed("call.outputs", [first, second], base))


@pytest.mark.parametrize(
    ("tolerance", "shape", "fits"),
    [
        ({"ranking_of": "scores"}, [2, 3, 1], True),
        ({"ranking_of": "scores"}, [2, 3], True),
        ({"ranking_of": "scores", "dim": 1}, [2, 9, 4], True),
        ({"ranking_of": "scores", "dim": -2}, [2, 4], True),
        ({"ranking_of": "scores", "dim": 1}, [None, 4], True),
        ({"ranking_of": "scores", "dim": 1}, [2, 3, 1], False),
        ({"ranking_of": "scores", "dim": 3}, [2, 3], False),
        ({"ranking_of": "scores", "dim": -(2**63)}, [2, 3], False),
        ({"ranking_of": "scores"}, [2], False),
        ({"ranking_of": "scores"}, [2, 3, 4, 1], False),
        ({"rows_of": "scores"}, [2, 3, 4, 5], True),
        ({"rows_of": "scores"}, [2, 3], False),
        ({"rows_of": "scores"}, [2, 4, 4], False),
    ],
)
def test_rule_9_a_ranking_has_the_sizes_of_what_it_ranks(
    refused: Refused, taken: Taken, tolerance: Document, shape: list[int | None], fits: bool
) -> None:
    first = entry("call.outputs.0", shape=[2, 3, 4])
    second = {**first, "name": "other", "shape": shape, "tolerance": {**first["tolerance"], **tolerance}}
    content = package(two_outputs(first, second, document()))
    if fits:
        assert taken(content).call.outputs[1].shape == tuple(shape)
    else:
        refused(content, ManifestConsistencyError, "their shapes do not fit")


def test_rule_9_strides_that_address_every_element_once_are_taken(taken: Taken) -> None:
    for shape, strides in (([2, 3], [1, 2]), ([1, 6], [77, 1]), ([6], [1]), ([3, 1, 2], [1, 0, 3])):
        manifest = taken(package(changed("weights.0.strides", strides, changed("weights.0.shape", shape))))
        assert manifest.weights[0].strides == tuple(strides)


REFERENCES = {"scores": {"rms": 1e-8, "greatest": 1e-7}}


def referenced(*, accuracy: object = REFERENCES, reference_dtype: str | None = "float64") -> Document:
    """The sample with a reference of its output."""
    return changed("cases.0.calls.0.accuracy", accuracy, changed("cases.0.reference_dtype", reference_dtype))


def test_a_case_may_have_references(taken: Taken) -> None:
    assert taken(package(referenced())).cases[0].calls[0].accuracy == {"scores": Accuracy(rms=1e-8, greatest=1e-7)}


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"reference_dtype": "float16"}, ManifestSyntaxError, "float16"),
        ({"accuracy": {"scores": {"rms": -1e-8, "greatest": 0}}}, ManifestSyntaxError, "at least 0"),
        ({"accuracy": {"scores": {"rms": 0}}}, ManifestSyntaxError, "greatest"),
        ({"reference_dtype": None}, ManifestConsistencyError, "reference_dtype"),
        ({"accuracy": {}}, ManifestConsistencyError, "reference_dtype"),
        ({"accuracy": {"scores": None}}, ManifestConsistencyError, "must not be null"),
        ({"accuracy": {**REFERENCES, "other": None}}, ManifestConsistencyError, "not an output"),
    ],
)
def test_references_that_contradict_the_outputs(
    refused: Refused, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    refused(package(referenced(**changes)), error, says)


def test_rule_9_integers_have_no_accuracy_and_rows_need_their_indices_reference(refused: Refused) -> None:
    scores = at(document(), "call.outputs.0")
    indices = {**scores, "name": "indices", "dtype": "int64"}
    rows = {**scores, "name": "rows", "tolerance": {**scores["tolerance"], "rows_of": "indices"}}
    error = {"rms": 0, "greatest": 0}
    for accuracy, says in (({"indices": error}, "must be null"), ({"rows": error}, "its indices have none")):
        whole = two_outputs(indices, rows, referenced(accuracy=accuracy))
        refused(package(whole), ManifestConsistencyError, says)


def test_rule_9_a_tolerance_that_json_parsers_read_as_infinite(refused: Refused) -> None:
    data = msgspec.json.encode(changed("call.outputs.0.tolerance.rtol", 0.125)).replace(b"0.125", b"1e999")
    refused(package(data), ManifestSyntaxError, "out of range")


@pytest.mark.parametrize("name", ["data/aotinductor/gpu/model.so", "extra/x"])
def test_rule_9_code_of_a_target_that_is_not_declared_and_records_under_extra(refused: Refused, name: str) -> None:
    refused(package(contents=records({name: b"code"})), ManifestConsistencyError, name)


def test_rule_9_two_libraries_that_define_one_operator(refused: Refused) -> None:
    second = "exportkit/ops/linux-x86_64/libtoy_too.so"
    contents = records({second: samples.RECORDS[samples.LIBRARY]})
    whole = document(contents=contents)
    whole["libraries"].append({**whole["libraries"][0], "record": second})
    refused(package(whole, contents), ManifestConsistencyError, "both define toy::twice")


def test_rule_9_structures_nested_deeper_than_a_call_may_be(refused: Refused) -> None:
    node: dict[str, Any] = TENSOR
    for _ in range(33):
        node = {"type": "sequence", "kind": "list", "items": [node]}
    refused(package(changed("call.result", node)), ManifestConsistencyError, "nested deeper than 32")


ONNX = at(sidecar(), "onnx.0")
DATA, (FUNCTION,) = ONNX["data"], ONNX["functions"]


def sidecar_with(manifest: Document | None = None, **changes: object) -> bytes:
    """A sidecar of an ONNX model with some keys of its manifest, and of `onnx` in it, changed."""
    return package({**sidecar(), "onnx": [{**ONNX, **changes}], **(manifest or {})}, SIDECAR_RECORDS)


def function(**changes: str) -> Document:
    return {**FUNCTION, **changes}


def test_a_package_may_describe_an_onnx_model_and_nothing_else_that_runs(refused: Refused, taken: Taken) -> None:
    assert msgspec.to_builtins(taken(sidecar_with()).onnx[0]) == {**ONNX, "functions": (FUNCTION,)}
    refused(package(changed("onnx", [ONNX])), ManifestConsistencyError, "describes an ONNX model, but has")
    unused = {**at(document(), "weights.0"), "record": None}
    for more in ({"weights": [unused]}, {"program": program()}):
        refused(sidecar_with(more), ManifestConsistencyError, "describes an ONNX model, but has")
    refused(sidecar_with({"onnx": []}), ManifestConsistencyError, "nothing to run")


@pytest.mark.parametrize("name", ["model.onnx.data", "Größe 1.data", ".data", "a" * 255, "a\\b"])
def test_rule_8_a_plain_file_name_is_taken(taken: Taken, name: str) -> None:
    data = taken(sidecar_with(data={**DATA, "name": name})).onnx[0].data
    assert data is not None
    assert data.name == name


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        *(
            ({"data": {**DATA, "name": name}}, ManifestSyntaxError, "file in the same folder")
            for name in ("", ".", "..", "../up", "/etc/passwd", "a/b", "a\n", "\x7f", "\0", "a" * 256)
        ),
        *(({"opset": opset}, ManifestSyntaxError, "from 18 to 23") for opset in (0, 17, 24, -1)),
        ({"opset": "20"}, ManifestSyntaxError, "opset"),
        ({"sha256": "A" * 64}, ManifestSyntaxError, "sha256"),
        ({"size": -1}, ManifestSyntaxError, "size"),
        ({"functions": [function(operator="toy::thrice")]}, ManifestConsistencyError, "computes 'toy::thrice'"),
        ({"functions": [function(), function()]}, ManifestConsistencyError, "'toy::twice:float32' appears twice"),
        ({"functions": [function(domain="")]}, ManifestConsistencyError, "no domain or no name"),
        ({"functions": [function(name="")]}, ManifestConsistencyError, "no domain or no name"),
    ],
)
def test_rules_8_and_9_of_what_describes_an_onnx_model(
    refused: Refused, changes: dict[str, object], error: type[Exception], says: str
) -> None:
    refused(sidecar_with(**changes), error, says)


def test_one_operator_may_have_several_functions(taken: Taken) -> None:
    overloads = [function(), function(overload="float16"), function(overload="")]
    assert msgspec.to_builtins(taken(sidecar_with(functions=overloads)).onnx[0].functions) == tuple(overloads)
